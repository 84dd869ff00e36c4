"""Every form of index that NumPy has, evaluated on the devices, also by `x.at[...]`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from tests.core.array.cases import DEVICES, SHARDINGS, named, same, value
from tests.message_patterns import naming
from xlashard import Array, device_put
from xlashard.errors import DeletedError

V = value(np.int32)
KINDS = ("both", "columns", "single", "half the devices", "listed tiles", "own")
X = {kind: device_put(V, SHARDINGS[kind]) for kind in KINDS}


def numbers(size: int) -> st.SearchStrategy[Any]:
    """Return index arrays of one shape, as NumPy, JAX or xlashard arrays."""
    some = st.lists(st.integers(-size, size - 1), min_size=3, max_size=3).map(np.array)
    one = st.integers(-size, size - 1).map(lambda n: np.array([[n], [0]]))
    forms = st.sampled_from([lambda a: a, jnp.asarray, device_put])
    return st.builds(lambda a, form: form(a), st.one_of(some, one), forms)


def entry(size: int) -> st.SearchStrategy[Any]:
    steps = st.integers(-3, 3).filter(bool)
    bounds = st.integers(-size - 2, size + 2) | st.none()
    cuts = st.builds(slice, bounds, bounds, steps | st.none())
    return st.one_of(st.integers(-size, size - 1), cuts, numbers(size))


@st.composite
def indices(draw: st.DrawFn) -> Any:
    """Draw an index of an array of the shape of `V`."""
    rows, columns = V.shape
    form = draw(st.sampled_from(["one", "two", "mask", "row mask"]))
    if form == "mask":
        return V % draw(st.integers(2, 5)) == 0
    if form == "row mask":
        return draw(st.lists(st.booleans(), min_size=rows, max_size=rows).map(np.array))
    entries = [draw(entry(rows))]
    if form == "two":
        entries.append(draw(entry(columns)))
    for extra in draw(st.lists(st.sampled_from([None, ...]), max_size=2)):
        if extra is None or ... not in [e for e in entries if e is ...]:
            entries.insert(draw(st.integers(0, len(entries))), extra)
    if form == "two" and ... in [e for e in entries if e is ...]:
        # For `...` of zero dimensions NumPy returns an array where a plain index returns a scalar.
        entries = [e for e in entries if e is not ...]
    if len(entries) > 1 or draw(st.booleans()):
        return tuple(entries)
    return entries[0]


def plain(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(plain, index))
    return np.asarray(index) if isinstance(index, jax.Array) else index


@pytest.mark.slow
@settings(max_examples=30)
@given(kind=st.sampled_from(KINDS), index=indices())
def test_every_index_form_equals_numpy(kind: str, index: Any) -> None:
    x, wanted = X[kind], V[plain(index)]
    out = x[index]
    assert type(out) is Array
    assert same(out, wanted)
    # A slice that is one shard is an uncommitted array on one device.
    assert out.devices() == x.devices() or (not out.committed and len(out.devices()) == 1)
    part = x.at[index]
    assert same(part.get(), wanted)
    changed = V.copy()
    changed[plain(index)] = -1
    updated = part.set(-1)
    assert same(updated, changed)
    assert updated.devices() == x.devices() and updated.committed


def test_lists_are_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"use `arr\[array\(seq\)\]`|jnp\.array"):
        X["both"][[0, 1]]


@pytest.mark.slow
def test_indices_out_of_bounds() -> None:
    x = device_put(V.astype(np.float32), named("x", "y"))
    far = device_put(np.array([1, 99]))
    assert same(x.at[far].get(mode="clip"), V[[1, 7]].astype(np.float32))
    assert np.isnan(x.at[far].get(mode="fill")[1]).all()
    assert x.at[far].get(mode="fill", fill_value=-1)[1].tolist() == [-1.0] * 16
    near = x.at[np.array([1, 3])]
    some = V.astype(np.float32)[[1, 3]]
    assert same(near.get(indices_are_sorted=True, unique_indices=True), some)
    assert same(near.get(mode="promise_in_bounds"), some)
    kept = np.where(np.arange(8)[:, None] == 1, 0, V).astype(np.float32)
    assert same(x.at[far].set(0, mode="drop"), kept)
    assert same(x.at[99].set(0), V.astype(np.float32))


UPDATES: dict[str, Callable[[Any], Any]] = {
    "add": lambda at: at.add(2.0),
    "subtract": lambda at: at.subtract(2.0),
    "multiply": lambda at: at.multiply(2.0),
    "mul": lambda at: at.mul(2.0),
    "divide": lambda at: at.divide(2.0),
    "power": lambda at: at.power(2.0),
    "min": lambda at: at.min(20.0),
    "max": lambda at: at.max(20.0),
    "apply": lambda at: at.apply(jnp.negative),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(UPDATES))
def test_updates_add_up_where_an_index_comes_twice(name: str) -> None:
    v = V.astype(np.float32)
    twice = np.array([2, 2, 5])
    out = UPDATES[name](device_put(v, named("x", "y")).at[twice])
    np.testing.assert_allclose(out, UPDATES[name](jnp.asarray(v).at[twice]), rtol=1e-6)
    assert out.devices() == set(DEVICES) and out.committed


@pytest.mark.slow
def test_updates_with_arrays_of_every_kind() -> None:
    x = X["both"]
    row = V[0] + 1
    for given_row in (row, jnp.asarray(row), device_put(row, named("y")), row.tolist()[0]):
        wanted = V.copy()
        wanted[3] = np.asarray(given_row)
        assert same(x.at[3].set(given_row), wanted)
    traced = jax.jit(lambda t: x.at[t].add(x[t]))(3)
    wanted = V.copy()
    wanted[3] *= 2
    assert same(traced, wanted)


@pytest.mark.slow
def test_explicit_axes() -> None:
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = Array.from_jax(jax.device_put(V, jax.P("a")))
        assert same(x[:, 2], V[:, 2])
        assert same(x[:, 1:9:2], V[:, 1:9:2])
        out = x.at[:, 3].set(0)
        assert jax.typeof(out).sharding.spec[0] == "a"


def test_no_array_changes() -> None:
    x = X["both"]
    y = x
    y += 1
    assert y is not x
    assert same(x, V) and same(y, V + 1)
    with pytest.raises(TypeError, match=r"x = x\.at\[index\]\.set\(y\)"):
        x[0] = 1


def test_a_deleted_index_is_named() -> None:
    gone = device_put(np.array([1, 2]), named())
    gone.delete()
    for use in (lambda: X["both"][gone], lambda: X["both"].at[gone].set(0)):
        with pytest.raises(DeletedError, match=naming("int32[2]", "delete()")):
            use()
