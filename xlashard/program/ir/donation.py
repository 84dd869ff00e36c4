"""Pairs of donated arguments and the results that may take over their buffers."""

from collections import defaultdict, deque
from collections.abc import Callable
from math import prod

import numpy as np

from xlashard.lazily import dataclass
from xlashard.program.ir.plan import ProgramPlan, ValuePlan


@dataclass(frozen=True)
class Donation:
    """Plan for a program's donated arguments.

    Attributes:
        alias: The result that certainly takes over the buffers of each argument, or None.
        donor: Whether the compiler may reuse the buffers of each argument for any result.
        unusable: Positions of donated arguments that no result can reuse.
        partner: The result that each argument is paired with, or None.
    """

    alias: tuple[int | None, ...]
    donor: tuple[bool, ...]
    unusable: tuple[int, ...]
    partner: tuple[int | None, ...]

    def takers(self, plan: ProgramPlan) -> dict[int, int | None]:
        """Return the argument of each paired result; None for pairs of the module itself."""
        found: dict[int, int | None] = dict.fromkeys(plan.aliased)
        found |= {j: i for i, j in enumerate(self.partner) if j is not None}
        return found


def plan_donation(plan: ProgramPlan) -> Donation:
    """Pair donated arguments with results.

    A result of the same shape, dtype, memory, layout and sharding takes the argument's buffers by
    an alias. Where the partitioner still has to choose a sharding or a layout, or only the number
    of bytes agrees, the compiler is offered the buffers and decides.
    """
    if not any(plan.donated):
        none = (None,) * len(plan.args)
        return Donation(none, plan.donated, (), none)
    pairs = _Pairs(plan)
    waiting = [i for i, donated in enumerate(plan.donated) if donated]
    for key in (_same_place, _perhaps_same_place, _same_bytes, _perhaps_same_bytes):
        waiting = pairs.pair(waiting, key)
    return Donation(tuple(pairs.alias), tuple(pairs.donor), tuple(waiting), tuple(pairs.partner))


type _Key = Callable[[ProgramPlan, ValuePlan, bool], object]
"""Returns the key by which an argument (False) and a result (True) are paired."""


class _Pairs:
    """Donated arguments and the results that take over their buffers, while they are paired."""

    def __init__(self, plan: ProgramPlan) -> None:
        self._plan = plan
        self._taken = set(plan.aliased)
        self.alias: list[int | None] = [None] * len(plan.args)
        self.donor = [False] * len(plan.args)
        self.partner: list[int | None] = [None] * len(plan.args)

    def pair(self, waiting: list[int], key: _Key) -> list[int]:
        """Pair each argument with the first free result of an equal key; the others are left."""
        if not waiting:
            return waiting
        plan = self._plan
        free: dict[object, deque[int]] = defaultdict(deque)
        for j, result in enumerate(plan.results):
            if j not in self._taken:
                free[key(plan, result, True)].append(j)
        left = []
        for i in waiting:
            candidates = free.get(key(plan, plan.args[i], False))
            if not candidates:
                left.append(i)
                continue
            j = candidates.popleft()
            self._taken.add(j)
            self.partner[i] = j
            if key is _same_place and _is_certain(plan, i, j):
                self.alias[i] = j
            else:
                self.donor[i] = True
        return left


def _same_place(plan: ProgramPlan, value: ValuePlan, result: bool) -> object:
    same = _type(value), value.layout
    if len(plan.devices) == 1:
        return same
    if not value.is_settled or value.sharding is None:
        return *same, None
    return *same, value.sharding.rank_tiling(len(value.shape))


def _perhaps_same_place(plan: ProgramPlan, value: ValuePlan, result: bool) -> object:
    """Return a key that is equal where one sharding is open and may become the other."""
    return value.is_settled != result, _type(value)


def _type(value: ValuePlan) -> object:
    return value.shape, value.dtype, value.memory_kind


def _same_bytes(plan: ProgramPlan, value: ValuePlan, result: bool) -> object:
    if not value.is_settled or value.sharding is None:
        return "open", _bytes(value, value.shape), value.memory_kind
    return _bytes(value, value.sharding.shard_shape(value.shape)), value.memory_kind


def _perhaps_same_bytes(plan: ProgramPlan, value: ValuePlan, result: bool) -> object:
    return value.is_settled != result, _bytes(value, value.shape), value.memory_kind


def has_room(result: ValuePlan, value: ValuePlan) -> bool:
    """Return whether a result may be as large as an argument on each device, in the same memory."""
    if result.memory_kind != value.memory_kind:
        return False
    if result.is_settled and value.is_settled:
        return bytes_of(result) == bytes_of(value)
    return _bytes(result, result.shape) == _bytes(value, value.shape)


def bytes_of(value: ValuePlan) -> object:
    """Return the bytes of a value per device, or a comparable stand-in for keys."""
    whole = value.sharding is None or value.is_free
    sharding = None if whole else value.sharding
    return _bytes(value, value.shape if sharding is None else sharding.shard_shape(value.shape))


def _bytes(value: ValuePlan, shape: tuple[int, ...]) -> object:
    try:
        return prod(shape) * np.dtype(value.dtype).itemsize
    except TypeError:
        # PRNG keys compare with keys of their own kind only.
        return prod(shape), value.dtype


def _is_certain(plan: ProgramPlan, i: int, j: int) -> bool:
    arg, result = plan.args[i], plan.results[j]
    if "auto" in (arg.layout, result.layout):
        return False
    return len(plan.devices) == 1 or (arg.is_settled and result.is_settled)
