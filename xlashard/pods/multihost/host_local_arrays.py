"""Conversion between host-local arrays and global arrays, two views of the same shards.

A host-local array belongs to one process and lies on its devices only. The global array is composed
of the host-local arrays of all processes, each a block of the mesh. If the shards already match the
spec, a conversion moves no byte; only shape and sharding change. On traced values both conversions
are linear primitives, each the transpose of the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax

from xlashard._jax import originals
from xlashard._jax.runtime.transfer import Tracer
from xlashard._jax.trace import tracing
from xlashard._jax.trace.primitives import LinearRules, spmd_axis_names, transposed_pair
from xlashard.config import CheckName
from xlashard.core.array.array_class.base import check_alive
from xlashard.core.array.array_class.handles import wrap_result
from xlashard.core.array.placement.target import at_path, leaf_path
from xlashard.core.array.placement.tree_prefix import broadcast_prefix
from xlashard.core.pjit.constraint import batched_spec, constrain
from xlashard.core.sharding import Mesh, PartitionSpec, partition_spec, spec_of
from xlashard.errors import (
    ArgumentError,
    CompileError,
    GeometryError,
    PlacementError,
    ShardingError,
    XlashardError,
)
from xlashard.pods.multihost.collective_call import CollectiveCall, named_leaves
from xlashard.pods.multihost.host_mesh import HostMesh, as_global, as_host_local, host_mesh
from xlashard.pods.multihost.program_checks import compare_parts, read_check
from xlashard.support.tracebacks import short_tracebacks

TO_GLOBAL = "host_local_array_to_global_array"


TO_LOCAL = "global_array_to_host_local_array"


_INPUTS = "local_inputs"


def host_local_array_to_global_array(
    local_inputs: Any,
    global_mesh: Mesh,
    pspecs: Any,
    *,
    check: CheckName = "never",
    timeout: float = 60.0,
) -> Any:
    """Assemble global arrays from the part that each process holds on its devices.

    Parts are concatenated along mesh axes that cross processes, so the global dimension is larger
    than the local one. Along all other axes, and where a spec names no axis, all processes must
    pass the same values. Nothing is exchanged between processes unless `check` requests it, and an
    array whose shards already match the spec keeps its buffers.

    Under `vmap` and differentiation it is the same linear function; its transpose is
    `global_array_to_host_local_array`. Inside a compiled program, where every value is global, it
    is a sharding constraint; a spec that would change the shape raises an error.

    Args:
        local_inputs: Values of this process: NumPy arrays, numbers, Arrays, JAX arrays and PRNG
            keys, or a pytree of them. An array that spans processes is global already and is
            returned unchanged.
        global_mesh: The mesh. The devices of each process must be a contiguous box of it.
        pspecs: A PartitionSpec, or None for replicated, for all of `local_inputs` or as a pytree
            prefix of it.
        check: Whether the processes compare their inputs: the types of the global arrays, and
            replicated values. `"once"` compares at the first call from a source line with these
            paths, shapes and specs. All processes of the mesh must then call it, and values on
            devices are read.
        timeout: How long a check waits for the other processes, in seconds.

    Returns:
        `local_inputs` with an `Array` over all devices of the mesh for every value (for PRNG keys:
        a key array of JAX). A traced value stays traced.

    Raises:
        BoxError: The devices of a process are not a contiguous box of the mesh, or this process has
            no device in it; raised alike in all processes.
        PlacementError: A shape that is not divisible by its spec, with its path.
        ArgumentError: A value that no device can hold, or an invalid spec, with its path.
        UnequalError: With `check`, different values for the same part of an array, with path and
            process.
        ProcessesError: With `check`, different types, or processes that did not arrive.
        CompileError: Inside a program, a spec that changes the shape.
        TransferGuardError: JAX's transfer guards forbid the transfer.

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
        return _mapped(local_inputs, host, specs, _INPUTS, to_global=True)


def global_array_to_host_local_array(global_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Return this process's part of global arrays, as arrays over its own devices.

    An array whose sharding matches its spec keeps its buffers. Any other array is resharded first,
    which all processes of the mesh must do together.

    Under `vmap` and differentiation it is the same linear function; its transpose is
    `host_local_array_to_global_array`. Inside a compiled program, where every value is global, it
    is a sharding constraint; a spec that would change the shape raises an error.

    Args:
        global_inputs: Arrays over the devices of the mesh, PRNG key arrays, NumPy arrays with the
            whole value, or a pytree of them. If the mesh spans processes, an array on this
            process's devices alone is host-local already and is returned unchanged.
        global_mesh: The mesh. The devices of each process must be a contiguous box of it.
        pspecs: A PartitionSpec, or None for replicated, for all of `global_inputs` or as a pytree
            prefix of it.

    Returns:
        `global_inputs` with an `Array` over this process's part of the mesh for every value (for
        PRNG keys: a key array of JAX). A traced value stays traced.

    Raises:
        BoxError: The devices of a process are not a contiguous box of the mesh, or this process has
            no device in it.
        PlacementError: A shape that is not divisible by its spec, with its path.
        ArgumentError: A value that no device can hold, or an invalid spec, with its path.
        CompileError: Inside a program, a spec that changes the shape.
        TransferGuardError: JAX's transfer guards forbid the transfer.

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
        return _mapped(global_inputs, host, specs, "global_inputs", to_global=False)


