"""`reshard_plan`: the transfers of a reshard, computed without running it."""

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from xlashard._jax.runtime.shardings import Device
from xlashard.core.array.array_class.protocols import sharding_text
from xlashard.core.array.placement.target import (
    ResolvedSharding,
    parse_placement,
    parse_sharding,
    resolve_sharding,
)
from xlashard.core.array.reshard.p2p import numbered
from xlashard.core.array.reshard.plan import (
    Step,
    Strategy,
    keeps_tile,
    plan_steps,
    sharding_before_split,
)
from xlashard.core.sharding import SingleDeviceSharding
from xlashard.errors import ArgumentError
from xlashard.geometry import ReshardPlan, Tiling
from xlashard.support.consoles import make_console
from xlashard.support.formatting import Escaped, in_bytes, plain_text, typed
from xlashard.support.tracebacks import short_tracebacks

FORMAT = 2
"""Number of the JSON format. It grows when a field changes its meaning or is removed."""

_SERIALIZED = (
    "type nbytes source target route bytes_moved bytes_kept source_shard_bytes target_shard_bytes "
    "peak_bytes pairs"
)

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
    Strategy.TO_BYTES: "each element is copied into a byte, which XLA can send",
    Strategy.FROM_BYTES: "each byte is copied back into an element",
}


@dataclass(frozen=True)
class DevicePair:
    """Bytes from one device to another.

    Attributes:
        source: Id of the source device.
        destination: Id of the destination device.
        nbytes: Bytes.
    """

    source: int
    destination: int
    nbytes: int


