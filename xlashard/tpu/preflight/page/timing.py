"""How long a step takes: a bar for each thing that it could be waiting for."""

from collections.abc import Iterator
from dataclasses import dataclass

from xlashard.errors import counted
from xlashard.tpu.preflight.page.markup import Html, join, tag, user
from xlashard.tpu.preflight.parts import TimeEstimate
from xlashard.wording import in_bytes, in_flop, in_seconds

BOUNDS = {
    "compute": "arithmetic",
    "hbm": "the chip's memory (HBM)",
    "ici": "the links between chips (ICI)",
    "dcn": "the network between slices (DCN)",
}
"""What a program waits for, in words."""

SHORT = {"compute": "compute", "hbm": "HBM", "ici": "ICI", "dcn": "DCN"}
"""The same in a word."""


@dataclass(frozen=True)
class _Bar:
    key: str
    name: Html | str
    seconds: float
    words: str
    kind: str


def time_section(time: TimeEstimate) -> Html:
    """The bars, and what they don't count."""
    bars = list(_bars(time))
    longest = max(bar.seconds for bar in bars) or 1.0
    rows = [_row(bar, longest, is_bound=bar.key == time.bound) for bar in bars]
    head = tag(
        "thead",
        tag(
            "tr",
            [tag("th", name, scope="col") for name in ("what", "of what", "how long")],
        ),
        class_="unseen",
    )
    lead = f"The step waits for {BOUNDS[time.bound]}: {in_seconds(time.roofline_seconds)} at least."
    return join(
        tag("p", lead, class_="lead"),
        [tag("p", user(words), class_="warns note") for words in _uncounted(time)],
        tag(
            "table",
            tag("caption", "Time of one step", class_="unseen"),
            head,
            tag("tbody", rows),
            class_="times",
        ),
    )


def _bars(time: TimeEstimate) -> Iterator[_Bar]:
    yield _Bar("compute", "compute", time.compute_seconds, _work(time), "compute")
    moved = f"{in_bytes(time.hbm_bytes)} read and written"
    yield _Bar("hbm", "HBM", time.hbm_seconds, moved, "hbm")
    for network, seconds in (("ici", time.ici_seconds), ("dcn", time.dcn_seconds)):
        parts = [t for t in time.traffic if t.network == network]
        sent = in_bytes(sum(t.sent_bytes for t in parts))
        if parts or network == "ici":
            words = f"{sent} sent" if parts else "nothing sent"
            yield _Bar(network, SHORT[network], seconds, words, network)
        for part in parts:
            name = join("along ", user(part.along))
            words = f"{in_bytes(part.sent_bytes)} sent"
            yield _Bar(f"{network} {part.along}", name, part.seconds, words, f"{network} detail")
    if time.compiler_seconds is not None:
        words = "the compiler's schedule, by the cycles that it notes, loops counted"
        yield _Bar("compiler", "compiler", time.compiler_seconds, words, "compiler")


def _work(time: TimeEstimate) -> str:
    kinds = ", ".join(f"{in_flop(flops)} {dtype}" for dtype, flops in time.flops_by_dtype)
    parts = [f"{kinds} in matrix products"] if kinds else []
    if time.elementwise_flops:
        parts.append(f"{in_flop(time.elementwise_flops)} besides, which count as free")
    return "; ".join(parts) or f"{in_flop(time.flops)}, none of it in matrix products"


def _uncounted(time: TimeEstimate) -> Iterator[str]:
    """What the times leave out."""
    if time.unknown_loops:
        loops = counted(time.unknown_loops, "loop")
        verb = "counts" if time.unknown_loops == 1 else "count"
        yield f"{loops} of unknown length {verb} as one run: the true times are longer."
    if time.unknown_calls:
        calls = ", ".join(f"{name} ×{times:,}" for name, times in time.unknown_calls)
        yield f"Nobody knows what these custom calls calculate, they count as nothing: {calls}."


def _row(bar: _Bar, longest: float, *, is_bound: bool) -> Html:
    width = f"width:{bar.seconds / longest * 100:.2f}%"
    fill = tag("i", style=width, class_="fill")
    badge = tag("span", "bound", class_="tag") if is_bound else None
    return tag(
        "tr",
        tag("th", bar.name, badge, scope="row"),
        tag("td", fill if bar.seconds else None, tag("span", bar.words, class_="words")),
        tag("td", in_seconds(bar.seconds), class_="number", data_value=repr(bar.seconds)),
        class_=f"{bar.kind}{' bound' if is_bound else ''}",
        data_bar=bar.key,
    )
