"""`pad_to_mesh` and `unpad`: kinds of arrays, dtypes, masks, trees, and programs."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

import xlashard as xs
from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import Array, NamedSharding, P, device_put, explain, pad_to_mesh, pjit, unpad
from xlashard.errors import ArgumentError, MeshError, ResourceError

ABSTRACT = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.sampled_from([None, "x", "y", ("x", "y"), P.UNCONSTRAINED]), max_size=3),
    st.integers(-3, 3),
)
def test_pad_to_mesh_equals_a_numpy_oracle(shape, entries, fill):
    used: set[str] = set()
    spec = []
    for entry in entries[: len(shape)]:
        names = (
            {entry}
            if isinstance(entry, str)
            else set(entry or ())
            if isinstance(entry, tuple)
            else set()
        )
        spec.append(None if names & used else entry)
        used |= names
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape) + 10
    out, mask = pad_to_mesh(x, P(*spec), mesh=ABSTRACT, fill_value=fill, return_mask=True)
    tiles = {None: 1, P.UNCONSTRAINED: 1, "x": 4, "y": 2, ("x", "y"): 8}
    expected = tuple(
        -(-size // tiles[entry]) * tiles[entry]
        for size, entry in zip(shape, [*spec, *[None] * (len(shape) - len(spec))], strict=True)
    )
    assert out.shape == mask.shape == expected and out.dtype == x.dtype and mask.dtype == bool
    np.testing.assert_array_equal(out[mask], x.ravel())
    assert (out[~mask] == fill).all() and mask.sum() == x.size
    np.testing.assert_array_equal(unpad(out, x), x)
    np.testing.assert_array_equal(unpad(out, x.shape), x)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_pad_to_mesh_keeps_host_and_device_arrays(mesh):
    rows = NamedSharding(mesh, P("x"))
    columns = device_put(f32(10, 6), NamedSharding(mesh, P(None, "y")))
    for x in (f32(10, 6), jnp.asarray(f32(10, 6)), device_put(f32(10, 6)), columns):
        out, mask = pad_to_mesh(x, rows, return_mask=True)
        assert out.shape == mask.shape == (12, 6)
        kind = np.ndarray if isinstance(x, np.ndarray) else Array
        assert type(out) is kind and type(mask) is kind
        np.testing.assert_array_equal(out, np.pad(f32(10, 6), ((0, 2), (0, 0))))
        placed = device_put(out, rows)
        assert placed.sharding.shard_shape((12, 6)) == (3, 6)
        back = unpad(placed, x)
        assert type(back) is Array
        np.testing.assert_array_equal(back, f32(10, 6))
    assert pad_to_mesh(columns, P(None, "y"), mesh=mesh) is columns
    with jax.set_mesh(mesh):
        assert pad_to_mesh(f32(3), P("y")).shape == (4,)
        assert pad_to_mesh(f32(3), None).shape == (3,)


def test_shapes_for_preflight(mesh):
    params = {"table": jax.ShapeDtypeStruct((50257, 512), jnp.bfloat16), "bias": f32(3)}
    out, mask = pad_to_mesh(
        params, {"table": P("x"), "bias": None}, mesh=ABSTRACT, return_mask=True
    )
    assert (out["table"].shape, out["table"].dtype) == ((50260, 512), jnp.bfloat16)
    assert mask["table"] == jax.ShapeDtypeStruct((50260, 512), bool) and mask["bias"].all()
    assert unpad(out, params)["table"] == params["table"]


@pytest.mark.slow
def test_pad_to_mesh_works_inside_programs(mesh):
    rows = NamedSharding(mesh, P("x"))

    def mean(x):
        padded, mask = pad_to_mesh(x, rows, return_mask=True)
        padded, mask = xs.with_sharding_constraint((padded, mask), rows, strict=True)
        return unpad(padded * 2, x), padded.mean(where=mask)

    for call in (jax.jit(mean), pjit(mean, strict=True), mean):
        doubled, average = call(f32(10, 6))
        np.testing.assert_array_equal(doubled, f32(10, 6) * 2)
        np.testing.assert_allclose(average, f32(10, 6).mean(), rtol=1e-6)
    grads = jax.jit(jax.grad(lambda x: (pad_to_mesh(x, rows) ** 2).sum()))(f32(10, 6))
    np.testing.assert_allclose(grads, 2 * f32(10, 6))
    assert explain(pjit(mean), f32(10, 6)).unmet == ()


@pytest.mark.devices(8)
@pytest.mark.slow
def test_dtypes_and_fill_values(mesh):
    for dtype in (
        bool,
        np.int8,
        np.uint64,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.int4,
        complex,
    ):
        out = pad_to_mesh(np.ones(3, dtype), P("x"), mesh=mesh, fill_value=1)
        assert out.dtype == dtype and (out == np.ones(4, dtype)).all()
    assert np.isneginf(pad_to_mesh(f32(3), P("x"), mesh=mesh, fill_value=-np.inf)[3])
    assert np.isnan(pad_to_mesh(jnp.ones(3), P("x"), mesh=mesh, fill_value=np.nan)[3])
    tree = {"tokens": np.ones(3, np.int32), "labels": (np.ones(5, np.int32), np.ones(2, np.int32))}
    out = pad_to_mesh(tree, P("x"), mesh=mesh, fill_value={"tokens": 0, "labels": -100})
    assert out["tokens"].tolist() == [1, 1, 1, 0]
    assert [v.min() for v in out["labels"]] == [-100, -100]
    keys = pad_to_mesh(jax.random.split(jax.random.key(0), 3), P("x"), mesh=mesh)
    assert keys.shape == (4,) and jax.random.bits(keys[1]).shape == ()
    for dtype, fill in (
        (np.int32, 0.5),
        (np.int32, np.nan),
        (np.uint8, -1),
        (np.float16, 1e9),
        (np.float32, 1j),
        (bool, 2),
        (np.float32, "x"),
        (np.float32, [1.0]),
    ):
        with pytest.raises(ArgumentError):
            pad_to_mesh({"a": np.ones(3, dtype)}, P("x"), mesh=mesh, fill_value=fill)


def test_errors_name_the_path(mesh):
    with pytest.raises(ArgumentError, match=naming("tree['a']", "str")):
        pad_to_mesh({"a": "text"}, P("x"), mesh=mesh)
    with pytest.raises(ResourceError, match=naming("tree['a'] (float32[3])")):
        pad_to_mesh({"a": f32(3)}, P(None, "x"), mesh=mesh)
    with pytest.raises(MeshError):
        pad_to_mesh(f32(3), P("x"))
    for shapes in ({"a": (5,)}, {"a": (2, 1)}, {"a": 3}, {"b": (2,)}, [f32(2)]):
        with pytest.raises(ArgumentError, match="shapes"):
            unpad({"a": f32(4)}, shapes)
    with pytest.raises(ArgumentError, match="fill_value"):
        pad_to_mesh({"a": f32(3)}, P("x"), mesh=mesh, fill_value={"b": 0})
