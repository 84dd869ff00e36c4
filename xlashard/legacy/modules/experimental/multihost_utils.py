"""`jax.experimental.multihost_utils`; what is not here is as it is today."""

from typing import Any

import jax
import numpy as np

from xlashard import Array, multihost
from xlashard._jax.tracebacks import short_tracebacks
from xlashard.array.handles import as_kind
from xlashard.legacy.arrays.device_arrays import device_array_class
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.modes.array_mode import ArrayMode, current_array_mode
from xlashard.legacy.modes.result_classes import is_gda
from xlashard.legacy.modules.entry import Entry
from xlashard.multihost import assert_equal, broadcast_one_to_all, sync_global_devices
from xlashard.sharding import Mesh

__all__ = [
    "assert_equal",
    "broadcast_one_to_all",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "process_allgather",
    "sync_global_devices",
]


def process_allgather(in_tree: Any, tiled: bool = False) -> Any:
    """Brings the values of all processes to every process, and arrays of several in whole.

    All processes must call it, with trees of the same leaves, dtypes and shapes.

    Args:
        in_tree: NumPy arrays, numbers, Arrays, GlobalDeviceArrays, arrays and keys of JAX, or a
            pytree of them.
        tiled: False stacks the values of the processes: `[processes, ...]`. True puts them one
            after the other along their first dimension. A GlobalDeviceArray, and an array that
            spans processes, is one value, and that is what comes of it in either case.

    Returns:
        `in_tree` with a NumPy array for every value.

    Raises:
        ProcessesError: Processes that did not come, or with another tree; by process and path.

    Example:
        >>> process_allgather({"loss": np.float32(0.5)})
        {'loss': array([0.5], dtype=float32)}
    """
    with short_tracebacks:
        return _gathered(in_tree, tiled)


def _gathered(in_tree: Any, tiled: bool) -> Any:
    leaves, treedef = jax.tree.flatten(in_tree)

    def only(chosen: list[bool]) -> Any:
        """The tree with None, which is no leaf, in place of what was not chosen."""
        kept = [x if choose else None for x, choose in zip(leaves, chosen, strict=True)]
        return treedef.unflatten(kept)

    spans = [isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves]
    one_value = [s or isinstance(x, GlobalDeviceArray) for s, x in zip(spans, leaves, strict=True)]
    each = [not one for one in one_value]
    if not any(one_value):
        return multihost.process_allgather(in_tree, tiled)
    # A call for each kind that is there, which is the same in all processes.
    gathered = jax.tree.leaves(multihost.process_allgather(only(spans), True)) if any(spans) else []
    stacked = jax.tree.leaves(multihost.process_allgather(only(each), tiled)) if any(each) else []
    whole, own = iter(gathered), iter(stacked)
    out = [
        next(whole) if span else np.asarray(x) if one else next(own)
        for x, span, one in zip(leaves, spans, one_value, strict=True)
    ]
    return treedef.unflatten(out)


