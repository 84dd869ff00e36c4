"""Layouts of the state of training steps on machines made by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.auto.examples import find_layouts
from tests.auto.test_search import LATENCY, machine
from xlashard import P
from xlashard.auto.axis_costs import PARTIAL, WHOLE, Assignment, CostModel
from xlashard.auto.problem import AutoProblem
from xlashard.auto.search import Search


def train(state, x):
    def loss(state):
        return jnp.sum(jnp.tanh(x @ state["first"]) @ state["second"])

    return jax.tree.map(lambda w, g: w - g, state, jax.grad(loss)(state))


def training(on, first, second, rows):
    """Return the problem of a step that trains two products."""
    state = {"first": jax.ShapeDtypeStruct(first, np.float32)}
    state["second"] = jax.ShapeDtypeStruct(second, np.float32)
    jaxpr = jax.make_jaxpr(train)(state, jax.ShapeDtypeStruct((rows, first[0]), np.float32))
    tied = {"tied": ((0, 0), (1, 1)), "donated": (True, True, False), "memory_bytes": 1e9}
    return AutoProblem(jaxpr, on, (None,) * 3, (None,) * 2, **tied)


def test_one_layout_replicates_small_state_arrays():
    found = find_layouts(training(machine(x=8), (1024, 128), (128, 1 << 16), 1024))
    one = next(layout for layout in found if layout.name == "auto, small state replicated")
    assert one.in_specs[0] == P() and one.in_specs[1] != P()


def test_small_gradients_share_the_latency_of_one_reduction():
    found = training(machine(x=8), (1024, 128), (128, 1 << 16), 1024)
    graph = Search(found, 1.0).graph
    small = graph.labels_of(graph.arguments[0])
    each, one = (
        CostModel(graph, found.machine, found.machine.axes[0], Assignment(), combined)
        for combined in (frozenset(), small)
    )
    first, second = graph.arguments[:2]
    assert each.reduce_value(first) - one.reduce_value(first) == pytest.approx(2 * LATENCY)
    assert each.reduce_value(second) == one.reduce_value(second)
    number, slot, value = next(
        (number, slot, value)
        for number, op in enumerate(graph.operations)
        for slot, value in op.slots
        if slot < 0 and graph.labels_of(value) == small
    )
    seconds = [model.conversion(value, number, slot, WHOLE, PARTIAL) for model in (each, one)]
    assert seconds[0] - seconds[1] == pytest.approx(2 * LATENCY)


def test_results_written_into_a_cache_are_not_of_the_state():
    def write(cache, x, w):
        return jax.lax.dynamic_update_index_in_dim(cache, x @ w, 3, 0)

    shapes = (64, 8, 256), (8, 512), (512, 256)
    jaxpr = jax.make_jaxpr(write)(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes))
    graph = Search(
        AutoProblem(jaxpr, machine(x=8), (None,) * 3, (None,), ((0, 0),), (True, False, False)), 1.0
    ).graph
    (made,) = (op.results[0] for op in graph.operations if op.rule.flops)
    assert graph.is_state(graph.arguments[0]) and graph.is_state(graph.results[0])
    assert not graph.is_state(made)


@pytest.mark.parametrize("size", [32, 256])
def test_a_small_weight_that_a_loop_needs_whole_stays_whole(size):
    def roll(w, x):
        def advance(x, _):
            value = x @ w
            return jnp.tanh(x + value), value

        x, values = jax.lax.scan(advance, x, length=64)
        return w + jnp.mean(x), x, values

    weight, rows = (jax.ShapeDtypeStruct(s, np.float32) for s in ((size, 1), (1 << 14, size)))
    jaxpr = jax.make_jaxpr(roll)(weight, rows)
    tied = ((0, 0), (1, 1))
    found = AutoProblem(jaxpr, machine(x=8), (None,) * 2, (None,) * 3, tied, (True, True))
    best = find_layouts(found)[0]
    assert best.in_specs == (P(), P("x"))


@pytest.mark.slow
def test_lighter_layouts_shard_state_first_and_then_other_values():
    search = Search(training(machine(x=4, y=2), (1024, 2048), (2048, 512), 4096), 60.0)
    data = next(layout for layout in search.run() if layout.name == "data")
    both = P(("x", "y"))
    assert data.in_specs == (P(), P(), both)
    # To shard the smaller array is enough.
    (lighter,) = search.lighter(data, 1e5)
    assert lighter.name == "data, lighter" and lighter.in_specs[2] == both
    assert lighter.in_specs[0] == P() != lighter.in_specs[1]
    assert lighter.memory_bytes <= data.memory_bytes - 1e5
    (less,) = search.lighter(data, 1e7)
    assert less.in_specs[0] != P() and less.in_specs[2] == both
    assert less.memory_bytes <= data.memory_bytes - 1e7
    # Constraints inside are those of the layout.
    inside = next(x for x in search.thinned(data) if x.name == "data; inside: none")
    (lighter_inside,) = search.lighter(inside, 1e7)
    assert lighter_inside.name == "data, lighter; inside: none"
    assert less.constraints and not lighter_inside.constraints
    assert lighter_inside.in_specs == less.in_specs
    # Where that doesn't suffice, activations are sharded otherwise.
    fsdp = next(layout for layout in search.run() if layout.name == "x: fsdp, y: tensor")
    (other,) = search.lighter(fsdp, 1e5)
    assert other.in_specs[2] != fsdp.in_specs[2]
    assert search.lighter(fsdp, 1e7) == search.lighter(replace(fsdp, name="data!"), 1.0) == []


@pytest.mark.slow
def test_state_is_sharded_over_largest_or_major_dimensions():
    found = find_layouts(training(machine(x=4, y=2), (1024, 2048), (2048, 512), 4096))
    specs = {layout.name: layout.in_specs[0] for layout in found}
    assert specs["fsdp"] == P(None, ("x", "y"))
    assert specs["x: fsdp, y: data"] == P("x")
    found = find_layouts(training(machine(x=4, y=2), (1028, 2048), (2048, 512), 4096))
    specs = {layout.name: layout.in_specs[0] for layout in found}
    assert specs["x: fsdp, y: data"] == P(None, "x")


def factored(state, x):
    """Train one product with second moments by row and by column, as Adafactor does."""
    w, row, column = state
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    square = jnp.square(gradient)
    row, column = row + jnp.mean(square, 1), column + jnp.mean(square, 0)
    return w - gradient * jax.lax.rsqrt(row[:, None] * column), row, column


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"x": 8}, {"x": 4, "y": 2}])
def test_fsdp_shards_a_parameter_with_factored_moments(sizes):
    width, columns = 1 << 12, 1 << 14
    shapes = (width, columns), (width,), (columns,), (1 << 15, width)
    jaxpr = jax.make_jaxpr(lambda w, row, column, x: factored((w, row, column), x))(
        *(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    )
    tied, rows = ((0, 0), (1, 1), (2, 2)), P(tuple(sizes) if len(sizes) > 1 else "x")
    found = AutoProblem(jaxpr, machine(**sizes), (None,) * 4, (None,) * 3, tied, (True,) * 4)
    fsdp = next(layout for layout in find_layouts(found) if layout.name == "fsdp")
    assert fsdp.in_specs[0] == P(None, *rows) and fsdp.in_specs[3] == rows
    assert fsdp.seconds < np.inf
