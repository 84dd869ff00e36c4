"""Host-local arrays and global ones: two views of the same shards.

A host-local array is what one process has: an array of its own over its own devices. The global
one is the array that the host-local ones of all processes make up, each a block of the mesh. From
one to the other no byte moves if the shards lie as the spec says; only shape and sharding change.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np

from xlashard._jax import tracing
from xlashard._jax.primitives import LinearRules, spmd_axis_names, transposed_pair
from xlashard._jax.tracebacks import short_tracebacks
from xlashard._jax.transfer import Handle, HandleType, Tracer, assemble, split
from xlashard.array import Array
from xlashard.array.guards import Way, free_transfers, guarded, guards_in_force
from xlashard.array.handles import wrap_result
from xlashard.array.holder import check_alive
from xlashard.array.host import read_value
from xlashard.array.host_put import host_value, put_value
from xlashard.array.keys import is_key_array, key_handle, keys_over
from xlashard.array.moving import at_path, placed
from xlashard.array.placement import Places, places
from xlashard.array.prefix import broadcast_prefix, leaf_path
from xlashard.array.reshard import reshard
from xlashard.errors import (
    ArgumentError,
    CompileError,
    GeometryError,
    PlacementError,
    ResourceError,
    ShardingError,
    XlashardError,
)
from xlashard.multihost.calls import Call
from xlashard.multihost.host_mesh import HostMesh, host_mesh
from xlashard.multihost.leaves import named_leaves
from xlashard.multihost.parts import Check, compare_parts, read_check
from xlashard.pjit.constraint import constrain
from xlashard.sharding import Mesh, NamedSharding, PartitionSpec, partition_spec, spec_of

_TO_GLOBAL = "host_local_array_to_global_array"
_TO_LOCAL = "global_array_to_host_local_array"
_INPUTS = "local_inputs"


def host_local_array_to_global_array(
    local_inputs: Any,
    global_mesh: Mesh,
    pspecs: Any,
    *,
    check: Check = "never",
    timeout: float = 60.0,
) -> Any:
    """Makes global arrays of which each process gives the part that its devices hold.

    Along an axis of the mesh that crosses processes the parts are put side by side, so the global
    dimension is larger than the local one. Along all others, and where a spec names no axis, all
    processes give the same. Nothing is exchanged between processes unless you want it checked, and
    an array whose shards lie on this process's devices as the spec says keeps its buffers.

    Inside `vmap` and under derivatives it is the linear function that it is outside; its transpose
    is `global_array_to_host_local_array`. Compiled into a program it is a sharding constraint, if
    the shape stays the same; several processes convert before the program.

    Args:
        local_inputs: What this process has: NumPy arrays, numbers, Arrays, arrays and keys of JAX,
            or a pytree of them. An array that spans processes is global already, and stays as it
            is.
        global_mesh: The mesh. The devices of each process must be a contiguous box of it.
        pspecs: A PartitionSpec, or None for replicated, for all of `local_inputs` or as a pytree
            prefix of it.
        check: Whether the processes compare what they give: the types of the global arrays, and
            the values of parts that several of them have. `"once"` does so the first time for
            these paths, shapes and specs. All processes of the mesh must call it then, and values
            on devices are read.
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
            call = Call(_TO_GLOBAL, timeout, host.processes, series=_TO_GLOBAL)
            named = [(p, tracing.value_behind(x)) for p, x in named_leaves(local_inputs, _INPUTS)]
            compare_parts(call, host, list(zip(named, specs, strict=True)), once=check == "once")
        return _mapped(_to_global, local_inputs, host, specs, _INPUTS)


