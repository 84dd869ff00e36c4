"""Reason of a cache miss, found by comparing the call with earlier ones."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from xlashard.lazily import dataclass
from xlashard.pjit.recompile.call_differences import CallDifference, differences
from xlashard.pjit.recompile.history import MissRecord
from xlashard.wording import in_seconds

type Kind = Literal["compilation", "lowering", "tracing"]
type Reason = Literal["first", "differs", "recreated", "cleared", "concurrent", "unknown"]

COMPILED = ("the compiler", "the persistent cache")


@dataclass(frozen=True)
class Explanation:
    """Stages that one call had to run, and the reason.

    Attributes:
        number: Number of the cache miss.
        kind: The last stage that ran: a `compilation`; a `lowering` whose module equals that of a
            live executable; a `tracing` alone, for shapes or a transformation.
        file: The file of the call.
        line: Its line.
        trace_seconds: Duration of tracing; None if nothing was traced.
        lower_seconds: Duration of lowering, likewise.
        compile_seconds: Duration of compiling, or of reading the persistent cache, likewise.
        executable: Origin of the executable: `the compiler`, `the persistent cache` or the live
            program of an equal module; None if the call needed none.
        reason: `first` of its kind; it `differs` from all earlier calls; the pjit-ed function is
            `recreated` from source that another one was made of, for an equal call; the caches were
            `cleared` before; a `concurrent` call in another thread ran the same stages; or
            `unknown`: no recorded property of the call differs.
        nearest: Number of the earlier call with the fewest differences, if any.
        differences: The differences from that call.
    """

    number: int
    kind: Kind
    file: str
    line: int
    trace_seconds: float | None
    lower_seconds: float | None
    compile_seconds: float | None
    executable: str | None
    reason: Reason
    nearest: int | None
    differences: tuple[CallDifference, ...]

    @property
    def seconds(self) -> float:
        """Total duration."""
        parts = (self.trace_seconds, self.lower_seconds, self.compile_seconds)
        return sum(part for part in parts if part is not None)

    @property
    def place(self) -> str:
        """File name and line of the call: `train.py:41`."""
        return f"{Path(self.file).name}:{self.line}"

    def text(self, function: str) -> str:
        """Format the explanation as one line."""
        head = f"{self.kind} {self.number} of {function} at {self.place} ({self.costs})"
        return f"{head}: {self.because}"

    @property
    def costs(self) -> str:
        """Duration, and the origin of an executable that was not compiled."""
        cost = in_seconds(self.seconds)
        if self.executable is None or self.executable == COMPILED[0]:
            return cost
        return f"{cost}, executable from {self.executable}"

    @property
    def because(self) -> str:
        """The reason as a phrase."""
        if self.reason == "first":
            return f"the first {self.kind}"
        if self.reason == "differs":
            parts = "; ".join(map(str, self.differences))
            return f"differs from number {self.nearest} in {parts}"
        if self.reason == "recreated":
            return "another pjit-ed function of the same source was called like this before"
        return (
            f"like number {self.nearest}, "
            + {
                "cleared": "after jax.clear_caches()",
                "concurrent": "run by two threads concurrently",
                "unknown": "except for a property that is not recorded",
            }[self.reason]
        )


def explain_record(
    record: MissRecord, earlier: Sequence[MissRecord], of_others: Collection[int] = ()
) -> Explanation:
    """Explain a record by comparing it with earlier ones.

    Args:
        record: The record.
        earlier: The earlier records, in order.
        of_others: Digests of calls for which other functions of the same source missed the cache.
    """
    reason, nearest, found = _reason(record, _candidates(record, earlier))
    if reason == "first" and record.key.digest() in of_others:
        reason = "recreated"
    return Explanation(
        number=record.number,
        kind=_kind(record),
        file=record.location[0],
        line=record.location[1],
        trace_seconds=record.seconds.get("trace"),
        lower_seconds=record.seconds.get("lower"),
        compile_seconds=record.seconds.get("compile"),
        executable=record.executable_source,
        reason=reason,
        nearest=nearest.number if nearest else None,
        differences=found,
    )


def _kind(record: MissRecord) -> Kind:
    """Return the last stage of a record."""
    if record.executable_source in COMPILED:
        return "compilation"
    return "lowering" if "lower" in record.seconds else "tracing"


def _candidates(record: MissRecord, earlier: Sequence[MissRecord]) -> Sequence[MissRecord]:
    """List the earlier records whose result the call could have reused."""
    if record.executable_source is not None:
        found = [r for r in earlier if r.executable_source is not None]
    elif "lower" in record.seconds:
        found = [r for r in earlier if "lower" in r.seconds or r.executable_source is not None]
    else:
        return earlier
    # Without an equally advanced record, compare with traced calls.
    return earlier if not found and "trace" in record.seconds else found


def _reason(
    record: MissRecord, candidates: Sequence[MissRecord]
) -> tuple[Reason, MissRecord | None, tuple[CallDifference, ...]]:
    compared = [(differences(other.key, record.key), other) for other in candidates]
    if not compared:
        return "first", None, ()
    found, nearest = min(reversed(compared), key=lambda pair: len(pair[0]))
    if found:
        return "differs", nearest, found
    if nearest.clear_count != record.clear_count:
        return "cleared", nearest, ()
    return ("concurrent" if record.began < nearest.ended else "unknown"), nearest, ()
