"""Resolve the sharding of each argument and result of a call on its device assignment."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

from xlashard._jax.lowering import aval_text
from xlashard._jax.runtime.shardings import (
    Device,
    is_auto_layout,
    is_same_layout,
    layout_code,
)
from xlashard._jax.runtime.topologies import UnassignedDevice
from xlashard._jax.runtime.transfer import default_device
from xlashard._jax.trace import tracing
from xlashard.core.pjit.arguments import Argument, own_layout
from xlashard.core.pjit.shardings.device_assignment import (
    ShardingRequest,
    abstract_source,
    agreed_devices,
    assigned_devices,
    common_mesh,
    device_sources,
    mesh_over,
    typed_sharding,
    typed_source,
)
from xlashard.core.pjit.shardings.resources import INFERRED, Resource, misfit
from xlashard.core.pjit.shardings.unreduced import reshard_problem
from xlashard.core.program.plan import replicate_over
from xlashard.core.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    as_tiles,
    grid_of,
    partition_spec,
    spec_of,
)
from xlashard.core.sharding.named import check_fits
from xlashard.core.sharding.replicated import REPLICATED, custom_memory_kind
from xlashard.core.sharding.sharding_texts import as_code, described, or_whole
from xlashard.errors import (
    DeviceMismatchError,
    DivisibilityError,
    GeometryError,
    MeshError,
    ResourceError,
    ShardingError,
)
from xlashard.geometry import validate_spec
from xlashard.support.lazily import dataclass


@dataclass(frozen=True)
class ProgramPlacement:
    """The devices of a program, and the shardings of its arguments and results.

    Attributes:
        devices: The device assignment.
        mesh: The mesh by whose axes shardings that the partitioner chooses are named, or None.
        in_shardings: The sharding of each argument; None leaves it to the partitioner.
        out_shardings: The sharding of each result; None leaves it to the partitioner.
        committed: True if the results are committed to their devices.
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
        """Return the placement that selects the program: equal ones share a program.

        Each spec is in its shortest form. On a single device nothing is partitioned, and only
        memory kinds other than the default one remain.
        """
        alone = len(self.devices) == 1
        canonical = _canonical_on_one if alone else _canonical
        return ProgramPlacement(
            self.devices,
            None if alone else self.mesh,
            tuple(map(canonical, self.in_shardings)),
            tuple(map(canonical, self.out_shardings)),
            True,
        )


@lru_cache(maxsize=4096)
def _canonical(sharding: XLACompatibleSharding | None) -> XLACompatibleSharding | None:
    if not isinstance(sharding, NamedSharding):
        return sharding
    shortest = partition_spec(sharding.normal_spec)
    return sharding if shortest == sharding.spec else sharding.with_spec(shortest)


def _canonical_on_one(sharding: XLACompatibleSharding | None) -> XLACompatibleSharding | None:
    kind = None if sharding is None else custom_memory_kind(sharding)
    if sharding is None or kind is None:
        return None
    return SingleDeviceSharding(sharding.devices[0], memory_kind=kind)


def resolve(request: ShardingRequest) -> ProgramPlacement:
    """Return the devices and shardings of a call.

    Raises:
        DeviceMismatchError: If two parts of the request name different devices.
        ResourceError: If a sharding does not fit its argument or result, or contradicts that of a
            committed argument.
    """
    sources = device_sources(request)
    try:
        devices = agreed_devices(sources, request.names)
    except DeviceMismatchError as error:
        request = request.in_one_order()
        sources = device_sources(request)
        try:
            devices = agreed_devices(sources, request.names)
        except DeviceMismatchError:
            raise error from None  # no-catalogue: raises the first error again
    abstract = abstract_source(sources)
    if devices is None and abstract is None:
        abstract = typed_source(request)
    committed = devices is not None or abstract is not None
    if devices is None:
        devices = assigned_devices(request, abstract) if abstract else (default_device(),)
    if abstract is not None:
        request = request.on(devices)
        sources = device_sources(request)
    mesh = request.mesh if request.mesh is not None else common_mesh(sources, devices)
    if mesh is None and abstract is not None and isinstance(abstract.mesh, AbstractMesh):
        mesh = mesh_over(devices, abstract.mesh)
    ins = _argument_shardings(request, devices, mesh)
    outs = _result_shardings(request, devices, mesh)
    committed = committed or len(devices) > 1 or request.commits
    return ProgramPlacement(devices, mesh, ins, outs, committed)


def resolve_layouts(
    arguments: Sequence[Argument],
    values: Sequence[Any],
    requested: Sequence[Any],
    keyword: str,
) -> tuple[Any, ...]:
    """Return the layout of each argument: the requested one, or that of a committed array.

    Args:
        arguments: The arguments.
        values: Their values.
        requested: The layout that was requested for each, or None.
        keyword: The keyword by which.

    Raises:
        ResourceError: If a committed argument has another layout than the requested one.
    """
    layouts = []
    for argument, value, layout in zip(arguments, values, requested, strict=True):
        if layout is None:
            layout = argument.layout if argument.committed else None
        else:
            check_committed_layout(argument, value, layout, f"{keyword} takes {{}}")
        layouts.append(layout)
    return tuple(layouts)


