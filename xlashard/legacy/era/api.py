"""What `jax` and `jax.experimental` had besides today's names."""

from collections.abc import Callable
from functools import partial
from typing import Any

from xlashard._jax.era import backend
from xlashard.legacy.refusals import Refusal

clear_backends = backend.clear_backends
loops = Refusal("jax.experimental.loops")
mask = Refusal("jax.mask")
soft_pmap = Refusal("jax.soft_pmap")
xla_computation = Refusal("jax.xla_computation")


def curry(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes the first arguments, and gives one that takes the others."""
    return partial(partial, f)
