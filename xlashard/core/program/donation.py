"""Pair donated arguments with results, and report the arguments that no result can take over."""

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import log, prod

import numpy as np

from xlashard.core.program.plan import ProgramPlan, ValuePlan
from xlashard.core.sharding import GSPMDSharding, NamedSharding, XLACompatibleSharding
from xlashard.errors import DonationError
from xlashard.support.formatting import typed
from xlashard.support.lazily import dataclass


@dataclass(frozen=True)
class Donation:
    """Plan for a program's donated arguments.

    Attributes:
        pairs: The result of each paired argument, by position.
        certain: The paired arguments whose buffers the result takes over in any case. Those of the
            others the compiler may reuse for any result.
        unusable: Positions of donated arguments that no result can reuse.
    """

    pairs: Mapping[int, int]
    certain: frozenset[int]
    unusable: tuple[int, ...]


NO_DONATION = Donation({}, frozenset(), ())
"""Plan for a program without donated arguments."""


def plan_donation(plan: ProgramPlan) -> Donation:
    """Pair donated arguments with results.

    A result of the same shape, dtype, memory, layout and sharding takes the argument's buffers by
    an alias. Where the partitioner still has to choose a sharding or a layout, or only the number
    of bytes agrees, the compiler is offered the buffers and decides.
    """
    pairs: dict[int, int] = {}
    certain = set()
    for key in (_same_place, _perhaps_same_place, _same_bytes, _perhaps_same_bytes):
        used = {*plan.aliased, *pairs.values()}
        free: dict[object, deque[int]] = defaultdict(deque)
        for j, result in enumerate(plan.results):
            if j not in used:
                free[key(plan, result, True)].append(j)
        for i in _unpaired(plan, pairs):
            candidates = free.get(key(plan, plan.args[i], False))
            if candidates:
                pairs[i] = j = candidates.popleft()
                if key is _same_place and _is_certain(plan, i, j):
                    certain.add(i)
    ordered = dict(sorted(pairs.items()))
    return Donation(ordered, frozenset(certain), tuple(_unpaired(plan, pairs)))


def check_open_layouts(plan: ProgramPlan, donation: Donation, function: str) -> None:
    """Refuse a layout that the compiler would choose to be that of a result, or of an argument.

    Raises:
        DonationError: If a donated argument or its result alone has an open layout.
    """
    for i, j in donation.pairs.items():
        value, result = plan.args[i], plan.results[j]
        is_open = value.layout == "auto"
        if is_open != (result.layout == "auto") and _local_type(value) == _local_type(result):
            first, other = (value, result) if is_open else (result, value)
            raise DonationError(
                f"{function} leaves the layout of {_name(first)} to the compiler (Layout.AUTO), "
                f"but not that of {_name(other)}, with which it shares the donated buffers: give "
                f"{_name(other)} a Format with Layout.AUTO too"
            )


def _local_type(value: ValuePlan) -> object:
    local = value.shape if value.sharding is None else value.sharding.shard_shape(value.shape)
    return local, value.dtype, value.memory_kind


def _unpaired(plan: ProgramPlan, pairs: Mapping[int, int]) -> list[int]:
    """Return the donated arguments that have no result yet."""
    return [i for i, donated in enumerate(plan.donated) if donated and i not in pairs]


def _same_place(plan: ProgramPlan, value: ValuePlan, result: bool) -> object:
    layout = None if value.layout is None else _layout_key(plan, value, value.layout)
    same = value.shape, value.dtype, value.memory_kind, layout
    if len(plan.devices) == 1:
        return same
    if not value.is_settled or value.sharding is None:
        return *same, None
    return *same, value.sharding.rank_tiling(len(value.shape))


def _layout_key(plan: ProgramPlan, value: ValuePlan, layout: str) -> str | None:
    """Return the layout of a value; None where it spells out the default one."""
    if plan.devices[0].platform == "tpu":
        return layout  # its default layouts have tiles
    default = f"{{{','.join(map(str, reversed(range(value.physical_ndim))))}}}"
    return None if layout == default else layout


def _perhaps_same_place(plan: ProgramPlan, value: ValuePlan, result: bool) -> object:
    """Return a key that is equal where one sharding is open and may become the other."""
    return value.is_settled != result, value.shape, value.dtype, value.memory_kind


def _same_bytes(plan: ProgramPlan, value: ValuePlan, result: bool) -> object:
    if not value.is_settled or value.sharding is None:
        return "open", local_bytes(value, None), value.memory_kind
    return bytes_of(value), value.memory_kind


def _perhaps_same_bytes(plan: ProgramPlan, value: ValuePlan, result: bool) -> object:
    return value.is_settled != result, local_bytes(value, None), value.memory_kind


def has_room(result: ValuePlan, value: ValuePlan) -> bool:
    """Return whether a result may be as large as an argument on each device, in the same memory."""
    if result.memory_kind != value.memory_kind:
        return False
    if result.is_settled and value.is_settled:
        return bytes_of(result) == bytes_of(value)
    return local_bytes(result, None) == local_bytes(value, None)


