"""Settings of JAX that change what a function traces or lowers to."""

from typing import Any

from jax._src import config

# Of these, what is different says nothing more than the mesh in force does.
_MESHES = ("mesh_context_manager", "abstract_mesh_context_manager")


def trace_context() -> Any:
    """A hashable value that differs whenever such a setting does."""
    return config.trace_context(), config.use_shardy_partitioner.value


def changed_settings(before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """The name and both values of each setting in which two trace contexts differ.

    The mesh in force is none of them.
    """
    said, says = _by_name(before), _by_name(after)
    # One that was made in between is in one of them.
    both = [name for name in says if name in said and name not in _MESHES]
    return [(name, said[name], says[name]) for name in both if said[name] != says[name]]


def _by_name(context: Any) -> dict[str, Any]:
    settings, shardy = context
    named = zip(config.trace_context_names(), settings, strict=False)
    return {**dict(named), "jax_use_shardy_partitioner": shardy}


def is_tracing_forbidden() -> bool:
    """True under `jax.no_tracing`."""
    return config.no_tracing.value


def is_x64_enabled() -> bool:
    """True if 64-bit numbers stay what they are (`jax_enable_x64`)."""
    return config.enable_x64.value


def explains_cache_misses() -> bool:
    """True if JAX was asked to say why it traces and compiles (`jax_explain_cache_misses`)."""
    return config.explain_cache_misses.value
