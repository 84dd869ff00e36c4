"""Sections that reports of programs and preflight reports share."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

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
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.analysis.report.cells import (
    Span,
    TableCell,
    join_cell,
    operation_cell,
    source_cell,
)
from xlashard.analysis.report.excerpts import Excerpt, read_excerpts
from xlashard.analysis.report.parts import WIDE, Column, Section
from xlashard.analysis.report.texts import line_text, operation_text, short_name, split_steps
from xlashard.analysis.report.trees import TreeDrawing, make_tree
from xlashard.errors import counted
from xlashard.support.formatting import in_bytes, in_seconds, typed

_COLLECTIVE_SUMS = (
    "count",
    "times",
    "operand_bytes",
    "result_bytes",
    "payload_bytes",
    "sent_bytes",
)


def collective_sums(collectives: Sequence[CollectiveReport]) -> dict[str, int]:
    """Sum the counts, executions and bytes of collectives."""
    return _sums(collectives, _COLLECTIVE_SUMS)


def sent_by_axes(collectives: Iterable[CollectiveReport]) -> dict[str, int]:
    """Sum the bytes that a device sends, by the axes along which it does."""
    sent: dict[str, int] = {}
    for c in collectives:
        sent[c.along] = sent.get(c.along, 0) + c.sent_bytes
    return sent


def sent_text(collectives: Sequence[CollectiveReport]) -> str:
    """Format the bytes that a device sends, by the axes along which it does."""
    if not collectives:
        return "nothing to other devices"
    count, times = sum(c.count for c in collectives), sum(c.times for c in collectives)
    text = f"{in_bytes(sum(c.sent_bytes for c in collectives))} in "
    text += counted(count, "collective")
    text += f", run {times} times" if times != count else ""
    biggest = sorted(sent_by_axes(collectives).items(), key=lambda item: -item[1])
    text += ": " + ", ".join(f"{in_bytes(sent)} along {name}" for name, sent in biggest)
    if any(not c.times_known for c in collectives):
        text += "; a loop with unknown trip count counts as one run"
    if any(c.conditional for c in collectives):
        text += "; every branch counts as taken"
    return text


def _describe_cause(c: CollectiveReport) -> Hashable:
    what = c.kind, c.along, c.groups, c.operands, c.results
    certain = c.times_known, c.conditional, c.asynchronous
    named = _pattern(c.argument) or operation_text(c.op_name), operation_text(c.needed_by)
    return what, certain, named, c.source, c.needed_by_source


def _make_merge(
    *sums: str,
    order: str = "",
    paths: Sequence[str] = ("path",),
    key: Callable[[Any], Hashable] | None = None,
) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function that merges similar rows, the largest first.

    Args:
        *sums: Fields that are summed up.
        order: Field of the size of a row; the first of the sums if empty.
        paths: Fields with paths, which become one path; the first one is followed by the number of
            rows.
        key: Returns a key of similar rows; by default their other fields, with any index in texts.
    """

    def find_key(row: Any) -> Hashable:
        values = [getattr(row, each.name) for each in fields(row) if each.name not in sums]
        return tuple(_pattern(value) if isinstance(value, str) else value for value in values)

    def merge(rows: Sequence[Any]) -> list[Any]:
        groups: dict[Hashable, list[Any]] = {}
        for row in rows:
            groups.setdefault((key or find_key)(row), []).append(row)
        merged: list[Any] = []
        for group in groups.values():
            named = {
                path: _path([getattr(row, path) for row in group], count=path == paths[0])
                for path in paths
            }
            merged.append(replace(group[0], **named, **_sums(group, sums)))
        return sorted(merged, key=lambda row: -getattr(row, order or sums[0]))

    return merge


def _sums(group: Sequence[Any], names: Sequence[str]) -> dict[str, int]:
    return {name: sum(getattr(value, name) for value in group) for name in names}


def _pattern(path: str) -> str:
    """Replace the indices of a path."""
    return re.sub(r"\[\d+\]", "[*]", path)