def bytes_of(value: ValuePlan) -> object:
    """Return the bytes of a value per device, or a comparable stand-in for keys."""
    return local_bytes(value, None if value.is_free else value.sharding)


def sum_known(sizes: Sequence[object]) -> int:
    """Return the sum of the bytes of values, keys left out."""
    return sum([size for size in sizes if isinstance(size, int)])


def local_bytes(value: ValuePlan, sharding: XLACompatibleSharding | None) -> object:
    """Return the bytes per device of a value under a sharding; None for the whole value."""
    return _shard_bytes(value.shape, value.dtype, sharding)


@lru_cache(maxsize=4096)
def _shard_bytes(
    shape: tuple[int, ...], dtype: str, sharding: XLACompatibleSharding | None
) -> object:
    count = prod(shape if sharding is None else sharding.shard_shape(shape))
    try:
        return count * np.dtype(dtype).itemsize
    except TypeError:
        # PRNG keys compare with keys of their own kind only.
        return count, dtype


def _is_certain(plan: ProgramPlan, i: int, j: int) -> bool:
    arg, result = plan.args[i], plan.results[j]
    if "auto" in (arg.layout, result.layout):
        return False
    return len(plan.devices) == 1 or (arg.is_settled and result.is_settled)


NO_USE = "the function makes no use of it, so its buffers stay as they are"
"""Reason of an argument that the program drops."""


@dataclass(frozen=True)
class UnusedDonation:
    """A donated argument whose buffers stay as they are.

    Attributes:
        value: The argument.
        reason: The reason.
        advice: What to write instead; empty without advice.
    """

    value: ValuePlan
    reason: str
    advice: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.reason, self.advice)))


def report_text(refusals: Sequence[UnusedDonation], function: str) -> str:
    """Return the message about donated arguments that can't be reused, each by its path."""
    one = len(refusals) == 1
    what = "a donated argument" if one else f"{len(refusals)} donated arguments"
    lines = [f"{_described(refused.value)}: {refused}" for refused in refusals]
    return (
        f"{function} got {what} whose buffers no result can take over: leave "
        f"{'it' if one else 'them'} out of donate_argnums, or follow the advice:\n  "
        + "\n  ".join(lines)
    )


def find_unused(
    plan: ProgramPlan, aliases: Mapping[int, int], tokens: int
) -> dict[int, UnusedDonation]:
    """Return the reasons why donated arguments keep their buffers, by position.

    Args:
        plan: The program's plan, with the compiler's choices.
        aliases: For each result that reuses an argument's buffers, the position of that argument.
        tokens: Number of tokens, which the positions of `aliases` count.
    """
    takers = {result - tokens: argument - tokens for result, argument in aliases.items()}
    consumed = set(takers.values())
    kept = [i for i, is_donated in enumerate(plan.donated) if is_donated and i not in consumed]
    return dict(zip(kept, find_refusals(plan, kept, dict(takers)), strict=True))


def find_refusals(
    plan: ProgramPlan, positions: Sequence[int], takers: Mapping[int, int | None]
) -> list[UnusedDonation]:
    """Return the reasons why no result takes over the buffers of some arguments.

    The reason is that of the result whose path ends like the argument's, as those of a state that a
    step updates do; of equal results, that of the one before it in order.

    Args:
        plan: The program's plan, with the compiler's choices if known.
        positions: The arguments.
        takers: The argument whose buffers each result takes over; None for pairs of the module
            itself.
    """
    nearest = _NearestResults(plan, takers)
    return [nearest.refusal(plan.args[position]) for position in positions]


class _NearestResults:
    """The results of a program by shape, size and path, so that no argument reads all of them.

    Args:
        plan: The program's plan.
        takers: See `find_refusals`.
    """

    def __init__(self, plan: ProgramPlan, takers: Mapping[int, int | None]) -> None:
        self._plan = plan
        self._takers = takers
        self._by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._by_bytes: dict[object, list[int]] = defaultdict(list)
        self._found: dict[ValuePlan, list[dict[tuple[str, ...], int]]] = {}
        for j, result in enumerate(plan.results):
            self._by_shape[result.shape].append(j)
            if j in takers:
                self._by_bytes[local_bytes(result, None)].append(j)
                self._by_bytes["settled", bytes_of(result)].append(j)

    def refusal(self, value: ValuePlan) -> UnusedDonation:
        """Return the reason why no result takes over the buffers of an argument."""
        kind = value.with_name("")
        groups = self._found.get(kind)
        if groups is None:
            groups = self._found[kind] = list(map(self._index, self._group(value)))
        ends = path_ends(value.name)
        nearest = (group[end] for group in groups for end in ends if end in group)
        return UnusedDonation(value, *self._explain(value, next(nearest, None)))

    def _group(self, value: ValuePlan) -> tuple[list[int], list[int], list[int]]:
        """Return the results that explain a refusal: of the type, of the shape, of the size."""
        results = self._plan.results
        alike = [j for j in self._by_shape[value.shape] if self._explains(value, j)]
        size, settled = local_bytes(value, None), ("settled", bytes_of(value))
        sized = sorted({*self._by_bytes[size], *self._by_bytes[settled]})
        return (
            [j for j in alike if results[j].dtype == value.dtype],
            [j for j in alike if results[j].dtype != value.dtype],
            [j for j in sized if has_room(results[j], value)],
        )

    def _index(self, results: Sequence[int]) -> dict[tuple[str, ...], int]:
        """Return the first of some results for each end of a path."""
        first: dict[tuple[str, ...], int] = {}
        for j in results:
            for end in path_ends(self._plan.results[j].name):
                first.setdefault(end, j)
        return first

    def _explains(self, value: ValuePlan, j: int) -> bool:
        result = self._plan.results[j]
        takes_over = j in self._takers and has_room(result, value)
        return takes_over or _difference(value, result) is not None

    def _explain(self, value: ValuePlan, j: int | None) -> tuple[str, ...]:
        """Return the reason and the advice; `j` is the nearest result, None without one."""
        if j is None:
            return (_nothing_near(self._plan, value),)
        result = self._plan.results[j]
        if j in self._takers and has_room(result, value):
            return (_conflict(self._plan, result, self._takers[j]),)
        return _difference(value, result) or ()


