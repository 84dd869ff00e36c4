"""Indexing: NumPy's values, and no program where a shard is the answer."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from tests.core.array.cases import DEVICES, SHARDINGS, named, same, value
from tests.message_patterns import naming
from xlashard import (
    Array,
    NamedSharding,
    P,
    PmapSharding,
    SingleDeviceSharding,
    device_put,
    device_put_replicated,
    pjit,
)
from xlashard.core.array.array_class import indexing
from xlashard.core.array.placement import reshape
from xlashard.errors import ArgumentError, DeletedError

V = value(np.float32)


def guard(x: Array, index: Any) -> None:
    """Replacement of the fallback path of indexing."""
    raise AssertionError("a program ran")


@pytest.mark.devices(8)
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
    monkeypatch.setattr(indexing, "_get_item", guard)
    part = x[index]
    assert type(part) is Array
    assert same(part, V[index])
    assert len(part.devices()) == 1


@pytest.mark.devices(8)
def test_rows_of_one_shard_run_no_program_in_any_notation(monkeypatch: pytest.MonkeyPatch) -> None:
    x = device_put(V, named("y"))
    monkeypatch.setattr(indexing, "_get_item", guard)
    for index in (slice(2, 4), (slice(2, 4),), (slice(2, 4), ...), (slice(2, 4), slice(None))):
        assert same(x[index], V[2:4])
    with pytest.raises(AssertionError, match="a program ran"):
        x[0:3]


@pytest.mark.devices(8)
@pytest.mark.slow
def test_shard_outlives_its_array_and_is_uncommitted() -> None:
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


# JAX computes with arrays in host memory only where it is specified.
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(SHARDINGS) - {"pinned"}))
def test_basic_indices_equal_numpy(kind: str) -> None:
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


@pytest.mark.slow
@given(index=st.lists(entries, max_size=3).map(tuple))
def test_bounds_of_static_indices_equal_numpy(index: tuple[Any, ...]) -> None:
    v = np.arange(64).reshape(8, 8)
    found = indexing._static_part(index, v.shape)
    if found is None:
        return
    part = v[tuple(slice(a, max(a, b)) for a, b in found.bounds)]
    assert np.array_equal(part.squeeze(found.dropped), v[index])


@pytest.mark.slow
def test_arrays_on_explicit_axes_are_indexed_as_in_jax() -> None:
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    handle = jax.device_put(V, jax.sharding.NamedSharding(mesh, jax.P("a")))
    x = Array.from_jax(handle)
    assert jax.typeof(x).sharding.spec[0] == "a"
    with jax.set_mesh(mesh):
        assert same(x[:, 0:2], V[:, :2])
        assert same(x * 2, V * 2)
        assert same(np.stack([*x]), V) and same(np.stack([*reversed(x)]), V[::-1])
    assert same(np.stack([*x]), V)


@pytest.mark.slow
def test_boolean_and_integer_arrays_index() -> None:
    x = device_put(V, named("x", "y"))
    assert same(x[V > 50], V[V > 50])
    assert same(x[np.array([0, 3])], V[[0, 3]])
    assert same(x[jnp.array([0, 3]), 1], V[[0, 3], 1])
    assert same(x[np.array([0, 3]), :], V[[0, 3]])
    assert DEVICES[0] in x[0].devices()


class Compilations:
    """Counter of XLA compilations. The first execution for a shape includes its compilation."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, seconds: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_the_counter_counts(compilations: Compilations) -> None:
    x = device_put(value(np.float32, (8, 3, 5)), PmapSharding.default((8, 3, 5)))
    assert same(x[2, 1], np.asarray(x)[2, 1])
    assert compilations.count > 0


@pytest.mark.devices(8)
@pytest.mark.parametrize("unstacked", [False, True])
def test_integers_and_slices_that_select_a_shard_compile_nothing(
    compilations: Compilations, unstacked: bool
) -> None:
    v = value(np.float32, (8, 3, 7))
    x = device_put(v, PmapSharding.default(v.shape, unstacked=unstacked))
    for index in (0, 7, -1, np.int64(3), (5, ...), (2, slice(None)), slice(4, 5), (slice(4, 5),)):
        part = x[index]
        assert type(part) is Array
        assert same(part, v[index])
        assert not part.committed
    for number, row in enumerate(x):
        assert same(row, v[number])
        assert row.devices() == {DEVICES[number]}
    assert [same(row, v[7 - n]) for n, row in enumerate(reversed(x))] == [True] * 8
    assert compilations.count == 0


@pytest.mark.devices(8)
@pytest.mark.slow
def test_numbers_in_every_dimension_that_is_cut_into_elements(compilations: Compilations) -> None:
    v = value(np.int32, (2, 11, 4))
    x = device_put(v, named("x", None, "y"))
    assert same(x[1, :, 2], v[1, :, 2])
    assert same(x[-1, ..., -4:-3], v[-1, ..., -4:-3])
    assert same(x[0:1, :, 3], v[0:1, :, 3])
    assert compilations.count == 0
    assert same(x[1], v[1])
    assert same(x[1, 4, 2], v[1, 4, 2])
    assert compilations.count > 0


@pytest.mark.devices(8)
@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "float8_e4m3fn", "complex64", "bool"])
def test_rows_of_every_dtype(dtype: str) -> None:
    v = value(jnp.dtype(dtype), (8, 3))
    x = device_put(v, PmapSharding.default(v.shape))
    assert all(same(row, v[number]) for number, row in enumerate(x))


