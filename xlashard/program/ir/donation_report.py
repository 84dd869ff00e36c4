"""Messages about donated buffers that can't be reused, with the nearest result and advice."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log, prod

from xlashard.lazily import dataclass
from xlashard.program.ir.donation import bytes_of, has_room
from xlashard.program.ir.plan import ProgramPlan, ValuePlan
from xlashard.sharding import GSPMDSharding, NamedSharding, XLACompatibleSharding
from xlashard.wording import typed


@dataclass(frozen=True)
class UnusedDonation:
    """A donated argument whose buffers stay as they are.

    Attributes:
        value: The argument.
        reason: The reason, and advice.
    """

    value: ValuePlan
    reason: str


def report_text(refusals: Sequence[UnusedDonation], function: str) -> str:
    """Return the message about donated arguments that can't be reused, each by its path."""
    one = len(refusals) == 1
    what = "a donated argument" if one else f"{len(refusals)} donated arguments"
    lines = [f"{_described(refused.value)}: {refused.reason}" for refused in refusals]
    return (
        f"{function} got {what} whose buffers no result can take over: leave "
        f"{'it' if one else 'them'} out of donate_argnums, or follow the advice:\n  "
        + "\n  ".join(lines)
    )


def unused_refusal(value: ValuePlan) -> UnusedDonation:
    """Return the refusal of an argument that the function does not use."""
    return UnusedDonation(value, "the function makes no use of it, so its buffers stay as they are")


def refusal(plan: ProgramPlan, position: int, takers: Mapping[int, int | None]) -> UnusedDonation:
    """Return the reason why no result takes over the buffers of an argument.

    Args:
        plan: The program's plan, with the compiler's choices if known.
        position: The argument.
        takers: The argument whose buffers each result takes over; None for pairs of the module
            itself.
    """
    value = plan.args[position]
    alike = [j for j, r in enumerate(plan.results) if (r.shape, r.dtype) == _type(value)]
    for candidates in (alike, range(len(plan.results))):
        for j in candidates:
            result = plan.results[j]
            if j in takers and has_room(result, value):
                return UnusedDonation(value, _taken(plan, result, takers[j]))
        for j in candidates:
            reason = _difference(plan, value, plan.results[j])
            if reason is not None:
                return UnusedDonation(value, reason)
    return UnusedDonation(value, _nothing_near(plan, value))


def _type(value: ValuePlan) -> tuple[tuple[int, ...], str]:
    return value.shape, value.dtype


def _taken(plan: ProgramPlan, result: ValuePlan, taker: int | None) -> str:
    taker_name = "another argument" if taker is None else _name(plan.args[taker])
    return (
        f"{_described(result)} has room for it, but takes over the buffers of {taker_name} already"
    )


def _difference(plan: ProgramPlan, value: ValuePlan, result: ValuePlan) -> str | None:
    """Return the difference that keeps a result of the same shape from taking over the buffers."""
    if value.shape != result.shape:
        return None
    name = _name(result)
    if value.dtype != result.dtype:
        return f"{name} has its shape, but is {result.dtype}: return it as .astype({value.dtype!r})"
    if value.memory_kind != result.memory_kind:
        here, there = (_memory(v) for v in (value, result))
        return (
            f"{name} has its type, but is in the memory {there}, and the argument in {here}: give "
            f"out_shardings with memory_kind={here!r}"
        )
    if bytes_of(result) != bytes_of(value):
        return (
            f"{name} has its type, but is sharded as {_place(result.sharding)}, "
            f"{_size_text(result)}, and the argument as {_place(value.sharding)}, "
            f"{_size_text(value)}: give out_shardings={_place(value.sharding)} for {name}"
        )
    if value.layout != result.layout:
        return (
            f"{name} has its type, but the layout {_layout(result)}, and the argument as "
            f"{_layout(value)}: give both the same Format"
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
    mine = prod(value.shape) or 1
    nearest = min(plan.results, key=lambda r: abs(log((prod(r.shape) or 1) / mine)))
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
