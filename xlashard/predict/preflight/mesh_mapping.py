"""The mesh of a preflight, and the shardings of a program mapped to it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from xlashard._jax.runtime.shardings import JaxSharding
from xlashard._jax.trace import jitted
from xlashard._jax.trace.jaxprs import hoist
from xlashard._jax.trace.rewriting import MeshMap, meshes_in
from xlashard._jax.trace.tracing import mesh_in_force, replace_fields
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.trace import Call
from xlashard.core.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from xlashard.errors import ArgumentError
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.predict.targets.gpu.gpu_names import is_gpu_name
from xlashard.predict.targets.gpu.topologies import topology as gpu_topology
from xlashard.predict.targets.tpu.topologies import topology as tpu_topology
from xlashard.support.formatting import typed

type MeshLike = Mesh | jax.sharding.AbstractMesh | Mapping[str, int]
"""Axis names and sizes, on any devices."""


def find_topology(topology: str | BaseTopology, slices: int = 1) -> BaseTopology:
    """Return the topology of a name.

    Args:
        topology: Topology, or its name: `"v5p-128"`, `"h100-32"`.
        slices: Number of slices of TPUs; number by which to multiply the nodes of GPUs.

    Raises:
        TopologyError: If the name is unknown, or the compiler for its chips is missing.
    """
    if isinstance(topology, BaseTopology):
        return topology
    return (gpu_topology if is_gpu_name(topology) else tpu_topology)(topology, slices)


def resolve_mesh(
    topology: BaseTopology, mesh: MeshLike | None, meshes: Mapping[str, MeshLike]
) -> Mesh:
    """Return the mesh of a preflight: the given one, else that of the program.

    Args:
        topology: Topology of the mesh devices.
        mesh: Mesh of the caller. One of the topology's chips keeps its order, whatever client has
            made its devices; others contribute axis names, sizes and types.
        meshes: Meshes that the program names, by the path of an argument or another part of it.

    Raises:
        ArgumentError: If there is no mesh, or the program names different ones.
        TopologyError: If the mesh doesn't match the topology.
    """
    if mesh is None:
        mesh = _only_mesh(topology, meshes)
    devices = topology.match_devices(mesh.devices.flat) if isinstance(mesh, Mesh) else None
    if devices is not None and isinstance(mesh, Mesh):
        grid = np.array(devices, dtype=object).reshape(mesh.devices.shape)
    else:
        grid = topology.mesh({str(name): int(n) for name, n in _sizes(mesh).items()}).devices
    if isinstance(mesh, Mapping):
        return Mesh(grid, tuple(map(str, mesh)))
    # Inside shard_map a mesh has manual axes.
    types = [AxisType.Auto if kind == AxisType.Manual else kind for kind in mesh.axis_types]
    return Mesh(grid, mesh.axis_names, axis_types=tuple(types))


def _only_mesh(topology: BaseTopology, meshes: Mapping[str, MeshLike]) -> MeshLike:
    different = {tuple(_sizes(mesh).items()): (path, mesh) for path, mesh in meshes.items()}
    if len(different) == 1:
        return different.popitem()[1][1]
    count = topology.num_devices
    if not different:
        raise ArgumentError(
            f"mesh is missing, and no argument has a named sharding on the {count} devices of "
            f"{topology.name}: write mesh={{'data': {count}}}, or --mesh data={count} on the "
            "command line"
        )
    meshes_text = " and ".join(f"{path} on {_axes_text(mesh)}" for path, mesh in different.values())
    raise ArgumentError(
        f"the arguments have different meshes, {meshes_text}: specify one, mesh={{'data': {count}}}"
    )


def _sizes(mesh: MeshLike) -> Mapping[Any, int]:
    return mesh if isinstance(mesh, Mapping) else mesh.shape


def _axes_text(mesh: MeshLike) -> str:
    return ", ".join(f"{name}={size}" for name, size in _sizes(mesh).items())


def meshes_of_arguments(arguments: Mapping[str, Any]) -> dict[str, MeshLike]:
    """Return the meshes of the named shardings of argument leaves, by path.

    Raises:
        ArgumentError: If an argument is sharded over several devices without a named sharding.
    """
    meshes: dict[str, MeshLike] = {}
    for path, value in arguments.items():
        sharding = sharding_of(value)
        if isinstance(sharding, jax.sharding.NamedSharding):
            meshes[path] = sharding.mesh
        elif sharding is not None and sharding.num_devices > 1:
            raise ArgumentError(
                f"{path} ({typed(value.dtype, value.shape)}) is sharded over "
                f"{sharding.num_devices} devices by {sharding}, without mesh axes: write "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))"
            )
    return meshes


def meshes_of_function(fun: Any) -> dict[str, MeshLike]:
    """Return the mesh that a function's own shardings stand on, or else the mesh in force.

    Args:
        fun: A function of `xlashard.pjit` or `jax.jit`, or a wrapper of one.
    """
    own, inner = getattr(fun, "_function", None), jitted.jitted_within(fun)
    requested: list[Any] = []
    if isinstance(own, Function):
        resources = (*own.options.in_resources.leaves, *own.options.out_resources.leaves)
        requested = [resource.value for resource in resources]
    elif inner is not None:
        requested = jitted.requested_shardings(inner)
    for sharding in requested:
        if isinstance(sharding, jax.sharding.NamedSharding):
            return {"the shardings of the function": sharding.mesh}
    mesh = mesh_in_force() or jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else {"the mesh in force": mesh}


def meshes_of_call(call: Call) -> dict[str, MeshLike]:
    """Return the meshes that a traced call names, at its boundary and inside."""
    shardings = (*call.in_shardings, *call.out_shardings)
    named = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    meshes = [*named, *meshes_in(call.traced.jaxpr)]
    return {f"mesh {i} of the function": mesh for i, mesh in enumerate(meshes) if not mesh.empty}


def sharding_of(value: Any) -> Any:
    """Return the sharding of an argument leaf; None for a value of the host."""
    return value.sharding if isinstance(value, jax.Array | jax.ShapeDtypeStruct) else None


def argument_placer(mesh: Mesh) -> Callable[[Any], Any]:
    """Return a function that maps an argument leaf to its shape with a sharding on `mesh`.

    Shardings on another mesh map by axis names. Values on a single device stay unspecified.
    """

    def placed(value: Any) -> Any:
        sharding = sharding_of(value)
        if sharding is None:
            return value
        weak = bool(getattr(value, "weak_type", False))
        target = None
        if isinstance(sharding, jax.sharding.NamedSharding):
            target = _moved(sharding, mesh)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=target, weak_type=weak)

    return placed


def _moved(sharding: jax.sharding.NamedSharding, mesh: Mesh) -> NamedSharding:
    if sharding.mesh == mesh:
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    # Platforms name their memories differently: use the default memory.
    return NamedSharding(mesh, sharding.spec)


def map_call(call: Call, on: Mesh) -> Call:
    """Return a traced call with all its shardings on the mesh of a topology.

    Meshes with the axes of `on` become `on`; others over as many devices keep their axes, on the
    same positions in the device assignment. Closed-over arrays over several devices become
    arguments.

    Args:
        call: The call.
        on: Mesh on the devices of a topology.

    Raises:
        ArgumentError: If a mesh of the program has other axes or sizes than `on`.
    """
    jaxpr, traced = call.traced.jaxpr, call.traced
    first = next((m for m in meshes_of_call(call).values() if isinstance(m, Mesh)), None)
    mapping = _MeshMapping(traced.name, on, first)
    place = argument_placer(on)
    chosen = [_is_spread(value) for value in jaxpr.consts]
    hoisted, closed = hoist(jaxpr, chosen)
    if closed:
        names = tuple(f"closed over [{i}]" for i in range(len(closed)))
        debug = hoisted.debug_info
        debug = debug._replace(arg_names=(*names, *traced.arg_names))
        hoisted = replace_fields(hoisted, debug_info=debug)
        args, kwargs = traced.in_tree.children()
        leaves = [jax.tree.structure(0)] * len(closed)
        every = jax.tree_util.treedef_tuple([*leaves, *args.children()])
        in_tree = jax.tree_util.treedef_tuple([every, kwargs])
        traced = replace(traced, arg_names=(*names, *traced.arg_names), in_tree=in_tree)
    body = MeshMap(mapping).jaxpr(hoisted)
    none = (None,) * len(closed)
    return replace(
        call,
        traced=replace(traced, jaxpr=body, in_avals=tuple(body.in_avals)),
        values=tuple(map(place, (*closed, *call.values))),
        mesh=on,
        in_shardings=(*none, *map(mapping.sharding, call.in_shardings)),
        out_shardings=tuple(map(mapping.sharding, call.out_shardings)),
        layouts=((*none, *call.layouts[0]), call.layouts[1]),
        donated=(*(False for _ in closed), *call.donated),
        auto=None if call.auto is None else (*(False for _ in closed), *call.auto),
        moves=(*(False for _ in closed), *call.moves) if call.moves else (),
    )


def _is_spread(value: Any) -> bool:
    sharding = sharding_of(value)
    return sharding is not None and sharding.num_devices > 1


class _MeshMapping:
    """Mapping of the meshes of one program to a topology.

    Args:
        name: The function's name.
        on: Mesh on the devices of the topology.
        first: A mesh of the program, whose devices stand for those of `on`, in order.
    """

    def __init__(self, name: str, on: Mesh, first: Mesh | None) -> None:
        self._name, self._on = name, on
        self._target = set(on.devices.flat)
        order = [] if first is None else list(first.devices.flat)
        self._position = {device: i for i, device in enumerate(order)}

    def __call__(self, value: Any, *, in_trace: bool) -> Any:
        """Return a mesh or a sharding on the topology.

        Args:
            value: Mesh or sharding of a parameter of an equation.
            in_trace: True if types of the trace depend on the sizes of its axes.
        """
        if isinstance(value, Mesh | AbstractMesh):
            return self._mesh(value, in_trace=in_trace)
        if not isinstance(value, jax.sharding.NamedSharding):
            return value
        mesh = self._mesh(value.mesh, in_trace=in_trace)
        return value if mesh is value.mesh else type(value)(mesh, value.spec)

    def sharding(self, value: Sharding | None) -> Sharding | None:
        """Return a requested sharding on the topology; None for one of a single other device."""
        if isinstance(value, JaxSharding) and not isinstance(value, jax.sharding.NamedSharding):
            return value if set(value.device_set) <= self._target else None
        return self(value, in_trace=False)

    def _mesh(self, mesh: Any, *, in_trace: bool) -> Any:
        on = self._on
        if mesh.empty or (isinstance(mesh, Mesh) and set(mesh.devices.flat) <= self._target):
            return mesh
        if dict(mesh.shape) == dict(on.shape):
            return mesh if isinstance(mesh, AbstractMesh) else on
        if isinstance(mesh, Mesh) and mesh.size == on.size and self._position:
            devices = np.array(on.devices.flat, dtype=object)
            grid = [devices[self._position[device]] for device in mesh.devices.flat]
            grid = np.array(grid, dtype=object).reshape(mesh.devices.shape)
            return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
        if not in_trace and set(mesh.shape) <= set(on.shape):
            return on
        raise ArgumentError(
            f"{self._name} names the mesh {_axes_text(mesh)} over {math.prod(mesh.shape.values())} "
            f"devices, which does not map to {_axes_text(on)}: pass "
            f"mesh={{{', '.join(f'{str(n)!r}: {s}' for n, s in mesh.shape.items())}}} and a "
            "topology of as many devices, or build the mesh in the function from its arguments"
        )
