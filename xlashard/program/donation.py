"""Which result may take over the buffers of which donated argument."""

from collections import defaultdict, deque
from dataclasses import dataclass
from math import prod

from xlashard.program.annotate import is_open
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
    an alias. Where the partitioner still has to choose a sharding, or only the number of elements
    agrees, the compiler is offered the buffers and decides.
    """
    alias: list[int | None] = [None] * len(plan.args)
    donor = [False] * len(plan.args)
    taken: set[int] = set()
    waiting = [i for i, donated in enumerate(plan.donated) if donated]
    waiting = _pair(plan, waiting, taken, alias, donor)
    by_size: dict[tuple[int, str | None], deque[int]] = defaultdict(deque)
    for j, result in enumerate(plan.results):
        if j not in taken:
            by_size[prod(result.shape), result.memory_kind].append(j)
    unusable = []
    for i in waiting:
        arg = plan.args[i]
        free = by_size[prod(arg.shape), arg.memory_kind]
        if not free:
            unusable.append(i)
            continue
        free.popleft()
        donor[i] = True
    return Donation(tuple(alias), tuple(donor), tuple(unusable))


def _pair(
    plan: ProgramPlan,
    waiting: list[int],
    taken: set[int],
    alias: list[int | None],
    donor: list[bool],
) -> list[int]:
    alike: dict[object, deque[int]] = defaultdict(deque)
    for j, result in enumerate(plan.results):
        alike[_kind(result)].append(j)
    left = []
    for i in waiting:
        candidates = alike[_kind(plan.args[i])]
        if not candidates:
            left.append(i)
            continue
        j = next((j for j in candidates if _same_place(plan, i, j)), candidates[0])
        candidates.remove(j)
        taken.add(j)
        if _same_place(plan, i, j):
            alias[i] = j
        else:
            donor[i] = True
    return left


def _kind(value: ValuePlan) -> object:
    return value.shape, value.dtype, value.memory_kind


def _same_place(plan: ProgramPlan, i: int, j: int) -> bool:
    arg, result = plan.args[i], plan.results[j]
    if arg.layout != result.layout:
        return False
    if len(plan.devices) == 1:
        return True
    if arg.sharding is None or is_open(result.sharding) or result.sharding is None:
        return False
    return arg.sharding.is_equivalent_to(result.sharding, len(arg.shape))


def unusable_text(plan: ProgramPlan, donation: Donation, function: str) -> str:
    """Why donated arguments can't be reused, each by its path."""
    lines = [_why(plan, plan.args[i]) for i in donation.unusable]
    return (
        f"{function} was given {len(lines)} donated argument(s) whose buffers no result can take "
        f"over; leave them out of donate_argnums:\n  " + "\n  ".join(lines)
    )


def _why(plan: ProgramPlan, arg: ValuePlan) -> str:
    what = f"{arg.name or 'an argument'}: {arg.dtype}{list(arg.shape)}"
    same_size = [r for r in plan.results if prod(r.shape) == prod(arg.shape)]
    if not same_size:
        return f"{what}: no result has its {prod(arg.shape)} elements"
    same_kind = [r for r in same_size if r.memory_kind == arg.memory_kind]
    if not same_kind:
        return f"{what}: results of its size live in another memory ({same_size[0].memory_kind})"
    return f"{what}: results of its size already take over other donated arguments"
