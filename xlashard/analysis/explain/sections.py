"""Sections that program reports and preflight reports share, printed and on pages."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from xlashard.analysis.explain.findings import Column, Findings
from xlashard.analysis.explain.model import (
    CollectiveReport,
    DonationReport,
    IgnoredReport,
    MoveReport,
    RepeatedReport,
    ReplicationReport,
    UnevenReport,
    ValueReport,
)
from xlashard.analysis.explain.tables import (
    WIDE,
    Page,
    decided_text,
    line_text,
    listing,
    operation_text,
    section,
    sharding_text,
    short_type,
    table,
)
from xlashard.support.formatting import in_bytes

_COLLECTIVE_SUMS = (
    "count",
    "times",
    "operand_bytes",
    "result_bytes",
    "payload_bytes",
    "sent_bytes",
)


def merged_values(values: Sequence[ValueReport]) -> list[ValueReport]:
    """Merge values of one type and sharding with similar paths; sum their bytes."""
    groups = _groups(values, lambda v: replace(v, path=_pattern(v.path)))
    return [_merged(group, "path", ("nbytes", "device_bytes")) for group in groups]


def merged_collectives(collectives: Sequence[CollectiveReport]) -> list[CollectiveReport]:
    """Merge collectives of one line with similar arguments, most sent bytes first."""
    merged = [
        _merged(group, "argument", _COLLECTIVE_SUMS) for group in _groups(collectives, _reason)
    ]
    return sorted(merged, key=lambda c: -c.sent_bytes)


def collective_sums(collectives: Sequence[CollectiveReport]) -> dict[str, int]:
    """Sum the counts, executions and bytes of collectives."""
    return _sums(collectives, _COLLECTIVE_SUMS)


def _reason(c: CollectiveReport) -> Hashable:
    what = c.kind, c.along, c.groups, c.operands, c.results
    certain = c.times_known, c.conditional, c.asynchronous
    named = _pattern(c.argument) or operation_text(c.op_name), operation_text(c.needed_by)
    return what, certain, named, c.source, c.needed_by_source


def merged_moves(moves: Sequence[MoveReport]) -> list[MoveReport]:
    """Merge moves between the same shardings with similar arguments, the largest first."""
    groups = _groups(moves, lambda m: (_pattern(m.path), m.source, m.target))
    merged = [_merged(group, "path", ("device_bytes_moved", "host_bytes")) for group in groups]
    return sorted(merged, key=lambda m: -m.nbytes)


def merged_donations(donations: Sequence[DonationReport]) -> list[DonationReport]:
    """Merge donations with similar arguments and results."""
    return [
        replace(
            _merged(group, "path", ("device_bytes",)),
            result=_path([d.result for d in group], count=False),
        )
        for group in _groups(donations, _outcome)
    ]


def _outcome(d: DonationReport) -> Hashable:
    return d.donated, _pattern(d.path), _pattern(d.result), _pattern(d.reason)


def _groups[T](values: Sequence[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.values())


def _merged(group: Sequence[Any], path: str, sums: Sequence[str]) -> Any:
    """Merge similar values: name them by one path, and sum some of their fields."""
    paths = [getattr(value, path) for value in group]
    return replace(group[0], **{path: _path(paths)}, **_sums(group, sums))


def _sums(group: Sequence[Any], names: Sequence[str]) -> dict[str, int]:
    return {name: sum(getattr(value, name) for value in group) for name in names}


def _pattern(path: str) -> str:
    """Replace the indices of a path."""
    return re.sub(r"\[\d+\]", "[*]", path)


def _path(paths: Sequence[str], *, count: bool = True) -> str:
    """Format one path for similar ones: `layers[*].w (12)`. Common indices stay."""
    first, *others = [re.split(r"(\[\d+\])", path) for path in paths]
    if not others:
        return paths[0]
    steps = [
        step if all(other[i] == step for other in others) else "[*]" for i, step in enumerate(first)
    ]
    text = "".join(steps)
    return f"{text} ({len(paths)})" if count and text else text


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


def donations_section(donations: Sequence[DonationReport], page: Page) -> RenderableType | None:
    """Return the table of unused donations and of arguments that could be donated."""
    if not donations:
        return None
    reused = [d for d in donations if d.is_reused]
    lost = [d for d in donations if d.donated and not d.is_reused]
    could = sorted((d for d in donations if not d.donated), key=lambda d: -d.device_bytes)
    held = sum(d.device_bytes for d in reused)
    note = f"{len(reused)} reused for results, {in_bytes(held)} on each device"
    others = [*lost, *could]
    if not page.is_full:
        others = merged_donations(others)
    shown = listing(
        page,
        ("Donated", note if reused or lost else "nothing"),
        (">each device", "argument", ""),
        others,
        lambda d: (in_bytes(d.device_bytes), page.path(d.path), _donation_text(d, page)),
        lambda d: d.device_bytes,
    )
    return shown or section("Donated", note, None)


def _donation_text(d: DonationReport, page: Page) -> Text:
    if d.donated:
        lost = Text("donated, but not reused", style="yellow")
        return Text.assemble(lost, f": {d.reason}" if d.reason else "")
    return Text.assemble("could be donated to ", page.path(d.result))


def _replication_reason(r: ReplicationReport) -> str:
    axes, dims = ", ".join(r.axes), ", ".join(map(str, r.dims))
    what = f"dimension{'s' if len(r.dims) != 1 else ''} {dims}"
    match r.kind:
        case "constraint":
            line = "" if r.source is None else f" at {line_text(r.source)}"
            return f"the constraint{line} unshards {what}: gathered along {axes}"
        case "open dimension":
            return f"{what} left UNCONSTRAINED and not sharded by XLA; {axes} could shard it"
        case "argument":
            return f"no sharding, and not sharded by XLA; {axes} could shard {what}"
        case _:
            return f"unspecified; {axes}, which shards an argument, could shard {what}"


REPLICATIONS = Findings[ReplicationReport](
    field="replications",
    title="Replicated silently",
    note="bytes that each device holds or gathers without a request",
    summary="{count}, {total} on each device beyond the specification",
    columns=(
        Column("value", lambda r: r.path, "path"),
        Column("sharding", lambda r: r.spec, "code"),
        Column(
            ">wasted",
            lambda r: r.wasted_bytes,
            "bytes",
            "Extra bytes on a device, compared with sharding over its axes",
        ),
        Column("why", _replication_reason),
        Column("line", lambda r: r.source, "line"),
    ),
    printed={">wastes": "{wasted}", "value": "{value} as {sharding}", "why": "{why}"},
)
"""Section of the values with more copies than requested."""


def _uneven_reason(u: UnevenReport) -> str:
    """Format the dimension, its tiles, and what became of a result."""
    along = f" along {', '.join(u.axes)}" if u.axes else ""
    empty = f", {u.empty_shards} of padding alone" if u.empty_shards else ""
    result = f"; {u.result} is {u.result_spec} instead" if u.result else ""
    tiles = f"{u.shards} tiles of {u.shard_size}{along}{empty}"
    return f"dimension {u.dim} of {u.size} padded to {u.padded_size}, {tiles}{result}"


UNEVEN = Findings[UnevenReport](
    field="uneven",
    title="Constraints that do not divide",
    note="XLA pads them; pad_to_mesh pads first",
    summary="{count}, padded by XLA inside of the program",
    columns=(
        Column("value", lambda u: u.type, "code"),
        Column("sharding", lambda u: u.spec, "code"),
        Column(
            ">padding",
            lambda u: u.padding_bytes,
            "bytes",
            "Bytes of padding in one copy of the value",
        ),
        Column("why", _uneven_reason),
        Column("line", lambda u: u.source, "line"),
    ),
    printed={">padding": "{padding}", "value": "{value} as {sharding}", "why": "{line}{why}"},
)
"""Section of the constraints that do not divide a dimension."""


def _ignored_reason(i: IgnoredReport) -> str:
    """Format why nothing follows the sharding, and what to write."""
    match i.kind:
        case "constraint":
            return "its mesh is abstract and nothing places the program: give devices"
        case "device_put":
            return "device_put inside of a program: write with_sharding_constraint"
    first, more = i.results[0], len(i.results) - 1
    others = f" and {more} more" if more else ""
    return f"its shape alone is taken, {first}{others} on one device: give out_shardings"


IGNORED = Findings[IgnoredReport](
    field="ignored",
    title="Shardings without effect",
    note="the program names them and does not follow them",
    summary="{count}, for values of {total}",
    columns=(
        Column("value", lambda i: i.path, "code"),
        Column("sharding", lambda i: i.spec, "code"),
        Column(">size", lambda i: i.nbytes, "bytes", "Of the whole value"),
        Column("why", _ignored_reason),
        Column("line", lambda i: i.source, "line"),
    ),
    printed={">size": "{size}", "value": "{value} as {sharding}", "why": "{line}{why}"},
)
"""Section of the shardings that a program does not follow."""


def _operation(r: RepeatedReport) -> str:
    return f"{r.operation} ×{r.times}" if r.times > 1 else r.operation


def _remedy(r: RepeatedReport) -> str:
    """Format what to shard, so that devices share the work."""
    if r.argument:
        return f"shard {r.argument} as {r.spec}"
    if r.constraint is not None:
        return f"shard the constraint at {line_text(r.constraint)}"
    return "constrain an operand inside of the function"


REPEATED = Findings[RepeatedReport](
    field="repeated",
    title="Repeated by every device",
    note="products of whole operands, and the argument to shard",
    summary="{count}, {total} on each device",
    columns=(
        Column("operation", _operation, "code"),
        Column("operands", lambda r: " · ".join(r.operands), "code"),
        Column(">FLOP", lambda r: r.flops, "flop", "On each device, all executions"),
        Column(">share", lambda r: r.share, "part", "Of the products on a device"),
        Column("remedy", _remedy),
        Column("line", lambda r: r.source, "line"),
    ),
    printed={
        ">each device": "{FLOP}",
        ">share": "{share}",
        "what": "{operation}",
        "of": "{operands}",
        "remedy": "{line}{remedy}",
    },
)
"""Section of the products that every device computes whole."""


FINDINGS: tuple[Findings[Any], ...] = (REPLICATIONS, UNEVEN, IGNORED, REPEATED)
"""Sections of what a program does without a request, of `explain` and of a preflight."""

MOVES = Findings[MoveReport](
    field="moves",
    title="Moved before each call",
    note="to all devices; device_put them once to save it",
    summary="device_put these arguments once to save it.",
    columns=(
        Column("argument", lambda m: m.path, "path"),
        Column(">moves", lambda m: m.nbytes, "bytes", "To all devices"),
        Column("from", lambda m: m.source, "code"),
        Column("to", lambda m: m.target, "code"),
    ),
    printed={">moves": "{moves}", "argument": "{argument}", "from → to": "{from} → {to}"},
    merged=merged_moves,
)
"""Section of the arguments that are resharded or uploaded before each call."""


def findings_of(report: Any) -> list[tuple[Findings[Any], Sequence[Any]]]:
    """Return the sections of a report that list findings, each with them."""
    sections = ((each, getattr(report, each.field, ())) for each in FINDINGS)
    return [(section, rows) for section, rows in sections if rows]
