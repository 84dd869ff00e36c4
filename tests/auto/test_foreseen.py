"""Collectives predicted by a layout, and collectives added by the compiler."""

import math
from dataclasses import replace

import jax
import pytest

from tests.auto.examples import mlp_plan, shapes, step
from tests.core.pjit.helpers import make_mesh
from xlashard import AutoPlan, pjit
from xlashard.analysis.explain.descriptions import describe_collective
from xlashard.analysis.programs.source_lines import SourceLine, SourceLocator
from xlashard.auto.auto_program import read_program
from xlashard.auto.foreseen import link_seconds, unforeseen_collectives
from xlashard.auto.problem import ForeseenTransfer
from xlashard.auto.proof import Prover
from xlashard.auto.search import Search
from xlashard.geometry import MeshGrid
from xlashard.geometry.groups import ReplicaGroups
from xlashard.hlo.collectives import Collective
from xlashard.hlo.shapes import Shape
from xlashard.predict.costs.network_model import NetworkCost

ALONG = {
    "data": ReplicaGroups.of_list([[0, 2, 4, 6], [1, 3, 5, 7]]),
    "model": ReplicaGroups.of_list([[0, 1], [2, 3], [4, 5], [6, 7]]),
}


def collective(kind, axis, *dims, times=1, name="c"):
    shapes = tuple(Shape("f32", each) for each in dims)
    return Collective(kind, name, "main", shapes, shapes, ALONG[axis], times)


def unforeseen(transfers, *collectives, step_seconds=1e-3, **sent):
    mesh = make_mesh((4, 2), ("data", "model"))
    costs = [(each, NetworkCost(expected_seconds=1e-4, **sent)) for each in collectives]
    return unforeseen_collectives(costs, transfers, mesh, step_seconds)


GATHER = ForeseenTransfer("data", "all-gather", 64 * 128, 8.0)


def test_foreseen_collective_matches_kind_axis_size_and_count():
    assert not unforeseen([GATHER], collective("all-gather", "data", (64, 128), times=8))
    # The second axis has half of it.
    assert not unforeseen([GATHER], collective("all-gather", "data", (64, 64), times=8))
    # Before the loop, for all of its runs.
    assert not unforeseen([GATHER], collective("all-gather", "data", (8, 64, 128)))
    for other in (
        collective("all-gather", "model", (64, 128), times=8),
        collective("all-gather", "data", (64, 100), times=8),
        collective("all-gather", "data", (64, 128), times=16),
        collective("all-reduce", "data", (64, 128), times=8),
    ):
        (found,) = unforeseen([GATHER], other)
        assert found[0] == other
        assert link_seconds(*found) == pytest.approx(other.times * 1e-4)


def test_cheaper_reduction_than_foreseen_is_accepted():
    reduced = ForeseenTransfer("data", "all-reduce", 4096, 1.0)
    scattered = replace(reduced, kind="reduce-scatter")
    assert not unforeseen([reduced], collective("reduce-scatter", "data", (64, 64)))
    assert not unforeseen([scattered], collective("reduce-scatter", "data", (64, 64)))
    assert unforeseen([scattered], collective("all-reduce", "data", (64, 64)))


def test_foreseen_transfer_matches_only_one_collective():
    twice = [collective("all-gather", "data", (64, 128), times=8, name=n) for n in "ab"]
    (found,) = unforeseen([GATHER], *twice)
    assert found[0].name == "b"
    assert not unforeseen([GATHER, GATHER], *twice)


def test_operands_of_a_combined_collective_are_matched_individually():
    both = collective("all-gather", "data", (64, 128), (192, 128), times=8)
    (found,) = unforeseen([GATHER], both)
    assert [shape.dims for shape in found[0].operands] == [(192, 128)]
    assert link_seconds(*found) == pytest.approx(8e-4 * 3 / 4)


def test_negligible_collectives_are_left_out():
    assert unforeseen([], collective("all-reduce", "data", (4,)))
    assert not unforeseen([], collective("all-reduce", "data", (4,)), step_seconds=1.0)


@pytest.mark.parametrize(("sent", "network"), [({}, "ici"), ({"dcn_bytes": 1.0}, "dcn")])
def test_unforeseen_collective_reports_its_network(sent, network):
    (found,) = unforeseen([], collective("all-reduce", "data", (4,)), **sent)
    assert found[1].resource == network


@pytest.mark.slow
def test_search_foresees_gradient_all_reduces_of_data_parallelism():
    args = shapes(256, 1024, rows=2**16)
    program = read_program(pjit(step, donate_argnums=0), args, {}, {"data": 4, "model": 2})
    found = {layout.name: layout for layout in Search(program.problem(), 10.0).run()}
    data = found["data"]
    sizes = {math.prod(leaf.shape) for leaf in jax.tree.leaves(args[0]["params"])}
    reduced = {t.elements for t in data.transfers if t.kind == "all-reduce" and t.times == 1}
    assert sizes <= reduced
    proven, other = (
        Prover(program, math.inf).prove([layout], 1)[0]
        for layout in (data, replace(data, transfers=()))
    )
    assert not proven.unforeseen
    assert {collective.kind for collective, _ in other.unforeseen} == {"all-reduce"}
    assert sum(link_seconds(*each) for each in other.unforeseen) > 0


@pytest.mark.slow
def test_plans_list_unforeseen_collectives():
    plan = mlp_plan()
    line = SourceLine("model.py", 12, "loss", in_user_file=True)
    exchange = collective("all-to-all", "model", (160, 2048))
    grid, sources = MeshGrid(("data", "model"), (4, 2)), SourceLocator.of(None)
    moved = describe_collective(exchange, grid, {}, sources)
    moved = replace(moved, times=24, seconds=0.046, source=line)
    plan = replace(plan, unforeseen=(moved,))
    for text in (str(plan), plan.to_html()):
        for fact in ("Unforeseen", "all-to-all", "f32[160,2048]", "24", "46", "model.py:12"):
            assert fact in text
    assert AutoPlan.from_json(plan.to_json()) == plan
