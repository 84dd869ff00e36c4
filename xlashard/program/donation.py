"""Which result may take over the buffers of which donated argument."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from xlashard.program.plan import ProgramPlan, ValuePlan


@dataclass(frozen=True)
class Donation:
    """What becomes of a program's donated arguments.

    Attributes:
        alias: For each argument the result that certainly takes over its buffers, or None.
        donor: For each argument whether the compiler may reuse its buffers for any result.
        unusable: Positions of donated arguments that no result can reuse.
    """

    alias: tuple[int | None, ...]
    donor: tuple[bool, ...]
    unusable: tuple[int, ...]


def plan_donation(plan: ProgramPlan) -> Donation:
    """Pairs donated arguments with results.

    A result of the same shape, dtype, memory, layout and sharding takes the argument's buffers by
    an alias. Where the partitioner still has to choose a sharding or a layout, or only the number
    of bytes agrees, the compiler is offered the buffers and decides.
    """
    pairs = _Pairs(plan)
    waiting = [i for i, donated in enumerate(plan.donated) if donated]
    for key in (_same_place, _perhaps_same_place, _same_bytes, _perhaps_same_bytes):
        waiting = pairs.pair(waiting, key)
    return Donation(tuple(pairs.alias), tuple(pairs.donor), tuple(waiting))


type _Key = Callable[[ProgramPlan, ValuePlan, bool], object]
"""What must be equal for an argument (False) and a result (True) to be paired."""


class _Pairs:
    """Donated arguments and the results that take over their buffers, while they are paired."""

    def __init__(self, plan: ProgramPlan) -> None:
        self._plan = plan
        self._taken = set(plan.aliased)
        self.alias: list[int | None] = [None] * len(plan.args)
        self.donor = [False] * len(plan.args)

    def pair(self, waiting: list[int], key: _Key) -> list[int]:
        """Pairs each argument with the first free result of an equal key; the others are left."""
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
    """Equal where one of the two is still open, and may come to be cut like the other."""
    return value.is_settled != result, _type(value)


def _type(value: ValuePlan) -> object:
    return value.shape, value.dtype, value.memory_kind


def _same_bytes(plan: ProgramPlan, value: ValuePlan, result: bool) -> object:
    if not value.is_settled or value.sharding is None:
        return "open", _bytes(value, value.shape), value.memory_kind
    return _bytes(value, value.sharding.shard_shape(value.shape)), value.memory_kind


def _perhaps_same_bytes(plan: ProgramPlan, value: ValuePlan, result: bool) -> object:
    return value.is_settled != result, _bytes(value, value.shape), value.memory_kind


def _bytes(value: ValuePlan, shape: tuple[int, ...]) -> object:
    try:
        return prod(shape) * np.dtype(value.dtype).itemsize
    except TypeError:
        # PRNG keys, which are like other keys of their kind only.
        return prod(shape), value.dtype


def _is_certain(plan: ProgramPlan, i: int, j: int) -> bool:
    arg, result = plan.args[i], plan.results[j]
    if "auto" in (arg.layout, result.layout):
        return False
    return len(plan.devices) == 1 or (arg.is_settled and result.is_settled)


def unusable_text(plan: ProgramPlan, donation: Donation, function: str) -> str:
    """Why donated arguments can't be reused, each by its path."""
    lines = [_why(plan, plan.args[i]) for i in donation.unusable]
    count = "a donated argument" if len(lines) == 1 else f"{len(lines)} donated arguments"
    return (
        f"{function} was given {count} whose buffers no result can take over; leave "
        f"{'it' if len(lines) == 1 else 'them'} out of donate_argnums:\n  " + "\n  ".join(lines)
    )


def _why(plan: ProgramPlan, arg: ValuePlan) -> str:
    what = f"{arg.name or 'an argument'}: {arg.dtype}[{','.join(map(str, arg.shape))}]"
    size = _bytes(arg, arg.shape)
    alike = [r for r in plan.results if _bytes(r, r.shape) == size]
    if not alike:
        has = f"its {size} bytes" if isinstance(size, int) else "as many keys"
        return f"{what}: no result has {has}"
    here = [r for r in alike if r.memory_kind == arg.memory_kind]
    if not here:
        kinds = sorted({r.memory_kind or "device" for r in alike})
        return f"{what}: the results of its size live in another memory ({', '.join(kinds)})"
    mine = _same_bytes(plan, arg, False)
    if arg.is_settled and not any(_same_bytes(plan, r, True) == mine for r in here):
        return f"{what}: the results of its size are cut into other pieces"
    return f"{what}: the results of its size take over other donated arguments already"