def _path(paths: Sequence[str], *, count: bool) -> str:
    """Format one path for similar ones: `layers[*].w (12)`. Common indices stay."""
    first, *others = [re.split(r"(\[\d+\])", path) for path in paths]
    if not others:
        return paths[0]
    steps = [
        step if all(other[i] == step for other in others) else "[*]" for i, step in enumerate(first)
    ]
    text = "".join(steps)
    return f"{text} ({len(paths)})" if count and text else text


merge_values: Callable[[Sequence[ValueReport]], list[ValueReport]]
merge_values = _make_merge(
    "device_bytes", "nbytes", key=lambda value: replace(value, path=_pattern(value.path))
)
"""Merges values of one type and sharding with similar paths, largest first."""

_merge_collectives = _make_merge(
    *_COLLECTIVE_SUMS, order="sent_bytes", paths=("argument",), key=_describe_cause
)
_merge_donations = _make_merge("device_bytes", paths=("path", "result"))


def groups_text(collective: CollectiveReport) -> str:
    """Format the axes, or the groups with the first one: `4 groups of 2 devices: 0,3 …`."""
    groups = collective.groups
    if not groups:
        return collective.along
    first = ",".join(map(str, groups[0][:4])) + (",…" if len(groups[0]) > 4 else "")
    return f"{collective.along}: {first}{' …' if len(groups) > 1 else ''}"


def types_text(collective: CollectiveReport) -> str:
    """Format types of operands and results: `f32[8,16] → f32[16,16]`."""
    one, other = map(_types, (collective.operands, collective.results))
    return one if one == other else f"{one} → {other}"


def _types(types: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(types))
    if len(distinct) == 1:
        return distinct[0] if len(types) == 1 else f"{len(types)} × {distinct[0]}"
    return f"{distinct[0]} and {len(types) - 1} more"


_LETTERS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_type(value: ValueReport | InnerValueReport) -> str:
    """Format a type as in a jaxpr: `f32[8,16]`."""
    letters = re.match(r"[a-z]*", value.dtype)
    word = letters[0] if letters else ""
    dtype = _LETTERS.get(word, word) + value.dtype[len(word) :]
    return typed(dtype, value.shape)


def sharding_text(value: ValueReport | InnerValueReport) -> str:
    """Format a sharding with the copies of each shard: `P('data') ×4`."""
    if isinstance(value, ValueReport) and not value.used:
        return "not used"
    return f"{value.spec} ×{value.copies}" if value.copies > 1 else value.spec


_DECIDED = {
    "caller": "you",
    "auto": "AUTO",
    "argument": "the argument",
    "default": "default",
    "partitioner": "the partitioner",
    "function": "the function",
    "unknown": "",
}


def decided_text(value: ValueReport) -> str:
    """Format the origin of a value's sharding; empty if unknown."""
    return _DECIDED[value.decided_by] if value.used else ""


def _runs_text(c: CollectiveReport) -> str:
    """Format the number of executions, if it is not a certain 1."""
    times = f" ×{c.times}" if c.times > 1 else ""
    return f"{times}{'' if c.times_known else ' ×?'}{' in a branch' if c.conditional else ''}"


def find_cause(c: CollectiveReport) -> tuple[str, SourceLine | None]:
    """Return the operation of a collective and its line; for an all-gather its consumer."""
    gathers = c.kind == "all-gather" and not c.op_name.endswith("sharding_constraint")
    if c.needed_by and (gathers or c.source is None):
        return c.needed_by, c.needed_by_source or c.source
    return c.op_name, c.source


def cause_text(c: CollectiveReport) -> str:
    """Return the argument, or the operation, that a collective is for."""
    return c.argument or operation_text(find_cause(c)[0])


def read_causes(collectives: Iterable[CollectiveReport]) -> tuple[Excerpt, ...]:
    """Return excerpts of the source lines of collectives."""
    return read_excerpts(find_cause(c)[1] for c in collectives)


