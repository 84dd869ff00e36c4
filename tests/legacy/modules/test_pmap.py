"""The era's `pmap`: its results have the era's shardings, in every array mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from xlashard import legacy
from xlashard.errors import RefusedError
from xlashard.legacy import DeviceArray, GlobalDeviceArray, ShardedDeviceArray
from xlashard.legacy.modules.toplevel import pmap

ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)


def double(row):
    return {"twice": row * 2, "sum": row.sum()}


@pytest.mark.slow
@pytest.mark.parametrize("jax_array", [True, False])
def test_pmap_results_with_and_without_jax_array(jax_array):
    with legacy.jax_array(jax_array):
        out = pmap(double)(ROWS)
        kinds = {type(x) for x in out.values()}
        assert kinds == {xlashard.Array if jax_array else ShardedDeviceArray}
        np.testing.assert_array_equal(out["twice"], ROWS * 2)
        np.testing.assert_array_equal(out["sum"], ROWS.sum(axis=1))
        for x in out.values():
            assert isinstance(x.sharding, xlashard.PmapSharding)
            assert list(x.sharding.devices) == jax.devices()
        again = pmap(double)(out["twice"])
        np.testing.assert_array_equal(again["twice"], ROWS * 4)


@pytest.mark.slow
@pytest.mark.parametrize("jax_array", [True, False])
def test_integer_index_returns_the_row_of_one_device(jax_array):
    with legacy.jax_array(jax_array):
        x = pmap(lambda row: row + 1)(ROWS)
    assert [row.device for row in x] == jax.devices()
    assert not any(isinstance(row, ShardedDeviceArray) for row in x)
    for number in (0, 5, -1):
        piece = x[number]
        assert piece.device == jax.devices()[number]
        np.testing.assert_array_equal(piece, ROWS[number] + 1)
        assert isinstance(piece, DeviceArray) and not isinstance(piece, ShardedDeviceArray)
    np.testing.assert_array_equal(x[1:3], ROWS[1:3] + 1)
    assert isinstance(x[1:3], ShardedDeviceArray)


@pytest.mark.slow
def test_device_buffers_keep_the_mapped_dimension_by_the_flag():
    f = pmap(lambda row: row + 1)
    with legacy.jax_array(False):
        with legacy.pmap_no_rank_reduction(False):
            assert [b.shape for b in f(ROWS).device_buffers] == [(3,)] * 8
        with legacy.pmap_no_rank_reduction(True):
            assert [b.shape for b in f(ROWS).device_buffers] == [(1, 3)] * 8


@pytest.mark.slow
def test_pmap_supports_axes_devices_names_and_static_arguments():
    x = pmap(lambda row: row, out_axes=1)(ROWS)
    assert x.shape == (3, 8)
    assert x[:, 2].device == jax.devices()[2]
    total = pmap(lambda row: jax.lax.psum(row, "i"), "i", out_axes=None)(ROWS)
    assert total.is_fully_replicated
    np.testing.assert_array_equal(total, ROWS.sum(axis=0))
    two = jax.devices()[3:5]
    some = pmap(lambda row, scale: row * scale, in_axes=(0, None), devices=two)(ROWS[:2], 3.0)
    assert some[1].device == two[1]
    powers = pmap(lambda row, n: row**n, static_broadcasted_argnums=1)(ROWS, 2)
    np.testing.assert_array_equal(powers, ROWS**2)


@pytest.mark.slow
def test_pmap_supports_grad_eval_shape_and_lower():
    def loss(x):
        return pmap(lambda row: (row**2).sum())(x).sum()

    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(ROWS)), 2 * ROWS)
    assert jax.eval_shape(pmap(double), ROWS)["sum"].shape == (8,)
    assert "shard_map" in str(jax.make_jaxpr(pmap(double))(ROWS))
    assert pmap(double).lower(ROWS).compile()(ROWS)["sum"].shape == (8,)


def test_pmap_decorator_keeps_name_and_docstring():
    @pmap
    def step(row):
        """Does it."""
        return row

    assert step.__name__ == "step" and step.__doc__ == "Does it."


def test_jax_pmap_is_replaced_while_legacy_names_are_installed(mesh):
    own = jax.pmap
    with legacy.installed():
        assert jax.pmap is pmap
        assert jax.pmap(lambda row: row)(ROWS)[4].device == jax.devices()[4]
        gda = GlobalDeviceArray.from_callback((8, 3), mesh, ("x",), lambda index: ROWS[index])
        with pytest.raises(RefusedError, match="pmap"):
            jax.pmap(lambda row: row)(gda)
    assert jax.pmap is own
