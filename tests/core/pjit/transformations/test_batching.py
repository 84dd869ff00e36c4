"""vmap of pjit-ed functions and of constraints, also with a sharded batch."""

import functools
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import f32, make_mesh, spec_of, under
from tests.grouped_cases import sweep
from tests.message_patterns import naming
from xlashard import (
    GSPMDSharding,
    NamedSharding,
    P,
    SingleDeviceSharding,
    pjit,
    with_sharding_constraint,
)
from xlashard.errors import ResourceError

U = P.UNCONSTRAINED


@pytest.fixture
def cube():
    return make_mesh((2, 2, 2), ("a", "b", "c"))


def constraints(fun, *args):
    """Return the dimensions of each constraint in the module of a function."""
    text = under("jax_use_shardy_partitioner", True, lambda: jax.jit(fun).lower(*args).as_text())
    found = re.findall(r"sharding_constraint %\w+ <@mesh, \[(.*?)\]>", text)
    return [text.replace('"', "") for text in found]


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.parametrize("out_axis", [0, 1, -1])
@pytest.mark.parametrize("in_axis", [0, 2])
def test_axes(mesh, in_axis, out_axis):
    named = NamedSharding(mesh, P("x"))
    f = pjit(jnp.sin, in_shardings=named, out_shardings=named)
    x = f32(8, 8, 8)
    out = jax.vmap(f, in_axis, out_axis)(x)
    np.testing.assert_allclose(out, jax.vmap(jnp.sin, in_axis, out_axis)(x), rtol=1e-5)
    cut = out.sharding.shard_shape(out.shape)
    assert cut[{0: 1, 1: 0, -1: 0}[out_axis]] == 2


@pytest.mark.slow
def test_unbatched_arguments_are_accepted(mesh):
    named = NamedSharding(mesh, P("x"))
    f = pjit(lambda d: (d["a"] + d["b"], d["b"]), in_shardings=named)
    a, b = f32(3, 8), f32(8)
    total, same = jax.vmap(f, ({"a": 0, "b": None},), (1, None))({"a": a, "b": b})
    np.testing.assert_array_equal(total, (a + b).T)
    np.testing.assert_array_equal(same, b)
    out = jax.vmap(pjit(jnp.sin, in_shardings=named), in_axes=None, axis_size=3)(b)
    np.testing.assert_allclose(out, np.stack([np.sin(b)] * 3), rtol=1e-6)


@pytest.mark.slow
def test_collectives_over_the_batch(mesh):
    named, x = NamedSharding(mesh, P("x")), f32(3, 8)

    def fun(x):
        i = jax.lax.axis_index("batch")
        return jax.lax.psum(x, "batch") * i, jax.lax.all_gather(x, "batch").sum(0)

    scaled, gathered = jax.vmap(pjit(fun, in_shardings=named), axis_name="batch")(x)
    np.testing.assert_allclose(scaled, x.sum(0) * np.arange(3)[:, None], rtol=1e-6)
    np.testing.assert_allclose(gathered, np.stack([x.sum(0)] * 3), rtol=1e-6)
    mean = pjit(lambda x: jax.lax.pmean(jnp.sin(x), ("batch", "outer")), in_shardings=named)
    both = jax.vmap(jax.vmap(mean, axis_name="batch"), axis_name="outer")
    gradient = jax.grad(lambda x: both(x).sum())(f32(2, 3, 8))
    np.testing.assert_allclose(gradient, np.cos(f32(2, 3, 8)), rtol=1e-5)


@pytest.mark.slow
def test_keys(mesh):
    named = NamedSharding(mesh, P("x"))
    draw = pjit(jax.vmap(jax.random.uniform), in_shardings=named, out_shardings=named)
    keys = jax.random.split(jax.random.key(0), (3, 8))
    np.testing.assert_array_equal(
        jax.vmap(draw)(keys), jax.vmap(jax.vmap(jax.random.uniform))(keys)
    )
    split = jax.vmap(pjit(lambda key: jax.random.split(key)[0]))(keys[0])
    wanted = jax.vmap(lambda key: jax.random.split(key)[0])(keys[0])
    np.testing.assert_array_equal(jax.random.key_data(split), jax.random.key_data(wanted))


