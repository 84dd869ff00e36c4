"""Findings: rows of a report, described once for a terminal and for pages.

A new section is the class of its rows in `model.py`, its `Findings` in `FINDINGS` of
`sections.py`, a module with the function that finds them, an entry in `FINDERS` of `explain.py`,
and a field of each report that has it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from string import Formatter
from typing import Any, Literal

from rich.console import RenderableType
from rich.text import Text

from xlashard.analysis.explain.tables import Page, line_text, listing
from xlashard.support.formatting import FORMATTERS, Unit

type Style = Unit | Literal["path", "code", "words", "line"]
"""Style of a cell: an amount; a path or other text of the user's program; words; a source line."""


@dataclass(frozen=True)
class Column[T]:
    """Column of a table of findings.

    Attributes:
        name: Its name, with ">" before that of a number.
        value: Returns the value of a finding, to show, to sort and to search by.
        style: Style of its cells.
        tip: Tooltip of its head on a page.
    """

    name: str
    value: Callable[[T], Any]
    style: Style = "words"
    tip: str = ""

    def text(self, finding: T, page: Page) -> str | Text:
        """Return a cell for a terminal; that of a known line ends with a colon."""
        value = self.value(finding)
        if self.style == "path":
            return page.path(value)
        if self.style == "line":
            return "" if value is None else f"{line_text(value)}: "
        if value is None or self.style in ("code", "words"):
            return value or ""
        return FORMATTERS[self.style](value)


@dataclass(frozen=True)
class Findings[T]:
    """Section of a report that lists findings, printed and on a page.

    Attributes:
        field: The field of reports that holds the findings; those without it lack the section.
        title: Its title.
        note: Words beside the title in a terminal.
        summary: Words beside the title on a page, with `{count}` and `{total}` of the findings.
        columns: Columns of the table on a page; the first one of numbers is summed up.
        printed: Columns of the table in a terminal: by heading the cell, in which `{name}` stands
            for a column of `columns`.
        merged: Merges similar findings, where a terminal shows the largest only.
    """

    field: str
    title: str
    note: str
    summary: str
    columns: tuple[Column[T], ...]
    printed: Mapping[str, str]
    merged: Callable[[Sequence[T]], Sequence[T]] | None = None

    def section(self, findings: Sequence[T], page: Page) -> RenderableType | None:
        """Return the section of a printed report; None without findings."""
        if self.merged is not None and not page.is_full:
            findings = self.merged(findings)
        heading, columns = (self.title, self.note), list(self.printed)
        return listing(page, heading, columns, findings, partial(self._row, page), *self._amount)

    def summarize(self, findings: Sequence[T]) -> str:
        """Return the words beside the title on a page."""
        amount, shown = self._amount
        return self.summary.format(
            count=f"{len(findings):,}", total=shown(sum(map(amount, findings)))
        )

    @property
    def _amount(self) -> tuple[Callable[[T], Any], Callable[[float], str]]:
        """Return the value and the formatter of the column that is summed up."""
        return next(
            (lambda finding, value=column.value: value(finding) or 0, FORMATTERS[column.style])
            for column in self.columns
            if column.style not in ("path", "code", "words", "line")
        )

    def _row(self, page: Page, finding: T) -> list[Text]:
        cells = {c.name.removeprefix(">"): c.text(finding, page) for c in self.columns}
        return [_filled(cell, cells) for cell in self.printed.values()]


def _filled(template: str, cells: Mapping[str, str | Text]) -> Text:
    """Return a template with a cell in place of each `{name}`."""
    parts = Formatter().parse(template)
    filled = ((text, cells[name] if name else "") for text, name, _, _ in parts)
    return Text.assemble(*chain.from_iterable(filled))
