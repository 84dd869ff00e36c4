"""Computations on arrays that span processes, restricted by `jax_spmd_mode`.

All processes must run such a computation in the same order, so the era allowed it in `pjit` and
`jax.jit` by default, but not where a line of `jax.numpy` happens to run in one process only.
"""

from collections.abc import Sequence
from typing import Any

import jax

from xlashard._jax.compat import legacy_api
from xlashard.errors import NotAddressableError
from xlashard.legacy.modes.config_flags import spmd_mode
from xlashard.wording import typed


def restrict_computations() -> None:
    """Check each computation of JAX that has not run yet under the current mode."""
    legacy_api.watch_computations(_check)


def allow_computations() -> None:
    """Undo `restrict_computations`."""
    legacy_api.watch_computations(None)


def _check(computation: legacy_api.TopLevelComputation, arguments: Sequence[Any]) -> None:
    """Refuse a computation that the mode does not allow on arrays that span processes.

    Raises:
        NotAddressableError: With the type of the first such array.
    """
    mode = spmd_mode.value
    if mode == "allow_all" or not (computation.is_eager or mode == "allow_pjit"):
        return
    spanning = (x for x in arguments if isinstance(x, jax.Array) and not x.is_fully_addressable)
    array = next(spanning, None)
    if array is None:
        return
    kind = "eager operation" if computation.is_eager else "jax.jit"
    inside = "jax.jit or pjit" if mode == "allow_jit" else "pjit"
    raise NotAddressableError(  # no-catalogue: needs several processes
        f"{kind} {computation.name}: an argument {typed(array.dtype.name, array.shape)} spans "
        f"several processes, which jax_spmd_mode={mode!r} does not allow: compute it inside "
        f"{inside}, or write: with jax.spmd_mode('allow_all')"
    )
