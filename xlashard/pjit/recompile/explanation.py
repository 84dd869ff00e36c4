"""Why a call of a function had something to make: what is new about it."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from xlashard.lazily import dataclass
from xlashard.pjit.recompile.difference import Difference, differences
from xlashard.pjit.recompile.history import Record

type Kind = Literal["compilation", "lowering", "tracing"]
type Why = Literal["first", "differs", "made anew", "cleared", "at once", "unknown"]

COMPILED = ("the compiler", "the persistent cache")


@dataclass(frozen=True)
class Explanation:
    """What one call had to make, and why.

    Attributes:
        number: Counted over all calls that had something to make.
        kind: The last thing that was made: a `compilation`; a `lowering` where the module says the
            same as one whose executable lives; a `tracing` alone, for shapes or a transformation.
        file: The file of the call.
        line: Its line.
        trace_seconds: How long tracing took; None where nothing was traced.
        lower_seconds: How long lowering took, likewise.
        compile_seconds: How long compiling took, likewise; reading it from the persistent cache
            counts as that.
        executable: Where the executable came from: `the compiler`, `the persistent cache`, `a
            program that says the same`; None if it was not asked for.
        why: `first` of its kind; it `differs` from all earlier ones; the pjit-ed function is `made
            anew` of source that another was made of, for the same call; the caches were `cleared`
            before; a second thread made the same `at once`; or it is `unknown`: the difference is
            in nothing that is remembered of a call.
        nearest: The number of the earlier call that it has most in common with, if any.
        differences: In what it is different from that one.
    """

    number: int
    kind: Kind
    file: str
    line: int
    trace_seconds: float | None
    lower_seconds: float | None
    compile_seconds: float | None
    executable: str | None
    why: Why
    nearest: int | None
    differences: tuple[Difference, ...]

    @property
    def seconds(self) -> float:
        """How long all of it took."""
        parts = (self.trace_seconds, self.lower_seconds, self.compile_seconds)
        return sum(part for part in parts if part is not None)

    @property
    def place(self) -> str:
        """`train.py:41`, the line of the call."""
        return f"{Path(self.file).name}:{self.line}"

    def text(self, function: str) -> str:
        """One line, with the name of the function."""
        head = f"{self.kind} {self.number} of {function} at {self.place} ({self.costs})"
        return f"{head}: {self.because}"

    @property
    def costs(self) -> str:
        """`0.83 s`, and what saved more."""
        cost = seconds_text(self.seconds)
        if self.executable is None or self.executable == COMPILED[0]:
            return cost
        return f"{cost}, executable from {self.executable}"

    @property
    def because(self) -> str:
        """Why it was made, in words."""
        if self.why == "first":
            return f"the first {self.kind}"
        if self.why == "differs":
            parts = "; ".join(map(str, self.differences))
            return f"differs from number {self.nearest} in {parts}"
        if self.why == "made anew":
            return "another pjit-ed function of the same source was called like this before"
        return (
            f"like number {self.nearest}, "
            + {
                "cleared": "after jax.clear_caches()",
                "at once": "made by two threads at once",
                "unknown": "but for something that is not remembered of a call",
            }[self.why]
        )


def seconds_text(seconds: float) -> str:
    """`0.83 s`, `12 ms`, `95 s`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.2g} ms"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def explain_record(
    record: Record, earlier: Sequence[Record], of_others: Collection[int] = ()
) -> Explanation:
    """Explains a record by those that came before it.

    Args:
        record: What was made.
        earlier: All that was made before, in order.
        of_others: Digests of calls for which other functions of the same source made something.
    """
    why, nearest, found = _reason(record, _rivals(record, earlier))
    if why == "first" and record.key.digest() in of_others:
        why = "made anew"
    return Explanation(
        number=record.number,
        kind=kind_of(record),
        file=record.place[0],
        line=record.place[1],
        trace_seconds=record.trace,
        lower_seconds=record.lower,
        compile_seconds=record.compile,
        executable=record.source,
        why=why,
        nearest=nearest.number if nearest else None,
        differences=found,
    )


def kind_of(record: Record) -> Kind:
    """What the last thing is that a record tells of."""
    if record.source in COMPILED:
        return "compilation"
    return "tracing" if record.lower is None else "lowering"


def _rivals(record: Record, earlier: Sequence[Record]) -> Sequence[Record]:
    """The earlier records that might have saved making this one."""
    if record.source is not None:
        found = [r for r in earlier if r.source is not None]
    elif record.lower is not None:
        found = [r for r in earlier if r.lower is not None or r.source is not None]
    else:
        return earlier
    # Where nothing came as far before, there is still what was traced.
    return earlier if not found and record.trace is not None else found


def _reason(
    record: Record, rivals: Sequence[Record]
) -> tuple[Why, Record | None, tuple[Difference, ...]]:
    compared = [(differences(rival.key, record.key), rival) for rival in rivals]
    if not compared:
        return "first", None, ()
    found, nearest = min(reversed(compared), key=lambda pair: len(pair[0]))
    if found:
        return "differs", nearest, found
    if nearest.clearings != record.clearings:
        return "cleared", nearest, ()
    return ("at once" if record.began < nearest.ended else "unknown"), nearest, ()
