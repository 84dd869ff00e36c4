"""Host-local arrays and global ones: two views of the same shards.

A host-local array is what one process has: an array of its own over its own devices. The global
one is the array that the host-local ones of all processes make up, each a block of the mesh. From
one to the other no byte moves if the shards lie as the spec says; only shape and sharding change.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax

from xlashard._jax import tracing
from xlashard._jax.tracebacks import short_tracebacks
from xlashard._jax.transfer import Tracer
from xlashard.array.handles import wrap_result
from xlashard.array.holder import check_alive
from xlashard.array.moving import at_path
from xlashard.array.prefix import broadcast_prefix, leaf_path
from xlashard.config import CheckName
from xlashard.errors import (
    ArgumentError,
    GeometryError,
    PlacementError,
    ShardingError,
    XlashardError,
)
from xlashard.multihost.collective_call import CollectiveCall
from xlashard.multihost.consistency import compare_parts, read_check
from xlashard.multihost.host_local.host_mesh import HostMesh, host_mesh
from xlashard.multihost.host_local.primitives import TO_GLOBAL, bind_traced, to_global_p, to_local_p
from xlashard.multihost.host_local.views import as_global, as_host_local
from xlashard.multihost.leaves import named_leaves
from xlashard.sharding import Mesh, PartitionSpec, partition_spec, spec_of

_INPUTS = "local_inputs"


def host_local_array_to_global_array(
    local_inputs: Any,
    global_mesh: Mesh,
    pspecs: Any,
    *,
    check: CheckName = "never",
    timeout: float = 60.0,
) -> Any:
    """Makes global arrays of which each process gives the part that its devices hold.

    Along an axis of the mesh that crosses processes the parts are put side by side, so the global
    dimension is larger than the local one. Along all others, and where a spec names no axis, all
    processes give the same. Nothing is exchanged between processes unless you want it checked, and
    an array whose shards lie on this process's devices as the spec says keeps its buffers.

    Inside `vmap` and under derivatives it is the linear function that it is outside; its transpose
    is `global_array_to_host_local_array`. Inside a program, where every value is global, it is a
    sharding constraint; a spec along which the array would grow is refused there.

    Args:
        local_inputs: What this process has: NumPy arrays, numbers, Arrays, arrays and keys of JAX,
            or a pytree of them. An array that spans processes is global already, and stays as it
            is.
        global_mesh: The mesh. The devices of each process must be a contiguous box of it.
        pspecs: A PartitionSpec, or None for replicated, for all of `local_inputs` or as a pytree
            prefix of it.
        check: Whether the processes compare what they give: the types of the global arrays, and
            the values of parts that several of them have. `"once"` does so at the first call from
            a line of yours with these paths, shapes and specs. All processes of the mesh must
            call it then, and values on devices are read.
        timeout: How long a check waits for the other processes, in seconds.

    Returns:
        `local_inputs` with an `Array` over all devices of the mesh for every value (for keys: a
        key array of JAX). A traced value stays one.

    Raises:
        BoxError: A mesh in which the devices of a process leave a gap, or this process has none;
            all processes say the same.
        PlacementError: A shape that can't be dealt out, with its path.
        ArgumentError: A value that no device can hold, or a spec that is none, with its path.
        UnequalError: By a check, different values for the same part of an array, by path and
            process.
        ProcessesError: By a check, different types, or processes that did not come.
        CompileError: Inside a program, a spec by which the shape changes.
        TransferGuardError: JAX's transfer guards forbid it.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, P
        >>> from xlashard.multihost import host_local_array_to_global_array
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> batch = {"x": np.ones((4, 8), np.float32), "scale": np.float32(2)}
        >>> specs = {"x": P("data"), "scale": P()}
        >>> host_local_array_to_global_array(batch, mesh, specs)["x"].shape
        (4, 8)
    """
    with short_tracebacks:
        host = host_mesh(global_mesh)
        specs = _specs_of(pspecs, local_inputs, _INPUTS)
        if read_check(check) != "never" and len(host.processes) > 1:
            call = CollectiveCall(TO_GLOBAL, timeout, host.processes, series=TO_GLOBAL)
            named = [(p, tracing.value_behind(x)) for p, x in named_leaves(local_inputs, _INPUTS)]
            compare_parts(call, host, list(zip(named, specs, strict=True)), once=check == "once")
        return _mapped(_to_global, local_inputs, host, specs, _INPUTS)


def global_array_to_host_local_array(global_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Makes of global arrays what this process holds of them: arrays over its own devices.

    An array that lies as its spec says keeps its buffers. One that lies otherwise is resharded
    first, which all processes of the mesh must do together.

    Inside `vmap` and under derivatives it is the linear function that it is outside; its transpose
    is `host_local_array_to_global_array`. Inside a program, where every value is global, it is a
    sharding constraint; a spec along which the array would shrink is refused there.

    Args:
        global_inputs: Arrays over the devices of the mesh, key arrays of JAX, NumPy arrays with
            the whole value, or a pytree of them. Where the mesh spans processes, an array on this
            process's devices alone is host-local already, and stays as it is.
        global_mesh: The mesh. The devices of each process must be a contiguous box of it.
        pspecs: A PartitionSpec, or None for replicated, for all of `global_inputs` or as a pytree
            prefix of it.

    Returns:
        `global_inputs` with an `Array` over this process's part of the mesh for every value (for
        keys: a key array of JAX). A traced value stays one.

    Raises:
        BoxError: A mesh in which the devices of a process leave a gap, or this process has none.
        PlacementError: A shape that can't be dealt out, with its path.
        ArgumentError: A value that no device can hold, or a spec that is none, with its path.
        CompileError: Inside a program, a spec by which the shape changes.
        TransferGuardError: JAX's transfer guards forbid it.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, P, pjit
        >>> from xlashard.multihost import global_array_to_host_local_array
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> with jax.set_mesh(mesh):
        ...     out = pjit(lambda x: x + 1, out_shardings=P("data"))(np.zeros(4, np.float32))
        >>> global_array_to_host_local_array(out, mesh, P("data"))
        Array([1., 1., 1., 1.], dtype=float32)
    """
    with short_tracebacks:
        host = host_mesh(global_mesh)
        specs = _specs_of(pspecs, global_inputs, "global_inputs")
        return _mapped(_to_local, global_inputs, host, specs, "global_inputs")