@pytest.mark.devices(8)
def test_batch_dimension_is_sharded_by_the_partitioner(mesh, partitioner):
    f = pjit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P("x")))
    out = jax.vmap(f)(f32(6, 8))
    np.testing.assert_array_equal(out, f32(6, 8) * 2)
    assert out.sharding.shard_shape(out.shape)[1] == 2


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.parametrize("names", ["y", ("y",)])
def test_spmd_axis_name(mesh, names, partitioner):
    f = pjit(lambda x: x * 2, in_shardings=NamedSharding(mesh, P("x")))
    out = jax.vmap(f, spmd_axis_name=names)(f32(2, 8))
    np.testing.assert_array_equal(out, f32(2, 8) * 2)
    assert spec_of(out) == ("y", "x")
    gradient = jax.grad(lambda x: (jax.vmap(f, spmd_axis_name=names)(x) ** 2).sum())
    np.testing.assert_allclose(gradient(f32(2, 8)), 8 * f32(2, 8))
    assert spec_of(gradient(f32(2, 8))) == ("y", "x")


SHARDED = {
    "in": lambda m, s: m.jit(lambda x: x * 2, in_shardings=s),
    "out": lambda m, s: m.jit(lambda x: x * 2, out_shardings=s),
    "constraint": lambda m, s: m.jit(lambda x: m.lax.with_sharding_constraint(x * 2, s)),
}


@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", sweep(SHARDED, quick=["out"]))
@pytest.mark.parametrize("spmd", [None, pytest.param("c", marks=pytest.mark.slow)])
def test_batches_are_placed_as_in_jax(cube, kind, spmd):
    """JAX leaves the batch of a constraint open, and that of an argument or result whole."""
    ours = SimpleNamespace(jit=pjit, lax=xlashard)
    specs = itertools.product([P("a"), P(None, "a")], [P("c"), P("a"), P(None, "b")], [0, 1])
    for inner, outer, axis in specs:
        results = []
        for m in (jax, ours):
            f = SHARDED[kind](m, jax.sharding.NamedSharding(cube, inner))
            x = jax.device_put(f32(4, 4, 4), jax.sharding.NamedSharding(cube, outer))
            try:
                out = jax.vmap(f, axis, axis, spmd_axis_name=spmd)(x)
                np.testing.assert_array_equal(out, f32(4, 4, 4) * 2)
                results.append(spec_of(out))
            except (ValueError, ResourceError):
                results.append("refused")
        assert results[0] == results[1], (inner, outer, axis)


@pytest.mark.devices(8)
def test_spmd_axis_name_applies_to_nested_calls_and_constraints(cube):
    inner = pjit(lambda x: x * 2, in_shardings=NamedSharding(cube, P("c")))

    def pinned(spec):
        named = NamedSharding(cube, spec)
        return pjit(lambda x: pjit(lambda x: with_sharding_constraint(x * 2, named))(x))

    def scanned(x):
        return jax.lax.scan(lambda c, _: (inner(c), None), x, length=2)[0]

    x, x3 = f32(4, 8), f32(2, 2, 8)
    nested = jax.vmap(jax.vmap(inner, spmd_axis_name="a"), spmd_axis_name="b")
    assert constraints(nested, x3) == ["{b}, {a}, {c}"]
    assert constraints(jax.vmap(jax.vmap(inner), spmd_axis_name="b"), x3) == ["{b}, {}, {c}"]
    assert constraints(jax.vmap(inner, spmd_axis_name=("a", "b")), x) == ["{a, b}, {c}"]
    assert constraints(jax.vmap(pinned(P("c")), spmd_axis_name="a"), x) == ["{a}, {c}"]
    assert constraints(jax.vmap(pinned(P(U)), spmd_axis_name="a"), x) == ["{a}, {?}"]
    assert constraints(jax.vmap(pinned(P(U))), x) == ["{?}, {?}"]
    assert constraints(jax.vmap(scanned, spmd_axis_name="a"), x) == ["{a}, {c}"]
    gradient = jax.grad(lambda x: jax.vmap(inner, spmd_axis_name="a")(x).sum())
    assert set(constraints(gradient, x)) == {"{a}, {c}"}
    again = jax.grad(lambda x: jax.vmap(jax.checkpoint(inner), spmd_axis_name="a")(x).sum())
    assert set(constraints(again, x)) == {"{a}, {c}"}


def test_spmd_axis_name_of_an_axis_in_use_is_refused(mesh):
    f = pjit(lambda x: x * 2, in_shardings=NamedSharding(mesh, P("x")))
    with pytest.raises(ResourceError, match=naming("spmd_axis_name", "P('x')")):
        jax.vmap(f, spmd_axis_name="x")(f32(4, 8))


