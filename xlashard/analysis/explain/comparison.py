"""Comparison of two reports of programs."""

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, replace
from typing import Any, Literal

from xlashard.analysis.report.cells import Content, Span, Style, TableCell, join_cell
from xlashard.analysis.report.parts import WIDE, Column, Head, Section
from xlashard.analysis.report.printable import Part, SerializableReport
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import FORMATTERS, Unit, in_bytes, in_seconds, signed

_BETTER_IF_MORE = ("memory to spare", "tokens per second", "model FLOP utilisation")
_COLOURS: dict[str, Style] = {"added": "bad", "grown": "bad", "removed": "good", "shrunk": "good"}


@dataclass(frozen=True)
class FactChange:
    """A changed text.

    Attributes:
        name: Name of the fact.
        old: Text in the first report; empty if absent.
        new: Text in the second report; empty if absent.
        where: Source line of a finding, from the second report if it has one; else empty.
    """

    name: str
    old: str
    new: str
    where: str = ""


@dataclass(frozen=True)
class AmountChange:
    """A number of both reports.

    Attributes:
        name: Name of the number.
        unit: Its unit.
        old: Value in the first report; None if absent.
        new: Value in the second report; None if absent.
        old_error: Ends of the error bar of the first value, as parts of it: `(-0.1, 0.2)`; the
            upper one is None for a lower bound. None for an exact value.
        new_error: The same of the second value.
    """

    name: str
    unit: Unit
    old: float | None
    new: float | None
    old_error: tuple[float, float | None] | None = None
    new_error: tuple[float, float | None] | None = None

    @property
    def is_changed(self) -> bool:
        """True if the values differ."""
        return self.old != self.new

    @property
    def is_within_error(self) -> bool:
        """True if the second value lies within the error bar of the first one."""
        if self.old_error is None or not self.old or self.new is None:
            return False
        below, above = self.old_error
        is_low = above is None or self.new <= self.old * (1 + above)
        return is_low and self.old * (1 + below) <= self.new

    @property
    def ratio(self) -> float | None:
        """Second value divided by the first; None if one is missing or the first is 0."""
        return None if not self.old or self.new is None else self.new / self.old


@dataclass(frozen=True)
class UsageChange:
    """A change in memory use, or in bytes sent.

    Attributes:
        change: Kind of change.
        what: Name of the buffer or collective.
        where: Source line, from the second report if it has one; empty if unknown.
        old_bytes: Bytes in the first report; 0 if new.
        new_bytes: Bytes in the second report; 0 if removed.
        old_seconds: Network time in the first report.
        new_seconds: Network time in the second report.
    """

    change: Literal["added", "removed", "grown", "shrunk"]
    what: str
    where: str
    old_bytes: int
    new_bytes: int
    old_seconds: float = 0.0
    new_seconds: float = 0.0


@dataclass(frozen=True, repr=False)
class Comparison(SerializableReport):
    """Changes from one report to another. Made by `compare`.

    `print(comparison)` displays it; `to_json`, `to_markdown` and `to_html` write it.

    Attributes:
        old: Title of the first report.
        new: Title of the second report.
        facts: Changed texts: outcome, topology, mesh, versions, flags, ...
        amounts: Every number of either report, changed or not.
        memory: Arguments, results and temporaries with changed memory, largest change first.
        traffic: Collectives with changed bytes, largest change first.
        shardings: Arguments and results with a changed type or sharding.
        donations: Arguments with changed donation.
        unmet: Requests that only one of the programs does not follow.
        findings: Work that every device repeats, and closed-over arrays, of one of the programs.
        drawn: Sections of its page that its JSON lacks, such as both timelines.
    """

    _format = ReportFormat("comparison of reports", 1, "compare(...).to_json()")
    _print_all = "comparison.print(all=True)"
    _kind = "comparison"

    old: str
    new: str
    facts: tuple[FactChange, ...]
    amounts: tuple[AmountChange, ...]
    memory: tuple[UsageChange, ...]
    traffic: tuple[UsageChange, ...]
    shardings: tuple[FactChange, ...]
    donations: tuple[FactChange, ...]
    unmet: tuple[FactChange, ...] = ()
    findings: tuple[FactChange, ...] = ()
    drawn: InitVar[tuple[Section[Any], ...]] = ()

    def __post_init__(self, drawn: tuple[Section[Any], ...]) -> None:
        # An attribute, which `replace` passes on; no field, which the JSON would have.
        object.__setattr__(self, "drawn", drawn)

    @property
    def is_same(self) -> bool:
        """True if nothing but the compile time changed."""
        moved = any(a.is_changed for a in self.amounts if a.name != "time to compile")
        texts = any(self._texts.values())
        return not (moved or self.facts or self.memory or self.traffic or texts)

    @property
    def _texts(self) -> dict[str, tuple[FactChange, ...]]:
        """Return the changed texts of values, by title."""
        return {
            "Shardings": self.shardings,
            "Donations": self.donations,
            "Asked for and not done": self.unmet,
            "Wasted memory and work": self.findings,
        }

    @property
    def regressions(self) -> tuple[str, ...]:
        """Return what became worse, one line each.

        These are more bytes sent in all, by the collectives that send more; more memory in all; a
        time above the error bar of the first one; donations that are no longer reused; requests
        that are newly not followed; and new findings.
        """
        sent = sum(u.new_bytes - u.old_bytes for u in self.traffic)
        grown = [u for u in self.traffic if u.new_bytes > u.old_bytes]
        lines = [f"{_use_text(u)} more" for u in grown] if sent > 0 else []
        lines += [
            f"{a.name}: {_amount(a, a.old)} → {_amount(a, a.new)}"
            for a in self.amounts
            if a.name in ("memory", "time") and (a.new or 0) > (a.old or 0)
            if _differs(a) and not a.is_within_error
        ]
        lines += [
            f"{d.name} is no longer donated and reused: {d.new or 'it is no argument'}"
            for d in self.donations
            if d.old.startswith(REUSED) and d.new and not d.new.startswith(REUSED)
        ]
        lines += [
            f"{u.name} is not as requested: {_append_line(u, u.new)}" for u in self.unmet if u.new
        ]
        lines += [f"{f.name} is new: {_append_line(f, f.new)}" for f in self.findings if f.new]
        return tuple(lines)

    def parts(self) -> Iterator[Part]:
        """Yield the titles of both reports, what became worse, and the changes."""
        worse = self.regressions
        better = "Nothing changed." if self.is_same else "Nothing became worse."
        yield Head(
            title=" → ".join(dict.fromkeys((self.old, self.new))),
            headline="Some figures became worse." if worse else better,
            notes=[("worse", join_cell(Span(line, "name"))) for line in worse],
            severity="costly" if worse else "",
        )
        yield _FACTS.with_rows(self.facts)
        yield _AMOUNTS.with_rows(self.amounts)
        yield from self.drawn  # pyright: ignore[reportAttributeAccessIssue]
        yield _USES.with_rows(self.memory)
        title, note = "Collectives", "what each device sends"
        yield replace(_USES, id="traffic", title=title, note=note, rows=self.traffic)
        for title, facts in self._texts.items():
            yield replace(_FACTS, id=title.lower().replace(" ", "-"), title=title, rows=facts)

    def __repr__(self) -> str:
        return f"<Comparison of {self.old} with {self.new}; print it>"


