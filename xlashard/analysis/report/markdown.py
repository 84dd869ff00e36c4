"""View of reports as Markdown, for a comment on a pull request."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from xlashard.analysis.report.cells import TableCell, join_cell
from xlashard.analysis.report.parts import Head, Section
from xlashard.support.formatting import printable

_MOST_ROWS = 30


def markdown_text(text: str) -> str:
    """Return text that Markdown shows as it is."""
    text = printable(" ".join(text.split()))
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)


def format_markdown(parts: Iterable[Head | Section[Any]]) -> str:
    """Return the parts of a report as Markdown."""
    blocks: list[str] = []
    for part in parts:
        blocks += _head(part) if isinstance(part, Head) else _section(part)
    return "\n\n".join(blocks) + "\n"


def _head(head: Head) -> Iterator[str]:
    place = markdown_text(" · ".join(head.place))
    between = (", " if head.is_line else " on ") if place else ""
    level = "##" if head.is_line or head.is_outer else "###"
    yield f"{level} {markdown_text(head.title)}{between}{place}"
    if head.headline:
        yield f"**{markdown_text(head.headline)}**"
    facts = [(word, join_cell(fact)) for word, fact in head.sentences]
    if head.worth:
        facts.append(("most worth doing", join_cell(head.worth)))
    lines = [f"- **{word}**: {markdown_text(fact.text)}" for word, fact in (*facts, *head.notes)]
    if lines:
        yield "\n".join(lines)


def _section(section: Section[Any]) -> Iterator[str]:
    """Yield a section as a heading, a table and sentences; nothing if it has nothing to show."""
    rows = section.short_rows
    if section.view in ("page", "full") or not (rows or section.is_kept):
        return
    note = f" ({markdown_text(section.note)})" if section.note else ""
    yield f"#### {markdown_text(section.title)}{note}"
    if rows:
        columns = section.page_columns
        names = [column.name.removeprefix(">") for column in columns]
        sides = ["---:" if column.name.startswith(">") else "---" for column in columns]
        lines = [f"| {' | '.join(names)} |", f"| {' | '.join(sides)} |"]
        for row in rows[:_MOST_ROWS]:
            lines.append(f"| {' | '.join(_cell(column.cell(row)) for column in columns)} |")
        yield "\n".join(lines)
    if len(rows) > _MOST_ROWS:
        yield f"and {len(rows) - _MOST_ROWS:,} more"
    if section.rest:
        yield markdown_text(" ".join(section.rest))


def _cell(cell: TableCell) -> str:
    bars = (f"{span.share:.0%}" for span in cell.spans if span.style == "bar")
    return markdown_text(cell.text) or "".join(bars)