def _mapped(
    convert: Callable[[Any, HostMesh, PartitionSpec], Any],
    inputs: Any,
    host: HostMesh,
    specs: Sequence[PartitionSpec],
    name: str,
) -> Any:
    """Converts each leaf by its spec."""
    leaves, treedef = jax.tree.flatten(inputs)
    out = []
    for number, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        try:
            out.append(convert(leaf, host, spec))
        except XlashardError as error:
            raise _told(error, leaf_path(inputs, number, name), host, spec) from None
    return treedef.unflatten(out)


def _specs_of(pspecs: Any, inputs: Any, name: str) -> list[PartitionSpec]:
    """For each leaf its spec."""
    if type(inputs) in (tuple, list) and type(pspecs) in (tuple, list):
        pspecs = type(inputs)(pspecs)  # at the top people write one for the other
    specs = broadcast_prefix(pspecs, inputs, _is_spec, "pspecs", name)
    out = []
    for number, spec in enumerate(specs):
        try:
            out.append(_read_spec(spec))
        except XlashardError as error:
            raise at_path(error, leaf_path(inputs, number, name)) from None
    return out


def _told(error: XlashardError, path: str, host: HostMesh, spec: PartitionSpec) -> XlashardError:
    """The error with the leaf's path, and for a shape that does not fit with what it must fit."""
    if isinstance(error, GeometryError):
        return PlacementError(
            f"{path} under {spec_of(spec).describe()} on {host.describe()}: {error}"
        )
    return at_path(error, path)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | jax.sharding.Sharding)


def _read_spec(spec: Any) -> PartitionSpec:
    if spec is None:
        return PartitionSpec()
    if not isinstance(spec, PartitionSpec):
        raise ArgumentError(
            f"its entry of pspecs is {spec!r} ({type(spec).__name__}): give a PartitionSpec such "
            "as P('data'), or None for replicated"
        )
    return _in_one_writing(spec)


@lru_cache(maxsize=1024)
def _in_one_writing(spec: PartitionSpec) -> PartitionSpec:
    """The spec as all that say the same are written, so that they lead to the same shardings."""
    normal = spec_of(spec)
    if not normal.is_constrained:
        raise ShardingError(
            f"its entry of pspecs is {spec}, which leaves a dimension open, but no program runs "
            "that could choose: write None there for whole, or the names of axes"
        )
    return partition_spec(normal)


def _to_global(x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    known = tracing.value_behind(x)
    if isinstance(known, jax.Array) and not isinstance(known, Tracer):
        check_alive(known)
        if not known.is_fully_addressable:
            return wrap_result(x)
    if isinstance(x, Tracer):
        return bind_traced(to_global_p, x, host, spec)
    return as_global(x, host, spec)


def _to_local(x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    known = tracing.value_behind(x)
    if isinstance(known, jax.Array) and not isinstance(known, Tracer):
        check_alive(known)
        if known.is_fully_addressable and not host.is_all_here:
            return wrap_result(x)
    if isinstance(x, Tracer):
        return bind_traced(to_local_p, x, host, spec)
    return as_host_local(x, host, spec)