REUSED = "reused for"
"""Start of the text of a donation that a result reuses."""


def _append_line(fact: FactChange, text: str) -> str:
    """Append the line of a finding to a text."""
    return f"{text} at {fact.where}" if fact.where else text


def _use_text(use: UsageChange) -> str:
    at = f" at {use.where}" if use.where else ""
    return f"{use.what}{at} sends {in_bytes(use.new_bytes - use.old_bytes)}"


def _differs(a: AmountChange) -> bool:
    """Return whether the printed amounts differ, ignoring the compile time."""
    if a.name == "time to compile":
        return False
    return _amount(a, a.old) != _amount(a, a.new)


def _amount(
    a: AmountChange, value: float | None, error: tuple[float, float | None] | None = None
) -> str:
    if value is None:
        return "–"
    shown = FORMATTERS[a.unit]
    text = f"-{shown(-value)}" if value < 0 else shown(value)
    if error is None:
        return text
    below, above = error
    return f"{text} ({below:+.0%} {'or more' if above is None else f'{above:+.0%}'})"


def _ratio_cell(a: AmountChange) -> TableCell:
    ratio = a.ratio
    if ratio is None or ratio <= 0:
        return TableCell()
    text = f"{ratio - 1:+.1%}"
    if ratio >= 2:
        text = f"×{ratio:.1f}" if ratio < 10 else f"×{ratio:,.0f}"
    text += ", within the error" * (a.is_within_error and ratio != 1)
    is_worse = (ratio > 1) != (a.name in _BETTER_IF_MORE)
    return join_cell(Span(text, "" if ratio == 1 else "bad" if is_worse else "good"), key=ratio)


def _name_cell(name: str) -> Content:
    return join_cell(Span(name, "path" if "[" in name else "name"))


_FACTS = Section[FactChange](
    id="facts",
    title="Changed",
    columns=(
        Column("what", lambda f: _name_cell(f.name)),
        Column("before", lambda f: f.old or "–"),
        Column("after", lambda f: f.new or "–"),
        Column("line", "where", "code"),
    ),
    printed="what | before | =→ | after | line",
)

_AMOUNTS = Section[AmountChange](
    id="numbers",
    title="Numbers",
    note="of one device",
    columns=(
        Column("number", "name", ""),
        Column(">before", lambda a: join_cell(_amount(a, a.old, a.old_error), key=a.old)),
        Column(">after", lambda a: join_cell(_amount(a, a.new, a.new_error), key=a.new)),
        Column(">change", _ratio_cell, tip="What is after by what was before"),
    ),
    printed="number | >before | =→ | >after | >change",
    merged=lambda rows: list(filter(_differs, rows)),
    most=100,
)


def _use_cell(nbytes: int, seconds: float, is_absent: bool) -> TableCell:
    note = Span(in_seconds(seconds), "note") if seconds else None
    return join_cell("–", key=0) if is_absent else join_cell(in_bytes(nbytes), note, key=nbytes)


def _seconds_text(u: UsageChange) -> str:
    if not (u.old_seconds or u.new_seconds):
        return ""
    return f"{in_seconds(u.old_seconds)} → {in_seconds(u.new_seconds)}"


_USES = Section[UsageChange](
    id="memory",
    title="Memory by leaf",
    note="of one device",
    columns=(
        Column("what", "what"),
        Column("change", lambda u: join_cell(Span(u.change, _COLOURS[u.change]))),
        Column(">before", lambda u: _use_cell(u.old_bytes, u.old_seconds, u.change == "added")),
        Column(">after", lambda u: _use_cell(u.new_bytes, u.new_seconds, u.change == "removed")),
        Column(">more", lambda u: u.new_bytes - u.old_bytes, signed(in_bytes)),
        Column("time", _seconds_text, "", on_page=False),
        Column("line", "where", "code"),
    ),
    printed="change | >before | =→ | >after | time | what={what}  {line}",
    widths={"time": WIDE},
)
