"""Device assignment of a call, from every part of its request that names devices.

Computation follows data: what the user requested comes first, then the placement of committed
arguments and of closed-over arrays. All of them must name the same devices in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from xlashard._jax.lowering import memory_kind_of
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.trace.tracing import sharding_of_type
from xlashard.core.pjit.arguments import Argument
from xlashard.core.program.ignored_shardings import IgnoredSharding, find_unplaced
from xlashard.core.sharding import (
    AbstractMesh,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    Sharding,
    XLACompatibleSharding,
)
from xlashard.core.sharding.replicated import REPLICATED, names_devices
from xlashard.errors import DeviceMismatchError, MeshError
from xlashard.support.formatting import format_two_device_lists
from xlashard.support.lazily import dataclass


def on_devices(sharding: XLACompatibleSharding, devices: Sequence[Device]) -> XLACompatibleSharding:
    """Return a sharding without devices as one over these devices.

    Raises:
        DeviceMismatchError: If it stands on an abstract mesh of another size.
    """
    if sharding is REPLICATED:
        return GSPMDSharding.get_replicated(devices)
    if not isinstance(sharding, NamedSharding) or names_devices(sharding):
        return sharding
    if sharding.mesh.size != len(devices):
        raise DeviceMismatchError(
            f"{sharding} stands on an abstract mesh of {sharding.mesh.size} devices, but the "
            f"program runs on {len(devices)}: write NamedSharding(mesh, {sharding.spec}) on a mesh "
            "of its devices"
        )
    mesh = mesh_over(tuple(devices), sharding.mesh)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def mesh_of(sharding: Sharding) -> Mesh | None:
    """Return the mesh of devices on which a sharding stands, or None."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


@lru_cache(maxsize=256)
def mesh_over(devices: tuple[Device, ...], mesh: AbstractMesh) -> Mesh:
    """Return the mesh over devices with the axes of an abstract one."""
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return Mesh(grid.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)


