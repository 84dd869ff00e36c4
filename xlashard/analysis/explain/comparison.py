"""Comparison of two reports of programs, as text, JSON and Markdown."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import RenderableType
from rich.text import Text

from xlashard.analysis.explain.tables import WIDE, Page, SerializableReport, listing, section, table
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import FORMATTERS, Unit, in_bytes, in_seconds, printable

_BETTER_IF_MORE = ("memory to spare", "tokens per second", "model FLOP utilisation")
_COLOURS = {"added": "red", "grown": "red", "removed": "green", "shrunk": "green"}


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

    `print(comparison)` displays it; `to_json` and `to_markdown` write it.

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
    """

    _format = ReportFormat("comparison of reports", 1, "compare(...).to_json()")
    _print_all = "comparison.print(all=True)"

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
        lines += [f"{u.name} is not as requested: {_placed(u, u.new)}" for u in self.unmet if u.new]
        lines += [f"{f.name} is new: {_placed(f, f.new)}" for f in self.findings if f.new]
        return tuple(lines)

    def _sections(self, page: Page) -> Iterator[RenderableType]:
        titles = dict.fromkeys((self.old, self.new))
        yield Text("  →  ").join(Text(title, "bold") for title in titles)
        parts = [
            _facts_section("Changed", self.facts, page),
            _amounts_section(self.amounts, page),
            _uses_section("Memory by leaf", "of one device", self.memory, page),
            _uses_section("Collectives", "what each device sends", self.traffic, page),
            *(_facts_section(title, facts, page) for title, facts in self._texts.items()),
        ]
        shown = [part for part in parts if part is not None]
        yield from shown or [Text("\nnothing changed", style="dim")]

    def __repr__(self) -> str:
        return f"<Comparison of {self.old} with {self.new}; print it>"

    def to_markdown(self) -> str:
        """Return the comparison as Markdown, for a comment on a pull request."""
        titles = map(markdown_text, dict.fromkeys((self.old, self.new)))
        parts = [f"### {' → '.join(titles)}"]
        if self.regressions:
            lines = (f"- {markdown_text(line)}" for line in self.regressions)
            parts.append("\n".join(["**Worse:**", "", *lines]))
        changed = [a for a in self.amounts if _differs(a)]
        parts += [
            _markdown(
                "Numbers of one device",
                ("number", "before", "after", "change"),
                [
                    (
                        a.name,
                        _amount(a, a.old, a.old_error),
                        _amount(a, a.new, a.new_error),
                        _by(a).plain,
                    )
                    for a in changed
                ],
            ),
            _markdown(
                "Collectives, by what each device sends",
                ("collective", "change", "before", "after", "line"),
                [
                    (u.what, u.change, in_bytes(u.old_bytes), in_bytes(u.new_bytes), u.where)
                    for u in self.traffic
                ],
            ),
        ]
        for title, facts in {"Facts": self.facts, **self._texts}.items():
            rows = [(_placed(f, f.name), f.old or "–", f.new or "–") for f in facts]
            parts.append(_markdown(title, ("what", "before", "after"), rows))
        shown = [part for part in parts if part]
        return "\n\n".join(shown if len(shown) > 1 else [*shown, "Nothing changed."]) + "\n"


REUSED = "reused for"
"""Start of the text of a donation that a result reuses."""
_MOST_ROWS = 30


def _markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown under its title; "" without rows."""
    if not rows:
        return ""
    lines = [f"| {' | '.join(map(markdown_text, row))} |" for row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        lines += ["", f"and {len(rows) - _MOST_ROWS} more"]
    head = [f"#### {title}", "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*head, *lines])


def markdown_text(text: str) -> str:
    """Return text that Markdown shows as it is."""
    text = printable(" ".join(text.split()))
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)


def _placed(fact: FactChange, text: str) -> str:
    """Return a text with the line of a finding."""
    return f"{text} at {fact.where}" if fact.where else text


def _use_text(use: UsageChange) -> str:
    at = f" at {use.where}" if use.where else ""
    return f"{use.what}{at} sends {in_bytes(use.new_bytes - use.old_bytes)}"


def _facts_section(title: str, facts: Sequence[FactChange], page: Page) -> RenderableType | None:
    def row(f: FactChange) -> Sequence[RenderableType]:
        name = page.path(f.name) if "[" in f.name else f.name
        return name, f.old or "–", "→", f.new or "–", f.where

    return listing(page, (title, ""), ("", "", "", "", ""), facts, row)


def _amounts_section(amounts: Sequence[AmountChange], page: Page) -> RenderableType | None:
    shown = [a for a in amounts if page.is_full or _differs(a)]
    if not shown:
        return None
    rows = [
        (a.name, _amount(a, a.old, a.old_error), "→", _amount(a, a.new, a.new_error), _by(a))
        for a in shown
    ]
    return section("Numbers", "of one device", table(("", ">", "", ">", ">"), rows))


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


def _by(a: AmountChange) -> Text:
    ratio = a.ratio
    if ratio is None or ratio <= 0:
        return Text()
    text = f"{ratio - 1:+.1%}"
    if ratio >= 2:
        text = f"×{ratio:.1f}" if ratio < 10 else f"×{ratio:,.0f}"
    text += ", within the error" * (a.is_within_error and ratio != 1)
    is_worse = (ratio > 1) != (a.name in _BETTER_IF_MORE)
    return Text(text, "" if ratio == 1 else "red" if is_worse else "green")


def _uses_section(
    title: str, note: str, changes: Sequence[UsageChange], page: Page
) -> RenderableType | None:
    is_wide = page.width >= WIDE

    def row(u: UsageChange) -> Sequence[RenderableType]:
        seconds = ""
        if u.old_seconds or u.new_seconds:
            seconds = f"{in_seconds(u.old_seconds)} → {in_seconds(u.new_seconds)}"
        return (
            Text(u.change, _COLOURS[u.change]),
            in_bytes(u.old_bytes) if u.change != "added" else "–",
            "→",
            in_bytes(u.new_bytes) if u.change != "removed" else "–",
            *([seconds] if is_wide else []),
            Text.assemble(u.what, (f"  {u.where}" if u.where else "", "dim")),
        )

    columns = ("", ">", "", ">", *([""] if is_wide else []), "")
    return listing(page, (title, note), columns, changes, row)
