"""Plans of programs: frozen values, and the entry to this room."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from typing import Any

from xlashard._jax.lowering import uses_shardy
from xlashard._jax.runtime import coordination
from xlashard._jax.runtime.shardings import Device
from xlashard.core.sharding import (
    GSPMDSharding,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
    XLACompatibleSharding,
)
from xlashard.errors import PlanError, counted
from xlashard.support.formatting import format_two_device_lists
from xlashard.support.lazily import dataclass


class Partitioner(Enum):
    """Partitioner of a program."""

    SHARDY = "shardy"
    GSPMD = "gspmd"

    @classmethod
    def in_force(cls) -> "Partitioner":
        """Return the partitioner of JAX's configuration."""
        return cls.SHARDY if uses_shardy() else cls.GSPMD


@dataclass(frozen=True)
class ValuePlan:
    """One argument or result of `@main`.

    Attributes:
        shape: Its logical shape.
        dtype: Its dtype's name.
        sharding: Its sharding; None leaves it to the partitioner.
        layout: The order of its dimensions in memory, in the module's notation; None for default.
        memory_kind: Its memory; None for the device's default one.
        trailing: Number of trailing dimensions of its buffers (PRNG keys), which are replicated.
        name: Its path: `state['params']['w']`, `result[0]`.
        annotated: True if the module has a sharding for it already, which stays.
        is_token: True for a token, whose type in the module has no shape.
        is_whole: True for a result whose value in the body is reduced; partial results are made of
            it if its sharding is unreduced.
    """

    shape: tuple[int, ...]
    dtype: str
    sharding: XLACompatibleSharding | None = None
    layout: str | None = None
    memory_kind: str | None = None
    trailing: int = 0
    name: str = ""
    annotated: bool = False
    is_token: bool = False
    is_whole: bool = False

    @cached_property
    def is_free(self) -> bool:
        """Return True if the partitioner chooses any part of its sharding."""
        return not self.annotated and (self.sharding is None or bool(open_dims(self.sharding)))

    @cached_property
    def is_settled(self) -> bool:
        """Return True if its sharding is known before compilation."""
        return self.sharding is not None and not self.is_free

    def with_name(self, name: str) -> "ValuePlan":
        """Return the plan under another name."""
        # `replace` takes ten times as long, for each leaf of a large tree.
        named = object.__new__(ValuePlan)
        named.__dict__.update(self.__dict__, name=name)
        return named

    @property
    def physical_ndim(self) -> int:
        """Return the rank of its buffers."""
        return len(self.shape) + self.trailing


type _Chosen = Sequence[Sequence[Any]]
"""Values chosen for the arguments, and for the results."""


@dataclass(frozen=True)
class ProgramPlan:
    """Everything but the body that decides the compiled program.

    Equal plans of one body are one program: the plan is the explicit cache key.

    Attributes:
        name: The module's name.
        devices: The device assignment.
        args: The arguments, tokens not counted.
        results: The results, tokens not counted.
        donated: Whether the buffers of each argument may be reused.
        aliased: Positions of results that are aliased to an argument in the module already.
        partitioner: The partitioner.
        options: Options of the compiler, sorted by name.
        mesh: The mesh that names the axes of propagated shardings.
        context: Settings of JAX that change its lowering rules.
    """

    name: str
    devices: tuple[Device, ...]
    args: tuple[ValuePlan, ...]
    results: tuple[ValuePlan, ...]
    donated: tuple[bool, ...]
    partitioner: Partitioner
    options: tuple[tuple[str, Any], ...] = ()
    mesh: Mesh | None = None
    context: Any = None
    aliased: tuple[int, ...] = ()

    @property
    def function_name(self) -> str:
        """Return the function's name: the module's without the prefix of `pjit`."""
        return self.name.removeprefix("pjit_")

    @cached_property
    def has_unreduced(self) -> bool:
        """Return True if an argument or result is unreduced."""
        shardings = {value.sharding for value in (*self.args, *self.results)}
        return any([s is not None and s.is_unreduced for s in shardings])

    @property
    def local_devices(self) -> list[Device]:
        """Return its devices that belong to this process."""
        process = coordination.process_index()
        return [device for device in self.devices if device.process_index == process]

    @property
    def is_of_one_process(self) -> bool:
        """Return whether all its devices belong to one process."""
        first = self.devices[0].process_index
        return all([device.process_index == first for device in self.devices])

    def settle_values(
        self, shardings: "_Chosen", layouts: "_Chosen | None" = None
    ) -> "ProgramPlan":
        """Return the plan with what the compiler chose.

        Args:
            shardings: The shardings of the arguments, and of the results.
            layouts: Their layouts; None for those of the plan.
        """
        sides = self.args, self.results
        if layouts is None:
            layouts = [[value.layout for value in side] for side in sides]
        args, results = (
            tuple(
                replace(value, sharding=sharding, annotated=False, layout=layout)
                for value, sharding, layout in zip(values, chosen, orders, strict=True)
            )
            for values, chosen, orders in zip(sides, shardings, layouts, strict=True)
        )
        return replace(self, args=args, results=results)

    def replicated(self, memory_kind: str | None) -> XLACompatibleSharding:
        """Return the sharding of a value that each device holds; on the plan's mesh, if any."""
        return replicate_over(self.devices, self.mesh, memory_kind)

    def __post_init__(self) -> None:
        if len(self.donated) != len(self.args):
            marks, args = counted(len(self.donated), "donation mark"), len(self.args)
            # no-catalogue: pjit and compile_stablehlo never make such a plan
            raise PlanError(f"{marks} for {counted(args, 'argument')}")
        values = {id(value.sharding): value for value in (*self.args, *self.results)}
        for value in values.values():
            own = self.devices if value.sharding is None else value.sharding.devices
            if own is not self.devices and own != self.devices:
                texts = format_two_device_lists(own, self.devices)
                raise PlanError(  # no-catalogue: pjit and compile_stablehlo never make such a plan
                    f"{value.name or 'a value'} is sharded over {texts[0]}, and the program runs "
                    f"on {texts[1]}"
                )


def replicate_over(
    devices: tuple[Device, ...], mesh: Mesh | None, memory_kind: str | None = None
) -> XLACompatibleSharding:
    """Return the sharding of a value that each device holds; on a mesh of the devices, if any."""
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0], memory_kind=memory_kind)
    return GSPMDSharding.get_replicated(devices, memory_kind=memory_kind)


def open_dims(sharding: XLACompatibleSharding, ndim: int | None = None) -> tuple[int, ...]:
    """Return the dimensions that a sharding leaves to the partitioner.

    Args:
        sharding: The sharding.
        ndim: The rank of the value, checked if it is given.
    """
    if not isinstance(sharding, NamedSharding):
        return ()
    spec = sharding.normal_spec
    dims = spec.dims if ndim is None else spec.for_rank(ndim)
    return tuple([i for i, axes in enumerate(dims) if axes is None])


def option_items(options: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """Return compiler options as part of a key."""
    return tuple(sorted((options or {}).items()))
