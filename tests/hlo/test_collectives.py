"""Collectives of programs whose communication is known in closed form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.program.helpers import mesh
from xlashard import NamedSharding, P, pjit
from xlashard.geometry import MeshGrid
from xlashard.hlo.collectives import along_text, summarize
from xlashard.hlo.hlo_program import read_collectives

GRID = MeshGrid(("x", "y"), (2, 4))


def grid_of(on):
    return MeshGrid(on.axis_names, on.devices.shape)


def compiled(fun, args, ins, outs, on=None):
    """Return the collectives of a pjit-ed function under specs."""
    on = on or mesh()
    named = partial(jax.tree.map, partial(NamedSharding, on), is_leaf=lambda s: isinstance(s, P))
    step = pjit(fun, in_shardings=named(ins), out_shardings=named(outs))
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in args]
    return read_collectives(step.lower(*args).compile())


def mapped(fun, in_spec, out_spec, shape, on=None):
    """Return the collectives of a function that calls collectives explicitly."""
    on = on or mesh()
    body = jax.shard_map(fun, mesh=on, in_specs=in_spec, out_specs=out_spec, check_vma=False)
    return compiled(body, [shape], (in_spec,), out_spec, on)


def traffic(collectives, on=None):
    """Return kind, axes, and operand, result and sent bytes per device."""
    grid = grid_of(on or mesh())
    return [
        (c.kind, along_text(c, grid), c.operand_bytes, c.result_bytes, c.sent_bytes)
        for c in collectives
    ]


@pytest.fixture(params=["shardy", "gspmd"], autouse=True)
def partitioner(request):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.devices(8)
def test_fsdp_parameter_is_gathered_once_in_the_forward_pass():
    on = mesh((8,), ("fsdp",))
    found = compiled(
        lambda x, w: x @ w, [(64, 16), (16, 32)], (P("fsdp"), P("fsdp")), P("fsdp"), on
    )
    whole = 16 * 32 * 4
    assert traffic(found, on) == [("all-gather", "fsdp", whole // 8, whole, whole * 7 // 8)]


@pytest.mark.devices(8)
def test_gradient_of_replicated_parameters_is_all_reduced_over_the_data_axis():
    def gradient(w, x):
        return jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    found = compiled(gradient, [(8, 16), (64, 8)], (P(), P("x")), P())
    whole = 8 * 16 * 4
    assert traffic(found) == [("all-reduce", "x", whole, whole, whole)]
    assert [str(t) for c in found for t in c.operands] in (["f32[8,16]"], ["f32[16,8]"])


@pytest.mark.devices(8)
def test_psum_scatter_is_reported_as_reduce_scatter():
    scatter = partial(jax.lax.psum_scatter, axis_name="y", scatter_dimension=0, tiled=True)
    found = mapped(scatter, P("x"), P(("x", "y")), (64, 16))
    # Each device adds its 32 rows of 16 floats and keeps 8 rows.
    assert traffic(found) == [("reduce-scatter", "y", 2048, 512, 1536)]


@pytest.mark.devices(8)
@pytest.mark.slow
def test_moving_an_axis_to_another_dimension_is_an_all_to_all():
    for axis, parts in (("x", 2), ("y", 4)):
        found = compiled(lambda x: x * 2, [(8, 16)], (P(axis),), P(None, axis))
        shard = 8 * 16 * 4 // parts
        assert traffic(found) == [("all-to-all", axis, shard, shard, shard * (parts - 1) // parts)]


@pytest.mark.devices(8)
@pytest.mark.slow
def test_routing_tokens_to_experts_and_back_is_two_all_to_alls():
    def experts(tokens):
        there = jax.lax.all_to_all(tokens, "y", 1, 0, tiled=True)
        return jax.lax.all_to_all(jnp.tanh(there), "y", 0, 1, tiled=True)

    found = mapped(experts, P("y"), P("y"), (16, 32))
    shard = 4 * 32 * 4
    assert traffic(found) == [("all-to-all", "y", shard, shard, shard * 3 // 4)] * 2


@pytest.mark.devices(8)
def test_ring_ppermute_is_attributed_to_its_mesh_axis():
    ring = [(i, (i + 1) % 4) for i in range(4)]
    found = mapped(lambda x: jax.lax.ppermute(x, "y", ring), P("y"), P("y"), (64, 16))
    assert traffic(found) == [("collective-permute", "y", 1024, 1024, 1024)]
    chain = mapped(lambda x: jax.lax.ppermute(x, "x", [(0, 1)]), P("x"), P("x"), (64, 16))
    # Half of the devices send, the others only receive.
    assert traffic(chain) == [("collective-permute", "x", 2048, 2048, 1024)]


@pytest.mark.devices(8)
def test_groups_over_two_of_three_axes_are_named_by_both():
    on = mesh((2, 2, 2), ("a", "b", "c"))
    found = mapped(lambda x: jax.lax.psum(x, ("a", "c")), P(("a", "b", "c")), P("b"), (64, 16), on)
    assert traffic(found, on) == [("all-reduce", "a, c", 512, 512, 768)]


@pytest.mark.devices(8)
def test_replica_groups_over_part_of_an_axis_are_named_by_sub_axis():
    halves = [[0, 1], [2, 3]]
    found = mapped(
        lambda x: jax.lax.psum(x, "y", axis_index_groups=halves), P("y"), P("y"), (64, 16)
    )
    assert traffic(found) == [("all-reduce", "y:(2)2", 1024, 1024, 1024)]


@pytest.mark.devices(8)
def test_collective_axis_is_found_under_any_device_order():
    on = mesh((2, 4), ("x", "y"), order=[0, 2, 4, 6, 1, 3, 5, 7])
    found = mapped(lambda x: jax.lax.psum(x, "x"), P("x"), P(), (64, 16), on)
    assert traffic(found, on) == [("all-reduce", "x", 2048, 2048, 2048)]


@pytest.mark.devices(8)
def test_collectives_in_loops_are_multiplied_by_trip_counts():
    def layers(x):
        def layer(x, _):
            inner = jax.lax.fori_loop(0, 3, lambda _, x: jax.lax.pmean(x, "x"), x)
            return jax.lax.pmean(inner, "y"), None

        return jax.lax.scan(layer, x, None, length=5)[0]

    found = mapped(layers, P("y"), P("y"), (64, 16))
    times = {along_text(c, GRID): (c.times, c.times_known) for c in found}
    assert times == {"x": (15, True), "y": (5, True)}
    totals = {t.along: (t.count, t.times, t.payload_bytes) for t in summarize(found, GRID)}
    assert totals == {"x": (1, 15, 15 * 1024), "y": (1, 5, 5 * 1024)}


def test_data_dependent_loop_has_unknown_trip_count():
    found = mapped(
        lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 100, lambda x: jax.lax.psum(x, "x"), x),
        P("y"),
        P("y"),
        (64, 16),
    )
    assert [(c.times, c.times_known, c.conditional) for c in found] == [(1, False, False)]


def test_collective_in_a_branch_is_marked_conditional():
    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "x"), lambda x: x * 2, x)

    found = mapped(either, P("y"), P("y"), (64, 16))
    assert [(c.kind, c.times, c.conditional) for c in found] == [("all-reduce", 1, True)]


def test_collective_has_the_source_line_of_its_operation():
    def total(x):
        return jax.lax.psum(x, "x")  # HERE

    (found,) = mapped(total, P("y"), P("y"), (64, 16))
    assert found.op_name.endswith("psum")
    with open(__file__) as source:
        here = next(i for i, line in enumerate(source, 1) if line.endswith("# HERE\n"))
    assert (found.frames[0].file, found.frames[0].line) == (__file__, here)
    assert found.frames[0].function.endswith("total")
    # The outermost frame, the caller of the compilation, is last.
    assert "compiled" in [frame.function for frame in found.frames]


def test_single_device_program_has_no_collectives():
    double = pjit(lambda x: x * 2).lower(np.ones(4)).compile()
    assert read_collectives(double.as_text()) == ()
