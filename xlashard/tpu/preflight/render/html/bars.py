"""Bars of the page: the memory of a device by what takes it, and the time of a step by resource."""

from collections.abc import Iterator
from typing import NamedTuple

from xlashard.errors import counted
from xlashard.tpu.preflight.report.preflight_model import MemoryBreakdown, TimeEstimate
from xlashard.wording import in_bytes, in_flop


class MemorySegment(NamedTuple):
    """Segment of the memory bar.

    Attributes:
        name: Name, and CSS class.
        nbytes: Bytes.
        words: Description.
    """

    name: str
    nbytes: int
    words: str


def memory_segments(memory: MemoryBreakdown) -> tuple[MemorySegment, ...]:
    """Return the segments of the bar, in order; the last makes up the compiler's total."""
    aliased = memory.alias_bytes
    reused = f", {in_bytes(aliased)} of them reused by results" if aliased else ""
    segments = (
        MemorySegment("arguments", memory.argument_bytes, f"inputs of the program{reused}"),
        MemorySegment("results", memory.result_bytes, "results that need memory of their own"),
        MemorySegment("temporaries", memory.temporary_bytes, "the heap, at its peak"),
        MemorySegment("constants", memory.constant_bytes, "numbers written in the program"),
        MemorySegment("code", memory.code_bytes, "the program itself"),
    )
    rest = memory.total_bytes - sum(s.nbytes for s in segments)
    padding = MemorySegment("other", rest, "other parts of the compiler's total")
    return (*segments, padding) if rest > 0 else segments


class TimeBar(NamedTuple):
    """Bar of a resource, or of its part along some mesh axes.

    Attributes:
        key: Unique name.
        name: Name of the resource.
        seconds: Time.
        words: Work of the resource.
        kind: CSS classes.
        along: Mesh axes; empty for the whole resource.
    """

    key: str
    name: str
    seconds: float
    words: str
    kind: str
    along: str = ""


def time_bars(time: TimeEstimate) -> list[TimeBar]:
    """Return the bars of all resources, and of the compiler's estimate."""
    moved = f"{in_bytes(time.hbm_bytes)} read and written"
    bars = [
        TimeBar("compute", "compute", time.compute_seconds, _work(time), "compute"),
        TimeBar("hbm", "HBM", time.hbm_seconds, moved, "hbm"),
    ]
    for network, seconds in (("ici", time.ici_seconds), ("dcn", time.dcn_seconds)):
        parts = [t for t in time.traffic if t.network == network]
        sent = in_bytes(sum(t.sent_bytes for t in parts))
        if parts or network == "ici":
            words = f"{sent} sent" if parts else "nothing sent"
            bars.append(TimeBar(network, network.upper(), seconds, words, network))
        bars += [
            TimeBar(
                key=f"{network} {part.along}",
                name="",
                seconds=part.seconds,
                words=f"{in_bytes(part.sent_bytes)} sent",
                kind=f"{network} detail",
                along=part.along,
            )
            for part in parts
        ]
    if time.compiler_seconds is not None:
        words = "the compiler's schedule, by the cycles that it notes, loops counted"
        bars.append(TimeBar("compiler", "compiler", time.compiler_seconds, words, "compiler"))
    return bars


def _work(time: TimeEstimate) -> str:
    kinds = ", ".join(f"{in_flop(flops)} {dtype}" for dtype, flops in time.flops_by_dtype)
    parts = [f"{kinds} in matrix products"] if kinds else []
    if time.elementwise_flops:
        parts.append(f"{in_flop(time.elementwise_flops)} besides, which count as free")
    return "; ".join(parts) or f"{in_flop(time.flops)}, none of it in matrix products"


def uncounted_work(time: TimeEstimate) -> Iterator[str]:
    """Yield notes on work that the times leave out."""
    if time.unknown_loops:
        loops = counted(time.unknown_loops, "loop")
        verb = "counts" if time.unknown_loops == 1 else "count"
        yield f"{loops} of unknown trip count {verb} as one iteration: the true times are longer."
    if time.unknown_calls:
        calls = ", ".join(f"{name} ×{times:,}" for name, times in time.unknown_calls)
        yield f"Custom calls without a cost estimate count as zero: {calls}."