def host_local_array_to_global_array(local_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Puts the host-local values of all processes together to global arrays.

    Args:
        local_inputs: What this process has: NumPy arrays, numbers, Arrays, or a pytree of them.
        global_mesh: The mesh. The devices of each process must be a contiguous box of it.
        pspecs: A PartitionSpec, or None for replicated, for all of `local_inputs` or as a pytree
            prefix of it.

    Returns:
        `local_inputs` with an Array over all devices of the mesh for every value; without
        `jax_array` a GlobalDeviceArray, which the era's `pjit` takes for global.

    Raises:
        BoxError: A mesh in which the devices of a process leave a gap, or this process has none.
        PlacementError: A shape that can't be dealt out, with its path.
        ArgumentError: A value that no device can hold, or a spec that is none, with its path.
    """
    with short_tracebacks:
        out = multihost.host_local_array_to_global_array(local_inputs, global_mesh, pspecs)
        return _in_mode(out, current_array_mode(), GlobalDeviceArray)


def global_array_to_host_local_array(global_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Makes of global arrays what this process holds of them.

    Args:
        global_inputs: Arrays or GlobalDeviceArrays over the devices of the mesh, or a pytree of
            them.
        global_mesh: The mesh. The devices of each process must be a contiguous box of it.
        pspecs: A PartitionSpec, or None for replicated, for all of `global_inputs` or as a pytree
            prefix of it.

    Returns:
        `global_inputs` with an Array over this process's part of the mesh for every value; without
        `jax_array` a ShardedDeviceArray, or a DeviceArray if it has one device there. An array
        whose devices all belong to this process comes back as the same object.

    Raises:
        BoxError: A mesh in which the devices of a process leave a gap, or this process has none.
        PlacementError: A shape that can't be dealt out, with its path.
        ArgumentError: A value that no device can hold, or a spec that is none, with its path.
    """
    with short_tracebacks:
        out = multihost.global_array_to_host_local_array(global_inputs, global_mesh, pspecs)
        made = _in_mode(out, current_array_mode(), None)
        return jax.tree.map(lambda x, given: given if _is_local(given) else x, made, global_inputs)


def _is_local(x: Any) -> bool:
    """Return whether a value is an array of this process alone, and no GlobalDeviceArray."""
    return isinstance(x, jax.Array) and x.is_fully_addressable and not is_gda(x)


def _in_mode(tree: Any, mode: ArrayMode, kind: type[Array] | None) -> Any:
    """The Arrays of a tree as the world's: of a class, or of that for what a process has."""

    def made(x: Any) -> Any:
        if not isinstance(x, Array):
            return x
        if mode.jax_array:
            return x.to_jax()
        wanted = kind or device_array_class(x.to_jax())
        return x if type(x) is wanted else as_kind(x, wanted)

    return jax.tree.map(made, tree)


_THERE = "jax.experimental.multihost_utils"
# Since when it takes GlobalDeviceArrays no more.
_GONE = "0.4.7"
_KINDS = (
    "Specs may be None for replicated, and the era's. Without `jax_array` it gives what the era's "
    "`pjit` takes: "
)
_WHO = "Values keep their dtypes, and errors name the processes and the paths of what differs."

ENTRIES: tuple[Entry, ...] = (
    Entry(
        _THERE,
        _GONE,
        "differs",
        __name__,
        "from xlashard import multihost",
        "What is not listed here is as it is today.",
    ),
    Entry(
        f"{_THERE}.process_allgather",
        _GONE,
        "works",
        f"{__name__}:process_allgather",
        "multihost.process_allgather(x, tiled=True)",
    ),
    Entry(
        f"{_THERE}.broadcast_one_to_all",
        _GONE,
        "differs",
        f"{__name__}:broadcast_one_to_all",
        "multihost.broadcast_one_to_all(x)",
        _WHO,
    ),
    Entry(
        f"{_THERE}.sync_global_devices",
        _GONE,
        "differs",
        f"{__name__}:sync_global_devices",
        "multihost.sync_global_devices(name)",
        "An error says who did not come, or came with another name.",
    ),
    Entry(
        f"{_THERE}.assert_equal",
        _GONE,
        "differs",
        f"{__name__}:assert_equal",
        "multihost.assert_equal(x)",
        _WHO,
    ),
    Entry(
        f"{_THERE}.host_local_array_to_global_array",
        _GONE,
        "differs",
        f"{__name__}:host_local_array_to_global_array",
        "multihost.host_local_array_to_global_array(x, mesh, specs)",
        _KINDS + "GlobalDeviceArrays.",
    ),
    Entry(
        f"{_THERE}.global_array_to_host_local_array",
        _GONE,
        "differs",
        f"{__name__}:global_array_to_host_local_array",
        "multihost.global_array_to_host_local_array(x, mesh, specs)",
        _KINDS + "this process's part.",
    ),
)
