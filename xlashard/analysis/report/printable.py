"""Reports that every view shows: their base classes."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from xlashard.analysis.report.cells import Span, TableCell, join_cell
from xlashard.analysis.report.parts import Head, PagePanel, Section, list_ids
from xlashard.support.consoles import make_console
from xlashard.support.documents import ReportFormat, Schema, report_schema
from xlashard.support.formatting import Escaped, plain_text
from xlashard.support.lazily import dataclass, deferred
from xlashard.support.tracebacks import short_tracebacks

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from xlashard.analysis.report import html_page, markdown, terminal_view
else:
    # Rich and Jinja take long to import, and a program may only make the report.
    html_page = deferred("xlashard.analysis.report.html_page")
    markdown = deferred("xlashard.analysis.report.markdown")
    terminal_view = deferred("xlashard.analysis.report.terminal_view")

type Part = Head | Section[Any]
"""Part of a report: the head of a subject, or a section."""


class PrintableReport(ABC):
    """Report that is printed, and shown as Markdown, as a page and in notebooks."""

    _print_all: ClassVar[str] = "report.print(all=True)"
    _kind: ClassVar[str] = "report"
    """Kind of the report at the top of a page."""
    _footer: ClassVar[str] = ""
    """Words at the bottom of a page."""

    @abstractmethod
    def parts(self) -> Iterable[Part]:
        """Yield the head and the sections, which every view shows."""

    def page_name(self) -> str:
        """Return the name of its subject on a page."""
        heads = (part.title for part in self.parts() if isinstance(part, Head))
        return next(heads, self._kind)

    def page_title(self) -> str:
        """Return the title of its page."""
        return self.page_name()

    def panels(self, others: Sequence[Part] = ()) -> Sequence[PagePanel]:
        """Return the panels of its page.

        Args:
            others: Further parts of the first panel, above its own.
        """
        return [PagePanel(self.page_name(), (*others, *self.parts()), self.page_data())]

    def page_data(self) -> Any:
        """Return what a page offers as JSON; None for nothing."""
        return None

    def renderable(self, *, all: bool = False, print_all: str = "") -> "RenderableType":
        """Return the report as a value that rich prints.

        Args:
            all: Show every row, instead of the first few and a sum of the rest.
            print_all: Code or flag that shows every row; `report.print(all=True)` if empty.
        """
        return Escaped(_Printed(self, all, print_all or self._print_all))

    def print(self, *, all: bool = False, console: "Console | None" = None) -> None:
        """Print the report.

        Args:
            all: Show every row, instead of the first few and a sum of the rest.
            console: The console; standard output if None.
        """
        (console or make_console()).print(self.renderable(all=all))

    def to_markdown(self) -> str:
        """Return the report as Markdown, for a comment on a pull request."""
        return markdown.format_markdown(self.parts())

    def to_html(self) -> str:
        """Return the report as a self-contained HTML page, to be written in UTF-8."""
        return self.make_page()

    def make_page(self, changes: "PrintableReport | None" = None) -> str:
        """Return the report as an HTML page that shows a comparison first."""
        panels = self.panels(() if changes is None else tuple(changes.parts()))
        return html_page.render_page(panels, self._kind, self._footer, self.page_title())

    def _repr_html_(self) -> str:
        return html_page.render_card(self.parts())

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield self.renderable()

    def __str__(self) -> str:
        return plain_text(self.renderable())


@dataclass(frozen=True, eq=False)
class _Printed:
    """Rich renderable of a report."""

    report: PrintableReport
    is_full: bool
    print_all: str

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        page = terminal_view.PrintedPage(options.max_width, self.is_full, self.print_all)
        return terminal_view.render_parts(self.report.parts(), page)


class SerializableReport(PrintableReport):
    """Report that is a frozen dataclass with a JSON format."""

    _format: ClassVar[ReportFormat]

    def page_data(self) -> Any:
        """Return what a page offers as JSON."""
        return self.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to dicts, lists, strings and numbers, with its format's version."""
        return self._format.to_dict(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Write the report as JSON, with its format's version.

        Args:
            indent: Spaces per level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def json_schema(cls) -> Schema:
        """Return the JSON Schema (draft 2020-12) of what `to_json` writes."""
        return report_schema(cls, cls._format.noun, cls._format.version)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a report that `to_json` wrote.

        Args:
            text: The JSON.

        Raises:
            ArgumentError: If the text is not JSON, of another format, or of another shape.
        """
        with short_tracebacks:
            return cls._format.read(cls, text)


def list_panels(
    panels: Sequence[PagePanel],
    make_overview: Callable[[Sequence[TableCell]], Section[Any]],
    others: Sequence[Part] = (),
) -> Sequence[PagePanel]:
    """Return the panels of a page of reports; of several the first one compares them.

    Args:
        panels: Those of the reports, with distinct names.
        make_overview: Returns the table of several reports, with links to their panels.
        others: Further parts of the first panel.
    """
    if len(panels) < 2:
        return [replace(panel, parts=(*others, *panel.parts)) for panel in panels]
    names = [panel.name for panel in panels]
    ids = list_ids(["All", *names])[1:]
    links = [join_cell(Span(n, "link", id), key=n) for n, id in zip(names, ids, strict=True)]
    return [PagePanel("All", (make_overview(links), *others)), *panels]
