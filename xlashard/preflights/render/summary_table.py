"""Terminal output of several reports side by side."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from xlashard.pjit.report.tables import WIDE, section, table
from xlashard.preflights.render.report_text import (
    axes_text,
    price_with_currency,
    topology_text,
    words_of,
)
from xlashard.preflights.report.preflight_model import PreflightFields
from xlashard.wording import in_amount, in_bytes, in_seconds


class SummaryText:
    """Rich renderable of several reports as one table.

    Args:
        reports: Reports in row order.
    """

    def __init__(self, reports: Sequence[PreflightFields]) -> None:
        self._reports = reports

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        reports = self._reports
        columns = {
            "program": [_title(r) for r in reports],
            "topology": [topology_text(r.topology) for r in reports],
            "mesh": [axes_text(r.mesh).replace(" ", "") for r in reports],
            "fits": [_fits(r) for r in reports],
            ">takes": [in_seconds(r.time.seconds) for r in reports],
            "bound by": [words_of(r.topology).bounds[r.time.bound] for r in reports],
            ">tokens/s": [_tokens(r) for r in reports],
            ">MFU": [_utilisation(r) for r in reports],
            ">a step": [_step(r) for r in reports],
        }
        if options.max_width < WIDE:
            for name in ("mesh", "bound by"):
                del columns[name]
        shown = {name: column for name, column in columns.items() if any(map(str, column))}
        rows = list(zip(*shown.values(), strict=True))
        yield section(f"{len(reports)} reports", "", table(list(shown), rows))


def _title(report: PreflightFields) -> str:
    return f"{report.title or report.name}{' (estimate)' if report.is_estimate else ''}"


def _fits(report: PreflightFields) -> Text:
    spare = report.memory.spare_bytes
    if report.outcome == "fits":
        return Text(f"{in_bytes(spare)} to spare", "green")
    return Text(f"lacks {in_bytes(-spare)}" if spare < 0 else "too large", "red")


def _tokens(report: PreflightFields) -> str:
    return "" if report.throughput is None else in_amount(report.throughput.tokens_per_second)


def _utilisation(report: PreflightFields) -> str:
    return "" if report.throughput is None else f"{report.throughput.utilisation:.1%}"


def _step(report: PreflightFields) -> str:
    if report.price is None:
        return ""
    return price_with_currency(report.price.step, report.price.currency)