def _cause_cell(c: CollectiveReport) -> TableCell:
    """Return the argument, or the operation, that a collective is for."""
    if c.argument:
        return join_cell(Span(c.argument, "path", c.op_name))
    return operation_cell(find_cause(c)[0], "unknown to XLA")


def _kind_cell(c: CollectiveReport) -> TableCell:
    branch = Span("in a branch", "tag") if c.conditional else None
    beside = Span("beside other work", "note") if c.asynchronous else None
    return join_cell(Span(c.kind, "kind"), branch, beside, key=c.kind)


def _origin_cell(c: CollectiveReport) -> TableCell:
    """Return the cause of a collective, with what would remove it."""
    text = ORIGINS.get(c.origin, "")
    if c.requested:
        return join_cell(text)
    instead = Span(f"Instead: {c.suggestion}", "note") if c.suggestion else None
    return join_cell(Span(text, "warn"), Span("not required", "tag"), instead, key=text)


ORIGINS: Mapping[str, str] = {
    "constraint": "a constraint",
    "explicit": "the program itself",
    "gradient": "the sum of a gradient",
    "reduction": "a sum over a cut dimension",
    "argument": "an argument's sharding",
    "rematerialization": "repeated by rematerialization",
    "result": "a result's sharding",
    "resharding": "a resharding",
}
"""Causes of collectives."""


def collectives_section(
    collectives: Sequence[CollectiveReport],
    note: str = "what each device sends in one call",
    per: str = "a call",
    networks: Mapping[str, str] | None = None,
    excerpts: Sequence[Excerpt] = (),
) -> Section[CollectiveReport]:
    """Return the table of the communication between devices.

    Args:
        collectives: The collectives.
        note: Words beside the title.
        per: What the bytes are of.
        networks: Names of networks; None for collectives without a price.
        excerpts: Excerpts of their source lines.
    """
    names = networks or {}

    def along(c: CollectiveReport) -> str:
        return groups_text(c) + (f" ({names[c.network]})" if c.network == "dcn" else "")

    return Section(
        id="collectives",
        title="Collectives",
        note=note,
        summary=_sum_up_collectives(collectives, per),
        columns=(
            Column("what", _kind_cell),
            Column("runs", _runs_text, "", on_page=False),
            Column("along", along),
            Column("of", types_text, "code"),
            Column(">times", _times_cell),
            Column(">sent", "sent_bytes", "bytes", f"Bytes that a device sends in {per}"),
            Column(">takes", lambda c: c.seconds or None, "seconds", "At the speed of the links"),
            Column("for", _cause_cell),
            Column("cause", _origin_cell),
            Column("line", lambda c: source_cell(find_cause(c)[1], excerpts)),
        ),
        rows=collectives,
        printed=">takes | >sent | what={what}{runs} | along | of | for={line: }{for} | cause",
        widths={">sent": WIDE, "of": 130} if networks else {},
        merged=None if networks else _merge_collectives,
        row_name=lambda c: f"{c.kind} {c.along} {cause_text(c)}",
        is_marked=lambda c: not c.requested,
        filters={
            "kind": lambda c: [c.kind],
            "axis": lambda c: ["other groups"] if c.axes is None else c.axes,
            "reason": lambda c: ["required" if c.requested else "not required"],
            "network": lambda c: [names[c.network]] if c.network in names else [],
        },
    )


def modules_section(
    id: str,
    title: str,
    amounts: Iterable[tuple[str, float]],
    format_amount: Callable[[float], str],
    whole: str,
) -> Section[None]:
    """Return a flame graph of amounts by name scope and operation.

    Args:
        id: Name of the section in links.
        title: Its title.
        amounts: Amounts with the JAX names of their operations; empty for unknown ones.
        format_amount: Returns an amount with its unit.
        whole: Name of the whole.
    """
    tree = make_tree(
        whole, [(_split_scopes(name or "unknown"), amount) for name, amount in amounts]
    )
    figure = TreeDrawing(tree, format_amount) if tree.parts else None
    note = "by name scope and operation, forward and backward pass together"
    return Section(id, title, note=note, figure=figure, view="page")