def global_array_to_host_local_array(global_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Makes of global arrays what this process holds of them: arrays over its own devices.

    An array that lies as its spec says keeps its buffers. One that lies otherwise is resharded
    first, which all processes of the mesh must do together.

    Inside `vmap` and under derivatives it is the linear function that it is outside; its transpose
    is `host_local_array_to_global_array`. Compiled into a program it is a sharding constraint, if
    the shape stays the same; several processes convert after the program.

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
        TransferGuardError: JAX's transfer guards forbid it.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, P, pjit
        >>> from xlashard.multihost import global_array_to_host_local_array
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> with mesh:
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
    normal = spec_of(spec)
    if not normal.is_constrained:
        raise ShardingError(
            f"its entry of pspecs is {spec}, which leaves a dimension open, but no program runs "
            "that could choose: write None there for whole, or the names of axes"
        )
    # Equal specs in other words lead to the same cached shardings.
    return partition_spec(normal)


def _to_global(x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    known = tracing.value_behind(x)
    if isinstance(known, jax.Array) and not isinstance(known, Tracer):
        check_alive(known)
        if not known.is_fully_addressable:
            return wrap_result(x)
    if isinstance(x, Tracer):
        return _bound(to_global_p, x, host, host.global_sharding(spec))
    return _lifted(x, host, spec)


def _to_local(x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    known = tracing.value_behind(x)
    if isinstance(known, jax.Array) and not isinstance(known, Tracer):
        check_alive(known)
        if known.is_fully_addressable and not host.is_all_here:
            return wrap_result(x)
    if isinstance(x, Tracer):
        return _bound(to_local_p, x, host, host.local_sharding(spec))
    return _lowered(x, host, spec)


def _bound(primitive: Any, x: Any, host: HostMesh, there: NamedSharding) -> Any:
    out = primitive.bind(x, global_mesh=host.whole, pspec=there.spec)
    if host.is_all_here and tracing.is_staging():
        return constrain(out, there)
    return out


def _lifted(x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    """The global array of which a concrete value is this process's part."""
    if is_key_array(x):
        host.global_shape(spec, x.shape)
        return keys_over(_lifted(key_handle(x), host, spec).to_jax(), x)
    shape = np.shape(x)
    there = host.global_shape(spec, shape)
    if isinstance(x, np.ndarray) and x.dtype == jax.dtypes.float0:
        return np.zeros(there, x.dtype)
    source = places(shape, host.local_sharding(spec))
    return _viewed(_put(x, source), places(there, host.global_sharding(spec)))


def _lowered(x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    """This process's part of a concrete value, which is global."""
    if is_key_array(x):
        host.local_shape(spec, x.shape)
        return keys_over(_lowered(key_handle(x), host, spec).to_jax(), x)
    shape = np.shape(x)
    here = host.local_shape(spec, shape)
    if isinstance(x, np.ndarray) and x.dtype == jax.dtypes.float0:
        return np.zeros(here, x.dtype)
    source = places(shape, host.global_sharding(spec))
    return _viewed(_put(x, source), places(here, host.local_sharding(spec)))


def _put(x: Any, target: Places) -> Handle:
    """A concrete value where it belongs: on the devices if it is there already."""
    if isinstance(x, Array | HandleType):
        check_alive(x)
        array = x if isinstance(x, Array) else Array.from_jax(x)
        if array.is_fully_addressable == target.sharding.is_fully_addressable:
            # A computation, whatever has to move for that.
            with free_transfers():
                return reshard(array.to_jax(), target)
        # Each process has the whole value, and puts its own part of it.
        return put_value(read_value(array), target, weak_type=array.weak_type)
    value, weak_type = host_value(x, lambda: "it")
    guards = guards_in_force()
    if guards is None:
        return put_value(value, target, weak_type=weak_type)
    with guarded(guards, Way.HOST_TO_DEVICE, f"the {type(x).__name__}"):
        return put_value(value, target, weak_type=weak_type)


def _viewed(handle: Handle, there: Places) -> Array:
    """The same shards as those of another array, in the same order."""
    if handle.shape == there.shape and handle.sharding == there.twin and handle.committed:
        return placed(handle, there.sharding)
    aval = there.aval(handle.dtype, handle.weak_type)
    return placed(assemble(aval, there.twin, split(handle)), there.sharding)


def _lift(x: Any, *, global_mesh: Mesh, pspec: PartitionSpec) -> Any:
    return _lifted(x, host_mesh(global_mesh), pspec)


def _lower(x: Any, *, global_mesh: Mesh, pspec: PartitionSpec) -> Any:
    return _lowered(x, host_mesh(global_mesh), pspec)


def _lifted_shape(
    shape: Sequence[int], *, global_mesh: Mesh, pspec: PartitionSpec
) -> tuple[int, ...]:
    return host_mesh(global_mesh).global_shape(pspec, shape)


def _lowered_shape(
    shape: Sequence[int], *, global_mesh: Mesh, pspec: PartitionSpec
) -> tuple[int, ...]:
    return host_mesh(global_mesh).local_shape(pspec, shape)


def _with_batch(
    axis_data: Any, dim: int, *, global_mesh: Mesh, pspec: PartitionSpec
) -> dict[str, Any]:
    """The parameters for a batch, whole or dealt out along `spmd_axis_name`."""
    axes, spec = spmd_axis_names(axis_data), spec_of(pspec)
    clash = [axis for axis in axes if axis in spec.axes]
    if clash:
        raise ResourceError(
            f"vmap deals its batch out along {clash[0]!r} (spmd_axis_name), but the spec "
            f"{spec.describe()} inside uses that axis already: leave it out of one of them"
        )
    return {"global_mesh": global_mesh, "pspec": partition_spec(spec.insert(dim, axes))}


def _in_program(
    name: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    x: Any,
    *,
    global_mesh: Mesh,
    pspec: PartitionSpec,
) -> Any:
    """In a program all values are global, so only what changes no shape can be one of its steps."""
    if shapes[0] == shapes[1]:
        return x
    _refuse_in_program(name, shapes, pspec)


def _refuse_in_program(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], pspec: PartitionSpec
) -> NoReturn:
    raise CompileError(
        f"{name} makes {shapes[0]} to {shapes[1]} inside of a compiled program, which runs on the "
        "devices of all processes as one, so that every value in it is global: convert before and "
        f"after it, x = {_TO_GLOBAL}(x, global_mesh, {spec_of(pspec).describe()}); y = pjit(f)(x); "
        f"y = {_TO_LOCAL}(y, global_mesh, pspec)"
    )


to_global_p, to_local_p = transposed_pair(
    LinearRules(_TO_GLOBAL, _lift, _lifted_shape, _with_batch, partial(_in_program, _TO_GLOBAL)),
    LinearRules(_TO_LOCAL, _lower, _lowered_shape, _with_batch, partial(_in_program, _TO_LOCAL)),
)
"""From host-local to global, and back; parameters `global_mesh` and `pspec`."""