@pytest.mark.devices(8)
def test_row_outlives_its_array() -> None:
    v = value(np.float32, (8, 4))
    x = device_put(v, PmapSharding.default(v.shape))
    row = x[3]
    x.delete()
    assert same(row, v[3])
    with pytest.raises(DeletedError):
        x[3]


@pytest.mark.devices(8)
def test_an_array_that_is_deleted_on_the_way() -> None:
    x = device_put(V, PmapSharding.default(V.shape))
    rows = iter(x)
    first = next(rows)
    x.delete()
    with pytest.raises(DeletedError, match=naming("float32[8,16]", "delete()")):
        next(rows)
    assert same(first, V[0])


@pytest.mark.devices(8)
def test_weak_types_and_memories_stay() -> None:
    x = device_put_replicated(2.5, DEVICES)
    assert x[1].weak_type
    kinds = [memory.kind for memory in DEVICES[0].addressable_memories()]
    y = device_put(V, PmapSharding.default(V.shape).with_memory_kind(kinds[-1]))
    assert y[2].sharding.memory_kind == kinds[-1]
    assert same(y[2], V[2])


def test_reshaping_a_buffer_by_program_equals_host_reshape() -> None:
    """The path of other platforms, run on a CPU, where the result must be the same."""
    (shard,) = device_put(V[:1], DEVICES[3]).addressable_shards
    for program in (reshape.reshape_by_program, reshape.reshape_buffer):
        out = program(shard.data.to_jax(), (16,))
        assert out.devices() == {DEVICES[3]}
        assert same(out, V[0])
    kinds = [memory.kind for memory in DEVICES[3].addressable_memories()]
    pinned = device_put(V[:1], SingleDeviceSharding(DEVICES[3], memory_kind=kinds[-1]))
    out = reshape.reshape_by_program(pinned.to_jax(), (16,))
    assert out.sharding.memory_kind == kinds[-1]
    assert same(out, V[0])

    @jax.jit
    def traced(t: Any) -> Any:
        row = reshape.reshape_by_program(shard.data.to_jax(), (16,))
        assert not isinstance(row, jax.core.Tracer)
        return row * t

    assert same(traced(np.float32(2)), V[0] * 2)


@pytest.mark.slow
def test_dimensions_longer_than_32_bits() -> None:
    size = 2**31 + 8
    # Read-only pages take no memory, and XLA aliases aligned ones.
    memory = np.zeros(size + 64, np.int8)
    start = -memory.ctypes.data % 64
    host = memory[start : start + size]
    host[:5], host[-8:] = range(3, 8), range(1, 9)
    x = Array.from_jax(jax.dlpack.from_dlpack(host))
    assert x.shape == (size,) and not jax.config.jax_enable_x64
    found = [
        x[2], x[jnp.int32(3)], x[2**31 + 3], x[np.int64(2**31 + 1)], x[-1], x[jnp.int32(-1)],
        next(iter(x)), next(reversed(x)), x.at[2**31 + 3].get(), x.at[jnp.int32(4)].get(),
    ]  # fmt: skip
    assert [int(element) for element in found] == [5, 6, 4, 2, 8, 8, 3, 8, 4, 7]
    assert {element.dtype for element in found} == {np.dtype(np.int8)}
    for index, wanted in (
        (slice(2**31 + 2, 2**31 + 5), [3, 4, 5]),
        (slice(-3, None), [6, 7, 8]),
        (np.array([2, 2**31 + 3, -1]), [5, 4, 8]),
        (np.array([2, -1], np.int32), [5, 8]),
        (jnp.array([2, 4]), [5, 7]),
        ((None, slice(1, 3)), [[4, 5]]),
    ):
        np.testing.assert_array_equal(x[index], wanted)


def test_programs_with_indices_too_short_for_a_dimension() -> None:
    x, i = jax.ShapeDtypeStruct((2**31 + 8,), np.int8), np.int32(3)
    narrow, wide = jax.ShapeDtypeStruct((1,), np.int8), jax.ShapeDtypeStruct((4, 2**31), np.int8)
    for fun, args in (
        (lambda x, i: x[i], (x, i)),
        (lambda x, i: jax.lax.scan(lambda c, _: (c + x[i], None), jnp.int8(0), None, 2)[0], (x, i)),
        (lambda x, u: jax.lax.dynamic_update_slice(x, u, (3,)), (x, narrow)),
    ):
        with pytest.raises(
            ArgumentError,
            match=naming("int8[2147483656]", "int32", "2,147,483,647", "jax_enable_x64"),
        ):
            pjit(fun).lower(*args)
    pjit(lambda x: x[2**31 + 3] + x[-1]).lower(x)
    pjit(lambda x, i: x[i]).lower(wide, i)


@pytest.mark.slow
def test_short_slices_of_long_arrays_are_cut_from_their_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = jax.sharding.Mesh(np.array(DEVICES[:8]).reshape(4, 2), ("x", "y"))
    monkeypatch.setattr(indexing, "_LARGEST", 30)
    value = np.arange(64 * 4, dtype=np.float32).reshape(64, 4)
    indices = [np.s_[3:9], np.s_[14:34, 1:2], np.s_[15:17, 1:3], np.s_[60:64, ..., -1:]]
    for spec in (P("x", "y"), P(None, "y")):
        x = device_put(value, NamedSharding(mesh, spec))
        with monkeypatch.context() as patch:
            patch.setattr(indexing, "_get_item", None)
            for index in indices:
                part = x[index]
                np.testing.assert_array_equal(part, value[index])
                assert len(part.devices()) == 1 and not part.committed
        np.testing.assert_array_equal(x[1:62], value[1:62])  # longer than a shard
        np.testing.assert_array_equal(x[5:5], value[5:5])
