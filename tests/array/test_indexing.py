"""Indexing: NumPy's values, and no program where a shard is the answer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from tests.array.cases import DEVICES, SHARDINGS, named, same, value
from xlashard import Array, device_put
from xlashard.array import indexing

V = value(np.float32)


class Guard:
    """Stands in for the handle's class where indexing falls back on it."""

    def __getitem__(self, index: Any) -> None:
        raise AssertionError("a program ran")


@pytest.mark.parametrize(
    "index",
    [
        (slice(0, 4), slice(4, 8)),
        (slice(4, 8), slice(0, 4)),
        (slice(-4, None), slice(-4, None)),
        (slice(None, 4, 1), slice(12, 100)),
        (..., slice(4, None), slice(8, 12)),
        (slice(0, 4), ..., slice(8, 12)),
    ],
)
def test_a_slice_that_is_a_shard_runs_no_program(
    index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = device_put(V, named("x", "y"))
    monkeypatch.setattr(indexing, "HandleType", Guard)
    part = x[index]
    assert type(part) is Array
    assert same(part, V[index])
    assert len(part.devices()) == 1


def test_rows_that_are_a_shard_need_not_say_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    x = device_put(V, named("y"))
    monkeypatch.setattr(indexing, "HandleType", Guard)
    for index in (slice(2, 4), (slice(2, 4),), (slice(2, 4), ...), (slice(2, 4), slice(None))):
        assert same(x[index], V[2:4])
    with pytest.raises(AssertionError, match="a program ran"):
        x[0:3]


def test_a_shard_outlives_its_array_and_goes_where_others_are() -> None:
    x = device_put(V, named("x"))
    part = x[4:8]
    assert not part.committed
    x.delete()
    assert same(part, V[4:8])
    other = device_put(V[:4], named(None, "y"))
    assert (part + other).devices() == other.devices()


def test_a_shard_in_a_program_is_a_constant_like_any() -> None:
    x = device_put(V, named("x"))
    np.testing.assert_allclose(jax.jit(lambda t: x[4:8] * t)(2.0), V[4:8] * 2)


# JAX computes with arrays in host memory only where it is told to.
@pytest.mark.parametrize("kind", sorted(set(SHARDINGS) - {"pinned"}))
def test_any_index_gives_numpy_s_value(kind: str) -> None:
    x = device_put(V, SHARDINGS[kind])
    for index in (3, -1, (2, 5), (slice(1, 7, 2), slice(None)), (None, 0), ..., slice(0, 0)):
        out = x[index]
        assert type(out) is Array
        assert same(out, V[index])


entries = st.one_of(
    st.integers(-8, 7),
    st.slices(8),
    st.just(None),
    st.just(...),
    st.builds(slice, st.integers(-9, 9) | st.none(), st.integers(-9, 9) | st.none()),
)


@given(index=st.lists(entries, max_size=3).map(tuple))
def test_bounds_are_those_of_numpy(index: tuple[Any, ...]) -> None:
    v = np.arange(64).reshape(8, 8)
    bounds = indexing._static_bounds(index, v.shape)
    if bounds is None:
        return
    part = v[tuple(slice(a, max(a, b)) for a, b in bounds)]
    assert np.array_equal(part, v[index])


def test_explicit_axes_follow_jax_s_rules() -> None:
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    handle = jax.device_put(V, jax.sharding.NamedSharding(mesh, jax.P("a")))
    x = Array.from_jax(handle)
    assert jax.typeof(x).sharding.spec[0] == "a"
    with jax.set_mesh(mesh):
        assert same(x[:, 0:2], V[:, :2])
        assert same(x * 2, V * 2)


def test_boolean_and_integer_arrays_index() -> None:
    x = device_put(V, named("x", "y"))
    assert same(x[V > 50], V[V > 50])
    assert same(x[np.array([0, 3])], V[[0, 3]])
    assert same(x[jnp.array([0, 3]), 1], V[[0, 3], 1])
    assert same(x[np.array([0, 3]), :], V[[0, 3]])
    assert DEVICES[0] in x[0].devices()
