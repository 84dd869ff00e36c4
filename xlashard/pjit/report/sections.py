"""Sections that program reports and preflight reports share, with similar rows merged."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from xlashard.pjit.report.model import (
    CollectiveReport,
    DonationReport,
    MoveReport,
    RepeatedReport,
    ReplicationReport,
    SourceLine,
    UnevenReport,
    ValueReport,
)
from xlashard.pjit.report.tables import (
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
from xlashard.wording import in_bytes, in_flop, in_percent

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


def runs_text(c: CollectiveReport) -> str:
    """Format the number of executions, if it is not a certain 1."""
    times = f" ×{c.times}" if c.times > 1 else ""
    return f"{times}{'' if c.times_known else ' ×?'}{' in a branch' if c.conditional else ''}"


def cause_text(c: CollectiveReport, page: Page) -> Text:
    """Format the line and operation of a collective, or of the consumer of a gather."""
    name, source = cause_of(c)
    if c.argument:
        return Text.assemble(place_text(source), page.path(c.argument))
    return Text.assemble(place_text(source), (operation_text(name) or "unknown to XLA", "dim"))


def cause_of(c: CollectiveReport) -> tuple[str, SourceLine | None]:
    """Return the operation of a collective and its line; for an all-gather its consumer."""
    gathers = c.kind == "all-gather" and not c.op_name.endswith("sharding_constraint")
    if c.needed_by and (gathers or c.source is None):
        return c.needed_by, c.needed_by_source
    return c.op_name, c.source


def place_text(source: SourceLine | None) -> Text:
    """Format a line and a space, bold in a file of the user; empty if unknown."""
    if source is None:
        return Text()
    return Text.assemble((line_text(source), "bold" if source.in_user_file else ""), " ")


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


def replications_section(
    replications: Sequence[ReplicationReport], page: Page
) -> RenderableType | None:
    """Return the table of values with more copies than requested."""
    return listing(
        page,
        ("Replicated silently", "bytes that each device holds or gathers without a request"),
        (">wastes", "value", "why"),
        replications,
        lambda r: (
            in_bytes(r.wasted_bytes),
            Text.assemble(page.path(r.path), " as ", r.spec),
            _why(r),
        ),
        lambda r: r.wasted_bytes,
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
        case "argument":
            return f"no sharding, and not sharded by XLA; {axes} could shard {what}"
        case _:
            return f"unspecified; {axes}, which shards an argument, could shard {what}"


def uneven_section(uneven: Sequence[UnevenReport], page: Page) -> RenderableType | None:
    """Return the table of dimensions that do not divide."""
    return listing(
        page,
        (
            "Constraints that do not divide",
            "XLA pads them; pad_to_mesh pads first",
        ),
        (">padding", "value", "why"),
        uneven,
        lambda u: (
            in_bytes(u.padding_bytes),
            f"{u.type} as {u.spec}",
            f"{'' if u.source is None else line_text(u.source) + ': '}{uneven_reason(u)}",
        ),
        lambda u: u.padding_bytes,
    )


def uneven_reason(u: UnevenReport) -> str:
    """Format the dimension, its tiles, and what became of a result."""
    along = f" along {', '.join(u.axes)}" if u.axes else ""
    empty = f", {u.empty_shards} of padding alone" if u.empty_shards else ""
    result = f"; {u.result} is {u.result_spec} instead" if u.result else ""
    tiles = f"{u.shards} tiles of {u.shard_size}{along}{empty}"
    return f"dimension {u.dim} of {u.size} padded to {u.padded_size}, {tiles}{result}"


def repeated_section(repeated: Sequence[RepeatedReport], page: Page) -> RenderableType | None:
    """Return the table of products that every device computes whole."""
    return listing(
        page,
        ("Repeated by every device", "products of whole operands, and the argument to shard"),
        (">each device", ">share", "what", "of", "remedy"),
        repeated,
        lambda r: (
            in_flop(r.flops),
            in_percent(r.share),
            f"{r.operation}{f' ×{r.times}' if r.times > 1 else ''}",
            f"{' · '.join(r.operands)}",
            f"{'' if r.source is None else line_text(r.source) + ': '}{remedy_text(r)}",
        ),
        lambda r: r.flops,
        in_flop,
    )


def remedy_text(r: RepeatedReport) -> str:
    """Format what to shard, so that devices share the work."""
    if r.argument:
        return f"shard {r.argument} as {r.spec}"
    if r.constraint is not None:
        return f"shard the constraint at {line_text(r.constraint)}"
    return "constrain an operand inside of the function"
