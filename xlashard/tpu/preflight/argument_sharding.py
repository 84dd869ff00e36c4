"""Shardings of the arguments on the devices of a topology."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from xlashard.errors import ArgumentError
from xlashard.sharding import Mesh, NamedSharding
from xlashard.tpu.topologies import Topology
from xlashard.wording import typed

type MeshLike = Mesh | jax.sharding.AbstractMesh | Mapping[str, int]
"""Axis names and sizes, on any devices."""


def resolve_mesh(topology: Topology, mesh: MeshLike | None, arguments: Mapping[str, Any]) -> Mesh:
    """Return the mesh of a preflight: the given one, else that of the arguments.

    Args:
        topology: Topology of the mesh devices.
        mesh: Mesh of the caller. A mesh of other devices contributes axis names and sizes.
        arguments: Argument leaves by path.

    Raises:
        ArgumentError: If there is no mesh, or arguments have different meshes.
        TopologyError: If the mesh doesn't match the topology.
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
            "mesh is missing, and no argument has a named sharding on the "
            f"{topology.num_devices} devices of {topology.name}: write "
            f"mesh={{'data': {topology.num_devices}}}, or "
            f"--mesh data={topology.num_devices} on the command line"
        )
    meshes_text = " and ".join(
        f"{path} on {', '.join(f'{name}={size}' for name, size in axes)}"
        for axes, (path, _) in meshes.items()
    )
    raise ArgumentError(
        f"the arguments have different meshes, {meshes_text}: specify one, "
        f"mesh={{'data': {topology.num_devices}}}"
    )


def check_named_shardings(arguments: Mapping[str, Any]) -> None:
    """Raise if an argument is sharded over several devices without a named sharding.

    Raises:
        ArgumentError: With the path of the argument.
    """
    for path, value in arguments.items():
        sharding = _sharding(value)
        if sharding is None or isinstance(sharding, jax.sharding.NamedSharding):
            continue
        if sharding.num_devices > 1:
            raise ArgumentError(
                f"{path} ({typed(value.dtype, value.shape)}) is sharded over "
                f"{sharding.num_devices} devices by {sharding}, without mesh axes: write "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))"
            )


def _sharding(value: Any) -> Any:
    return value.sharding if isinstance(value, jax.Array | jax.ShapeDtypeStruct) else None


def argument_placer(mesh: Mesh) -> Callable[[Any], Any]:
    """Return a function that maps an argument leaf to its shape with a sharding on `mesh`.

    Shardings on another mesh map by axis names. Values on a single device stay unspecified.
    """

    def placed(value: Any) -> Any:
        sharding = _sharding(value)
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
