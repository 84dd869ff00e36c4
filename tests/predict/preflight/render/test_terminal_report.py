"""Preflight reports in a terminal."""

import io
import re
from dataclasses import replace
from typing import Any, get_args

import pytest
from rich.console import Console

from tests.predict.preflight.examples import ALL, FITTING, HUGE, SMALL, TWO_SLICES
from tests.without_jax import HAS_JAX
from xlashard.predict.costs.operation import Unit
from xlashard.predict.preflight.render.report_text import WORDS, mesh_text
from xlashard.predict.preflight.report.comparison import PreflightReports, compare, page
from xlashard.predict.preflight.report.preflight_model import Bound
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.support.formatting import plain_text
from xlashard.tpu import topology

if HAS_JAX:
    from xlashard.predict.preflight.report.build import describe_mesh


def shown(report: PreflightReport, width: int, *, all: bool = False, color: bool = False) -> str:
    file = io.StringIO()
    system = "truecolor" if color else None
    report.print(
        all=all,
        console=Console(file=file, width=width, color_system=system, force_terminal=color),
    )
    return file.getvalue()


def sections(text: str) -> list[str]:
    """Return the headings."""
    return [line.partition("  ")[0] for line in text.split("\n\n") if line[:1].isupper()]


def test_every_unit_and_bound_of_a_tpu_has_a_name() -> None:
    words, bounds = WORDS["ici"], set(get_args(Bound.__value__))
    assert set(get_args(Unit)) < set(words.shares)
    assert bounds == {name for name, each in words.resources.items() if each.short}
    assert all(words.resources[bound].bound and words.resources[bound].detail for bound in bounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "name", "detail"),
    [
        ("vmem", "VMEM", "the memory of its cores (VMEM)"),
        ("launch", "launches of operations", "waits for the launches of its operations"),
        ("host", "transfers to and from the host", "waits for the host"),
    ],
)
def test_report_names_what_binds(bound: Bound, name: str, detail: str) -> None:
    time = replace(FITTING.time, bound=bound, shares=((bound, 2.0), ("matrix", 1.0)))
    text, html = shown(replace(FITTING, time=time), 160), page(replace(FITTING, time=time))
    assert f"bound by {name};" in text
    assert re.search(rf"2\.00 s +█+░* +{re.escape(name)} *\n", text)
    assert detail in html and f'id="time.{bound}" class="unasked"' in html


def test_head_of_a_lower_bound_is_open_upwards() -> None:
    unknown = {"unknown_calls": (("solve", 3), ("double", 1)), "unknown_kernels": (("double", 1),)}
    time = replace(FITTING.time, above=None, unknown_loops=2, **unknown)
    report = replace(FITTING, time=time)
    text, html = shown(report, 500), page(report).replace("<wbr>", "")
    assert re.search(r"takes   at least 2\.39 s \(-12 % or more\), bound by arithmetic;", text)
    lacking = (
        "without the kernels of unknown cost: double, and the calls of unknown cost: solve ×3, and "
        "more than one iteration of 2 loops of unknown trip count"
    )
    assert lacking in text and lacking in html
    assert "kernel_costs={'double': seconds}" in text
    assert "at least 2.39 s; print it" in repr(report)
    assert "at least 2.39 s" in plain_text(PreflightReports((FITTING, report)))
    assert "trains  at most 219,078 tokens/s" in text
    assert "costs   at least 0.089 USD a step" in text
    assert ">at least 2.39 s<" in html and "of 459 TFLOP/s bf16 (MFU)" in html


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("color", [False, True], ids=["plain", "colour"])
def test_report_fits_the_terminal_width(name: str, width: int, color: bool) -> None:
    text = shown(ALL[name], width, color=color)
    assert ("\x1b[" in text) == color
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= width
    assert ALL[name].topology.name in plain


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [40, 60, 80])
def test_lines_are_not_broken_in_a_narrow_terminal(name: str, width: int) -> None:
    names = r"[\w./]+\.py:\d+"
    wide, narrow = (re.findall(names, shown(ALL[name], n, all=True)) for n in (400, width))
    assert sorted(narrow) == sorted(wide)


@pytest.mark.needs_jax
@pytest.mark.parametrize(
    ("name", "axes", "text"),
    [
        ("v5e:2x4", {"data": 4, "model": 2}, "data along y, model along x"),
        ("v5e:2x2", {"model": 4}, "model around x and y"),
        ("v5p:4x4x4", {"data": 16, "model": 4}, "data around x and y, model around z"),
        ("v5p:4x4x4", {"a": 4, "b": 2, "c": 8}, "a around x, b along y, c around y and z"),
        ("tpu7x:2x2x1", {"data": 4, "model": 2}, "data around x and y, model along the cores"),
    ],
)
def test_axis_with_wraparound_links_is_marked_as_closed(
    name: str, axes: dict[str, int], text: str
) -> None:
    place = topology(name)
    mesh = describe_mesh(place, place.mesh(axes))
    assert mesh_text(mesh).startswith(text)
    rows = re.findall(r'<tr role="row" id="mesh\..*?</tr>', page(replace(SMALL, mesh=mesh)))
    assert [">closed<" in row for row in rows] == ["around" in t for t in text.split(", ")]
    assert all((">closed<" in row) != (">open<" in row) for row in rows)


