"""The mesh of a preflight, and the shardings of a program mapped to it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import NamedSharding as JaxNamedSharding

from xlashard._jax.trace import jitted
from xlashard._jax.trace.tracing import abstract_meshes_in, mesh_in_force
from xlashard.analysis.programs.program import LoweredModule, Program
from xlashard.analysis.programs.program_reader import find_pjit_function
from xlashard.core.program.signature import Signature
from xlashard.core.sharding import Mesh, NamedSharding
from xlashard.errors import ArgumentError, check_type
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
        ArgumentError: If it is of another type.
        TopologyError: If the name is unknown, or the compiler for its chips is missing.
    """
    if isinstance(topology, BaseTopology):
        return topology
    check_type("topology", topology, str, "a name or a topology, such as 'v5e-8' or 'h100-8'")
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
    expected = "a mesh or its axis sizes, such as {'data': 8}"
    check_type("mesh", mesh, (Mesh, jax.sharding.AbstractMesh, Mapping), expected)
    devices = None
    if isinstance(mesh, Mesh) and not mesh.empty:
        devices = topology.match_devices(mesh.devices.flat)
    if devices is not None and isinstance(mesh, Mesh):
        grid = np.array(devices, dtype=object).reshape(mesh.devices.shape)
    else:
        grid = topology.mesh({str(name): n for name, n in _sizes(mesh).items()}).devices
    if isinstance(mesh, Mapping):
        return Mesh(grid, tuple(map(str, mesh)))
    # Inside shard_map a mesh has manual axes.
    types = [AxisType.Auto if kind == AxisType.Manual else kind for kind in mesh.axis_types]
    return Mesh(grid, mesh.axis_names, axis_types=tuple(types))


def _only_mesh(topology: BaseTopology, meshes: Mapping[str, MeshLike]) -> MeshLike:
    different = {tuple(_sizes(mesh).items()): (path, mesh) for path, mesh in meshes.items()}
    if len(different) == 1:
        return different.popitem()[1][1]
    if have_one_order(meshes.values()):
        return next(iter(meshes.values()))
    count = topology.num_devices
    if not different and count == 1:
        return {"device": 1}
    if not different:
        raise ArgumentError(
            f"mesh is missing, and no argument has a named sharding on the {count} devices of "
            f"{topology.name}: write mesh={{'data': {count}}}, or --mesh data={count} on the "
            "command line"
        )
    meshes_text = " and ".join(f"{path} on {axes_text(mesh)}" for path, mesh in different.values())
    raise ArgumentError(
        f"the arguments have different meshes, {meshes_text}: specify one, mesh={{'data': {count}}}"
    )


def have_one_order(meshes: Iterable[MeshLike]) -> bool:
    """Return True if all meshes have the same devices in the same order."""
    orders = [tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else None for mesh in meshes]
    return None not in orders and len(set(orders)) == 1


def _sizes(mesh: MeshLike) -> Mapping[Any, int]:
    return mesh if isinstance(mesh, Mapping) else mesh.shape


def axes_text(mesh: MeshLike) -> str:
    """Return the axes of a mesh as text: `data=4, model=2`."""
    return ", ".join(f"{name}={size}" for name, size in _sizes(mesh).items())


def axes_code(mesh: MeshLike) -> str:
    """Return the axes of a mesh as the inside of a dict."""
    return ", ".join(f"{str(name)!r}: {size}" for name, size in _sizes(mesh).items())


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
    own, inner = find_pjit_function(fun), jitted.jitted_within(fun)
    requested: list[Any] = []
    if own is not None:
        requested = list(own.requested_shardings)
    elif inner is not None:
        requested = jitted.requested_shardings(inner)
    for sharding in requested:
        if isinstance(sharding, jax.sharding.NamedSharding):
            return {"the shardings of the function": sharding.mesh}
    mesh = mesh_in_force() or jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else {"the mesh in force": mesh}


def meshes_of_program(program: Program | LoweredModule) -> dict[str, MeshLike]:
    """Return the abstract meshes that a program names, at its boundary and inside."""
    if isinstance(program, LoweredModule):
        program = program.program
    values = (*program.arguments, *program.results)
    named = [v.requested.mesh for v in values if isinstance(v.requested, JaxNamedSharding)]
    inner = [] if program.jaxpr is None else abstract_meshes_in(program.jaxpr)
    meshes = dict.fromkeys(mesh for mesh in (*named, *inner) if not mesh.empty)
    return {f"mesh {i} of the function": mesh for i, mesh in enumerate(meshes)}


def leaves_by_path(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of a call by their path, under the names of the function's parameters."""
    paths = Signature.of(getattr(fun, "__wrapped__", fun)).paths(args, kwargs)
    return dict(zip(paths, jax.tree_util.tree_leaves((args, kwargs)), strict=True))


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
