"""Settings of JAX that change what a function traces or lowers to."""

from typing import Any

from jax._src import config


def trace_context() -> Any:
    """A hashable value that differs whenever such a setting does."""
    return config.trace_context(), config.use_shardy_partitioner.value


def is_tracing_forbidden() -> bool:
    """True under `jax.no_tracing`."""
    return config.no_tracing.value


def is_x64_enabled() -> bool:
    """True if 64-bit numbers stay what they are (`jax_enable_x64`)."""
    return config.enable_x64.value
