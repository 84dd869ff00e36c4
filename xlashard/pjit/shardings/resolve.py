"""Which devices a call runs on, and the sharding of each argument and result.

Computation follows data: what a person said comes first, then where committed arguments are. All of
it must agree on one device assignment.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, repeat
from typing import Any, NamedTuple

from xlashard._jax.lower.lowering import dtype_name
from xlashard._jax.runtime.shardings import Device, default_memory_kind
from xlashard._jax.runtime.topologies import UnassignedDevice
from xlashard._jax.runtime.transfer import default_device
from xlashard.errors import (
    DeviceMismatchError,
    DivisibilityError,
    GeometryError,
    MeshError,
    ResourceError,
    ShardingError,
)
from xlashard.lazily import dataclass
from xlashard.pjit.arguments import Argument
from xlashard.pjit.shardings.error_hints import as_code, described, divisible_hint
from xlashard.pjit.shardings.resources import as_tiles
from xlashard.pjit.shardings.unassigned import REPLICATED, names_devices, on_devices, typed_sharding
from xlashard.pjit.shardings.unreduced import reshard_problem
from xlashard.sharding import (
    AbstractMesh,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    partition_spec,
)


@dataclass(frozen=True)
class ProgramPlacement:
    """Where a program runs.

    Attributes:
        devices: The device assignment.
        mesh: The mesh on which chosen shardings get their names, or None.
        in_shardings: For each argument its sharding; None leaves it to the partitioner.
        out_shardings: For each result its sharding; None leaves it to the partitioner.
        committed: Whether the results are bound to their devices.
    """

    devices: tuple[Device, ...]
    mesh: Mesh | None
    in_shardings: tuple[XLACompatibleSharding | None, ...]
    out_shardings: tuple[XLACompatibleSharding | None, ...]
    committed: bool

    @property
    def is_unassigned(self) -> bool:
        """Return True if the devices are stand-ins for those that a later step gives."""
        return isinstance(self.devices[0], UnassignedDevice)

    def canonicalize(self) -> "ProgramPlacement":
        """What of it decides the program: two placements with one normal form share theirs.

        Each spec stands in its shortest writing. On a single device nothing is dealt out, so that
        only memories other than the default one are said.
        """
        alone = len(self.devices) == 1
        normal = _normal_on_one if alone else _normal
        return ProgramPlacement(
            self.devices,
            None if alone else self.mesh,
            tuple(map(normal, self.in_shardings)),
            tuple(map(normal, self.out_shardings)),
            True,
        )


def _normal(sharding: XLACompatibleSharding | None) -> XLACompatibleSharding | None:
    if not isinstance(sharding, NamedSharding):
        return sharding
    shortest = partition_spec(sharding.normal_spec)
    return sharding if shortest == sharding.spec else sharding.with_spec(shortest)


def _normal_on_one(sharding: XLACompatibleSharding | None) -> XLACompatibleSharding | None:
    if sharding is None or sharding.memory_kind is None:
        return None
    device, kind = sharding.devices[0], sharding.memory_kind
    if kind == default_memory_kind(device):
        return None
    return SingleDeviceSharding(device, memory_kind=kind)


@dataclass(frozen=True)
class ShardingRequest:
    """What a person said of a call's arguments and results.

    Attributes:
        arguments: The arguments.
        in_shardings: What was said of each; None for nothing.
        out_shardings: What was said of each result; None for nothing.
        result_avals: The abstract values of the results.
        result_paths: The results' paths.
        used: For each argument whether the program takes it: others place nothing. Empty for all.
        inner: Shardings that constraints inside the function name.
        closed: Arrays that the function closes over, by what to call them, and where they are.
        mesh: The mesh in force, or None.
        device: The one device asked for, or None.
        assign: Gives devices for the size of the abstract mesh on which all shardings stand; None
            where the program needs devices of its own.
        names: What the caller calls what was said of arguments and of results.
    """

    arguments: tuple[Argument, ...]
    in_shardings: tuple[Sharding | None, ...]
    out_shardings: tuple[Sharding | None, ...]
    result_avals: tuple[Any, ...]
    result_paths: tuple[str, ...]
    used: tuple[bool, ...] = ()
    inner: tuple[Sharding, ...] = ()
    closed: tuple[tuple[Callable[[], str], Sharding], ...] = ()
    mesh: Mesh | None = None
    device: Device | None = None
    assign: Callable[[int], tuple[Device, ...]] | None = None
    names: tuple[str, str] = ("in_shardings", "out_shardings")

    @property
    def placing(self) -> "Iterator[tuple[Argument, Sharding | None]]":
        """The arguments that the program takes, each with what was said of it."""
        pairs = zip(self.arguments, self.in_shardings, strict=True)
        return compress(pairs, self.used or repeat(True))


def resolve(wanted: ShardingRequest) -> ProgramPlacement:
    """Settles devices and shardings of a call.

    Raises:
        DeviceMismatchError: If two of those who have a say name different devices.
        ResourceError: If a sharding does not fit its argument or result, or disagrees with where a
            committed argument is.
    """
    devices = _agreed(wanted)
    abstract = _abstract_meshes(wanted)
    named = devices is not None
    if devices is None:
        devices = _assigned(wanted, abstract[0]) if abstract else (default_device(),)
    if abstract:
        wanted = _on_devices(wanted, devices)
    mesh = _mesh_of(wanted, devices)
    multi = len(devices) > 1
    ins = _argument_shardings(wanted, devices, mesh)
    outs = []
    for aval, path, said in zip(
        wanted.result_avals, wanted.result_paths, wanted.out_shardings, strict=True
    ):
        value = _Value(wanted.names[1], path, aval)
        sharding = _concrete(said, value, devices, mesh)
        if sharding is not None:
            _check_fits(sharding, value)
            _check_reductions(sharding, value)
        outs.append(typed_sharding(aval, devices) if sharding is None else sharding)
    committed = multi or named or bool(abstract)
    return ProgramPlacement(devices, mesh, tuple(ins), tuple(outs), committed)


def _argument_shardings(
    wanted: ShardingRequest, devices: tuple[Device, ...], mesh: Mesh | None
) -> list[XLACompatibleSharding | None]:
    """Return the sharding of each argument; None for those that the program does not take."""
    ins = []
    used = wanted.used or repeat(True)
    for argument, said, is_used in zip(wanted.arguments, wanted.in_shardings, used, strict=False):
        value = _Value(wanted.names[0], argument.path, argument.aval)
        sharding = _concrete(said, value, devices, mesh)
        if sharding is not None:
            _check_fits(sharding, value)
            _check_type(sharding, value)
            sharding = _agreeing(argument, sharding, wanted.names[0])
        elif argument.committed:
            sharding = argument.sharding
        elif len(devices) > 1 and argument.aval.ndim == 0:
            # A scalar is everywhere anyway; saying so keeps calls with and without one alike.
            sharding = _replicated(devices, mesh)
        ins.append(sharding if is_used else None)
    return ins


type _Abstract = tuple[str, AbstractMesh]
"""A name for a sharding, and the abstract mesh on which it stands."""


def _abstract_meshes(wanted: ShardingRequest) -> list[_Abstract]:
    """Return the shardings of arguments and results that stand on abstract meshes."""
    said_in, said_out = wanted.names
    if all(map(names_devices, filter(None, (*_of_arguments(wanted), *wanted.out_shardings)))):
        return []
    every = (
        *((f"{said_in} of {a.path}", said) for a, said in wanted.placing),
        *((f"the sharding of {a.path}", a.sharding) for a, _ in wanted.placing if a.committed),
        *zip(
            (f"{said_out} of {path}" for path in wanted.result_paths),
            wanted.out_shardings,
            strict=True,
        ),
    )
    return [
        (who, s.mesh)
        for who, s in every
        if isinstance(s, NamedSharding) and isinstance(s.mesh, AbstractMesh)
    ]


def _assigned(wanted: ShardingRequest, abstract: _Abstract) -> tuple[Device, ...]:
    """Return the devices of a program whose shardings all stand on abstract meshes.

    Raises:
        MeshError: If it needs devices of its own.
    """
    who, mesh = abstract
    if wanted.assign is None:
        axes = ", ".join(f"{name!r}: {size}" for name, size in mesh.shape.items())
        raise MeshError(
            f"{who} stands on the abstract mesh ({axes}), and nothing else names devices: call "
            "inside `with jax.set_mesh(mesh):` of a mesh with those axes, or write f.trace(...)"
            ".lower(lowering_platforms=('tpu',)).compile(device_assignment=devices)"
        )
    return wanted.assign(mesh.size)


def _on_devices(wanted: ShardingRequest, devices: tuple[Device, ...]) -> ShardingRequest:
    """Return the request with the devices of the program in place of abstract meshes."""

    def placed(sharding: Any) -> Any:
        return on_devices(sharding, devices) if isinstance(sharding, NamedSharding) else sharding

    return replace(
        wanted,
        arguments=tuple(replace(a, sharding=placed(a.sharding)) for a in wanted.arguments),
        in_shardings=tuple(map(placed, wanted.in_shardings)),
        out_shardings=tuple(map(placed, wanted.out_shardings)),
    )


class _Value(NamedTuple):
    """An argument or result, as errors speak of it."""

    what: str
    path: str
    aval: Any

    def __str__(self) -> str:
        return f"{self.what} of {self.path} ({dtype_name(self.aval)})"


@dataclass(frozen=True)
class _Voice:
    who: str | Callable[[], str]
    devices: tuple[Device, ...]
    is_argument: bool = False

    def __str__(self) -> str:
        return self.who if isinstance(self.who, str) else self.who()


def _voices(wanted: ShardingRequest) -> list[_Voice]:
    """Everything that names devices, the most explicit first."""
    voices: list[_Voice] = []
    if wanted.device is not None:
        voices.append(_Voice("the device asked for", (wanted.device,)))
    if wanted.mesh is not None:
        voices.append(_Voice("the mesh in force", wanted.mesh._flat_devices_tuple))
    for argument, said in wanted.placing:
        if said is not None and names_devices(said):
            who = partial(_described, f"the {wanted.names[0]} of", argument)
            voices.append(_Voice(who, tuple(said.devices)))
    for argument, said in wanted.placing:
        sharding = _deciding(argument, said)
        if sharding is not None and names_devices(sharding):
            who = partial(_described, "the argument", argument)
            voices.append(_Voice(who, tuple(sharding.devices), is_argument=True))
    for path, said in zip(wanted.result_paths, wanted.out_shardings, strict=True):
        if said is not None and names_devices(said):
            voices.append(_Voice(f"the {wanted.names[1]} of {path}", tuple(said.devices)))
    voices += [_Voice("a sharding constraint inside", tuple(s.devices)) for s in wanted.inner]
    voices += [_Voice(who, tuple(s.devices), is_argument=True) for who, s in wanted.closed]
    return voices


def _described(what: str, argument: Argument) -> str:
    """Return an argument with its type, for an error: the text costs more than all the rest."""
    return f"{what} {argument.describe()}"


def _of_arguments(wanted: ShardingRequest) -> list[Sharding | None]:
    """Return what was requested of used arguments, then shardings of committed ones."""
    pairs = list(wanted.placing)
    return [*(requested for _, requested in pairs), *(_deciding(*pair) for pair in pairs)]


def _deciding(argument: Argument, requested: Sharding | None) -> Sharding | None:
    """Return the sharding of a committed argument, unless it goes where `in_shardings` names."""
    if not argument.committed or (requested is not None and names_devices(requested)):
        return None
    return argument.sharding


def _device_lists(wanted: ShardingRequest) -> list[tuple[Device, ...]]:
    """Return the devices that each member of `_voices` names; the texts for errors cost more."""
    lists = [] if wanted.device is None else [(wanted.device,)]
    if wanted.mesh is not None:
        lists.append(wanted.mesh._flat_devices_tuple)
    for sharding in (*_of_arguments(wanted), *wanted.out_shardings):
        if sharding is not None and names_devices(sharding):
            lists.append(tuple(sharding.devices))
    lists += [tuple(sharding.devices) for sharding in wanted.inner]
    lists += [tuple(sharding.devices) for _, sharding in wanted.closed]
    return lists


def _agreed(wanted: ShardingRequest) -> tuple[Device, ...] | None:
    """Return the devices of a call; None if no part of the request names devices.

    Raises:
        DeviceMismatchError: If two parts of it name different devices.
    """
    lists = _device_lists(wanted)
    if not lists:
        return None
    if all(devices is lists[0] or devices == lists[0] for devices in lists):
        return lists[0]
    first, *others = _voices(wanted)
    other = next(voice for voice in others if voice.devices != first.devices)
    raise DeviceMismatchError(_mismatch_text(first, other))


def _mismatch_text(first: _Voice, other: _Voice) -> str:
    said = (
        f"one program runs on one list of devices, but {first} names {_ids(first.devices)} and "
        f"{other} names {_ids(other.devices)}"
    )
    if set(first.devices) == set(other.devices):
        return said + ": the same devices in another order; build both meshes in one order"
    if first.is_argument or other.is_argument:
        return said + ": move the array with device_put(x, sharding), or leave it uncommitted"
    return said + (
        ": give shardings on one mesh, and call inside `with jax.set_mesh(mesh):` of that mesh or "
        "of none"
    )


def _ids(devices: Sequence[Device]) -> str:
    ids = [d.id for d in devices]
    shown = str(ids) if len(ids) <= 16 else f"[{ids[0]}, {ids[1]}, ..., {ids[-1]}]"
    plural = "device" if len(ids) == 1 else f"{len(ids)} devices"
    return f"{plural} {shown} ({devices[0].platform})" if devices else "no device"


def _mesh_of(wanted: ShardingRequest, devices: tuple[Device, ...]) -> Mesh | None:
    if wanted.mesh is not None:
        return wanted.mesh
    said = [*(said for _, said in wanted.placing), *wanted.out_shardings]
    there = [a.sharding for a, _ in wanted.placing if a.committed]
    closed = [sharding for _, sharding in wanted.closed]
    for sharding in (*said, *there, *wanted.inner, *closed):
        if isinstance(sharding, NamedSharding) and sharding.devices == devices:
            return sharding.mesh if isinstance(sharding.mesh, Mesh) else None
    return None


def _replicated(devices: tuple[Device, ...], mesh: Mesh | None) -> XLACompatibleSharding:
    if len(devices) == 1 and mesh is None:
        return SingleDeviceSharding(devices[0])
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec())
    return GSPMDSharding.get_replicated(devices)


def _concrete(
    said: Sharding | None, value: _Value, devices: tuple[Device, ...], mesh: Mesh | None
) -> XLACompatibleSharding | None:
    """A sharding that XLA can be told of, for what was said."""
    if said is REPLICATED:
        return _replicated(devices, mesh)
    if said is None:
        return None
    try:
        return as_tiles(said, value.aval.shape)
    except (GeometryError, ShardingError) as error:
        raise ResourceError(
            f"{value} is a {type(said).__name__}: {error}. Let devices_indices_map give each of "
            "its devices a slice of the same size",
            path=value.path,
        ) from None


def _agreeing(
    argument: Argument, sharding: XLACompatibleSharding, what: str
) -> XLACompatibleSharding:
    """The sharding of an argument for which one was asked.

    Raises:
        ResourceError: If the argument is committed and lies otherwise.
    """
    there = argument.sharding
    if not argument.committed or there is None or there is sharding:
        return sharding
    if _has_same_tiles(sharding, there, argument.aval.ndim):
        return sharding
    raise ResourceError(
        f"{what} puts {argument.describe()} as {described(sharding)}, but the argument is "
        f"committed as {described(there)}: move it first with device_put(x, "
        f"{as_code(sharding)}), or leave its resource UNSPECIFIED to compute where it is",
        path=argument.path,
    )


def _has_same_tiles(
    sharding: XLACompatibleSharding, there: XLACompatibleSharding, ndim: int
) -> bool:
    """Compare the tiles of two shardings; a call moves an argument between devices, as JAX does."""
    if sharding.is_equivalent_to(there, ndim):
        return True
    if sharding.memory_kind != there.memory_kind or sharding.is_unreduced or there.is_unreduced:
        return False
    tilings = sharding.rank_tiling(ndim), there.rank_tiling(ndim)
    if all(tiling.is_replicated for tiling in tilings):
        return True
    return sharding.num_devices == there.num_devices and tilings[0].same_tiles(tilings[1])


def _check_fits(sharding: XLACompatibleSharding, value: _Value) -> None:
    try:
        sharding.is_compatible_aval(tuple(value.aval.shape))
    except DivisibilityError as error:
        raise _misfit(sharding, value, f"{error}. {divisible_hint(sharding, error)}") from None
    except GeometryError as error:
        raise _misfit(sharding, value, str(error)) from None


def _check_type(sharding: XLACompatibleSharding, value: _Value) -> None:
    """Checks that an argument for which an unreduced sharding was asked has it in its type.

    Raises:
        ResourceError: If it has not: the function was traced as if it got the whole value.
    """
    if not isinstance(sharding, NamedSharding) or not sharding.is_unreduced:
        return
    typed = getattr(value.aval, "sharding", None)
    if typed is None or typed.spec.unreduced != sharding.spec.unreduced:
        raise ResourceError(
            f"{value} is {described(sharding)}, but its type {dtype_name(value.aval)} is not "
            f"unreduced so: pass an unreduced array, by device_put({value.path}, "
            f"{as_code(sharding)})",
            path=value.path,
        )


def _check_reductions(sharding: XLACompatibleSharding, value: _Value) -> None:
    """Checks that a result needs no change of its partial results that XLA can't do.

    Raises:
        ResourceError: If it does.
    """
    typed = getattr(value.aval, "sharding", None)
    if typed is None or not isinstance(sharding, NamedSharding) or not sharding.is_unreduced:
        return
    problem = reshard_problem(typed.spec, sharding.spec, value.aval.dtype)
    if problem:
        raise ResourceError(
            f"{value} is {described(sharding)}, but its type is {dtype_name(value.aval)}: "
            f"{problem}",
            path=value.path,
        )


def _misfit(sharding: XLACompatibleSharding, value: _Value, why: str) -> ResourceError:
    return ResourceError(f"{value} is {described(sharding)}: {why}", path=value.path)
