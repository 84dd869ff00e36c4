"""Sections that program reports and preflight reports share, printed and on pages."""

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from xlashard.analysis.explain.findings import Column, Findings
from xlashard.analysis.explain.model import (
    CollectiveReport,
    ConstantReport,
    DonationReport,
    InnerValueReport,
    MoveReport,
    RepeatedReport,
    UnmetRequest,
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
from xlashard.support.formatting import in_bytes, typed

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
    """Merge arguments with similar paths and results that could be donated."""
    return [
        replace(
            _merged(group, "path", ("device_bytes",)),
            result=_path([d.result for d in group], count=False),
        )
        for group in _groups(donations, lambda d: (_pattern(d.path), _pattern(d.result)))
    ]


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
    """Return the table of arguments that could be donated, below what was donated."""
    if not donations:
        return None
    reused = [d for d in donations if d.is_reused]
    lost = sum(d.donated and not d.is_reused for d in donations)
    could = sorted((d for d in donations if not d.donated), key=lambda d: -d.device_bytes)
    held = sum(d.device_bytes for d in reused)
    note = f"{len(reused)} reused for results, {in_bytes(held)} on each device"
    note += f"; {lost} in vain" if lost else ""
    if not page.is_full:
        could = merged_donations(could)
    shown = listing(
        page,
        ("Donated", note if reused or lost else "nothing"),
        (">each device", "argument", ""),
        could,
        lambda d: (
            in_bytes(d.device_bytes),
            page.path(d.path),
            Text.assemble("could be donated to ", page.path(d.result)),
        ),
        lambda d: d.device_bytes,
    )
    return shown or section("Donated", note, None)


def merged_unmet(rows: Sequence[UnmetRequest]) -> list[UnmetRequest]:
    """Merge requests with similar paths and reasons, most bytes first."""
    groups = _groups(
        rows,
        lambda u: (u.kind, u.requested, u.source, *map(_pattern, (u.path, u.actual, u.reason))),
    )
    merged = [_merged(group, "path", ("nbytes",)) for group in groups]
    return sorted(merged, key=lambda u: -u.nbytes)


def _outcome_text(u: UnmetRequest) -> str:
    """Format what the program does, why, and what to write."""
    why = ": ".join(filter(None, (u.actual, u.reason)))
    return "; ".join(filter(None, (why, u.advice)))


UNMET = Findings[UnmetRequest](
    field="unmet",
    title="Asked for and not done",
    note="or held whole by each device without a request",
    summary="{count}, for {total}",
    columns=(
        Column("value", lambda u: u.path, "path"),
        Column("asked", lambda u: u.requested, "code"),
        Column(
            ">bytes",
            lambda u: u.nbytes,
            "bytes",
            "Of the value, or in excess of a sharded value on one device",
        ),
        Column("what happens", _outcome_text),
        Column("line", lambda u: u.source, "line"),
    ),
    printed={">bytes": "{bytes}", "asked": "{value}: {asked}", "done": "{line}{what happens}"},
    merged=merged_unmet,
)
"""Section of the requests that a program does not follow."""


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
    note="work on whole values, and the argument to shard",
    summary="{count}",
    columns=(
        Column("operation", _operation, "code"),
        Column("operands", lambda r: " · ".join(r.operands), "code"),
        Column(">FLOP", lambda r: r.flops or None, "flop", "Of a product or FFT on each device"),
        Column(">bytes", lambda r: r.nbytes or None, "bytes", "That other work reads and writes"),
        Column(
            ">share",
            lambda r: r.share,
            "part",
            "Of the FLOP of products and FFTs on a device, or of all bytes read and written",
        ),
        Column("remedy", _remedy),
        Column("line", lambda r: r.source, "line"),
    ),
    printed={
        ">each device": "{FLOP}{bytes}",
        ">share": "{share}",
        "what": "{operation}",
        "of": "{operands}",
        "remedy": "{line}{remedy}",
    },
)
"""Section of the work that every device repeats."""


def merged_constants(rows: Sequence[ConstantReport]) -> list[ConstantReport]:
    """Merge constants with similar paths and equal types, most bytes first."""
    groups = _groups(rows, lambda c: (_pattern(c.path), c.shape, c.dtype, c.spec))
    merged = [_merged(group, "path", ("nbytes", "argument_bytes")) for group in groups]
    return sorted(merged, key=lambda c: -c.nbytes)


