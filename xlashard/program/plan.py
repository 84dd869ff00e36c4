"""What a program is asked to be, as frozen values: the way in to this room."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from xlashard._jax.shardings import Device
from xlashard.sharding import Mesh, XLACompatibleSharding


class Partitioner(Enum):
    """Who deals the operations of a program out over the devices."""

    SHARDY = "shardy"
    GSPMD = "gspmd"


@dataclass(frozen=True)
class ValuePlan:
    """One argument or result of `@main`.

    Attributes:
        shape: Its shape as the user sees it.
        dtype: Its dtype's name.
        sharding: How it is dealt out; None leaves that to the partitioner.
        layout: The order of its dimensions in memory, in the module's writing; None for default.
        memory_kind: The memory it lives in; None for the device's default one.
        trailing: Dimensions that its buffers have past those of `shape` (PRNG keys), never cut.
        name: What a person would call it: `state['params']['w']`, `result[0]`.
    """

    shape: tuple[int, ...]
    dtype: str
    sharding: XLACompatibleSharding | None = None
    layout: str | None = None
    memory_kind: str | None = None
    trailing: int = 0
    name: str = ""

    @property
    def physical_ndim(self) -> int:
        """The rank of its buffers."""
        return len(self.shape) + self.trailing


@dataclass(frozen=True)
class ProgramPlan:
    """Everything that decides what is compiled, but the body.

    Two plans that are equal, for one body, are one program: this is the cache's explicit key.

    Attributes:
        name: The module's name.
        devices: The device assignment.
        args: The arguments, tokens not counted.
        results: The results, tokens not counted.
        donated: For each argument, whether its buffers may be reused.
        partitioner: Who partitions.
        options: Options of the compiler, sorted by name.
        mesh: The mesh on which shardings that the partitioner chose get their names.
        context: Settings of JAX that change what its rules write.
    """

    name: str
    devices: tuple[Device, ...]
    args: tuple[ValuePlan, ...]
    results: tuple[ValuePlan, ...]
    donated: tuple[bool, ...]
    partitioner: Partitioner
    options: tuple[tuple[str, Any], ...] = ()
    mesh: Mesh | None = field(default=None)
    context: Any = None

    def __post_init__(self) -> None:
        if len(self.donated) != len(self.args):
            raise ValueError(f"{len(self.donated)} donation marks for {len(self.args)} arguments")


def option_items(options: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """Compiler options as a part of a key."""
    return tuple(sorted((options or {}).items()))
