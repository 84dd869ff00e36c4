"""Placement of the values of a StableHLO module, by its annotations and the user's overrides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.shardings import Device, default_memory_kind, layout_text
from xlashard._jax.trace.tracing import mesh_in_force
from xlashard.errors import ArgumentError, DeviceMismatchError, ModuleError, counted
from xlashard.pjit.arguments import Argument
from xlashard.pjit.options import index_tuple
from xlashard.pjit.shardings.device_assignment import ShardingRequest
from xlashard.pjit.shardings.resolve import ProgramPlacement, resolve
from xlashard.pjit.shardings.resources import Resource, expand, read_resources, to_sharding
from xlashard.pjit.signature import positions_text
from xlashard.program.parsed_module import ModuleValue, ParsedModule, partitioner_for
from xlashard.program.plan import ProgramPlan, ValuePlan
from xlashard.sharding import GSPMDSharding, Mesh, Sharding, XLACompatibleSharding


@dataclass(frozen=True)
class UserOverrides:
    """Options of `compile_stablehlo` that override annotations of the module.

    Attributes:
        ins: The resource of each argument.
        outs: The resource of each result.
        donated: For each argument, True if its buffers may be reused.
        devices: The requested devices, or None.
        mesh: The requested mesh or the one in force, or None.
    """

    ins: tuple[Resource, ...]
    outs: tuple[Resource, ...]
    donated: tuple[bool, ...]
    devices: tuple[Device, ...] | None
    mesh: Mesh | None

    @classmethod
    def of(
        cls,
        parsed: ParsedModule,
        shardings: tuple[Any, Any],
        donate_argnums: int | Sequence[int],
        devices: Sequence[Device] | None,
        mesh: Mesh | None,
    ) -> "UserOverrides":
        """Check the options of `compile_stablehlo`.

        Raises:
            ArgumentError: If an option has the wrong type.
            ResourceError: If a sharding is invalid, or there are too many.
        """
        count, result_count = len(parsed.args), len(parsed.results)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ArgumentError(
                f"mesh must be a Mesh of devices, not {type(mesh).__name__}: write "
                "Mesh(devices, axis_names)"
            )
        return cls(
            _resources(shardings[0], count, "in_shardings", "args"),
            _resources(shardings[1], result_count, "out_shardings", "results"),
            _donated(donate_argnums, count),
            None if devices is None else _checked_devices(devices),
            mesh if mesh is not None else mesh_in_force(),
        )


def _resources(shardings: Any, count: int, what: str, side: str) -> tuple[Resource, ...]:
    tree = jax.tree_util.tree_structure((0,) * count)

    def path_of(path: Sequence[Any]) -> str:
        return side + jax.tree_util.keystr(tuple(path))

    return tuple(expand(read_resources(shardings, what), tree, path_of))


def _donated(argnums: int | Sequence[int], count: int) -> tuple[bool, ...]:
    positions = set()
    for i in index_tuple(argnums, "donate_argnums"):
        if not -count <= i < count:
            raise ArgumentError(
                f"donate_argnums names argument {i}, the module has {counted(count, 'argument')}: "
                f"give {positions_text(count)}"
            )
        positions.add(i % count)
    return tuple(i in positions for i in range(count))


def _checked_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    found = tuple(devices)
    if not found or not all(isinstance(d, jax.Device) for d in found):
        raise ArgumentError(
            f"devices must be a list of at least one device such as jax.devices(), not {devices!r}"
        )
    return found


def place_module(parsed: ParsedModule, overrides: UserOverrides) -> ProgramPlacement:
    """Resolve devices and shardings, as for a call of a pjit-ed function."""
    devices = _devices(parsed, overrides)
    mesh = overrides.mesh if overrides.mesh is not None else _own_mesh(parsed, devices)
    ins, outs = (
        tuple(to_sharding(r, mesh, what, v.path) for r, v in zip(rs, values, strict=True))
        for what, rs, values in (
            ("in_shardings", overrides.ins, parsed.args),
            ("out_shardings", overrides.outs, parsed.results),
        )
    )
    return resolve(
        ShardingRequest(
            arguments=tuple(Argument(v.path, v.aval, None, False) for v in parsed.args),
            in_shardings=ins,
            out_shardings=outs,
            result_avals=tuple(v.aval for v in parsed.results),
            result_paths=tuple(v.path for v in parsed.results),
            inner=() if devices is None else (GSPMDSharding.get_replicated(devices),),
            mesh=mesh,
        )
    )


def _devices(parsed: ParsedModule, overrides: UserOverrides) -> tuple[Device, ...] | None:
    """Return the devices to run on, None for the default one."""
    sources: list[tuple[str, tuple[Device, ...]]] = []
    if overrides.devices is not None:
        sources.append(("devices", overrides.devices))
    if overrides.mesh is not None:
        sources.append(("the mesh", overrides.mesh._flat_devices_tuple))
    for what, resources, values in (
        ("in_shardings", overrides.ins, parsed.args),
        ("out_shardings", overrides.outs, parsed.results),
    ):
        for resource, value in zip(resources, values, strict=True):
            if isinstance(resource.given, Sharding) and _has_devices(resource.given):
                sources.append((f"the {what} of {value.path}", tuple(resource.given.devices)))
    if not sources:
        return _devices_of(parsed)
    name, first = sources[0]
    for other_name, other in sources[1:]:
        if other != first:
            raise DeviceMismatchError(
                f"a program runs on one list of devices, but {name} names {_ids(first)} and "
                f"{other_name} names {_ids(other)}: leave devices out, or give the same to both"
            )
    return first


def _has_devices(sharding: Sharding) -> bool:
    mesh = getattr(sharding, "mesh", None)
    return mesh is None or isinstance(mesh, Mesh)


def _ids(devices: Sequence[Device]) -> str:
    shown = ", ".join(str(d.id) for d in devices[:8])
    return f"{len(devices)} [{shown}{', ...' if len(devices) > 8 else ''}]"


def _devices_of(parsed: ParsedModule) -> tuple[Device, ...] | None:
    count = parsed.num_partitions or 1
    if count == 1:
        return None
    devices = jax.devices()
    if count != len(devices):
        raise ModuleError(
            f"the module is for {count} partitions (mhlo.num_partitions) and there are "
            f"{len(devices)} devices: say which, devices=jax.devices()[:{count}]"
        )
    return tuple(devices)


def _own_mesh(parsed: ParsedModule, devices: tuple[Device, ...] | None) -> Mesh | None:
    found = None if devices is None else parsed.mesh_for(len(devices))
    if devices is None or found is None:
        return None
    names = [name for name, _ in found.axes]
    return Mesh(np.array(devices).reshape([size for _, size in found.axes]), names)


def plan_module(
    parsed: ParsedModule, overrides: UserOverrides, placement: ProgramPlacement, name: str
) -> ProgramPlan:
    """Return the plan of a module's program."""
    donated = tuple(
        d and not v.donated for d, v in zip(overrides.donated, parsed.args, strict=True)
    )
    return ProgramPlan(
        name=name,
        devices=placement.devices,
        args=tuple(map(_value, parsed.args, placement.in_shardings, overrides.ins)),
        results=tuple(map(_value, parsed.results, placement.out_shardings, overrides.outs)),
        donated=donated,
        partitioner=partitioner_for(parsed),
        mesh=placement.mesh,
        aliased=parsed.aliased,
    )


def _value(
    value: ModuleValue, sharding: XLACompatibleSharding | None, resource: Resource
) -> ValuePlan:
    kind = value.memory_kind
    if sharding is not None:
        default = default_memory_kind(sharding.devices[0])
        if sharding.memory_kind not in (None, default):
            kind = sharding.memory_kind
        elif kind is not None:
            sharding = sharding.with_memory_kind(kind)
    layout = layout_text(resource.layout, value.aval.dtype)
    return value.plan(sharding=sharding, memory_kind=kind, layout=layout)
