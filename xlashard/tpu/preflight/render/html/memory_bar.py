"""Memory of a device as a bar, with tables of its buffers and temporaries."""

from collections.abc import Sequence
from dataclasses import dataclass

from xlashard.pjit.report.tables import line_text, operation_text
from xlashard.tpu.preflight.render.html.markup import (
    Child,
    Html,
    TableCell,
    TableColumn,
    TableRow,
    filters,
    join,
    table,
    tag,
    user_text,
)
from xlashard.tpu.preflight.render.report_text import many
from xlashard.tpu.preflight.report.preflight_model import (
    BufferReport,
    MemoryBreakdown,
    TemporaryReport,
    TopologyReport,
)
from xlashard.wording import in_bytes, in_percent

_FEW = 8
"""Maximum number of rows without a filter field."""


@dataclass(frozen=True)
class Segment:
    """Segment of the bar.

    Attributes:
        name: Name, and CSS class.
        nbytes: Bytes.
        words: Description.
    """

    name: str
    nbytes: int
    words: str


def segments(memory: MemoryBreakdown) -> tuple[Segment, ...]:
    """Return the segments of the bar, in order; the last makes up the compiler's total."""
    aliased = memory.alias_bytes
    reused = f", {in_bytes(aliased)} of them reused by results" if aliased else ""
    found = (
        Segment("arguments", memory.argument_bytes, f"inputs of the program{reused}"),
        Segment("results", memory.result_bytes, "results that need memory of their own"),
        Segment("temporaries", memory.temporary_bytes, "the heap, at its peak"),
        Segment("constants", memory.constant_bytes, "numbers written in the program"),
        Segment("code", memory.code_bytes, "the program itself"),
    )
    rest = memory.total_bytes - sum(s.nbytes for s in found)
    padding = Segment("other", rest, "other parts of the compiler's total")
    return (*found, padding) if rest > 0 else found


def memory_bar(memory: MemoryBreakdown, label: str = "") -> Html:
    """Return a bar of used, free and excess memory."""
    width = max(memory.available_bytes, memory.total_bytes) or 1
    limit = memory.available_bytes / width * 100
    parts: list[Child] = []
    for segment in segments(memory):
        if segment.nbytes:
            share = segment.nbytes / width * 100
            words = f"{segment.name} {in_bytes(segment.nbytes)}"
            inside = tag("span", segment.name) if share > 9 else None
            parts.append(
                tag("i", inside, class_=f"part {segment.name}", style=_width(share), title=words)
            )
    if memory.spare_bytes > 0:
        share = memory.spare_bytes / width * 100
        inside = tag("span", f"{in_bytes(memory.spare_bytes)} free") if share > 12 else None
        words = f"free {in_bytes(memory.spare_bytes)}"
        parts.append(tag("i", inside, class_="part free", style=_width(share), title=words))
    beyond = None
    if not memory.fits:
        beyond = join(
            tag("i", class_="beyond", style=f"left:{limit:.3f}%"),
            tag("i", class_="limit", style=f"left:{limit:.3f}%"),
        )
    parts_text = ", ".join(f"{s.name} {in_bytes(s.nbytes)}" for s in segments(memory) if s.nbytes)
    over = f"{in_bytes(abs(memory.spare_bytes))} {'free' if memory.fits else 'too much'}"
    return tag(
        "div",
        parts,
        beyond,
        class_="bar memory" if memory.fits else "bar memory over",
        role="img",
        aria_label=f"{label or 'Memory of one device'}: {parts_text}; {over}",
    )


def memory_section(memory: MemoryBreakdown, topology: TopologyReport, *, is_fitting: bool) -> Html:
    """Return the bar with its legend, and expandable tables of buffers and temporaries.

    Args:
        memory: Memory of one device.
        topology: The devices.
        is_fitting: Whether the compiler accepted the program.
    """
    reserved = topology.hbm_bytes - memory.available_bytes
    keeps = f"; the runtime reserves {in_bytes(reserved)}" if reserved > 0 else ""
    host = f" The host's memory holds {in_bytes(memory.host_bytes)}." if memory.host_bytes else ""
    words = (
        f"{'All ' * (topology.devices > 1)}{many(topology.devices, 'device')} "
        f"{'hold the same' if topology.devices > 1 else 'holds all'}: "
        f"{in_bytes(memory.total_bytes)} of {in_bytes(memory.available_bytes)} at the peak{keeps}."
        f"{host}"
    )
    if memory.fits and not is_fitting:
        words += " The compiler rejected the program nevertheless."
    over = None
    if not memory.fits:
        limit = memory.available_bytes / memory.total_bytes * 100
        side = "right" if limit > 50 else "left"
        place = f"right:{100 - limit:.3f}%" if side == "right" else f"left:{limit:.3f}%"
        text = f"{in_bytes(memory.available_bytes)} available"
        over = tag("div", tag("span", text, style=place, class_=side), class_="ruler")
    return join(
        tag("p", words, class_="lead"),
        over,
        memory_bar(memory),
        _legend(memory),
        _held("Arguments", memory.arguments, memory.argument_bytes),
        _held("Results", memory.results, memory.result_bytes),
        _temporaries(memory),
    )


def _width(share: float) -> str:
    return f"width:{share:.3f}%"