def check_committed_layout(argument: Argument, value: Any, layout: Any, text: str) -> None:
    """Refuse an array that is committed in another layout than the one that a program takes.

    Args:
        argument: The array.
        value: Its value.
        layout: The layout that the program takes; None if it is unknown.
        text: The beginning of the error, with a place for the array.

    Raises:
        ResourceError: If the array has another layout.
    """
    sharding = argument.sharding
    if layout is None or sharding is None or not argument.committed:
        return
    own = own_layout(value)
    if own is None or is_same_layout(layout, own):
        return
    path, code = argument.path, layout_code(layout)
    advice = f"convert it first with device_put({path}, Format({code}, {as_code(sharding)}))"
    if is_auto_layout(layout):
        advice = (
            "give lower() a jax.ShapeDtypeStruct in its place, and call the compiled program with "
            "arrays of its input_formats"
        )
    raise ResourceError(
        f"{text.format(argument.describe())} in the layout {code}, but it is committed in the "
        f"layout {layout_code(own)}: {advice}",
        path=path,
    )


@lru_cache(maxsize=4096)
def named(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> NamedSharding:
    """Return the sharding of a spec on the mesh in force."""
    return NamedSharding(mesh, spec)


def to_sharding(
    resource: Resource, mesh: Mesh | AbstractMesh | None, *value: str
) -> Sharding | None:
    """Return the sharding that a resource stands for under a mesh; None if it is unspecified.

    `None` as a resource (replicated) needs devices: without a mesh it is resolved later, when the
    program's devices are known (`REPLICATED`).

    Args:
        resource: The resource.
        mesh: The mesh in force, or None.
        value: The keyword and the path of its value, for errors: `"in_shardings", "x"`.

    Raises:
        MeshError: For a spec without a mesh.
        ResourceError: For a spec that does not fit the mesh, or names manual axes of a `shard_map`
            around the call.
    """
    requested = resource.value
    if isinstance(requested, INFERRED):
        return None
    if requested is None:
        sharding = REPLICATED if mesh is None else named(mesh, PartitionSpec())
    elif not isinstance(requested, Sharding):
        sharding = _spec_on(mesh, requested, value)
    elif isinstance(requested, NamedSharding) and isinstance(requested.mesh, AbstractMesh):
        sharding = requested if mesh is None else _on_devices(requested, mesh, value)
    else:
        sharding = requested
    if not isinstance(sharding, NamedSharding):
        return sharding
    manual = tracing.manual_axes()
    for axis in sharding.normal_spec.axes if manual else ():
        if axis in manual:
            path = " of ".join(value)
            raise ResourceError(
                f"{path} is {sharding.spec}, but {axis!r} is a manual axis of the shard_map "
                "around it, where each value is one shard: leave that axis out",
                path=path,
            )
    return sharding


def _spec_on(
    mesh: Mesh | AbstractMesh | None, spec: PartitionSpec, value: Sequence[str]
) -> NamedSharding:
    """Return the sharding of a spec on the mesh in force."""
    path = " of ".join(value)
    if mesh is None:
        raise MeshError(
            f"{path} is {spec}, but no mesh is in force that has its axes: call inside "
            f"`with jax.set_mesh(mesh):`, or give NamedSharding(mesh, {spec})"
        )
    try:
        validate_spec(spec_of(spec), grid_of(mesh))
        return named(mesh, spec)
    except (GeometryError, ShardingError) as error:
        raise ResourceError(f"{path} is {spec}: {error}", path=path, also=type(error)) from None


def _on_devices(
    sharding: NamedSharding, mesh: Mesh | AbstractMesh, value: Sequence[str]
) -> NamedSharding:
    """Return a sharding on an abstract mesh over the devices of the mesh in force."""
    if _axes(mesh) != _axes(sharding.mesh):
        raise MeshError(
            f"{' of '.join(value)} stands on {sharding.mesh}, which has no devices, and the mesh "
            f"in force is {mesh}: call inside `with jax.set_mesh(mesh):` of a mesh with those "
            "axes, sizes and types"
        )
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _axes(mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    """Return the parts of a mesh that an abstract mesh has too, without the kind of devices."""
    return mesh.axis_names, mesh.axis_sizes, mesh.axis_types


def _argument_shardings(
    request: ShardingRequest, devices: tuple[Device, ...], mesh: Mesh | None
) -> tuple[XLACompatibleSharding | None, ...]:
    """Return the sharding of each argument; None for those that the program does not take."""
    keyword, used = request.names[0], request.used or repeat(True)
    shardings = []
    for argument, requested, is_used in zip(
        request.arguments, request.in_shardings, used, strict=False
    ):
        sharding, aval = None, argument.aval
        if requested is not None:
            sharding = fit_sharding(requested, (keyword, argument.path, aval), devices, mesh)
            if sharding.is_unreduced:
                _check_unreduced(sharding, (keyword, argument.path, aval), is_result=False)
            if argument.committed and argument.sharding is not sharding:
                _check_agrees(argument, sharding, keyword)
        elif argument.committed:
            sharding = argument.sharding
        elif len(devices) > 1 and aval.ndim == 0:
            # A scalar is replicated anyway; to request it keeps calls with and without one alike.
            sharding = replicate_over(devices, mesh)
        shardings.append(sharding if is_used else None)
    return tuple(shardings)


def _result_shardings(
    request: ShardingRequest, devices: tuple[Device, ...], mesh: Mesh | None
) -> tuple[XLACompatibleSharding | None, ...]:
    """Return the sharding of each result."""
    shardings = []
    for path, aval, requested in zip(
        request.result_paths, request.result_avals, request.out_shardings, strict=True
    ):
        if requested is None:
            shardings.append(typed_sharding(aval, devices))
            continue
        sharding = fit_sharding(requested, (request.names[1], path, aval), devices, mesh)
        if sharding.is_unreduced:
            _check_unreduced(sharding, (request.names[1], path, aval), is_result=True)
        shardings.append(sharding)
    return tuple(shardings)


type _Value = tuple[str, str, Any]
"""The keyword of a value's sharding, its path, and its abstract value."""


def _describe(value: _Value) -> str:
    keyword, path, aval = value
    return f"{keyword} of {path} ({aval_text(aval)})"


def fit_sharding(
    requested: Sharding, value: _Value, devices: tuple[Device, ...], mesh: Mesh | None
) -> XLACompatibleSharding:
    """Return a requested sharding as one that XLA takes, and that fits the shape of its value.

    Raises:
        ResourceError: If it doesn't fit, or has tiles of different sizes.
    """
    if requested is REPLICATED:
        return replicate_over(devices, mesh)
    keyword, path, aval = value
    shape = tuple(aval.shape)
    if not isinstance(requested, XLACompatibleSharding):
        try:
            requested = as_tiles(requested, shape)
        except (GeometryError, ShardingError) as error:
            raise ResourceError(
                f"{_describe(value)} is a {type(requested).__name__}: {error}. Let "
                "devices_indices_map give each of its devices a slice of the same size",
                path=path,
            ) from None
    try:
        if type(requested) is NamedSharding:
            check_fits(requested, shape)
        else:
            requested.is_compatible_aval(shape)
    except GeometryError as error:
        hint = ""
        if isinstance(error, DivisibilityError):
            pad = f"Pad dimension {error.dim} to a multiple of {error.tiles}"
            hint = f". {or_whole(pad, requested, [error.dim])}"
        kind = aval_text(aval)
        text = f"{error}{hint}"
        raise misfit(keyword, path, kind, requested, text, also=type(error)) from None
    return requested


def _check_agrees(argument: Argument, sharding: XLACompatibleSharding, keyword: str) -> None:
    """Check the requested sharding of a committed argument against its own.

    A call moves an argument between devices, as JAX does, but does not cut it anew.

    Raises:
        ResourceError: If their tiles differ.
    """
    own = argument.sharding
    if own is None or own == sharding or _has_same_tiles(sharding, own, argument.aval.ndim):
        return
    raise ResourceError(
        f"{keyword} puts {argument.describe()} as {described(sharding)}, but the argument is "
        f"committed as {described(own)}: move it first with device_put(x, {as_code(sharding)}), or "
        "leave its resource UNSPECIFIED to compute where it is",
        path=argument.path,
    )


def _has_same_tiles(first: XLACompatibleSharding, other: XLACompatibleSharding, ndim: int) -> bool:
    if first.is_equivalent_to(other, ndim):
        return True
    if first.memory_kind != other.memory_kind or first.is_unreduced or other.is_unreduced:
        return False
    tilings = first.rank_tiling(ndim), other.rank_tiling(ndim)
    if tilings[0].is_replicated and tilings[1].is_replicated:
        return True
    return first.num_devices == other.num_devices and tilings[0].same_tiles(tilings[1])


def _check_unreduced(sharding: XLACompatibleSharding, value: _Value, *, is_result: bool) -> None:
    """Check an unreduced sharding against the type of its value.

    Raises:
        ResourceError: If the type of an argument is not unreduced so, for the function was traced
            as if it got the reduced value; or if a result would need a change of its partial
            results that XLA can't make.
    """
    if not isinstance(sharding, NamedSharding):
        return
    _, path, aval = value
    typed = getattr(aval, "sharding", None)
    if is_result:
        problem = typed and reshard_problem(typed.spec, sharding.spec, aval.dtype)
        problem = problem and f"its type is {aval_text(aval)}: {problem}"
    elif typed is None or typed.spec.unreduced != sharding.spec.unreduced:
        problem = (
            f"its type {aval_text(aval)} is not unreduced so: pass an unreduced array, by "
            f"device_put({path}, {as_code(sharding)})"
        )
    else:
        problem = ""
    if problem:
        raise ResourceError(
            f"{_describe(value)} is {described(sharding)}, but {problem}", path=path
        )
