"""Comparisons of two preflight reports."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.predict.preflight.examples import (
    ALL,
    FITTING,
    OUT_OF_MEMORY,
    SMALL,
    TWO_SLICES,
)
from xlashard.preflights import Comparison, PreflightReport, compare


def shown(comparison: Comparison, width: int, *, all: bool = False) -> str:
    file = io.StringIO()
    comparison.print(all=all, console=Console(file=file, width=width, color_system=None))
    return file.getvalue()


@pytest.mark.parametrize("name", ALL)
def test_comparison_of_equal_reports_shows_no_change(name: str) -> None:
    later = replace(ALL[name], compile_seconds=1.5 * ALL[name].compile_seconds)
    comparison = compare(ALL[name], later)
    assert comparison.is_same
    assert "Nothing changed" in str(comparison)


def test_comparison_shows_a_program_that_no_longer_fits() -> None:
    found = compare(FITTING, OUT_OF_MEMORY)
    assert not found.is_same
    assert [(f.name, f.old, f.new) for f in found.facts] == [
        ("outcome", "fits", "out of memory"),
        ("bound by", "arithmetic", "HBM"),
    ]
    (grown,) = found.memory
    assert (grown.change, grown.what) == ("grown", "temporary of log_softmax")
    assert grown.new_bytes == 16 * grown.old_bytes
    assert grown.where.endswith("model.py:212")
    (donation,) = found.donations
    assert donation.new == "donated, not reused"
    spare = next(a for a in found.amounts if a.name == "memory to spare")
    assert spare.old is not None and spare.new is not None and spare.new < 0 < spare.old
    text = shown(found, 120)
    assert re.search(r"memory to spare +76\.4 GiB +→ +-41\.0 GiB", text)
    assert re.search(r"grown +7\.8 GiB +→ +125\.2 GiB +temporary of log_softmax", text)


def test_added_and_removed_traffic_is_listed() -> None:
    found = compare(FITTING, TWO_SLICES)
    assert [(t.change, t.what) for t in found.traffic] == [
        ("removed", "all-reduce along data for psum, backward"),
        ("added", "all-reduce along slice for psum, backward"),
    ]
    assert found.traffic[1].new_seconds > found.traffic[0].old_seconds > 0
    assert {f.name for f in found.facts} == {"bound by", "topology", "mesh", "mesh on the torus"}


def test_moved_source_lines_are_not_a_change() -> None:
    moved = [
        replace(t, source=t.source and replace(t.source, line=t.source.line + 7))
        for t in FITTING.traffic
    ]
    assert compare(FITTING, replace(FITTING, traffic=tuple(moved))).is_same


def test_changed_shardings_and_types_are_listed() -> None:
    first, *others = FITTING.inputs
    cut = replace(first, spec="P('tensor', None)", copies=8)
    found = compare(FITTING, replace(FITTING, inputs=(cut, *others)))
    assert [(f.name, f.old, f.new) for f in found.shardings] == [
        (
            "state['params']['embed']",
            "f32[128256,4096] P('tensor', 'fsdp') ×2",
            "f32[128256,4096] P('tensor', None) ×8",
        )
    ]


def test_changed_versions_and_flags_are_listed() -> None:
    versions = replace(FITTING.versions, libtpu="0.0.51", flags=())
    found = compare(FITTING, replace(FITTING, versions=versions))
    assert [(f.name, f.new) for f in found.facts] == [("libtpu", "0.0.51"), ("flags", "")]
    assert "–" in shown(found, 80)


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("pair", [(FITTING, SMALL), (SMALL, TWO_SLICES)], ids=["less", "more"])
def test_comparison_fits_the_terminal_width(
    pair: tuple[PreflightReport, PreflightReport], width: int
) -> None:
    some, every = (shown(compare(*pair), width, all=all) for all in (False, True))
    for text in (some, every):
        assert max(map(len, text.splitlines())) <= width
    assert "more: comparison.print(all=True)" in " ".join(some.split())
    assert "comparison.print" not in every


def test_comparison_round_trips_through_json() -> None:
    found = compare(FITTING, OUT_OF_MEMORY)
    assert json.loads(found.to_json()) == found.to_dict()
    first = {"name": "outcome", "old": "fits", "new": "out of memory", "where": ""}
    assert found.to_dict()["facts"][0] == first
    assert repr(found).startswith("<Comparison of configs/8b_v5p.toml on v5p:4x4x2 (32 chips) with")


def test_times_have_their_error_bars_and_findings_their_lines() -> None:
    below, above = FITTING.time.below, FITTING.time.above
    assert above is not None
    slower = replace(FITTING.time, seconds=FITTING.time.seconds * (1 + above / 2))
    found = compare(FITTING, replace(FITTING, time=slower, repeated=()))
    (time,) = (a for a in found.amounts if a.name == "time")
    assert time.old_error == (below, above) and time.is_within_error
    assert "within the error" in found.to_markdown() and f"{above:+.0%}" in found.to_markdown()
    assert not found.regressions
    much = replace(FITTING.time, seconds=FITTING.time.seconds * (1 + 2 * above))
    worse = compare(replace(FITTING, repeated=()), replace(FITTING, time=much))
    assert [line.partition(":")[0] for line in worse.regressions] == [
        "time",
        "dot_general of bfloat16[2048,4096] · bfloat16[4096,4096] is new",
    ]
    row = FITTING.repeated[0]
    assert row.source is not None and worse.regressions[1].endswith(f":{row.source.line}")
    assert f":{row.source.line}" in worse.to_markdown()


def test_bytes_are_listed_by_axis() -> None:
    row = next(c for c in FITTING.traffic if c.sent_bytes)
    found = compare(FITTING, replace(FITTING, traffic=(row,)))
    (axis,) = (a for a in found.amounts if a.name == f"sent along {row.along}")
    assert axis.new == row.sent_bytes <= (axis.old or 0)