CLOSURES = {
    "returned": lambda row, y: row,
    "added": lambda row, y: y + row,
    "reduced": lambda row, y: y * row.sum(),
    "as one of two results": lambda row, y: (y, row),
    "over a collective": lambda row, y: jax.lax.psum(y * row, "y"),
}


@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", sweep(CLOSURES, quick=["returned", "added"]))
def test_shard_map_closes_over_rows_of_a_sharded_batch(mesh, kind):
    """`jax.shard_map` returns the rows once per shard, or fails in its own assertions."""
    rows, other = f32(4, 2), f32(2)

    def share(row):
        inner = functools.partial(CLOSURES[kind], row)
        return xlashard.shard_map(inner, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(
            other
        )

    def gradient(mapped):
        return jax.grad(lambda rows: sum(x.sum() for x in jax.tree.leaves(mapped(rows))))(rows)

    over_rows = jax.vmap(share, spmd_axis_name="x")
    right = jax.tree.map(lambda *rows: np.stack(rows), *map(share, rows))
    for function in (over_rows, pjit(over_rows)):
        jax.tree.map(np.testing.assert_allclose, function(rows), right)
    pairs = jax.vmap(jax.vmap(share), spmd_axis_name="x")(np.stack([rows, rows], 1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:, 1], b), pairs, right)
    np.testing.assert_allclose(gradient(over_rows), gradient(jax.vmap(share)))


def test_tiles_without_names_are_batched(mesh, partitioner):
    tiles = GSPMDSharding(jax.devices(), "{devices=[4,2]<=[8] last_tile_dim_replicate}")
    f = pjit(lambda x: with_sharding_constraint(x * 2, tiles))
    for out_axis in (0, 1):
        out = jax.vmap(f, 0, out_axis)(f32(2, 8))
        np.testing.assert_array_equal(out, np.moveaxis(f32(2, 8) * 2, 0, out_axis))
        assert out.sharding.shard_shape(out.shape)[1 - out_axis] == 2


@pytest.mark.slow
def test_vmap_works_inside_and_over_control_flow(mesh):
    named = NamedSharding(mesh, P("x"))
    times = pjit(lambda c, a: c * a, in_shardings=named)
    out, _ = jax.lax.scan(lambda c, a: (jax.vmap(times)(c, a), None), f32(3, 8), f32(2, 3, 8))
    np.testing.assert_allclose(out, f32(3, 8) * f32(2, 3, 8).prod(0), rtol=1e-5)
    chosen = pjit(lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x), in_shardings=(None, named))
    out = jax.vmap(chosen)(np.array([True, False]), f32(2, 8))
    np.testing.assert_allclose(out, [np.sin(f32(2, 8)[0]), np.cos(f32(2, 8)[1])], rtol=1e-5)
    counted = pjit(lambda n: jax.lax.fori_loop(0, n, lambda i, c: c + i, 0))
    np.testing.assert_array_equal(jax.vmap(counted)(np.arange(4)), [0, 0, 1, 3])


def test_an_empty_batch(mesh):
    f = pjit(jnp.sin, in_shardings=NamedSharding(mesh, P("x")))
    assert jax.vmap(f)(np.zeros((0, 8), np.float32)).shape == (0, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        lambda place: {"device": place.devices[0]},
        lambda place: {"in_shardings": place},
        lambda place: {"out_shardings": place},
    ],
    ids=["device", "in_shardings", "out_shardings"],
)
def test_batch_stays_on_the_requested_device(options):
    place = SingleDeviceSharding(jax.devices()[3])
    double = pjit(lambda x: x * 2, **options(place))
    assert jax.vmap(double)(f32(4, 3)).sharding == place
    assert jax.jit(jax.vmap(double))(f32(4, 3)).sharding == place
    assert jax.vmap(jax.vmap(double))(f32(2, 4, 3)).sharding == place
    assert jax.jacfwd(double)(f32(3)).sharding == place


def test_spmd_axis_name_is_refused_for_a_single_device_sharding(mesh):
    place = SingleDeviceSharding(jax.devices()[3])
    double = pjit(lambda x: x * 2, out_shardings=place)
    with pytest.raises(
        ResourceError, match=naming("'x'", "spmd_axis_name", "cpu:3", "NamedSharding(mesh, P())")
    ):
        jax.vmap(double, spmd_axis_name="x")(f32(4, 3))
