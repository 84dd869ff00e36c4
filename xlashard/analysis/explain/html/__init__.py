"""HTML of reports: the frame of a page, filters of templates, and the page of `explain`.

A page is self-contained. Its content security policy blocks every request, and every script but its
own.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup, escape

from xlashard.analysis.explain.comparison import Comparison
from xlashard.analysis.explain.model import CollectiveReport
from xlashard.analysis.explain.sections import INNER_VALUES, MOVES, findings_of, list_remedies
from xlashard.analysis.explain.tables import (
    SerializableReport,
    cause_of,
    decided_text,
    groups_text,
    line_text,
    operation_text,
    short_type,
    types_text,
)
from xlashard.analysis.pictures.svg_html import make_environment
from xlashard.errors import ArgumentError
from xlashard.support.formatting import (
    FORMATTERS,
    Unit,
    in_bytes,
    in_flop,
    in_percent,
    in_seconds,
    printable,
    sizes_text,
)

MOST_ROWS = 1000
"""Maximum number of table rows, which keeps browsers responsive."""

_BREAKS = re.compile(r"(?<=.)[/,](?=.)|\](?=\[)", re.DOTALL)
"""Positions where a line may break."""


def render_page(
    template: Template,
    *,
    title: str,
    kind: str,
    names: Sequence[str],
    reports: Sequence[Any],
    dicts: Sequence[Mapping[str, Any]],
    changes: Sequence[Comparison] = (),
    **others: Any,
) -> str:
    """Return a page of reports.

    Args:
        template: A template that extends `shell.html`.
        title: Title of the page.
        kind: Kind of the reports: `explain`.
        names: A name for each report.
        reports: The reports.
        dicts: The reports as plain values.
        changes: Comparisons, of two of the reports or with stored ones.
        **others: Further values of the template, by name.
    """
    script = _asset("page.js")
    data = zip(map(_file_name, names), map(_json, dicts), strict=True)
    return template.render(
        title=title,
        kind=kind,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=_asset("shared.css") + _asset("page.css"),
        script=script,
        reports=reports,
        names=names,
        changes=changes,
        data=list(data),
        **others,
    )


def render_fragment(template: Template, report: Any) -> str:
    """Return an element for notebooks."""
    style = _asset("notebook.css") + _asset("shared.css")
    return template.render(report=report, style=style)


def program_page(
    reports: SerializableReport | Sequence[SerializableReport],
    changes: Comparison | Sequence[Comparison] = (),
    names: Sequence[str] = (),
) -> str:
    """Return the report of a program as an HTML page, or several reports with a tab for each.

    Args:
        reports: One `ProgramReport`, or several.
        changes: Comparisons of two of the reports, or with stored ones, shown first.
        names: A name for each report; by default those of the functions.

    Raises:
        ArgumentError: If `reports` is empty.
    """
    reports = (reports,) if isinstance(reports, SerializableReport) else tuple(reports)
    if not reports:
        # no-catalogue: explain and the command line always pass a report
        raise ArgumentError("reports is empty: write program_page(report)")
    dicts = [report.to_dict() for report in reports]
    named = tuple(names) or tuple(str(values["name"]) for values in dicts)
    if len(set(named)) < len(named):
        named = tuple(f"{n}. {name}" for n, name in enumerate(named, 1))
    title = named[0] if len(reports) == 1 else f"{len(reports)} programs"
    template = _environment().get_template("program.html")
    changes = (changes,) if isinstance(changes, Comparison) else tuple(changes)
    return render_page(
        template,
        title=title,
        kind="explain",
        names=named,
        reports=reports,
        dicts=dicts,
        changes=changes,
    )


def program_fragment(report: SerializableReport) -> str:
    """Return the key figures of a program as an element for notebooks."""
    return render_fragment(_environment().get_template("program_fragment.html"), report)


@lru_cache(maxsize=16)
def _asset(name: str) -> Markup:
    return Markup(files(__package__).joinpath("assets", name).read_text(encoding="utf-8"))


def _json(report: Mapping[str, Any]) -> Markup:
    """Return the report's JSON, escaped so that no text ends its script element."""
    return Markup(json.dumps(report).replace("<", "\\u003c"))


def _file_name(name: str) -> str:
    return f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in name)}.json"


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return report_environment(__package__ or "")


def report_environment(*packages: str) -> Environment:
    """Return an environment of the shared templates and those of other packages.

    Text is escaped where it is inserted.

    Args:
        *packages: Packages whose templates come first.
    """
    environment = make_environment(
        *dict.fromkeys((*packages, __package__ or "")),
        finalize=lambda value: (
            printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
    )
    environment.globals.update(
        INNER_VALUES=INNER_VALUES, MOST_ROWS=MOST_ROWS, MOVES=MOVES, findings_of=findings_of
    )
    environment.filters.update(
        amount=_amount,
        axes=axes_of,
        bytes=in_bytes,
        cause=cause_of,
        decided=decided_text,
        filter_choices=filter_choices,
        flop=in_flop,
        groups=groups_text,
        line=line_text,
        list_remedies=list_remedies,
        operation=operation_text,
        percent=in_percent,
        ratio=_ratio,
        seconds=in_seconds,
        short_type=short_type,
        sizes=sizes_text,
        text=user_text,
        types=types_text,
    )
    return environment


def user_text(text: str, name: str = "bdi", *, whole: bool = False, title: str = "") -> Markup:
    """Return an element for text from the user's program, such as a path.

    The text is isolated from its surroundings for bidirectional text, and may break after
    separators.

    Args:
        text: The text.
        name: Name of the element; elements other than `bdi` get `dir="auto"`.
        whole: Whether line breaks are suppressed.
        title: Tooltip.
    """
    direction = "" if name == "bdi" else ' dir="auto"'
    tip = f' title="{escape(printable(title))}"' if title else ""
    shown = printable(text)
    parts = [shown] if whole else _BREAKS.sub("\\g<0>\0", shown).split("\0")
    return Markup(f"<{name}{direction}{tip}>{Markup('<wbr>').join(parts)}</{name}>")


def _amount(value: float | None, unit: Unit) -> str:
    if value is None:
        return "–"
    text = FORMATTERS[unit](abs(value))
    return f"−{text}" if value < 0 else text


def _ratio(ratio: float | None) -> str:
    if ratio is None or ratio <= 0:
        return ""
    return f"×{ratio:,.1f}" if ratio >= 2 else f"{ratio - 1:+.1%}".replace("-", "−")


def axes_of(collective: CollectiveReport) -> tuple[str, ...]:
    """Return the mesh axes of a collective, to filter by."""
    return ("other groups",) if collective.axes is None else collective.axes


def filter_choices(collectives: Sequence[CollectiveReport]) -> dict[str, list[str]]:
    """Return the values to filter collectives by."""
    return {
        "kind": sorted({c.kind for c in collectives}),
        "axis": sorted({axis for c in collectives for axis in axes_of(c)}),
    }