def find_spec_mesh(mesh: Mesh | None) -> Mesh | AbstractMesh | None:
    """Return the mesh by whose axes partition specs are read.

    Args:
        mesh: The mesh in force, over whose devices `jax.sharding.use_abstract_mesh` may have put
            other axes; or None, and an abstract mesh may be in force.
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty or abstract.manual_axes:
        return mesh
    if mesh is None or mesh.size != abstract.size:
        return mesh or abstract
    if (mesh.axis_names, mesh.axis_sizes) == (abstract.axis_names, abstract.axis_sizes):
        return mesh
    return mesh_over(mesh._flat_devices_tuple, abstract)


def typed_sharding(aval: Any, devices: tuple[Device, ...]) -> XLACompatibleSharding | None:
    """Return the sharding that the type of a result prescribes; None where it has no such axes."""
    typed = sharding_of_type(aval)
    if typed is None or typed[0].size != len(devices):
        return None
    mesh, spec = typed
    return NamedSharding(mesh_over(devices, mesh), spec, memory_kind=memory_kind_of(aval))


@dataclass(frozen=True)
class ShardingRequest:
    """The shardings that a call requests, and the values that they are for.

    Attributes:
        arguments: The arguments.
        in_shardings: The requested sharding of each argument, or None.
        out_shardings: The requested sharding of each result, or None.
        result_avals: The abstract values of the results.
        result_paths: The results' paths.
        used: For each argument, True if the program takes it; others have no say in the devices.
            Empty for all.
        inner: Shardings of constraints inside the function.
        find_line: Returns file and line of a constraint by its sharding; empty if unknown.
        closed: Description and sharding of each closed-over array that has a say in the devices.
        mesh: The mesh in force, or None.
        device: The requested single device, or None.
        assign: Returns devices for the size of the abstract mesh on which all shardings stand; None
            where the program needs devices of its own.
        names: The keywords by which the user requested shardings of arguments and of results.
        commits: True if the program's own equations commit its results, to no certain devices.
    """

    arguments: tuple[Argument, ...]
    in_shardings: tuple[Sharding | None, ...]
    out_shardings: tuple[Sharding | None, ...]
    result_avals: tuple[Any, ...]
    result_paths: tuple[str, ...]
    used: tuple[bool, ...] = ()
    inner: tuple[Sharding, ...] = ()
    find_line: Callable[[Sharding], str] = lambda _: ""
    closed: tuple[tuple[Callable[[], str], Sharding], ...] = ()
    mesh: Mesh | None = None
    device: Device | None = None
    assign: Callable[[int], tuple[Device, ...]] | None = None
    names: tuple[str, str] = ("in_shardings", "out_shardings")
    commits: bool = False

    def find_unplaced(self) -> Iterator[IgnoredSharding]:
        """Find sharded arguments that a program on one device drops, and results like them."""
        used = self.used or repeat(True)
        pairs = zip(self.arguments, used, strict=False)
        outs = zip(self.result_paths, self.result_avals, self.out_shardings, strict=True)
        return find_unplaced(
            [(a.path, a.aval, a.sharding) for a, is_used in pairs if a.committed and not is_used],
            [(path, aval) for path, aval, requested in outs if requested is None],
        )

    def in_one_order(self) -> "ShardingRequest":
        """Return the request with replicated arguments on their devices in the program's order.

        Each device holds the whole value, so that nothing moves.
        """
        whole = [a.committed and a.is_replicated for a in self.arguments]
        pairs = list(zip(self.arguments, whole, strict=True))
        others = replace(self, arguments=tuple(a.unbound() if w else a for a, w in pairs))
        named = [*device_sources(others), *device_sources(self)]
        devices = next((s.devices for s in named if s.devices is not None and s.decides), ())

        def reorder(argument: Argument) -> Argument:
            own = argument.sharding
            if own is None or own.devices == devices or set(own.devices) != set(devices):
                return argument
            return replace(argument, sharding=GSPMDSharding.get_replicated(devices))

        return replace(self, arguments=tuple(reorder(a) if w else a for a, w in pairs))

    def on(self, devices: Sequence[Device]) -> "ShardingRequest":
        """Return the request with these devices in place of abstract meshes."""

        def assigned(sharding: Any) -> Any:
            is_named = isinstance(sharding, NamedSharding)
            return on_devices(sharding, devices) if is_named else sharding

        return replace(
            self,
            arguments=tuple(replace(a, sharding=assigned(a.sharding)) for a in self.arguments),
            in_shardings=tuple(map(assigned, self.in_shardings)),
            out_shardings=tuple(map(assigned, self.out_shardings)),
        )


class DeviceAssignmentSource(NamedTuple):
    """A part of a request that names devices or a mesh.

    Attributes:
        kind: The part of the request.
        subject: The argument, the path of the result, or a function that returns the line of the
            constraint or the description of the closed-over array.
        devices: The devices that it names; None for an abstract mesh, and for `REPLICATED`.
        mesh: The mesh on which its sharding stands, or None.
        decides: False for a committed argument that moves to the devices of its `in_shardings`.
    """

    kind: Literal["device", "mesh", "in", "out", "argument", "type", "constraint", "closed over"]
    subject: Any
    devices: tuple[Device, ...] | None
    mesh: Mesh | AbstractMesh | None
    decides: bool = True

    @property
    def holds_data(self) -> bool:
        """Return True for an array, which can be moved."""
        return self.kind in ("argument", "closed over")

    def describe(self, names: tuple[str, str]) -> str:
        """Return a noun phrase for errors.

        Args:
            names: See `ShardingRequest`.
        """
        match self.kind:
            case "device":
                return "the requested device"
            case "mesh":
                return "the mesh in force"
            case "in":
                return f"the {names[0]} of {self.subject.describe()}"
            case "argument":
                return f"the argument {self.subject.describe()}"
            case "out":
                return f"the {names[1]} of {self.subject}"
            case "type":
                return f"the type of {self.subject}"
            case "constraint":
                line = self.subject()
                return "a sharding constraint inside" + (f" at {line}" if line else "")
        return self.subject()


def device_sources(request: ShardingRequest) -> list[DeviceAssignmentSource]:
    """Return the parts of a request that name devices or a mesh, the most explicit first.

    A sharding that several parts share appears once, for the first of them.
    """
    mesh, device = request.mesh, request.device
    sources: list[DeviceAssignmentSource] = []
    if device is not None:
        sources.append(DeviceAssignmentSource("device", None, (device,), None))
    if mesh is not None:
        sources.append(DeviceAssignmentSource("mesh", None, mesh._flat_devices_tuple, mesh))
    used = request.used or repeat(True)
    triples = zip(request.arguments, request.in_shardings, used, strict=False)
    pairs = [(argument, requested) for argument, requested, is_used in triples if is_used]
    outs = zip(request.result_paths, request.out_shardings, strict=True)
    parts: list[tuple[Any, Any, Sharding | None, Sharding | None]] = [
        *[("in", argument, s, None) for argument, s in pairs if s is not None],
        *[("argument", a, a.sharding, requested) for a, requested in pairs if a.committed],
        *[("out", path, requested, None) for path, requested in outs if requested is not None],
        *[("constraint", partial(request.find_line, s), s, None) for s in request.inner],
        *[("closed over", describe, sharding, None) for describe, sharding in request.closed],
    ]
    devices_by_id: dict[int, tuple[Device, ...] | None] = {}
    known: set[tuple[int, bool]] = set()
    for kind, subject, sharding, moves_to in parts:
        if sharding is None:
            continue
        # Requested shardings come before those of arguments, so that of `moves_to` is there.
        decides = moves_to is None or devices_by_id[id(moves_to)] is None
        key = id(sharding), decides
        if key in known:
            continue
        known.add(key)
        its_mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if key[0] not in devices_by_id:
            is_assigned = sharding is not REPLICATED and not isinstance(its_mesh, AbstractMesh)
            devices_by_id[key[0]] = tuple(sharding.devices) if is_assigned else None
        devices = devices_by_id[key[0]]
        sources.append(DeviceAssignmentSource(kind, subject, devices, its_mesh, decides))
    return sources


def agreed_devices(
    sources: Sequence[DeviceAssignmentSource], names: tuple[str, str]
) -> tuple[Device, ...] | None:
    """Return the devices of a call; None if no part of its request names devices.

    Args:
        sources: The parts of the request.
        names: See `ShardingRequest`.

    Raises:
        DeviceMismatchError: If two parts name different devices.
    """
    first = None
    for source in sources:
        if source.devices is None or not source.decides:
            continue
        if first is None:
            first = source
        elif source.devices is not first.devices and source.devices != first.devices:
            raise DeviceMismatchError(_mismatch_text(first, source, names))
    return None if first is None else first.devices


def abstract_source(sources: Sequence[DeviceAssignmentSource]) -> DeviceAssignmentSource | None:
    """Return the first part of a request that stands on an abstract mesh, or None."""
    for source in sources:
        if source.decides and isinstance(source.mesh, AbstractMesh):
            return source
    return None


def typed_source(request: ShardingRequest) -> DeviceAssignmentSource | None:
    """Return the first argument or result with explicit axes in its type, or None."""
    used = request.used or repeat(True)
    pairs = zip(request.arguments, used, strict=False)
    values = [(argument.describe(), argument.aval) for argument, is_used in pairs if is_used]
    values += zip(request.result_paths, request.result_avals, strict=True)
    for subject, aval in values:
        typed = sharding_of_type(aval)
        if typed is not None:
            return DeviceAssignmentSource("type", subject, None, typed[0])
    return None


def assigned_devices(
    request: ShardingRequest, source: DeviceAssignmentSource
) -> tuple[Device, ...]:
    """Return the devices of a program whose shardings all stand on abstract meshes.

    Args:
        request: The request.
        source: A part of it that stands on an abstract mesh.

    Raises:
        MeshError: If the program needs devices of its own.
    """
    mesh: Any = source.mesh
    if request.assign is None:
        axes = ", ".join(f"{name!r}: {size}" for name, size in mesh.shape.items())
        raise MeshError(
            f"{source.describe(request.names)} stands on the abstract mesh ({axes}), and nothing "
            "else names devices: call inside `with jax.set_mesh(mesh):` of a mesh with those axes, "
            "or write f.trace(...).lower(lowering_platforms=('tpu',))"
            ".compile(device_assignment=devices)"
        )
    return request.assign(mesh.size)


def common_mesh(
    sources: Sequence[DeviceAssignmentSource], devices: tuple[Device, ...]
) -> Mesh | None:
    """Return the mesh by whose axes shardings that the partitioner chooses are named, or None.

    A mesh in force or of a requested sharding takes precedence over those of arrays.
    """
    requested = [s for s in sources if s.kind in ("mesh", "in", "out")]
    for source in (*requested, *sources):
        if source.mesh is not None and source.devices == devices:
            return source.mesh if isinstance(source.mesh, Mesh) else None
    return None


def _mismatch_text(
    first: DeviceAssignmentSource, other: DeviceAssignmentSource, names: tuple[str, str]
) -> str:
    devices, others = first.devices or (), other.devices or ()
    texts = format_two_device_lists(devices, others)
    conflict = (
        f"one program runs on one list of devices, but {first.describe(names)} names "
        f"{texts[0]} and {other.describe(names)} names {texts[1]}"
    )
    if set(devices) == set(others):
        return f"{conflict}: the same devices in another order; build both meshes in one order"
    if first.holds_data or other.holds_data:
        return f"{conflict}: move the array with device_put(x, sharding), or leave it uncommitted"
    return (
        f"{conflict}: give shardings on one mesh, and call inside `with jax.set_mesh(mesh):` of "
        "that mesh, or without a mesh in force"
    )
