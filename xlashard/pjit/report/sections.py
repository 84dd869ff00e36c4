"""Sections that program reports and preflight reports share."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from xlashard.pjit.report.cell_formatting import (
    decided_text,
    line_text,
    operation_text,
    sharding_text,
    short_type,
)
from xlashard.pjit.report.merging import merged_donations, merged_values
from xlashard.pjit.report.model import (
    CollectiveReport,
    DonationReport,
    ReplicationReport,
    ValueReport,
)
from xlashard.pjit.report.tables import WIDE, Page, section, table
from xlashard.wording import in_bytes


def runs_text(c: CollectiveReport) -> str:
    """Format the number of executions, if it is not a certain 1."""
    times = f" ×{c.times}" if c.times > 1 else ""
    return f"{times}{'' if c.times_known else ' ×?'}{' in a branch' if c.conditional else ''}"


def cause_text(c: CollectiveReport, page: Page) -> Text:
    """Format the line and operation of a collective, or of the consumer of a gather."""
    gathers = c.kind == "all-gather" and not c.op_name.endswith("sharding_constraint")
    name, source = c.op_name, c.source
    if c.needed_by and (gathers or source is None):
        name, source = c.needed_by, c.needed_by_source
    cause = Text()
    if source is not None:
        cause.append(line_text(source), "bold" if source.in_user_file else "")
        cause.append(" ")
    if c.argument:
        cause.append_text(page.path(c.argument))
    else:
        cause.append(operation_text(name) or "unknown to XLA", "dim")
    return cause


def values_section(title: str, values: Sequence[ValueReport], page: Page) -> RenderableType | None:
    """Return the table of the largest arguments or results with their shardings."""
    if not values:
        return None
    largest = values
    if not page.is_full:
        largest = sorted(merged_values(values), key=lambda v: -v.device_bytes)
    words = {decided_text(v) for v in values}
    total, held = sum(v.nbytes for v in values), sum(v.device_bytes for v in values)
    note = f"{len(values)}: {in_bytes(total)}, {in_bytes(held)} on each device"
    if len(words) == 1 and (word := words.pop()):
        note += f"; shardings by {word}"
    rest = page.rest(largest, lambda v: v.device_bytes)
    shown = page.rows(largest)
    columns = {
        ">each device": [in_bytes(v.device_bytes) if v.used else "–" for v in shown],
        ">whole": [in_bytes(v.nbytes) for v in shown],
        "type": [short_type(v) for v in shown],
        "sharding × copies": [sharding_text(v) for v in shown],
    }
    if words:
        columns["decided by"] = [decided_text(v) for v in shown]
    return section(title, note, _value_table([v.path for v in shown], columns, page), rest)


def _value_table(paths: Sequence[str], columns: dict[str, list[str]], page: Page) -> RenderableType:
    """Return a table of values, without the column `whole` if paths would be ambiguous."""
    headed = [[name, *column] for name, column in columns.items()]
    shown = page.paths(paths, headed) if page.width >= WIDE else None
    if shown is None:
        columns = {name: column for name, column in columns.items() if name != ">whole"}
        headed = [[name, *column] for name, column in columns.items()]
        shown = page.paths(paths, headed)
    numbers = [name for name in columns if name.startswith(">")]
    order = [*numbers, "path", *(name for name in columns if name not in numbers)]
    whole = {**columns, "path": shown or [Text(path, style="green") for path in paths]}
    return table(order, list(zip(*(whole[name] for name in order), strict=True)))


def donations_section(found: Sequence[DonationReport], page: Page) -> RenderableType | None:
    """Return the table of unused donations and of arguments that could be donated."""
    if not found:
        return None
    reused = [d for d in found if d.is_reused]
    lost = [d for d in found if d.donated and not d.is_reused]
    could = sorted((d for d in found if not d.donated), key=lambda d: -d.device_bytes)
    held = sum(d.device_bytes for d in reused)
    note = f"{len(reused)} reused for results, {in_bytes(held)} on each device"
    others = [*lost, *could]
    if not page.is_full:
        others = merged_donations(others)
    if not others:
        return section("Donated", note, None)
    rows = [
        (
            in_bytes(d.device_bytes),
            page.path(d.path),
            _donation_text(d, page),
        )
        for d in page.rows(others)
    ]
    return section(
        "Donated",
        note if reused or lost else "nothing",
        table((">each device", "argument", ""), rows),
        page.rest(others, lambda d: d.device_bytes),
    )


def _donation_text(d: DonationReport, page: Page) -> Text:
    if d.donated:
        lost = Text("donated, but not reused", style="yellow")
        return Text.assemble(lost, f": {d.reason}" if d.reason else "")
    return Text.assemble("could be donated to ", page.path(d.result))


def replications_section(found: Sequence[ReplicationReport], page: Page) -> RenderableType | None:
    """Return the table of values with more copies than requested."""
    if not found:
        return None
    rows = [
        (
            in_bytes(r.wasted_bytes),
            Text.assemble(page.path(r.path), " as ", r.spec),
            _why(r),
        )
        for r in page.rows(found)
    ]
    return section(
        "Replicated silently",
        "bytes that each device holds or gathers without a request",
        table((">wastes", "value", "why"), rows),
        page.rest(found, lambda r: r.wasted_bytes),
    )


def _why(r: ReplicationReport) -> str:
    axes, dims = ", ".join(r.axes), ", ".join(map(str, r.dims))
    what = f"dimension{'s' if len(r.dims) != 1 else ''} {dims}"
    match r.kind:
        case "constraint":
            line = "" if r.source is None else f" at {line_text(r.source)}"
            return f"the constraint{line} unshards {what}: gathered along {axes}"
        case "open dimension":
            return f"{what} left UNCONSTRAINED and not sharded by XLA; {axes} could shard it"
        case _:
            return f"unspecified; {axes}, which shards an argument, could shard {what}"
