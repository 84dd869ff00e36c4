"""The HTML page: reports rendered by the templates, with style, script and the reports' JSON.

The page is self-contained. Its content security policy blocks every request, and every script but
its own.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from xlashard.errors import ArgumentError
from xlashard.tpu.preflight.render.html.markup import environment
from xlashard.tpu.preflight.render.report_text import topology_name
from xlashard.tpu.preflight.report.preflight_model import (
    REPORT_FORMAT,
    ComparisonFields,
    PreflightFields,
)


def page(
    reports: PreflightFields | Sequence[PreflightFields],
    changes: ComparisonFields | None = None,
) -> str:
    """Return a preflight report as an HTML page, or several reports with a tab for each.

    The page is self-contained, makes no requests, and follows the light or dark theme of the
    system. Without scripts its tables neither sort nor filter.

    Args:
        reports: One report, or several.
        changes: Comparison of two of the reports, shown first.

    Raises:
        ArgumentError: If `reports` is empty.

    Returns:
        Text of the page, to be written in UTF-8.
    """
    given = (reports,) if isinstance(reports, PreflightFields) else tuple(reports)
    if not given:
        raise ArgumentError("reports is empty: write page(report)")
    names = _names(given)
    title = f"{_full_title(given[0])}: {given[0].outcome}"
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _render(
        "page.html",
        title=title if len(given) == 1 else f"{len(given)} preflight reports",
        digest=digest,
        style=_asset("shared.css") + _asset("page.css"),
        script=script,
        reports=given,
        names=names,
        changes=changes,
        data=[(_file_name(n), _json(r)) for n, r in zip(names, given, strict=True)],
    )


def fragment(report: PreflightFields) -> str:
    """Return the verdict as an element for notebooks.

    Args:
        report: The report.
    """
    style = _asset("notebook.css") + _asset("shared.css")
    return _render("fragment.html", report=report, style=style)


def _render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(values)


@lru_cache(maxsize=16)
def _asset(name: str) -> Markup:
    return Markup(files(__package__).joinpath("assets", name).read_text(encoding="utf-8"))


def _json(report: PreflightFields) -> Markup:
    """Return the report's JSON, escaped so that no text ends its script element."""
    return Markup(json.dumps(REPORT_FORMAT.to_dict(report)).replace("<", "\\u003c"))


def _file_name(name: str) -> str:
    return f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in name)}.json"


def _names(reports: Sequence[PreflightFields]) -> list[str]:
    """Return a distinct name for each report."""
    for name in (_title, _full_title):
        names = [name(report) for report in reports]
        if len(set(names)) == len(names):
            return names
    return [f"{n}. {_full_title(report)}" for n, report in enumerate(reports, 1)]


def _title(report: PreflightFields) -> str:
    return report.title or report.name


def _full_title(report: PreflightFields) -> str:
    return f"{_title(report)} on {topology_name(report.topology)}"