def sent_section(collectives: Sequence[CollectiveReport], per: str) -> Section[None]:
    """Return the flame graph of the bytes that a device sends, by name scope."""
    amounts = [(find_cause(c)[0], float(c.sent_bytes)) for c in collectives]
    return modules_section("sent-by-module", "Bytes sent by module", amounts, in_bytes, per)


def memory_map_section(
    parts: Iterable[tuple[str, int]],
    inputs: Iterable[ValueReport],
    outputs: Iterable[ValueReport],
    temporaries: Iterable[tuple[str, int]] = (),
) -> Section[None]:
    """Return a treemap of a device's memory.

    Args:
        parts: Bytes of what takes it, by name.
        inputs: The arguments.
        outputs: The results.
        temporaries: Bytes of temporaries by the JAX names of their operations.
    """
    inside_parts = {
        "arguments": [(_split_path(v.path), v.device_bytes) for v in inputs if v.used],
        "results": [
            (_split_path(v.path), v.device_bytes) for v in outputs if v.used and not v.aliased
        ],
        "temporaries": [(_split_scopes(name), nbytes) for name, nbytes in temporaries],
    }
    amounts: list[tuple[Sequence[str], float]] = []
    for name, nbytes in parts:
        held_values = inside_parts.get(name, ())
        inside = [((name, f" {first}", *rest), float(held)) for (first, *rest), held in held_values]
        other = nbytes - sum(held for _, held in inside)
        amounts += [*inside, ((name, " other") if inside else (name,), other)]
    tree = make_tree("", amounts)
    figure = TreeDrawing(tree, in_bytes, is_map=True) if tree.parts else None
    note = "arguments and results by path, temporaries by name scope"
    return Section("memory-map", "Memory at the peak", note=note, figure=figure, view="page")


def _split_scopes(op_name: str) -> Sequence[str]:
    """Return the name scopes and the operation of a JAX name; without any the name itself."""
    return re.findall(r"/?[^/]+", short_name(op_name)) or [op_name]


def _split_path(path: str) -> Sequence[str]:
    return split_steps(path) or [path]


def _times_cell(c: CollectiveReport) -> TableCell:
    return join_cell(f"{c.times:,}{'' if c.times_known else ' or more'}", key=c.times)


def _sum_up_collectives(collectives: Sequence[CollectiveReport], per: str) -> TableCell:
    lead = f"In {per} each device sends {sent_text(collectives)}."
    unasked = [c for c in collectives if not c.requested]
    if not unasked:
        return join_cell(lead)
    count, seconds = sum(c.count for c in unasked), sum(c.seconds for c in unasked)
    words = f" {count:,} of the collectives, {in_seconds(seconds)}, are not required. "
    button = Span("show only these", "choice", "not required")
    return join_cell(lead, Span(words, "warn"), button)


def _sharding_cell(v: ValueReport) -> TableCell:
    kind = f" in {v.memory_kind}" if v.memory_kind else ""
    return join_cell(Span(v.spec if v.used else "not used", "code"), kind)


def _shared_cell(v: ValueReport) -> Span | None:
    if v.aliased:
        return Span(v.aliased, "code")
    return Span("donated in vain", "warn") if v.donated else None


_VALUES = Section[ValueReport](
    id="values",
    title="Values",
    columns=(
        Column(">each device", lambda v: v.device_bytes if v.used else "–", "bytes"),
        Column(">whole", "nbytes", "bytes"),
        Column("path", "path", "path"),
        Column("type", lambda v: Span(short_type(v), "code", v.type)),
        Column("sharding", _sharding_cell),
        Column("placed", sharding_text, "code", on_page=False),
        Column(">copies", "copies", "number", "How many devices hold each part"),
        Column("decided by", decided_text, "", "Component that chose the sharding"),
        Column("second", "runner_up", "code", "In the layout that came second"),
        Column("memory shared with", _shared_cell),
    ),
    widths={">whole": WIDE, "second": WIDE},
    whole_paths="path",
)
_VALUES_PRINTED = ">each device | >whole | path | type | sharding × copies={placed}"