def path_ends(path: str) -> list[tuple[str, ...]]:
    """Return the ends of a path, the longest first and the empty one last.

    Example:
        >>> path_ends("state['w']")
        [('state', "['w']"), ("['w']",), ()]
    """
    steps = re.findall(r"\[[^]]*\]|\.?[^.[]+", path)
    return [tuple(steps[start:]) for start in range(len(steps) + 1)]


def _conflict(plan: ProgramPlan, result: ValuePlan, consumer: int | None) -> str:
    name = "another argument" if consumer is None else _name(plan.args[consumer])
    return f"{_described(result)} has room for it, but takes over the buffers of {name} already"


def _difference(value: ValuePlan, result: ValuePlan) -> tuple[str, str] | None:
    """Return the difference that keeps a result of the same shape from taking over the buffers.

    Returns:
        The difference, and what to write instead; None without a difference.
    """
    if value.shape != result.shape:
        return None
    name = _name(result)
    if value.dtype != result.dtype:
        different = f"{name} has its shape, but is {result.dtype}"
        return different, f"return it as .astype({value.dtype!r})"
    if value.memory_kind != result.memory_kind:
        memory, result_memory = (_memory(v) for v in (value, result))
        return (
            f"{name} has its type, but is in the memory {result_memory}, and the argument in "
            f"{memory}",
            f"give out_shardings with memory_kind={memory!r}",
        )
    if bytes_of(result) != bytes_of(value):
        difference = (
            f"{name} has its type, but is sharded as {_place(result.sharding)}, "
            f"{_size_text(result)}, and the argument as {_place(value.sharding)}, "
            f"{_size_text(value)}"
        )
        # Advice never takes more memory than the program does.
        size, other = bytes_of(value), bytes_of(result)
        if isinstance(size, int) and isinstance(other, int) and other < size:
            return difference, f"pass {_name(value)} as {_place(result.sharding)}"
        return difference, f"give out_shardings={_place(value.sharding)} for {name}"
    if value.layout != result.layout:
        return (
            f"{name} has its type, but the layout {_layout(result)}, and the argument as "
            f"{_layout(value)}",
            "give both the same Format",
        )
    return None


def _memory(value: ValuePlan) -> str:
    kind = None if value.sharding is None else value.sharding.memory_kind
    return value.memory_kind or kind or "device"


def _layout(value: ValuePlan) -> str:
    return value.layout or "the default one"


def _nothing_near(plan: ProgramPlan, value: ValuePlan) -> str:
    if not plan.results:
        return "the function returns no array"
    count = prod(value.shape) or 1
    nearest = min(plan.results, key=lambda r: abs(log((prod(r.shape) or 1) / count)))
    both = value.is_settled and nearest.is_settled
    size, other = (_size_text(v if both else replace(v, sharding=None)) for v in (value, nearest))
    return (
        f"no result has its shape {list(value.shape)} or its {size}; the nearest is "
        f"{_described(nearest)}, {other}"
    )


def _size_text(value: ValuePlan) -> str:
    size = bytes_of(value)
    if not isinstance(size, int):
        return f"{prod(value.shape)} keys"
    many = value.sharding is not None and value.sharding.num_devices > 1
    return f"{size:,} bytes{' on each device' if many else ''}"


def _described(value: ValuePlan) -> str:
    text = f"{_name(value)}: {typed(value.dtype, value.shape)}"
    sharding = value.sharding
    if sharding is None or sharding.num_devices == 1:
        return text
    return f"{text} as {_place(sharding)}"


def _name(value: ValuePlan) -> str:
    return value.name or "a value"


def _place(sharding: XLACompatibleSharding | None) -> str:
    if sharding is None:
        return "the partitioner chooses"
    if isinstance(sharding, NamedSharding):
        return sharding.normal_spec.describe()
    if isinstance(sharding, GSPMDSharding):
        return sharding.tile_assignment.to_text()
    return str(sharding)
