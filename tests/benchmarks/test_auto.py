"""Programs of the comparison with layouts by hand, and its summary."""

from dataclasses import replace
from typing import Any

import jax
import pytest
from jax.tree_util import tree_leaves_with_path

from benchmarks import auto, resharding
from benchmarks._auto_program import HandLayout, Turn, path_names
from benchmarks._auto_programs import PROGRAMS
from benchmarks.auto import Candidate, Comparison, Outcome
from xlashard import tpu
from xlashard.auto import axis_costs, axis_program, search
from xlashard.auto.axis_costs import WHOLE


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_layouts_refer_to_values_of_the_program(name: str) -> None:
    program = PROGRAMS[name]
    ranks: dict[str, set[int]] = {}

    def record(name: str, x: Any) -> Any:
        ranks.setdefault(name, set()).add(x.ndim)
        return x

    arguments = program.arguments()
    fed_back, _ = jax.eval_shape(program.build(record), *arguments)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (fed_back, arguments[0])]
    assert shapes[0] == shapes[1]
    paths = {key for path, _ in tree_leaves_with_path(arguments) for key in path_names(path)}
    for layout in layouts(name):
        assert set(layout.arguments) | set(layout.moments or {}) <= paths
        assert set(layout.inside) <= set(ranks)
        for inside, spec in layout.inside.items():
            specs = (spec.forth, spec.back) if isinstance(spec, Turn) else (spec,)
            assert {len(spec) for spec in specs} == ranks[inside]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ((0, 1), (0, 2), "one axis moves"),
        ((0, 1), (1, 0), "two axes swap"),
        ((0, 0), (1, 2), "two axes part or meet"),
        ((0, WHOLE), (WHOLE, 0), "one axis is gathered, one axis is sliced"),
    ],
)
def test_prices_of_the_search_are_near_what_the_partitioner_makes(
    before: tuple[int, int], after: tuple[int, int], kind: str
) -> None:
    one, other = (dict(zip(resharding.AXES, dims, strict=True)) for dims in (before, after))
    mesh = tpu.topology("v5e-16").mesh({"data": 4, "model": 4})
    assert resharding.name_change(one, other) == kind
    compiled = resharding.compile_seconds(one, other, "v5e-16", mesh)
    assert 2 / 3 < resharding.price(one, other, "v5e-16", mesh) / compiled < 3 / 2


def layouts(name: str) -> list[HandLayout]:
    """Layouts for every topology of a program; they read sizes of the mesh only."""
    found = []
    for sizes in PROGRAMS[name].meshes.values():
        mesh: Any = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        found += PROGRAMS[name].layouts(mesh).values()
    assert found
    return found


def outcome(layout: str, seconds: float, fits: bool = True) -> Outcome:
    """Return an outcome of 1 GiB."""
    return Outcome(layout, seconds, 2**30, fits, 3.0)


def test_summary_counts_ratios() -> None:
    hand = outcome("data", 1.0, fits=False), outcome("fsdp", 2.0), outcome("tensor", 3.0)
    autos = outcome("auto", 1.9), outcome("auto", 2.05), outcome("auto", 4.0)
    names = ("v5e-16", "v6e-64", "v5p-128")
    mesh = {"data": 4, "model": 4}
    ones = [
        Comparison("dense_1b", name, mesh, hand, own)
        for name, own in zip(names, autos, strict=True)
    ]
    ones.append(Comparison("dense_1b", "v5e-16", mesh, hand, outcome("auto", 1.0, fits=False)))
    ones.append(Comparison("dense_1b", "v5e-16", mesh, hand[:1], outcome("auto", 1.0, fits=False)))
    assert [one.best.layout if one.best else None for one in ones] == ["fsdp"] * 4 + [None]
    assert [one.ratio for one in ones] == [0.95, 1.025, 2.0, None, None]
    *_, within, better, missed = auto.summarize(ones)
    assert within.endswith(": 2 of 4")
    assert better.endswith(": 1 of 4")
    assert missed.endswith(": dense_1b on v5e-16")


def test_errors_of_the_search_and_bytes_sent_are_printed() -> None:
    hand = replace(outcome("data", 2.0), sent_bytes=100, waiting_seconds=0.5)
    figures = [(1.0, 2.0, 90, 100), (2.0, 4.0, 80, 100), (3.0, 8.0, 100, 100)]
    found = [Candidate("data", *each) for each in figures]
    own = replace(outcome("auto", 1.0), sent_bytes=150, candidates=tuple(found))
    one = Comparison("dense_1b", "v5e-16", {"data": 4, "model": 4}, (hand,), own)
    *_, sent, errors = auto.describe(one)
    assert "1.50 x the best by hand: its cores wait 0 s for links, by hand 500" in sent
    assert errors.strip() == (
        "3 compiled: median error of time 50%, of memory 10%; rank correlation 1.00"
    )
    assert errors.strip() in list(auto.summarize([one]))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("data", {"start: data", "inside: everything"}),
        ("data: fsdp, model: tensor; inside: none", {"start: fsdp, tensor", "inside: none"}),
        (
            "auto(data>model), corrected",
            {"start: auto", "inside: everything", "corrected: corrected"},
        ),
        (
            "argument 3 by P(('a', 'b'), None), lighter, corrected; inside: operands",
            {
                "start: an argument",
                "inside: operands",
                "corrected: lighter",
                "corrected: corrected",
            },
        ),
    ],
)
def test_kinds_of_a_layout_are_read_from_its_name(name: str, kinds: set[str]) -> None:
    assert Candidate(name, 1.0, 1.0, 1, 1).kinds == kinds


def test_kinds_are_rated_by_what_they_save_and_where() -> None:
    times = {"data": 1.0, "fsdp; inside: none": 0.5, "fsdp; inside: operands": 0.501, "auto": 0.1}
    found = [Candidate(name, 1.0, time, 1, 1, name != "auto") for name, time in times.items()]
    one = Comparison(
        "vit", "v5e-16", {}, (), replace(outcome("auto", 0.5), candidates=tuple(found))
    )
    lines = list(auto.rate_kinds([one]))
    (fsdp,) = [line for line in lines if line.startswith("start: fsdp")]
    (none,) = [line for line in lines if line.startswith("inside: none")]
    assert fsdp.endswith("100.0%  vit on v5e-16")
    assert "0.2%  less than" in none
    assert not any("auto" in line for line in lines)


def test_a_constant_is_set_in_every_module_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (axis_costs, axis_program, search):
        monkeypatch.setattr(module, "HIDDEN_SHARE", axis_costs.HIDDEN_SHARE)
    auto._set_constant("HIDDEN_SHARE=0")
    assert axis_costs.HIDDEN_SHARE == axis_program.HIDDEN_SHARE == search.HIDDEN_SHARE == 0.0
    with pytest.raises(SystemExit, match="no constant HIDDEN"):
        auto._set_constant("HIDDEN=0")


@pytest.mark.slow
def test_result_file_is_unique_per_options(tmp_path: Any) -> None:
    first, second = (auto.Options(memory, hand_only=True, cache=tmp_path) for memory in (0.9, 1.0))
    kept = auto.result_file(first, "vit", "v5e-16", "data")
    assert kept == auto.result_file(first, "vit", "v5e-16", "data")
    assert kept != auto.result_file(second, "vit", "v5e-16", "data")
    assert kept != auto.result_file(first, "vit", "v5e-16", "fsdp")
    assert auto.result_file(auto.Options(0.9, hand_only=True, cache=None), "vit") is None