def values_section(
    id: str, title: str, values: Sequence[ValueReport], shown: Sequence[ValueReport] | None = None
) -> Section[ValueReport]:
    """Return the table of arguments or results with their shardings, the largest first.

    Args:
        id: Name of the section in links.
        title: Its title.
        values: The arguments or results.
        shown: Those that a short view shows; None for all.
    """
    few = values if shown is None else shown
    words = {decided_text(v) for v in values}
    total, held = sum(v.nbytes for v in values), sum(v.device_bytes for v in values)
    note = f"{len(values)}: {in_bytes(total)}, {in_bytes(held)} on each device"
    if len(words) == 1 and (word := words.pop()):
        note += f"; shardings by {word}"
    if reuse := len(values) - len(few):
        note += f"; {f'{reuse:,}' if few else 'all of them'} reuse the memory of arguments"
    return replace(
        _VALUES,
        id=id,
        title=title,
        note=note,
        rows=values,
        printed=_VALUES_PRINTED + " | decided by" * bool(words) + " | second",
        merged=lambda rows: merge_values(few),
        is_folded=len(values) > 40,
        is_kept=bool(values),
    )


def _fate_cell(d: DonationReport) -> TableCell:
    if d.donated and not d.result:
        return join_cell(Span("donated in vain", "warn"))
    words = "reused for " if d.donated else "could be donated to "
    return join_cell(Span(words, "" if d.donated else "warn"), Span(d.result, "path"))


def donations_section(donations: Sequence[DonationReport]) -> Section[DonationReport]:
    """Return the table of donated arguments, and of those that could be."""
    reused = [d for d in donations if d.is_reused]
    lost = [d for d in donations if d.donated and not d.is_reused]
    could = sorted((d for d in donations if not d.donated), key=lambda d: -d.device_bytes)
    note = f"{len(reused)} reused for results, {in_bytes(sum(d.device_bytes for d in reused))}"
    note += " on each device" + (f"; {len(lost)} in vain" if lost else "")
    more = f"{len(could):,} could be, {in_bytes(sum(d.device_bytes for d in could))}"
    return Section(
        id="donations",
        title="Donated",
        note=note if reused or lost else "nothing",
        summary=join_cell(more if could else "No other argument could be."),
        columns=(
            Column(">each device", "device_bytes", "bytes"),
            Column("argument", "path", "path"),
            Column("its memory", _fate_cell),
        ),
        rows=(*lost, *could, *reused),
        merged=lambda rows: _merge_donations([d for d in rows if not d.donated]),
        severity="costly" if lost or could else "",
        is_folded=not (lost or could),
        is_kept=bool(donations),
    )


_merge_unmet = _make_merge("nbytes")


def _outcome_text(u: UnmetRequest) -> str:
    """Format what the program does, why, and what to write."""
    why = ": ".join(filter(None, (u.actual, u.reason)))
    return "; ".join(filter(None, (why, u.advice)))


