"""How long a step takes: a bar for each thing that it could be waiting for."""

from collections.abc import Iterator
from dataclasses import dataclass

from xlashard.tpu.preflight.page.markup import Html, join, tag, user
from xlashard.tpu.preflight.page.quantities import in_thousands
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
    loops = time.unknown_loops
    unknown = (
        f"{loops} loop{'s' if loops > 1 else ''} of unknown length "
        f"count{'' if loops > 1 else 's'} as one run: the true times are longer."
    )
    lead = f"The step waits for {BOUNDS[time.bound]}: {in_seconds(time.roofline_seconds)} at least."
    return join(
        tag("p", lead, class_="lead"),
        tag("p", unknown, class_="warns note") if loops else None,
        tag(
            "table",
            tag("caption", "Time of one step", class_="unseen"),
            head,
            tag("tbody", rows),
            class_="times",
        ),
    )


def _bars(time: TimeEstimate) -> Iterator[_Bar]:
    kinds = ", ".join(f"{in_thousands(flops)} {dtype}" for dtype, flops in time.flops_by_dtype)
    work = in_flop(time.flops) + (f" ({kinds} in matrix products)" if kinds else "")
    yield _Bar("compute", "compute", time.compute_seconds, work, "compute")
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
        words = "the compiler's own estimate, loops counted; without collectives"
        yield _Bar("compiler", "compiler", time.compiler_seconds, words, "compiler")


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
