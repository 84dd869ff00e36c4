"""Comparison of two preflight reports, and its terminal output."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import RenderableType
from rich.text import Text

from xlashard.pjit.report.model import DonationReport, ValueReport
from xlashard.pjit.report.serde import PrintableReport
from xlashard.pjit.report.tables import (
    WIDE,
    Page,
    line_text,
    operation_text,
    section,
    sharding_text,
    short_type,
    table,
)
from xlashard.tpu.preflight.render.report_text import (
    BOUNDS,
    FORMATTERS,
    axes_text,
    mesh_text,
    topology_text,
)
from xlashard.tpu.preflight.report.preflight_model import (
    AmountChange,
    ComparisonFields,
    FactChange,
    TrafficReport,
    Unit,
    UsageChange,
)
from xlashard.tpu.preflight.report.preflight_report import PreflightReport
from xlashard.wording import in_bytes, in_seconds

_BETTER_IF_MORE = ("memory to spare", "tokens per second", "model FLOP utilisation")
_COLOURS = {"added": "red", "grown": "red", "removed": "green", "shrunk": "green"}


@dataclass(frozen=True, repr=False)
class Comparison(PrintableReport, ComparisonFields):
    """Changes from one report to another. Made by `compare`.

    `print(comparison)` displays it; `to_json` serializes it.

    Attributes:
        old: Title of the first report.
        new: Title of the second report.
        facts: Changed texts: outcome, topology, mesh, versions, flags, ...
        amounts: Every number of either report, changed or not.
        memory: Arguments, results and temporaries with changed memory, largest change first.
        traffic: Collectives with changed bytes, largest change first.
        shardings: Arguments and results with a changed type or sharding.
        donations: Arguments with changed donation.
    """

    _print_all = "comparison.print(all=True)"

    @property
    def is_same(self) -> bool:
        """True if nothing but the compile time changed."""
        moved = any(a.is_changed for a in self.amounts if a.name != "time to compile")
        return not (
            moved or self.facts or self.memory or self.traffic or self.shardings or self.donations
        )

    def _sections(self, page: Page) -> Iterator[RenderableType]:
        yield Text.assemble((self.old, "bold"), "  →  ", (self.new, "bold"))
        parts = [
            _facts_section("Changed", self.facts, page),
            _amounts_section(self.amounts, page),
            _uses_section("Memory by leaf", "of one device", self.memory, page),
            _uses_section("Collectives", "what each device sends", self.traffic, page),
            _facts_section("Shardings", self.shardings, page),
            _facts_section("Donations", self.donations, page),
        ]
        shown = [part for part in parts if part is not None]
        yield from shown or [Text("\nnothing changed", style="dim")]

    def __repr__(self) -> str:
        return f"<Comparison of {self.old} with {self.new}; print it>"

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as dicts, lists, strings and numbers."""
        return json.loads(self.to_json())

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the comparison as JSON.

        Args:
            indent: Spaces per level; None for a single line.
        """
        return json.dumps({"format": 1, **asdict(self)}, indent=indent)


def compare(old: PreflightReport, new: PreflightReport) -> Comparison:
    """Compare two reports.

    Args:
        old: Report before the change, or of the first alternative.
        new: Report after the change, or of the second alternative.

    Example:
        >>> import jax
        >>> from xlashard import P, pjit, preflight
        >>> x = jax.ShapeDtypeStruct((1024, 512), "bfloat16")
        >>> gram = pjit(lambda x: x @ x.T, in_shardings=P("data"))
        >>> small = preflight(gram, x, topology="v5e-8", mesh={"data": 8})
        >>> large = preflight(gram, x, topology="v5e-16", mesh={"data": 16})
        >>> [(c.old, c.new) for c in compare(small, large).facts if c.name == "topology"]
        [('v5e:2x4 (8 chips)', 'v5e:4x4 (16 chips)')]
    """
    return Comparison(
        old=_title(old),
        new=_title(new),
        facts=_facts(old, new),
        amounts=_amounts(old, new),
        memory=_uses(_held(old), _held(new)),
        traffic=_uses(*([_sent_by(t) for t in report.traffic] for report in (old, new))),
        shardings=_values(old, new),
        donations=_donations(old, new),
    )


def _title(report: PreflightReport) -> str:
    return f"{report.title or report.name} on {topology_text(report.topology)}"


_FACTS: dict[str, Callable[[PreflightReport], str]] = {
    "outcome": lambda r: r.outcome,
    "bound by": lambda r: BOUNDS[r.time.bound],
    "function": lambda r: r.name,
    "topology": lambda r: topology_text(r.topology),
    "mesh": lambda r: axes_text(r.mesh),
    "mesh on the torus": lambda r: mesh_text(r.mesh),
    "partitioner": lambda r: r.partitioner,
    "xlashard": lambda r: r.versions.xlashard,
    "jax": lambda r: r.versions.jax,
    "jaxlib": lambda r: r.versions.jaxlib,
    "libtpu": lambda r: r.versions.libtpu,
    "flags": lambda r: " ".join(f"{where}: {flag}" for where, flag in r.versions.flags),
}


def _facts(old: PreflightReport, new: PreflightReport) -> tuple[FactChange, ...]:
    texts = ((name, fact(old), fact(new)) for name, fact in _FACTS.items())
    return tuple(
        FactChange(name, before, after) for name, before, after in texts if before != after
    )


_AMOUNTS: dict[str, tuple[Unit, Callable[[PreflightReport], float | None]]] = {
    "memory": ("bytes", lambda r: r.memory.total_bytes),
    "memory: arguments": ("bytes", lambda r: r.memory.argument_bytes),
    "memory: other results": ("bytes", lambda r: r.memory.result_bytes),
    "memory: temporaries": ("bytes", lambda r: r.memory.temporary_bytes),
    "memory to spare": ("bytes", lambda r: r.memory.spare_bytes),
    "time": ("seconds", lambda r: r.time.seconds),
    "time by the roofline": ("seconds", lambda r: r.time.roofline_seconds),
    "time by the compiler": ("seconds", lambda r: r.time.compiler_seconds),
    "time: arithmetic": ("seconds", lambda r: r.time.compute_seconds),
    "time: HBM": ("seconds", lambda r: r.time.hbm_seconds),
    "time: links within a slice": ("seconds", lambda r: r.time.ici_seconds),
    "time: network between slices": ("seconds", lambda r: r.time.dcn_seconds),
    "arithmetic": ("flop", lambda r: r.time.flops),
    "HBM read and written": ("bytes", lambda r: r.time.hbm_bytes),
    "sent within a slice": ("bytes", lambda r: _on(r, "ici")),
    "sent between slices": ("bytes", lambda r: _on(r, "dcn")),
    "tokens per second": (
        "number",
        lambda r: None if r.throughput is None else r.throughput.tokens_per_second,
    ),
    "model FLOP utilisation": (
        "part",
        lambda r: None if r.throughput is None else r.throughput.utilisation,
    ),
    "price of a step": ("number", lambda r: None if r.price is None else r.price.step),
    "price of a billion tokens": (
        "number",
        lambda r: None if r.price is None else r.price.billion_tokens,
    ),
    "time to compile": ("seconds", lambda r: r.compile_seconds),
}


def _on(report: PreflightReport, network: str) -> int:
    return sum(t.collective.sent_bytes for t in report.traffic if t.network == network)


def _amounts(old: PreflightReport, new: PreflightReport) -> tuple[AmountChange, ...]:
    found = [AmountChange(name, unit, of(old), of(new)) for name, (unit, of) in _AMOUNTS.items()]
    return tuple(change for change in found if change.old or change.new)


@dataclass(frozen=True)
class _Use:
    """Bytes of one report, with a key to match the other report."""

    key: tuple[str, ...]
    what: str
    where: str
    nbytes: int
    seconds: float = 0.0


_NOTHING = _Use((), "", "", 0)


def _held(report: PreflightReport) -> list[_Use]:
    memory = report.memory
    fresh = [h for h in memory.results if not h.aliased]
    values = [_Use(("value", h.path), h.path, "", h.device_bytes) for h in memory.arguments]
    values += [_Use(("value", h.path), h.path, "", h.device_bytes) for h in fresh]
    for t in memory.temporaries:
        operation = operation_text(t.op_name) if t.op_name else t.type
        function = t.source.function if t.source is not None else ""
        where = line_text(t.source) if t.source is not None else ""
        key = ("temporary", operation, function)
        values.append(_Use(key, f"temporary of {operation}", where, t.device_bytes))
    return values


def _sent_by(t: TrafficReport) -> _Use:
    """Return the bytes of a collective, keyed by kind, axes, network and operation or argument.

    The key excludes the line number, which changes with every edit above it.
    """
    c = t.collective
    source = c.source or c.needed_by_source
    operation = c.argument or operation_text(c.op_name or c.needed_by)
    function = source.function if source is not None else ""
    return _Use(
        key=(c.kind, c.along, t.network, operation, function),
        what=f"{c.kind} along {c.along}" + (f" for {operation}" if operation else ""),
        where=line_text(source) if source is not None else "",
        nbytes=c.sent_bytes,
        seconds=t.seconds,
    )


def _uses(old: Sequence[_Use], new: Sequence[_Use]) -> tuple[UsageChange, ...]:
    before, after = _by_key(old), _by_key(new)
    changes = [_use_change(before.get(key), after.get(key)) for key in {**before, **after}]
    found = [change for change in changes if change.old_bytes != change.new_bytes]
    return tuple(sorted(found, key=lambda c: -abs(c.new_bytes - c.old_bytes)))


def _by_key(uses: Sequence[_Use]) -> dict[tuple[str, ...], _Use]:
    found: dict[tuple[str, ...], _Use] = {}
    for use in uses:
        known = found.get(use.key)
        if known is not None:
            nbytes, seconds = use.nbytes + known.nbytes, use.seconds + known.seconds
            use = _Use(use.key, known.what, known.where, nbytes, seconds)
        found[use.key] = use
    return found


def _use_change(old: _Use | None, new: _Use | None) -> UsageChange:
    change: Literal["added", "removed", "grown", "shrunk"]
    if old is None:
        change = "added"
    elif new is None:
        change = "removed"
    else:
        change = "grown" if new.nbytes > old.nbytes else "shrunk"
    last, before, after = new or old or _NOTHING, old or _NOTHING, new or _NOTHING
    return UsageChange(
        change, last.what, last.where, before.nbytes, after.nbytes, before.seconds, after.seconds
    )


def _values(old: PreflightReport, new: PreflightReport) -> tuple[FactChange, ...]:
    texts = [{v.path: _value(v) for v in (*r.inputs, *r.outputs)} for r in (old, new)]
    return _changes(*texts)


def _value(v: ValueReport) -> str:
    return f"{short_type(v)} {sharding_text(v)}"


def _donations(old: PreflightReport, new: PreflightReport) -> tuple[FactChange, ...]:
    return _changes(*({d.path: _fate(d) for d in r.donations} for r in (old, new)))


def _fate(d: DonationReport) -> str:
    if d.donated:
        return f"reused for {d.result}" if d.result else "donated, not reused"
    return "not donated"


def _changes(before: dict[str, str], after: dict[str, str]) -> tuple[FactChange, ...]:
    return tuple(
        FactChange(path, before.get(path, ""), after.get(path, ""))
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    )


def _facts_section(title: str, found: Sequence[FactChange], page: Page) -> RenderableType | None:
    if not found:
        return None
    rows = [
        (page.path(f.name) if "[" in f.name else f.name, f.old or "–", "→", f.new or "–")
        for f in page.rows(found)
    ]
    rest = page.left(len(found) - len(rows))
    return section(title, "", table(("", "", "", ""), rows), rest)


def _amounts_section(found: Sequence[AmountChange], page: Page) -> RenderableType | None:
    shown = [a for a in found if page.is_full or _differs(a)]
    if not shown:
        return None
    rows = [(a.name, _amount(a, a.old), "→", _amount(a, a.new), _by(a)) for a in shown]
    return section("Numbers", "of one device", table(("", ">", "", ">", ">"), rows))


def _differs(a: AmountChange) -> bool:
    """Return whether the printed amounts differ, ignoring the compile time."""
    if a.name == "time to compile":
        return False
    return _amount(a, a.old) != _amount(a, a.new)


def _amount(a: AmountChange, value: float | None) -> str:
    if value is None:
        return "–"
    text = FORMATTERS[a.unit]
    return f"-{text(-value)}" if value < 0 else text(value)


def _by(a: AmountChange) -> Text:
    ratio = a.ratio
    if ratio is None or ratio <= 0:
        return Text()
    text = f"{ratio - 1:+.1%}"
    if ratio >= 2:
        text = f"×{ratio:.1f}" if ratio < 10 else f"×{ratio:,.0f}"
    is_worse = (ratio > 1) != (a.name in _BETTER_IF_MORE)
    return Text(text, "" if ratio == 1 else "red" if is_worse else "green")


def _uses_section(
    title: str, note: str, found: Sequence[UsageChange], page: Page
) -> RenderableType | None:
    if not found:
        return None
    rows: list[Sequence[RenderableType]] = []
    for u in page.rows(found):
        what = Text.assemble(u.what, (f"  {u.where}" if u.where else "", "dim"))
        row: list[RenderableType] = [
            Text(u.change, _COLOURS[u.change]),
            in_bytes(u.old_bytes) if u.change != "added" else "–",
            "→",
            in_bytes(u.new_bytes) if u.change != "removed" else "–",
        ]
        if page.width >= WIDE:
            row.append(
                f"{in_seconds(u.old_seconds)} → {in_seconds(u.new_seconds)}"
                if u.old_seconds or u.new_seconds
                else ""
            )
        rows.append((*row, what))
    columns = ["", ">", "", ">", *([""] if page.width >= WIDE else []), ""]
    rest = page.left(len(found) - len(rows))
    return section(title, note, table(columns, rows), rest)
