"""`jax.experimental.multihost_utils`, with the signatures and results of 2022."""

from typing import Any

import jax
import numpy as np

from xlashard import multihost
from xlashard.core.array import Array
from xlashard.core.array.array_class.handles import as_class
from xlashard.core.sharding import Mesh
from xlashard.legacy.arrays.device_arrays import device_array_class
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.modes.config_flags import ArrayMode, current_array_mode
from xlashard.support.tracebacks import short_tracebacks


def process_allgather(in_tree: Any, tiled: bool = False) -> Any:
    """Gather the values of all processes, and the global value of arrays that span processes.

    All processes must call it, with equal tree structures, dtypes and shapes.

    Args:
        in_tree: NumPy arrays, numbers, Arrays, GlobalDeviceArrays, arrays and PRNG keys of JAX, or
            a pytree of them.
        tiled: False stacks the values: `[processes, ...]`. True concatenates them along their
            first dimension. For a GlobalDeviceArray, and an array that spans processes, both
            return the global value.

    Returns:
        `in_tree` with a NumPy array for every value.

    Raises:
        ProcessesError: Processes timed out, or passed another tree; names processes and paths.

    Example:
        >>> process_allgather({"loss": np.float32(0.5)})
        {'loss': array([0.5], dtype=float32)}
    """
    with short_tracebacks:
        return _gathered(in_tree, tiled)


def _gathered(in_tree: Any, tiled: bool) -> Any:
    leaves, treedef = jax.tree.flatten(in_tree)
    spanning, local, other = [], [], []
    for number, x in enumerate(leaves):
        spans = isinstance(x, jax.Array) and not x.is_fully_addressable
        kind = spanning if spans else local if isinstance(x, GlobalDeviceArray) else other
        kind.append(number)
    if len(other) == len(leaves):
        return multihost.process_allgather(in_tree, tiled)
    out = dict(zip(local, (np.asarray(leaves[number]) for number in local), strict=True))
    # One call per kind that occurs, which is equal in all processes.
    for numbers, as_tiled in ((spanning, True), (other, tiled)):
        if numbers:
            # None is not a leaf.
            part: list[Any] = [None] * len(leaves)
            for number in numbers:
                part[number] = leaves[number]
            gathered = multihost.process_allgather(treedef.unflatten(part), as_tiled)
            out.update(zip(numbers, jax.tree.leaves(gathered), strict=True))
    return treedef.unflatten([out[number] for number in range(len(leaves))])


def host_local_array_to_global_array(local_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Convert host-local values to global arrays.

    Args:
        local_inputs: Host-local NumPy arrays, numbers, Arrays, or a pytree of them.
        global_mesh: The mesh. The devices of each process must form a contiguous box in it.
        pspecs: A PartitionSpec, or None for replicated, for all of `local_inputs` or as a pytree
            prefix of it.

    Returns:
        `local_inputs` with an Array over the mesh for every value; with `jax_array` off a
        GlobalDeviceArray, which `legacy.pjit` takes as global.

    Raises:
        BoxError: The devices of a process are not contiguous, or this process has none.
        PlacementError: A shape is not divisible; names its path.
        ArgumentError: A value or spec is invalid; names its path.
    """
    with short_tracebacks:
        out = multihost.host_local_array_to_global_array(local_inputs, global_mesh, pspecs)
        return _in_mode(out, current_array_mode(), GlobalDeviceArray)


def global_array_to_host_local_array(global_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Convert global arrays to host-local ones.

    Args:
        global_inputs: Arrays or GlobalDeviceArrays over the mesh, or a pytree of them.
        global_mesh: The mesh. The devices of each process must form a contiguous box in it.
        pspecs: A PartitionSpec, or None for replicated, for all of `global_inputs` or as a pytree
            prefix of it.

    Returns:
        `global_inputs` with an Array over this process's local mesh for every value; with
        `jax_array` off a ShardedDeviceArray, or a DeviceArray on one device. A fully addressable
        array is returned unchanged.

    Raises:
        BoxError: The devices of a process are not contiguous, or this process has none.
        PlacementError: A shape is not divisible; names its path.
        ArgumentError: A value or spec is invalid; names its path.
    """
    with short_tracebacks:
        out = multihost.global_array_to_host_local_array(global_inputs, global_mesh, pspecs)
        outputs = _in_mode(out, current_array_mode(), None)
        return jax.tree.map(
            lambda x, value: value if _is_local(value) else x, outputs, global_inputs
        )


def _is_local(x: Any) -> bool:
    """Return True for a fully addressable array that is not a GlobalDeviceArray."""
    if isinstance(x, GlobalDeviceArray):
        return False
    return isinstance(x, jax.Array) and x.is_fully_addressable


def _in_mode(tree: Any, mode: ArrayMode, kind: type[Array] | None) -> Any:
    """Return a tree whose Arrays have the class of the mode; None for the host-local class."""

    def convert(x: Any) -> Any:
        if not isinstance(x, Array):
            return x
        if mode.jax_array:
            return x.to_jax()
        array_class = kind or device_array_class(x._handle)
        return x if type(x) is array_class else as_class(x, array_class)

    return jax.tree.map(convert, tree)