UNMET = Section[UnmetRequest](
    id="unmet",
    title="Asked for and not done",
    note="or held whole by each device without a request",
    summary="{count}, for {total}",
    columns=(
        Column("value", "path", "path"),
        Column("asked", "requested", "code"),
        Column(">bytes", "nbytes", "bytes", "Or in excess of a sharded value on one device"),
        Column("what happens", _outcome_text),
        Column("line", "source", "line"),
    ),
    printed=">bytes | asked={value}: {asked} | done={line}{what happens}",
    merged=_merge_unmet,
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


REPEATED = Section[RepeatedReport](
    id="repeated",
    title="Repeated by every device",
    note="work on whole values, and the argument to shard",
    summary="{count}",
    columns=(
        Column("operation", _operation, "code"),
        Column("operands", lambda r: " · ".join(r.operands), "code"),
        Column(">FLOP", lambda r: r.flops or None, "flop", "Of a product or FFT on each device"),
        Column(">bytes", lambda r: r.nbytes or None, "bytes", "That other work reads and writes"),
        Column(">share", "share", "part", "Of the FLOP of products and FFTs, or of all bytes"),
        Column("remedy", _remedy),
        Column("line", "source", "line"),
    ),
    printed=(
        ">each device={FLOP}{bytes} | >share | operation | of={operands} | remedy={line}{remedy}"
    ),
)
"""Section of the work that every device repeats."""


def _as_argument(c: ConstantReport) -> str:
    if not c.saved_bytes:
        return "as an argument: the same bytes, once instead of in the program"
    return f"as an argument with {c.spec}: {in_bytes(c.saved_bytes)} less on each device"


CONSTANTS = Section[ConstantReport](
    id="constants",
    title="Closed over",
    note="arrays that jax.jit puts whole into the program of each device",
    summary="{count}, {total} in the program of each device",
    columns=(
        Column("array", "path", "path"),
        Column("type", lambda c: typed(c.dtype, c.shape), "code"),
        Column("sharding", "spec", "code", "Outside of the program"),
        Column(">bytes", "nbytes", "bytes"),
        Column("instead", _as_argument),
    ),
    printed=">each device={bytes} | array={array}  {type} | instead",
    merged=_make_merge("nbytes", "argument_bytes"),
)
"""Section of the arrays that are constants of a program."""


FINDINGS: tuple[Section[Any], ...] = (UNMET, REPEATED, CONSTANTS)
"""Sections of what a program does without a request, of `explain` and of a preflight."""

MOVES = Section[MoveReport](
    id="moves",
    title="Moved before each call",
    note="to all devices; device_put them once to save it",
    columns=(
        Column("argument", "path", "path"),
        Column(">moves", "nbytes", "bytes"),
        Column("from", "source", "code"),
        Column("to", "target", "code"),
    ),
    printed=">moves | argument | from → to={from} → {to}",
    merged=_make_merge("device_bytes_moved", "host_bytes", order="nbytes"),
)
"""Section of the arguments that are resharded or uploaded before each call."""


def _inner_facts(v: InnerValueReport) -> str:
    """Format the pass of a value, its number and its runs, or why its sharding is unknown."""
    facts = [v.in_pass] if v.in_pass != "forward" else []
    facts += [f"{v.count} alike"] if v.count > 1 else []
    facts += [f"{v.times} times"] if v.times > 1 else []
    return ", ".join([*facts, *filter(None, [v.reason])])


INNER_VALUES = Section[InnerValueReport](
    id="values",
    title="Values inside",
    note="with the shardings that the partitioner chose, before XLA fuses them",
    summary="{count} kinds, with the shardings that the partitioner chose, before XLA fuses them.",
    columns=(
        Column("value", "name", "path"),
        Column("type", lambda v: short_type(v) if v.dtype else "", "code"),
        Column(
            ">each device",
            lambda v: v.device_bytes if v.dtype else None,
            "bytes",
            "Of the shard of one value, where XLA keeps it in memory",
        ),
        Column("sharding × copies", sharding_text, "code"),
        Column("facts", _inner_facts),
        Column("line", "source", "line"),
    ),
    printed=">each device | type | sharding × copies | value={line}{value} | facts",
)
"""Section of the values inside of a program that match a pattern."""


def list_remedies(report: Any) -> Iterator[tuple[int, str]]:
    """Yield the code changes that save memory of a device: its bytes, and the change.

    Args:
        report: Report of a program.
    """
    saved = [
        (f"{line_text(u.source) or u.path}: {u.advice or 'shard it'}", u.nbytes)
        for u in _merge_unmet(report.unmet)
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


def list_findings(report: Any) -> Iterator[Section[Any]]:
    """Yield the sections of a report that list findings, with them."""
    for section in FINDINGS:
        rows = getattr(report, section.id, ())
        yield replace(section, rows=rows, severity="costly")