def _legend(memory: MemoryBreakdown) -> Html:
    rows = [
        tag(
            "tr",
            tag("th", tag("i", class_=f"swatch {s.name}"), s.name, scope="row"),
            tag("td", in_bytes(s.nbytes), class_="number", data_value=s.nbytes),
            tag("td", in_percent(s.nbytes / memory.available_bytes), class_="number"),
            tag("td", s.words, class_="words"),
            data_part=s.name,
        )
        for s in segments(memory)
    ]
    spare = memory.spare_bytes
    name = "free" if memory.fits else "too much"
    rows.append(
        tag(
            "tr",
            tag("th", tag("i", class_=f"swatch {name.split()[0]}"), name, scope="row"),
            tag("td", in_bytes(abs(spare)), class_="number", data_value=spare),
            tag("td", in_percent(abs(spare) / memory.available_bytes), class_="number"),
            tag("td", "of what the compiler lets a program use", class_="words"),
            data_part="spare",
            class_="sum",
        )
    )
    caption = tag("caption", "Memory of one device by what takes it", class_="unseen")
    head = tag(
        "thead",
        tag("tr", [tag("th", name, scope="col") for name in ("what", "bytes", "share", "it is")]),
        class_="unseen",
    )
    return tag("table", caption, head, tag("tbody", rows), class_="legend")


def _held(name: str, held: Sequence[BufferReport], total: int) -> Html | None:
    if not held:
        return None
    largest = max(h.device_bytes for h in held) or 1
    columns = (
        TableColumn(name.lower()),
        TableColumn("type"),
        TableColumn("sharding"),
        TableColumn("copies", True, "How many devices hold each part"),
        TableColumn("on a device", True),
        TableColumn("memory shared with"),
    )
    rows = [
        TableRow(
            (
                TableCell(user_text(h.path, "code"), h.path),
                TableCell(user_text(h.type, "code"), h.type),
                TableCell(user_text(h.spec, "code"), h.spec),
                TableCell(f"{h.copies:,}", h.copies),
                TableCell(_bytes_with_bar(h.device_bytes, largest), h.device_bytes),
                TableCell(_sharing(h), h.aliased),
            ),
            search=f"{h.path} {h.type} {h.spec} {h.aliased}",
        )
        for h in held
    ]
    return _unfolding(
        name,
        f"{many(len(held), 'leaf', 'leaves')}, {in_bytes(total)}",
        columns,
        rows,
    )


def _sharing(held: BufferReport) -> Html | None:
    if held.aliased:
        return user_text(held.aliased, "code")
    return tag("span", "donated in vain", class_="warns") if held.donated else None


def _temporaries(memory: MemoryBreakdown) -> Html | None:
    found = memory.temporaries
    if not found:
        return None
    largest = max(t.device_bytes for t in found) or 1
    columns = (
        TableColumn("at the peak"),
        TableColumn("type"),
        TableColumn("operation"),
        TableColumn("line"),
        TableColumn("count", True, "How many alike are alive together"),
        TableColumn("on a device", True),
    )
    rows = [
        TableRow(
            (
                TableCell(user_text(t.name, "code"), t.name),
                TableCell(user_text(t.type, "code"), t.type),
                TableCell(_operation(t), t.op_name),
                TableCell(None if t.source is None else source_line(t), _line(t)),
                TableCell(f"{t.count:,}", t.count),
                TableCell(_bytes_with_bar(t.device_bytes, largest), t.device_bytes),
            ),
            search=f"{t.name} {t.type} {t.op_name} {_line(t)}",
        )
        for t in found
    ]
    total = sum(t.device_bytes for t in found)
    words = f"{in_bytes(total)} of {in_bytes(memory.temporary_bytes)} by the operations that hold"
    return _unfolding("Temporaries at the peak", f"{words} them", columns, rows, is_open=True)


def _operation(temporary: TemporaryReport) -> Html | None:
    if not temporary.op_name:
        return None
    return user_text(operation_text(temporary.op_name), "code", title=temporary.op_name)


def source_line(temporary: TemporaryReport) -> Html | None:
    """Return the line of a temporary, with the full path as tooltip."""
    source = temporary.source
    if source is None:
        return None
    whole = f"{source.file}:{source.line}"
    return user_text(
        line_text(source),
        "code",
        whole=True,
        class_="line",
        title=f"{whole} in {source.function or '?'}",
    )


def _line(temporary: TemporaryReport) -> str:
    return line_text(temporary.source) if temporary.source else ""


def _bytes_with_bar(nbytes: int, largest: int) -> Html:
    share = f"width:{nbytes / largest * 100:.1f}%"
    return join(in_bytes(nbytes), tag("i", tag("i", style=share), class_="mini"))


def _unfolding(
    name: str,
    words: str,
    columns: Sequence[TableColumn],
    rows: Sequence[TableRow],
    *,
    is_open: bool = False,
) -> Html:
    search = filters(name.lower(), {}, "Filter by any of these …")
    return tag(
        "details",
        tag("summary", tag("b", name), " ", tag("span", words, class_="note")),
        tag(
            "div", search if len(rows) > _FEW else None, table(name, columns, rows), class_="finds"
        ),
        open=is_open,
    )