def _mapped(
    inputs: Any, host: HostMesh, specs: Sequence[PartitionSpec], name: str, *, to_global: bool
) -> Any:
    """Convert each leaf by its spec."""
    leaves, treedef = jax.tree.flatten(inputs)
    out = []
    for number, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        try:
            out.append(_converted(leaf, host, spec, to_global))
        except XlashardError as error:
            raise error_at(error, leaf_path(inputs, number, name), host, spec) from None
    return treedef.unflatten(out)


def _specs_of(pspecs: Any, inputs: Any, name: str) -> list[PartitionSpec]:
    """Return the spec of each leaf."""
    if type(inputs) in (tuple, list) and type(pspecs) in (tuple, list):
        pspecs = type(inputs)(pspecs)  # A tuple and a list are interchangeable at the top level.
    specs = broadcast_prefix(pspecs, inputs, _is_spec, "pspecs", name)
    out = []
    for number, spec in enumerate(specs):
        try:
            out.append(_read_spec(spec))
        except XlashardError as error:
            raise at_path(error, leaf_path(inputs, number, name)) from None
    return out


def error_at(error: XlashardError, path: str, host: HostMesh, spec: PartitionSpec) -> XlashardError:
    """Return an error with the path of its leaf; that of a shape with its spec and mesh too."""
    if isinstance(error, GeometryError):
        return PlacementError(
            f"{path} under {spec_of(spec).describe()} on {host.describe()}: {error}",
            also=type(error),
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
    """Canonicalize a spec, so that equivalent specs give equal shardings."""
    normal = spec_of(spec)
    if not normal.is_constrained:
        raise ShardingError(
            f"its entry of pspecs is {spec}, which leaves a dimension unconstrained, but no "
            "compiled program can choose its sharding: write None for a replicated dimension, or "
            "axis names"
        )
    return partition_spec(normal)


def _converted(x: Any, host: HostMesh, spec: PartitionSpec, to_global: bool) -> Any:
    known = tracing.value_behind(x)
    if isinstance(known, jax.Array) and not isinstance(known, Tracer):
        check_alive(known)
        is_local = known.is_fully_addressable
        is_converted = not is_local if to_global else is_local and not host.is_all_here
        if is_converted:
            return wrap_result(x)
    if isinstance(x, Tracer):
        return _bind_traced(to_global_p if to_global else to_local_p, x, host, spec)
    return as_global(x, host, spec) if to_global else as_host_local(x, host, spec)


def _bind_traced(primitive: Any, x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    """Bind a primitive to a traced value, and constrain the result's sharding inside a program."""
    out = primitive.bind(x, global_mesh=host.whole, pspec=spec)
    if out.shape != x.shape or not tracing.is_staging():
        return out
    target = host.global_sharding(spec)
    explicit = set(host.whole.explicit_axes)
    if explicit:
        # Explicit axes are part of the type, which a constraint cannot change.
        whole = spec_of(spec)
        dims = (axes and tuple(a for a in axes if a in explicit) for axes in whole.dims)
        typed = partition_spec(replace(whole, dims=tuple(dims)))
        out = originals.reshard(out, target.with_spec(typed).jax_sharding())
    return out if explicit.issuperset(host.whole.axis_names) else constrain(out, target)


def _with_batch(
    axis_data: Any, dim: int, *, global_mesh: Mesh, pspec: PartitionSpec
) -> dict[str, Any]:
    """Return the parameters for a batch dimension, sharded over `spmd_axis_name` if given."""
    batched = batched_spec(spec_of(pspec), dim, spmd_axis_names(axis_data))
    return {"global_mesh": global_mesh, "pspec": batched}


def _in_program(
    name: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    x: Any,
    *,
    global_mesh: Mesh,
    pspec: PartitionSpec,
) -> Any:
    """Return the value unchanged; inside a program the conversion must keep the shape."""
    if shapes[0] == shapes[1]:
        return x
    raise CompileError(  # no-catalogue: needs several processes
        f"{name} changes the shape {shapes[0]} to {shapes[1]} inside a compiled program, in which "
        f"every value is global: convert before and after the program, x = {TO_GLOBAL}(x, "
        f"global_mesh, {spec_of(pspec).describe()}); y = pjit(f)(x); y = {TO_LOCAL}(y, "
        "global_mesh, pspec)"
    )


def _rules(
    name: str,
    convert: Callable[[Any, HostMesh, PartitionSpec], Any],
    shape_of: Callable[[HostMesh, PartitionSpec, Sequence[int]], tuple[int, ...]],
) -> LinearRules:
    def concrete(x: Any, *, global_mesh: Mesh, pspec: PartitionSpec) -> Any:
        return convert(x, host_mesh(global_mesh), pspec)

    def shape(shape: Sequence[int], *, global_mesh: Mesh, pspec: PartitionSpec) -> tuple[int, ...]:
        return shape_of(host_mesh(global_mesh), pspec, shape)

    return LinearRules(name, concrete, shape, _with_batch, partial(_in_program, name))


to_global_p, to_local_p = transposed_pair(
    _rules(TO_GLOBAL, as_global, HostMesh.global_shape),
    _rules(TO_LOCAL, as_host_local, HostMesh.local_shape),
)
"""Host-local to global, and back; parameters `global_mesh` and `pspec`."""