@dataclass(frozen=True, repr=False, eq=False)
class ReshardReport:
    """Transfers of a reshard, computed by `xlashard.reshard_plan`.

    `print(report)`, rich's `print` and `report.print()` show it; `to_json` serializes it. The bytes
    are a lower bound: each device keeps what it holds, and gets the rest from one device. XLA's
    collectives may send more. Of a pending sum each device gets the partial results of its shard
    that it lacks; XLA's collectives send less if more than two are reduced for several devices. All
    figures are computed at first use.

    Attributes:
        type: Dtype and shape: `float32[8,16]`.
        nbytes: Bytes of the whole array.
        source: Description of the source sharding.
        target: Description of the target sharding.
        route: Strategies of the steps.
        source_shard_bytes: Bytes on each source device.
        target_shard_bytes: Bytes on each destination device.
        peak_bytes: Peak bytes on a device: its two shards and, where tiles change, buffers for at
            most one more; for elements that are sent as bytes, a copy of a shard. Emulated devices
            share blocks, and need less.

    Example:
        >>> import numpy as np
        >>> from xlashard import device_put
        >>> x = device_put(np.ones(4, np.float32))
        >>> reshard_plan(x, x.sharding).bytes_kept
        16
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
        """Bytes sent from one device to another."""
        return self._plan.bytes_moved

    @property
    def bytes_kept(self) -> int:
        """Bytes of the destination shards that are on their device already."""
        return self._plan.bytes_kept

    @cached_property
    def pairs(self) -> tuple[DevicePair, ...]:
        """Bytes between devices, largest first. Reading it enumerates all pairs."""
        pairs = [
            DevicePair(self._ids[source], self._ids[destination], nbytes)
            for (source, destination), nbytes in self._plan.bytes_by_pair.items()
        ]
        return tuple(sorted(pairs, key=lambda p: (-p.nbytes, p.source, p.destination)))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, with the number of the format."""
        record = {"format": FORMAT} | {name: getattr(self, name) for name in _SERIALIZED.split()}
        record["route"] = list(map(str, self.route))
        record["pairs"] = [asdict(pair) for pair in self.pairs]
        return record

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the report as JSON, with the number of the format.

        Args:
            indent: Spaces per level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def print(self, *, all: bool = False, console: Console | None = None) -> None:
        """Print the report.

        Args:
            all: Show every pair of devices instead of the largest.
            console: Console to print to; standard output if None.
        """
        console = console or make_console()
        for part in self._parts(None if all else _SHOWN):
            console.print(Escaped(part))

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
    """Report what `device_put(x, target)` would move between devices, without moving it.

    Args:
        x: An Array, or an object with shape and dtype such as a `jax.ShapeDtypeStruct`.
        target: Target as for `device_put`: a device, a sharding, a `Format`.
        source: Source device or sharding; by default the sharding of `x`.

    Returns:
        The report.

    Raises:
        ArgumentError: `x` has no shape and dtype, or no sharding although no source is given; or a
            sharding is invalid.
        PlacementError: The array cannot have the target sharding.
        GeometryError: A sharding does not fit the shape.

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
        shape, dtype, origin = _described(x, source)
        if isinstance(origin, jax.Device):
            origin = SingleDeviceSharding(origin)
        old = resolve_sharding(shape, parse_sharding(origin, "source")[0])
        new = parse_placement(target, "target").sharding
        return _report(shape, dtype, old, old if new is None else resolve_sharding(shape, new))


def _described(x: Any, source: Any) -> tuple[tuple[int, ...], Any, Any]:
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None or dtype is None:
        raise ArgumentError(
            f"x must have a shape and a dtype, unlike a {type(x).__name__}: give an Array or "
            "jax.ShapeDtypeStruct((8, 128), np.float32)"
        )
    origin = source if source is not None else getattr(x, "sharding", None)
    if origin is None:
        raise ArgumentError(
            f"x, a {type(x).__name__}, has no sharding: give source=, for example "
            "source=NamedSharding(mesh, P('data'))"
        )
    return tuple(shape), dtype, origin


def _report(
    shape: tuple[int, ...], dtype: Any, source: ResolvedSharding, target: ResolvedSharding
) -> ReshardReport:
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jnp.dtype(dtype)
    route = plan_steps(source, target, dtype)
    plan, devices = _transfers(shape, dtype.itemsize, source, target)
    shards = [math.prod(p.shard_shape) * dtype.itemsize for p in (source, target)]
    return ReshardReport(
        type=typed(dtype.name, shape),
        nbytes=math.prod(shape) * dtype.itemsize,
        source=sharding_text(source.sharding),
        target=sharding_text(target.sharding),
        route=tuple(step.strategy for step in route),
        source_shard_bytes=shards[0],
        target_shard_bytes=shards[1],
        peak_bytes=_peak(route, source, target, shards),
        _plan=plan,
        _ids=tuple(device.id for device in devices),
    )


def _transfers(
    shape: tuple[int, ...], itemsize: int, old: ResolvedSharding, new: ResolvedSharding
) -> tuple[ReshardPlan, tuple[Device, ...]]:
    """Return the plan of a reshard, and the devices by their numbers in it.

    Partial results are planned as slices of one array, stacked along a last dimension. A device
    whose new partial result is zeros receives nothing.
    """
    source, target, devices = old.tiling, new.tiling, new.sharding.devices
    if source != target and target.is_partial:
        before = sharding_before_split(old, new)
        keeps = keeps_tile(before, new)
        devices = tuple(compress(devices, keeps))
        tiles = list(compress(before.tiling.tile_ids().tolist(), keeps))
        target = Tiling(before.tiling.counts, len(tiles), listed=tuple(tiles))
    if source.is_partial:
        shape = (*shape, source.addends)
        source, target = _stacked(source), _stacked(target)
    return numbered(shape, itemsize, (source, old.sharding.devices), (target, devices))


def _stacked(tiling: Tiling) -> Tiling:
    """Return the tiling of partial results that are stacked along a last dimension."""
    counts = (*tiling.counts, tiling.addends)
    return replace(tiling, counts=counts, addends=1, reduction="")


def _peak(
    route: tuple[Step, ...], source: ResolvedSharding, target: ResolvedSharding, shards: list[int]
) -> int:
    if route == (Step(Strategy.KEEP, target),):
        return shards[0]
    if route[0].strategy is Strategy.TO_BYTES:
        return max(shards) + _peak(route[1:-1], source, target, shards)
    shared = not set(source.sharding.devices).isdisjoint(target.sharding.devices)
    # A source that was copied to the destination's devices lies there like any other.
    shared |= len(route) > 1
    ends = sum(shards) if shared else max(shards)
    changes = any(
        step.strategy in (Strategy.COMPILED, Strategy.P2P, Strategy.PERMUTE) for step in route
    )
    return ends + (max(shards) if changes else 0)