def _as_argument(c: ConstantReport) -> str:
    if not c.saved_bytes:
        return "as an argument: the same bytes, once instead of in the program"
    return f"as an argument with {c.spec}: {in_bytes(c.saved_bytes)} less on each device"


CONSTANTS = Findings[ConstantReport](
    field="constants",
    title="Closed over",
    note="arrays that jax.jit puts whole into the program of each device",
    summary="{count}, {total} in the program of each device",
    columns=(
        Column("array", lambda c: c.path, "path"),
        Column("type", lambda c: typed(c.dtype, c.shape), "code"),
        Column("sharding", lambda c: c.spec, "code", "Outside of the program"),
        Column(">bytes", lambda c: c.nbytes, "bytes", "On each device"),
        Column("instead", _as_argument),
    ),
    printed={">each device": "{bytes}", "array": "{array}  {type}", "instead": "{instead}"},
    merged=merged_constants,
)
"""Section of the arrays that are constants of a program."""


FINDINGS: tuple[Findings[Any], ...] = (UNMET, REPEATED, CONSTANTS)
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


def _inner_type(v: InnerValueReport) -> str:
    return short_type(v) if v.dtype else ""


def _inner_sharding(v: InnerValueReport) -> str:
    return f"{v.spec} ×{v.copies}" if v.copies > 1 else v.spec


def _inner_facts(v: InnerValueReport) -> str:
    """Format the pass of a value, its number and its runs, or why its sharding is unknown."""
    facts = [v.in_pass] if v.in_pass != "forward" else []
    facts += [f"{v.count} alike"] if v.count > 1 else []
    facts += [f"{v.times} times"] if v.times > 1 else []
    return ", ".join([*facts, *filter(None, [v.reason])])


INNER_VALUES = Findings[InnerValueReport](
    field="values",
    title="Values inside",
    note="with the shardings that the partitioner chose, before XLA fuses them",
    summary="{count} kinds, with the shardings that the partitioner chose, before XLA fuses them.",
    columns=(
        Column("value", lambda v: v.name, "path"),
        Column("type", _inner_type, "code"),
        Column(
            ">each device",
            lambda v: v.device_bytes if v.dtype else None,
            "bytes",
            "Of the shard of one value, where XLA keeps it in memory",
        ),
        Column("sharding × copies", _inner_sharding, "code"),
        Column("facts", _inner_facts),
        Column("line", lambda v: v.source, "line"),
    ),
    printed={
        ">each device": "{each device}",
        "type": "{type}",
        "sharding × copies": "{sharding × copies}",
        "value": "{line}{value}",
        "": "{facts}",
    },
)
"""Section of the values inside of a program that match a pattern."""


def list_remedies(report: Any) -> Iterator[tuple[int, str]]:
    """Yield the code changes that save memory of a device: its bytes, and the change.

    Args:
        report: Report of a program.
    """
    saved = [
        (f"{line_text(u.source) if u.source else u.path}: {u.advice or 'shard it'}", u.nbytes)
        for u in merged_unmet(report.unmet)
        if u.is_whole
    ]
    saved += [(f"pass {c.path} as an argument", c.saved_bytes) for c in report.constants]
    idle = [d for d in report.donations if d.result and not d.donated]
    if idle:
        more = f" and {len(idle) - 1:,} more" * (len(idle) > 1)
        saved.append((f"donate {idle[0].path}{more}", sum(d.device_bytes for d in idle)))
    for text, nbytes in saved:
        if nbytes >= _LEAST_BYTES:
            yield nbytes, f"{text}: -{in_bytes(nbytes)} on each device"


_LEAST_BYTES = 2**20
"""Bytes of a device that are worth a line at the head of a report."""


def findings_of(report: Any) -> list[tuple[Findings[Any], Sequence[Any]]]:
    """Return the sections of a report that list findings, each with them."""
    sections = ((each, getattr(report, each.field, ())) for each in FINDINGS)
    return [(section, rows) for section, rows in sections if rows]