@pytest.mark.needs_jax
def test_mesh_axes_of_size_1_are_counted() -> None:
    place = topology("v5e:2x4")
    ones = {f"axis{i}": 1 for i in range(10)}
    mesh = describe_mesh(place, place.mesh({"data": 4, **ones, "model": 2}))
    found = replace(SMALL, mesh=mesh)
    text, html = shown(found, 160), page(found)
    assert "data=4 × model=2 and 10 axes of size 1" in text
    assert "data along y, model along x" in text
    assert "axis3" not in text and "10 axes of size 1" in html
    assert 'id="mesh.axis3"' not in html
    assert len(found.to_dict()["mesh"]) == 12


@pytest.mark.slow
def test_every_form_of_an_estimate_is_marked_as_estimate() -> None:
    estimate = replace(FITTING, is_estimate=True)
    assert "  estimate  compiled without code" in shown(estimate, 160)
    assert "estimated in 38.4 s by libtpu" in shown(estimate, 160)
    assert "(estimate)" in plain_text(PreflightReports((FITTING, estimate)))
    assert "<PreflightReport of train_step on v5p:4x4x2 (32 chips): estimate" in repr(estimate)
    changes = compare(FITTING, estimate)
    assert changes.new.endswith("(estimate)")
    assert [(c.name, c.old, c.new) for c in changes.facts] == [
        ("compilation", "whole", "without code")
    ]
    for text in (estimate.to_html(), estimate._repr_html_()):
        assert text.count('<span class="badge estimate"') == 1
    assert 'class="badge estimate"' not in FITTING.to_html()
    several = page([FITTING, estimate])
    assert several.count('<span class="badge estimate"') == 1 and " (estimate)" in several


def test_operations_missing_from_the_time_are_listed() -> None:
    assert "unknown" not in shown(FITTING, 160) and "understood" not in shown(FITTING, 160)
    calls, strange = (("my_kernel", 32),), (("line", 1), ("opcode frobnicate", 2))
    time = replace(FITTING.time, unknown_calls=calls, not_understood=strange)
    text = shown(replace(FITTING, time=time), 200)
    assert "; without the calls of unknown cost: my_kernel ×32" in text
    assert "Not understood in the compiled program: line, opcode frobnicate ×2." in text


def test_out_of_memory_below_the_available_bytes_is_explained() -> None:
    memory = replace(FITTING.memory, total_bytes=FITTING.memory.available_bytes - 2**20)
    text = shown(replace(FITTING, outcome="out of memory", memory=memory), 160)
    assert "needs 95.7 GiB of HBM on each device, which the compiler could not fit into" in text


def test_traffic_between_slices_is_separate() -> None:
    text = shown(TWO_SLICES, 160)
    assert (
        "2 × v5p:4x4x2 (64 chips)" in text and "slice along the slices, fsdp along x and z" in text
    )
    assert "network between slices" in text and "slice (DCN)" in text


def test_empty_sections_are_left_out() -> None:
    text = shown(SMALL, 160)
    assert sections(text) == ["Memory", "Time", "Arguments", "Results"]
    assert "trains" not in text and "costs" not in text
    assert "x across several dimensions, y along y" in text


def test_print_with_all_shows_every_leaf() -> None:
    some, every = shown(HUGE, 120), shown(HUGE, 160, all=True)
    assert "and 24 more" in some and "more, " not in every
    leaves = ("state['optimizer'][0].mu['embed']", "result[0]['params']['embed']")
    assert all(leaf in every and leaf not in some for leaf in leaves)
    assert "31 reuse the memory of arguments" in some


def test_str_and_repr_of_a_report() -> None:
    assert str(FITTING) == plain_text(FITTING)
    assert repr(FITTING) == (
        "<PreflightReport of train_step on v5p:4x4x2 (32 chips): fits, 19.3 GiB of 95.7 GiB, "
        "2.39 s; print it>"
    )


HELPING = replace(FITTING.advice[0], outcome="helps", seconds=-0.5)


@pytest.mark.parametrize(
    ("changes", "first", "colour"),
    [
        ({"advice": (HELPING,)}, "-500.0 ms a step, +12.0 MiB on each device", "costly"),
        ({"unmet": (), "repeated": ()}, "-6.1 ms a step, within the error, +12.0 MiB", "fits"),
        ({"unmet": (), "advice": ()}, "", "fits"),
        ({"constants": (replace(FITTING.constants[0], nbytes=2**33),)}, "pass params['s", "costly"),
        ({"outcome": "out of memory"}, "", "not"),
    ],
)
def test_what_is_most_worth_doing_stands_first_with_its_price(
    changes: dict[str, Any], first: str, colour: str
) -> None:
    report = replace(FITTING, **changes)
    text, html = shown(report, 300), page(report).replace("<wbr>", "")
    assert f'<section class="verdict {colour}"' in html
    assert f'<span class="badge {colour}">' in html
    heads = [line for line in text.partition("Memory")[0].splitlines() if "most worth" in line]
    assert all(first in line for line in heads) and (heads or not first)
    assert ("Most worth doing" in html) == bool(heads)
