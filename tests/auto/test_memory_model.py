"""Predicted memory: live ranges in the order of execution, buffers that are reused, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.auto.test_search import machine
from xlashard import P
from xlashard.auto.axis_costs import Assignment
from xlashard.auto.graph.program_graph import ProgramGraph
from xlashard.auto.memory_model import MemoryModel
from xlashard.auto.problem import AutoProblem

MIB = 1 << 20


def peak(function, *arguments, donated=0, tied=(), on=None, sharded=(), specs=None):
    """Return the predicted MiB of a function of arrays of these shapes and dtypes.

    The first arguments are donated. `sharded` has positions, with results after arguments, and
    dimensions; `specs` the fixed specs of arguments.
    """
    jaxpr = jax.make_jaxpr(function)(
        *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments)
    )
    count, results = len(arguments), len(jaxpr.out_avals)
    given = tuple(k < donated for k in range(count))
    on = on or machine(x=8)
    specs = specs or (None,) * count
    problem = AutoProblem(jaxpr, on, specs, (None,) * results, tied, given)
    graph = ProgramGraph(jaxpr, tied, specs, problem.out_specs)
    model = MemoryModel(graph, problem)
    ends = [*graph.arguments, *graph.results]
    chosen = {graph.label(ends[k], dim) for k, dim in sharded}
    return model.peak(Assignment({"x": frozenset(chosen)})) / MIB


F32, BF16 = np.float32, jnp.bfloat16
SQUARE = ((1024, 1024), F32)


def test_elementwise_results_take_no_memory():
    """Two arguments and a product."""
    assert peak(lambda x, w: jnp.sin(x * 2 + 1) @ w, SQUARE, SQUARE) == 4 + 4 + 4


def test_result_is_materialized_if_its_operands_are_larger():
    def narrow(x, w):
        y = z = (x @ w).astype(BF16)
        for _ in range(10):
            z = z @ z
        return z @ y

    # The product in float32 ends where its conversion, of half the bytes, begins.
    assert peak(narrow, SQUARE, SQUARE) == 4 + 4 + 3 * 2


def test_wide_operands_of_later_elementwise_operations_stay_in_memory():
    def softmax(x, w):
        scores = x @ w
        shares = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
        mixed = shares @ w
        for _ in range(4):
            mixed = jnp.sin(mixed @ w)
        return mixed * shares

    # Arguments, scores, and two products.
    assert peak(softmax, SQUARE, SQUARE) == pytest.approx(5 * 4, abs=0.1)


def test_operations_independent_of_a_loop_run_after_the_loop():
    def steps(x, w, v, *, is_loss):
        large = x @ w
        found = jax.lax.fori_loop(0, 8, lambda _, y: jnp.sin(y @ w) @ w.T, large @ w.T)
        return found, (large @ v if is_loss else 0.0)

    shapes = ((64, 1024), F32), ((1024, 1 << 16), F32), ((1 << 16, 8), F32)
    least, large = 0.25 + 256 + 2, 16
    alone = peak(lambda *arrays: steps(*arrays, is_loss=False), *shapes)
    assert least + large < alone < least + large + 1
    # The product keeps its operand through the loop, which has a value of that size itself.
    both = peak(lambda *arrays: steps(*arrays, is_loss=True), *shapes)
    assert alone + large <= both < alone + large + 1


def test_donated_cache_updated_in_a_loop_takes_one_buffer():
    def decode(cache, x):
        def write(cache, k):
            row = jax.lax.dynamic_index_in_dim(cache, k) * 2 + x[None]
            return jax.lax.dynamic_update_index_in_dim(cache, row[0], k, 0), row.sum()

        return jax.lax.scan(write, cache, jnp.arange(16))

    arguments = ((16, 1024, 1024), F32), SQUARE
    kept = {"donated": 1, "tied": ((0, 0),)}
    assert 64 + 4 <= peak(decode, *arguments, **kept) <= 64 + 3 * 4 + 0.1
    # A cache that isn't donated is copied.
    assert peak(decode, *arguments) >= 2 * 64 + 4


def test_donated_cache_that_a_scan_reads_and_stacks_again_takes_two_buffers():
    def decode(cache, x):
        def write(x, row):
            row = jax.lax.dynamic_update_index_in_dim(row, x[0], 3, 0)
            return x @ row, row

        return jax.lax.scan(write, x, cache)[::-1]

    arguments = ((16, 1024, 1024), F32), ((8, 1024), F32)
    kept = {"donated": 1, "tied": ((0, 0),)}
    for specs in ((None, None), (P(), None)):
        assert 2 * 64 <= peak(decode, *arguments, specs=specs, **kept) <= 2 * 64 + 2 * 4


def test_stacked_weights_of_a_scan_are_converted_all_at_once():
    def layers(ws, x):
        return jax.lax.scan(lambda x, w: (x @ w.astype(BF16), None), x, ws)[0]

    def unconverted(ws, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    small = (8, 1024), BF16
    stack, converted = ((16, 1024, 1024), F32), ((16, 1024, 1024), BF16)
    assert peak(layers, stack, small) == pytest.approx(64 + 32, abs=0.1)
    assert peak(unconverted, converted, small) == pytest.approx(32, abs=0.1)


def test_memory_is_divided_and_padded_to_lanes():
    image = (16, 32, 256, 64), F32

    def convolve(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)

    kernel = (3, 3, 64, 64), F32
    # 64 features take 128 lanes, though 256 columns would fill them.
    whole = peak(convolve, image, kernel)
    assert whole == pytest.approx(2 * 2 * 32, rel=0.01)
    split = peak(convolve, image, kernel, sharded=[(0, 0), (2, 0)])
    assert split == pytest.approx(whole / 8, rel=0.06)
    # Of other values the minor dimension is the one that pads least.
    table = (1 << 16, 32), F32
    assert peak(lambda x: x * 2, table, donated=1, tied=((0, 0),)) == 8
    assert peak(lambda x: x * 2, table, donated=1, tied=((0, 0),), sharded=[(0, 0)]) == 1
