"""What `device_put` of an array would move, said without moving it."""

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.array.core.repr import sharding_text
from xlashard.array.placement.target import (
    ResolvedSharding,
    parse_placement,
    parse_sharding,
    resolve_sharding,
)
from xlashard.array.reshard.p2p import plan_between
from xlashard.array.reshard.plan import Step, Strategy, plan_steps
from xlashard.errors import ArgumentError
from xlashard.geometry import ReshardPlan
from xlashard.sharding import SingleDeviceSharding
from xlashard.wording import in_bytes, plain_text, typed

FORMAT = 2
"""Number of the JSON format. It grows when a field changes its meaning or goes away."""

_SHOWN = 8

_DESCRIPTIONS = {
    Strategy.KEEP: "nothing moves",
    Strategy.COPY: "each shard goes to another memory of its device",
    Strategy.HOST_MEMORY: "missing parts are copied within the memory that emulated devices share",
    Strategy.COMPILED: "one compiled program, whose collectives XLA chooses",
    Strategy.SPLIT: "whole shards become partial results",
    Strategy.CARRY: "whole shards go from device to device",
    Strategy.P2P: "pieces of shards go from device to device",
    Strategy.PERMUTE: "pieces of shards go between processes, by rounds of compiled permutations",
}


@dataclass(frozen=True)
class DevicePair:
    """What goes from one device to another.

    Attributes:
        source: The id of the device that has it.
        destination: The id of the device that takes it.
        nbytes: How many bytes.
    """

    source: int
    destination: int
    nbytes: int


