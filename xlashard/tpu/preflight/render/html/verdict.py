"""Verdict of a report: whether the program fits, and its key figures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from xlashard.tpu.preflight.render.html.markup import (
    Html,
    TableCell,
    TableColumn,
    TableRow,
    join,
    table,
    tag,
    user_text,
)
from xlashard.tpu.preflight.render.html.memory_bar import memory_bar
from xlashard.tpu.preflight.render.html.timing import BOUNDS, SHORT
from xlashard.tpu.preflight.render.report_text import (
    in_thousands,
    price_text,
    price_with_currency,
    topology_text,
)
from xlashard.tpu.preflight.report.preflight_model import PreflightFields
from xlashard.wording import in_bytes, in_flop, in_percent, in_seconds


@dataclass(frozen=True)
class Figure:
    """A key figure.

    Attributes:
        name: Name.
        text: Formatted number.
        value: The number.
        words: Explanation.
    """

    name: str
    text: str
    value: float | str
    words: str


def verdict_text(report: PreflightFields) -> str:
    """Return the verdict as a sentence."""
    memory = report.memory
    each, spare = in_bytes(memory.available_bytes), in_bytes(abs(memory.spare_bytes))
    if is_fitting(report):
        return f"{spare} to spare of {each} on each device"
    if memory.fits:
        total = in_bytes(memory.total_bytes)
        return f"The compiler did not fit {total} into the {each} of each device"
    return f"{spare} more than the {each} of each device"


def is_fitting(report: PreflightFields) -> bool:
    """Return whether the compiler accepted the program."""
    return report.outcome == "fits"


def title_of(report: PreflightFields) -> str:
    """Return the title, or else the function's name."""
    return report.title or report.name


def outcome(report: PreflightFields) -> Html:
    """Return the outcome as a badge."""
    kind, sign, words = (
        ("fits", "✓", "Fits") if is_fitting(report) else ("not", "✕", "Out of memory")
    )
    return tag("span", tag("span", sign, aria_hidden="true"), f" {words}", class_=f"badge {kind}")


def verdict_section(report: PreflightFields, *, with_bar: bool = False) -> Html:
    """Return the verdict with the program and its key figures.

    Args:
        report: The report.
        with_bar: Whether to include the memory bar.
    """
    tiles = [
        tag(
            "div",
            tag("dt", f.name),
            tag(
                "dd",
                tag("b", f.text, data_value=repr(f.value) if f.value != "" else None),
                tag("span", f.words, class_="note"),
            ),
            data_figure=f.name,
        )
        for f in figures(report)
    ]
    return tag(
        "section",
        tag("p", outcome(report)),
        tag("h2", verdict_text(report)),
        _subject(report),
        memory_bar(report.memory) if with_bar else None,
        tag("dl", tiles, class_="tiles"),
        class_="verdict fits" if is_fitting(report) else "verdict not",
        aria_label="Verdict",
    )


def figures(report: PreflightFields) -> Iterator[Figure]:
    """Yield the key figures, most important first."""
    time, memory = report.time, report.memory
    longer = "the compiler's estimate" if time.seconds > time.roofline_seconds else "the roofline"
    yield Figure("step time", in_seconds(time.seconds), time.seconds, f"by {longer}")
    yield Figure("bound", SHORT[time.bound], time.bound, f"waits for {BOUNDS[time.bound]}")
    used = memory.total_bytes / memory.available_bytes
    words = f"{in_bytes(memory.total_bytes)} of {in_bytes(memory.available_bytes)}"
    yield Figure("memory", in_percent(used), used, words)
    if report.throughput is not None:
        yield from _throughput(report)
    else:
        yield Figure("work", in_flop(time.flops), time.flops, "on each device")
    if report.price is not None:
        yield from _prices(report)


def _throughput(report: PreflightFields) -> Iterator[Figure]:
    throughput = report.throughput
    assert throughput is not None
    speed = throughput.tokens_per_second
    words = f"{throughput.workload.tokens:,} in a step"
    yield Figure("tokens/s", in_thousands(speed), speed, words)
    words = "of what the chips could do (MFU)"
    use = throughput.utilisation
    yield Figure("utilisation", in_percent(use), use, words)


def _prices(report: PreflightFields) -> Iterator[Figure]:
    price = report.price
    assert price is not None
    money = price.currency
    hour = price_with_currency(price.hour, money)
    words = f"{hour} an hour, {price_text(price.chip_hour)} a chip"
    yield Figure("price of a step", price_with_currency(price.step, money), price.step, words)
    if price.billion_tokens is not None:
        text = price_with_currency(price.billion_tokens, money)
        yield Figure("10⁹ tokens", text, price.billion_tokens, "at this speed")


def _subject(report: PreflightFields) -> Html:
    topology = report.topology
    mesh = [
        [" × " if n else "", user_text(axis.name), f"={axis.size}"]
        for n, axis in enumerate(report.mesh)
    ]
    return tag(
        "p",
        user_text(report.name, "code"),
        [" of ", user_text(report.title)] if report.title else None,
        " on ",
        tag("b", topology_text(topology)),
        [" · ", mesh] if report.mesh else None,
        f" · {report.partitioner}",
        class_="subject",
    )


_OVERVIEW = (
    TableColumn("report"),
    TableColumn("devices"),
    TableColumn("outcome"),
    TableColumn("memory of a device", True),
    TableColumn("step time", True),
    TableColumn("bound"),
    TableColumn("tokens/s", True),
    TableColumn("MFU", True),
    TableColumn("a step", True),
    TableColumn("10⁹ tokens", True),
)


def overview_section(reports: Sequence[PreflightFields], names: Sequence[str]) -> Html:
    """Return a table with a row per report.

    Args:
        reports: The reports.
        names: Name of each report.
    """
    rows = [_overview_row(report, names[n], n) for n, report in enumerate(reports)]
    return tag(
        "section",
        tag("h2", f"{len(reports)} reports side by side"),
        table("reports", _OVERVIEW, rows),
        class_="card overview",
    )


def _overview_row(report: PreflightFields, name: str, number: int) -> TableRow:
    topology, time, memory = report.topology, report.time, report.memory
    speed = report.throughput
    price = report.price
    mesh = " × ".join(f"{axis.name}={axis.size}" for axis in report.mesh)
    slices = f"{topology.slices} × " if topology.slices > 1 else ""
    share = in_percent(memory.total_bytes / memory.available_bytes)
    billion = None if price is None else price.billion_tokens
    money = "" if price is None else price.currency
    return TableRow(
        (
            TableCell(tag("a", user_text(name), href=f"#report-{number + 1}"), name),
            TableCell(
                [f"{slices}{topology.name}", tag("span", user_text(mesh), class_="note")],
                topology.name,
            ),
            TableCell(outcome(report), memory.total_bytes / memory.available_bytes),
            TableCell(join(share, memory_bar(memory, f"Memory of {name}")), memory.total_bytes),
            TableCell(in_seconds(time.seconds), time.seconds),
            TableCell(SHORT[time.bound], time.bound),
            _maybe(None if speed is None else speed.tokens_per_second, in_thousands),
            _maybe(None if speed is None else speed.utilisation, in_percent),
            _maybe(None if price is None else price.step, lambda n: price_with_currency(n, money)),
            _maybe(billion, lambda n: price_with_currency(n, money)),
        ),
        search=f"{name} {topology.name} {mesh}",
    )


def _maybe(number: float | None, write: Callable[[float], str]) -> TableCell:
    """Return a cell for an optional number."""
    return TableCell("–", "") if number is None else TableCell(write(number), number)
