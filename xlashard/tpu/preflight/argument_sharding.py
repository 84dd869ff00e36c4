"""Arguments as a person has them, placed on the devices of a topology."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from xlashard.errors import ArgumentError
from xlashard.sharding import Mesh, NamedSharding
from xlashard.tpu.topologies import Topology
from xlashard.wording import typed

type MeshLike = Mesh | jax.sharding.AbstractMesh | Mapping[str, int]
"""Axis names and sizes, on whichever devices."""


def resolve_mesh(topology: Topology, mesh: MeshLike | None, arguments: Mapping[str, Any]) -> Mesh:
    """The mesh of a preflight: the one that was given, or that of the arguments.

    Args:
        topology: Whose devices it is to have.
        mesh: As the caller gave it. One over other devices lends its names and sizes.
        arguments: The leaves of the arguments by their paths.

    Raises:
        ArgumentError: If neither says a mesh, or arguments say several.
        TopologyError: If a mesh of these sizes can't lie on the topology.
    """
    if mesh is None:
        mesh = _only_mesh(topology, arguments)
    if isinstance(mesh, Mesh) and _is_on(topology, mesh):
        return mesh
    sizes = mesh if isinstance(mesh, Mapping) else mesh.shape
    return topology.mesh({str(name): int(size) for name, size in sizes.items()})


def _is_on(topology: Topology, mesh: Mesh) -> bool:
    return set(mesh.devices.flat) <= set(topology.devices)


def _only_mesh(
    topology: Topology, arguments: Mapping[str, Any]
) -> Mesh | jax.sharding.AbstractMesh:
    shardings = {path: _sharding(value) for path, value in arguments.items()}
    named = {p: s for p, s in shardings.items() if isinstance(s, jax.sharding.NamedSharding)}
    meshes = {tuple(s.mesh.shape.items()): (path, s.mesh) for path, s in named.items()}
    if len(meshes) == 1:
        return meshes.popitem()[1][1]
    if not meshes:
        raise ArgumentError(
            f"none of the arguments says how the {topology.num_devices} devices of "
            f"{topology.name} form a mesh: write mesh={{'data': {topology.num_devices}}}, or "
            f"--mesh data={topology.num_devices} on the command line"
        )
    said = " and ".join(
        f"{path} on {', '.join(f'{name}={size}' for name, size in axes)}"
        for axes, (path, _) in meshes.items()
    )
    raise ArgumentError(
        f"the arguments lie on meshes of different axes, {said}: say which one is meant, "
        f"mesh={{'data': {topology.num_devices}}}"
    )


def check_named_shardings(arguments: Mapping[str, Any]) -> None:
    """Raises if an argument lies on several devices in a way that no mesh axes name.

    Raises:
        ArgumentError: With its path.
    """
    for path, value in arguments.items():
        sharding = _sharding(value)
        if sharding is None or isinstance(sharding, jax.sharding.NamedSharding):
            continue
        if sharding.num_devices > 1:
            raise ArgumentError(
                f"{path} ({typed(value.dtype, value.shape)}) lies on {sharding.num_devices} "
                f"devices as {sharding}, which names no axes of a mesh: write "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))"
            )


def _sharding(value: Any) -> Any:
    return value.sharding if isinstance(value, jax.Array | jax.ShapeDtypeStruct) else None


def argument_placer(mesh: Mesh) -> Callable[[Any], Any]:
    """A function that gives for each leaf of the arguments what stands for it on a mesh.

    What lies on another mesh lies here along axes of the same names. What lies on one device, as
    arrays do of which nothing was said, is left for the program to place.
    """

    def placed(value: Any) -> Any:
        sharding = _sharding(value)
        if sharding is None:
            return value
        weak = bool(getattr(value, "weak_type", False))
        there = None
        if isinstance(sharding, jax.sharding.NamedSharding):
            there = _moved(sharding, mesh)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=there, weak_type=weak)

    return placed


def _moved(sharding: jax.sharding.NamedSharding, mesh: Mesh) -> NamedSharding:
    if sharding.mesh == mesh:
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    # Memories are named differently by other platforms; their default is meant as the default.
    return NamedSharding(mesh, sharding.spec)