@dataclass(frozen=True, repr=False, eq=False)
class ReshardReport:
    """What a change of sharding moves. Made by `xlashard.reshard_plan`.

    `print(report)`, rich's `print` and `report.print()` show it; `to_json` keeps it. The figures
    are the least that has to move: each device keeps what it has, and takes the rest from one that
    has it. XLA's collectives may send more. Nothing is worked out before it is asked for.

    Attributes:
        type: Dtype and shape: `float32[8,16]`.
        nbytes: Bytes of the whole array.
        source: Where it is, in words.
        target: Where it goes, in words.
        route: How it gets there, step by step.
        source_shard_bytes: Bytes that each source device holds.
        target_shard_bytes: Bytes that each destination device holds.
        peak_bytes: The most that a device holds on the way, in bytes: its two shards, and where
            tiles change, buffers for at most one more. Emulated devices share blocks, and need
            less.
    """

    type: str
    nbytes: int
    source: str
    target: str
    route: tuple[Strategy, ...]
    source_shard_bytes: int
    target_shard_bytes: int
    peak_bytes: int
    _plan: ReshardPlan
    _ids: tuple[int, ...]

    @property
    def bytes_moved(self) -> int:
        """Bytes that go from one device to another."""
        return self._plan.bytes_moved

    @property
    def bytes_kept(self) -> int:
        """Bytes of the destination's shards that are on their device already."""
        return self._plan.bytes_kept

    @cached_property
    def pairs(self) -> tuple[DevicePair, ...]:
        """What goes between which devices, most bytes first. It walks through all of them."""
        found = [
            DevicePair(self._ids[source], self._ids[destination], nbytes)
            for (source, destination), nbytes in self._plan.bytes_by_pair.items()
        ]
        return tuple(sorted(found, key=lambda p: (-p.nbytes, p.source, p.destination)))

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, with the number of the format."""
        return {
            "format": FORMAT,
            "type": self.type,
            "nbytes": self.nbytes,
            "source": self.source,
            "target": self.target,
            "route": [str(strategy) for strategy in self.route],
            "bytes_moved": self.bytes_moved,
            "bytes_kept": self.bytes_kept,
            "source_shard_bytes": self.source_shard_bytes,
            "target_shard_bytes": self.target_shard_bytes,
            "peak_bytes": self.peak_bytes,
            "pairs": [asdict(pair) for pair in self.pairs],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as JSON, with the number of the format.

        Args:
            indent: Spaces per level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def print(self, *, all: bool = False, console: Console | None = None) -> None:
        """Prints it.

        Args:
            all: Show every pair of devices, where otherwise those come that move most.
            console: Where to; standard output if None.
        """
        console = console or Console()
        for part in self._parts(None if all else _SHOWN):
            console.print(part)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._parts(_SHOWN)

    def __str__(self) -> str:
        return plain_text(self)

    def __repr__(self) -> str:
        moved = in_bytes(self.bytes_moved)
        return f"<ReshardReport of {self.type}: {moved} moved; print it>"

    def _parts(self, most: int | None) -> list[Any]:
        facts = Table.grid(padding=(0, 2))
        facts.add_row("array", f"{self.type}, {in_bytes(self.nbytes)}")
        facts.add_row("from", f"{self.source}, {in_bytes(self.source_shard_bytes)} a device")
        facts.add_row("to", f"{self.target}, {in_bytes(self.target_shard_bytes)} a device")
        for number, strategy in enumerate(self.route):
            facts.add_row("how" if not number else "", _DESCRIPTIONS[strategy])
        facts.add_row("moved", in_bytes(self.bytes_moved))
        facts.add_row("kept", in_bytes(self.bytes_kept))
        facts.add_row("peak", f"{in_bytes(self.peak_bytes)} a device")
        if not self.bytes_moved:
            return [facts]
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("from device", "to device", "bytes"):
            table.add_column(heading, justify="right")
        for pair in self.pairs[:most]:
            table.add_row(str(pair.source), str(pair.destination), in_bytes(pair.nbytes))
        left = 0 if most is None else len(self.pairs) - most
        return [facts, table, *([f"and {left} more pairs"] if left > 0 else [])]


def reshard_plan(x: Any, target: Any, *, source: Any = None) -> ReshardReport:
    """What `device_put(x, target)` would move between which devices, without moving it.

    Args:
        x: An Array, or anything with a shape and a dtype such as a `jax.ShapeDtypeStruct`.
        target: Where to, as for `device_put`: a device, a sharding, a `Format`.
        source: Where from: a device or a sharding; the sharding of `x` if not given.

    Returns:
        The report.

    Raises:
        ArgumentError: `x` has no shape and dtype, or no sharding and no source is given; or a
            sharding is none.
        PlacementError: The array can't go there.
        GeometryError: The shape can't be placed so.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
        >>> x = jax.ShapeDtypeStruct((8, 4), np.float32)
        >>> rows, columns = NamedSharding(mesh, P("d")), NamedSharding(mesh, P(None, "d"))
        >>> report = reshard_plan(x, columns, source=rows)
        >>> report.bytes_moved, report.bytes_kept
        (0, 128)
    """
    with short_tracebacks:
        shape, dtype, given = _described(x, source)
        here = resolve_sharding(shape, parse_sharding(_spread(given), "source")[0])
        there = parse_placement(target, "target").sharding
        return _report(
            shape, dtype, here, here if there is None else resolve_sharding(shape, there)
        )


def _spread(given: Any) -> Any:
    return SingleDeviceSharding(given) if isinstance(given, jax.Device) else given


def _described(x: Any, source: Any) -> tuple[tuple[int, ...], Any, Any]:
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None or dtype is None:
        raise ArgumentError(
            f"x must have a shape and a dtype, and a {type(x).__name__} has not: give an Array or "
            "jax.ShapeDtypeStruct((8, 128), np.float32)"
        )
    given = source if source is not None else getattr(x, "sharding", None)
    if given is None:
        raise ArgumentError(
            f"x, a {type(x).__name__}, doesn't say where it is: give source=, for example "
            "source=NamedSharding(mesh, P('data'))"
        )
    return tuple(shape), dtype, given


def _report(
    shape: tuple[int, ...], dtype: Any, here: ResolvedSharding, there: ResolvedSharding
) -> ReshardReport:
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jnp.dtype(dtype)
    route = plan_steps(here, there)
    plan, devices = plan_between(shape, dtype.itemsize, here, there)
    shards = [math.prod(p.shard_shape) * dtype.itemsize for p in (here, there)]
    return ReshardReport(
        type=typed(dtype.name, shape),
        nbytes=math.prod(shape) * dtype.itemsize,
        source=sharding_text(here.sharding),
        target=sharding_text(there.sharding),
        route=tuple(step.strategy for step in route),
        source_shard_bytes=shards[0],
        target_shard_bytes=shards[1],
        peak_bytes=_peak(route, here, there, shards),
        _plan=plan,
        _ids=tuple(device.id for device in devices),
    )


def _peak(
    route: tuple[Step, ...], here: ResolvedSharding, there: ResolvedSharding, shards: list[int]
) -> int:
    if route == (Step(Strategy.KEEP, there),):
        return shards[0]
    shared = not set(here.sharding.devices).isdisjoint(there.sharding.devices)
    # A source that was carried to the destination's own devices lies there like any other.
    shared |= len(route) > 1
    ends = sum(shards) if shared else max(shards)
    changes = any(
        step.strategy in (Strategy.COMPILED, Strategy.P2P, Strategy.PERMUTE) for step in route
    )
    return ends + (max(shards) if changes else 0)
