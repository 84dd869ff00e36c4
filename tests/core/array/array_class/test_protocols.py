"""Protocols of Python and NumPy that an Array implements."""

import copy
import gc
import pickle
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.array.cases import DEVICES, HALF, named, same, value
from tests.message_patterns import naming
from xlashard import Array, NamedSharding, P, device_put
from xlashard.errors import ArgumentError, DeletedError

ROWS = named("x")


def put(x: Any, sharding: Any = ROWS) -> Array:
    return device_put(x, sharding)


def scalar(x: Any) -> Array:
    return device_put(x, named())


def test_numbers() -> None:
    assert len(put(np.zeros((4, 2)))) == 4
    assert bool(scalar(True)) is True
    assert int(scalar(np.int32(7))) == 7
    assert float(scalar(np.float32(1.5))) == 1.5
    assert float(scalar(jnp.bfloat16(1.5))) == 1.5
    assert complex(scalar(np.complex64(1 + 2j))) == 1 + 2j
    assert [10, 11, 12][scalar(np.int32(1))] == 11
    assert hex(scalar(np.int32(255))) == "0xff"
    assert oct(scalar(np.int32(8))) == "0o10"
    assert range(3)[scalar(np.uint8(2))] == 2


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: len(scalar(1.0)), "dimensions"),
        (lambda: bool(put(np.zeros(2))), "x.any(), x.all() or x.size > 0"),
        (lambda: bool(put(np.zeros(0))), "0 elements"),
        (lambda: int(put(np.zeros(2))), "int(x[index]) or x.tolist()"),
        (lambda: float(put(np.zeros(2))), "float32[2]"),
        (lambda: complex(put(np.zeros(2))), "complex"),
        (lambda: [1][scalar(1.0)], "integer"),
        (lambda: hex(scalar(1.0)), "index"),
        (lambda: oct(put(np.zeros(2, np.int32))), "int32[2]"),
        (lambda: hash(scalar(1.0)), "unhashable"),
        (lambda: iter(scalar(1.0)), "iteration"),
        (lambda: put(np.zeros(2)).__setitem__(0, 1.0), "x = x.at[index].set(y)"),
    ],
)
def test_unsupported_protocols_raise(use: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        use()
    assert text in str(caught.value)


def test_text() -> None:
    x = put(np.array([1, 2], np.int32))
    assert repr(x) == "Array([1, 2], dtype=int32)"
    assert str(x) == "[1 2]"
    assert f"{x}" == "[1 2]"
    assert f"{scalar(np.float32(1.5)):.3f}" == "1.500"
    assert repr(device_put(2.0)) == "Array(2., dtype=float32, weak_type=True)"
    assert repr(put(np.zeros((0, 3)))) == "Array([], shape=(0, 3), dtype=float32)"
    big = put(np.zeros((1024, 1024), np.float32))
    assert repr(big) == "Array(shape=(1024, 1024), dtype=float32)"
    with pytest.raises(TypeError):
        f"{x:.3f}"


def test_long_text_breaks_lines_as_numpy_does() -> None:
    v = np.arange(60, dtype=np.int32)
    text = repr(put(v))
    assert max(map(len, text.splitlines())) <= np.get_printoptions()["linewidth"]
    assert eval(text, {"Array": lambda values, dtype: values, "int32": None}) == v.tolist()


def test_repr_of_a_deleted_array_shows_dtype_and_shape() -> None:
    x = put(np.zeros((4, 2)))
    x.delete()
    assert repr(x) == str(x) == f"{x}" == "Array(float32[4,2], deleted)"


@pytest.mark.slow
def test_iterating_stays_on_the_devices() -> None:
    v = value(np.float32, (130, 4))
    x = put(v, named("x", "y"))
    rows = list(x)
    assert len(rows) == 130
    assert all(type(row) is Array and row.devices() == x.devices() for row in rows)
    assert all(same(row, v[i]) for i, row in enumerate(rows))
    assert all(same(row, v[-1 - i]) for i, row in enumerate(reversed(x)))
    a, b = put(np.arange(2))
    assert (int(a), int(b)) == (0, 1)
    assert list(put(np.zeros((0, 3)))) == []
    assert 3 in put(np.arange(4)) and 9 not in put(np.arange(4))


@pytest.mark.devices(8)
def test_numpy_views_are_read_only() -> None:
    v = value(np.float32)
    x = put(v, named("x", "y"))
    read = np.asarray(x)
    with pytest.raises(ValueError, match="read-only"):
        read[0, 0] = 1
    own = np.array(x)
    own[0, 0] = 100
    assert same(x, v)
    assert np.asarray(x, np.int32).dtype == np.int32
    assert x.__array__() is x.__array__()
    assert x.__array__(copy=True) is not x.__array__()
    with pytest.raises(ValueError, match=naming("Array float32[8,16]", "int32", "copy")):
        x.__array__(np.int32, copy=False)
    assert np.add(x, 1).dtype == np.float32
    assert np.sum(x) == v.sum()
    assert np.concatenate([x, x]).shape == (16, 16)
    assert x.__array_priority__ == 100
    assert np.dtype(x) == np.float32


def test_buffers() -> None:
    v = value(np.float32)
    assert bytes(put(v, named("x", "y"))) == v.tobytes()
    assert memoryview(put(v)).shape == v.shape
    assert memoryview(put(v)).readonly
    with pytest.raises(BufferError, match="bfloat16"):
        memoryview(put(v.astype(jnp.bfloat16)))


def test_items() -> None:
    v = value(np.float32)
    x = put(v)
    assert x.item(3) == v.item(3)
    assert x.item(2, 1) == v.item(2, 1)
    assert scalar(np.int32(4)).item() == 4
    assert x.tobytes("F") == v.tobytes("F")


@pytest.mark.devices(8)
def test_dlpack_export_requires_one_device() -> None:
    v = value(np.float32)
    x = device_put(v, DEVICES[0])
    assert same(np.from_dlpack(x), v)
    assert same(jax.dlpack.from_dlpack(x), v)
    assert x.__dlpack_device__() == x.to_jax().__dlpack_device__()
    for use in (lambda y: y.__dlpack__(), lambda y: y.__dlpack_device__()):
        with pytest.raises(
            BufferError, match=naming("DLPack", "8", "x.addressable_shards[i].data")
        ):
            use(put(v))


def test_dlpack_comes_in() -> None:
    v = value(np.float32)
    x = xlashard.from_dlpack(v)
    assert type(x) is Array and same(x, v)
    y = xlashard.from_dlpack(v, device=DEVICES[2], copy=True)
    assert y.devices() == {DEVICES[2]}


@pytest.mark.devices(8)
def test_cuda_array_interface_exists_on_gpu_devices_only() -> None:
    x = device_put(value(np.float32), DEVICES[0])
    on_cpu = DEVICES[0].platform == "cpu"
    assert hasattr(x, "__cuda_array_interface__") is not on_cpu
    assert x.unsafe_buffer_pointer() == x.to_jax().unsafe_buffer_pointer()
    with pytest.raises(ValueError, match="unsafe_buffer_pointer"):
        put(value(np.float32)).unsafe_buffer_pointer()


def test_pickle_keeps_value_dtype_and_weak_type_not_the_place() -> None:
    x = put(value(jnp.bfloat16), named("x", "y"))
    back = pickle.loads(pickle.dumps(x))
    assert same(back, np.asarray(x))
    assert back.devices() == {jax.devices()[0]}
    assert pickle.loads(pickle.dumps(device_put(1.0))).weak_type
    assert pickle.loads(pickle.dumps({"a": [x]}))["a"][0].dtype == jnp.bfloat16


def test_arrays_compare_by_element() -> None:
    x = put(np.arange(4))
    assert (x == x).tolist() == [True] * 4
    assert (x != 2).tolist() == [True, True, False, True]
    assert (x == None) is False  # noqa: E711
    with pytest.raises(TypeError):
        {x}  # noqa: B018


def test_an_array_without_buffers_names_the_constructors() -> None:
    raw = Array()
    for use in (
        lambda: raw.shape,
        lambda: raw + 1,
        lambda: np.asarray(raw),
        lambda: raw.sum(),
        lambda: raw[0],
        lambda: repr(raw),
        lambda: jnp.sin(raw),
        lambda: jax.jit(lambda x: x)(raw),
        lambda: device_put(raw, DEVICES[0]),
        lambda: raw.delete(),
        lambda: raw.is_deleted(),
    ):
        with pytest.raises(ArgumentError, match=r"Array\(\)"):
            use()


def test_errors_of_removed_attributes_suggest_replacements() -> None:
    x = put(np.zeros(4))
    with pytest.raises(AttributeError, match=r"addressable_data\(0\)"):
        _ = x.device_buffer
    with pytest.raises(AttributeError, match=r"shard\.data for shard in x\.addressable_shards"):
        _ = x.device_buffers
    assert not hasattr(x, "device_buffer")
    with pytest.raises(AttributeError, match="'colour'"):
        _ = x.colour


def test_addressable_data_and_shards() -> None:
    x = device_put(np.arange(8), NamedSharding(HALF, P("z")))
    assert x.addressable_data(-1).devices() == {DEVICES[7]}
    with pytest.raises(IndexError, match=naming("addressable_data(4)", "from 0 to 3")):
        x.addressable_data(4)
    whole = device_put(np.arange(8), NamedSharding(HALF, P()))
    for index in (0, 3, -1, 99, -99):
        for y in (whole, whole.to_jax()):
            assert y.addressable_data(index).devices() == {DEVICES[4]}
    with pytest.raises(ArgumentError, match="integer"):
        whole.addressable_data("0")  # type: ignore[arg-type]
    (first, *_) = x.addressable_shards
    assert repr(first).startswith("Shard(device=")
    assert "index=[0:2]" in repr(first)
    assert x.platform() == DEVICES[0].platform


def test_weak_references() -> None:
    """Weak references work as on JAX's arrays."""
    x = put(np.zeros((4, 2)))
    gone: list[int] = []
    reference = weakref.ref(x)
    weakref.finalize(x, gone.append, 1)
    assert reference() is x
    del x
    gc.collect()
    assert reference() is None
    assert gone == [1]


def test_live_arrays_are_arrays_of_this_package() -> None:
    x = put(np.zeros(4))
    theirs = jax.device_put(np.zeros(3), DEVICES[1])
    doubled = xlashard.pjit(lambda x: x * 2)(x)
    exposed = put(np.zeros(8))
    handle = exposed.to_jax()
    live = xlashard.live_arrays(DEVICES[0].platform)
    assert all(sum(a is y for a in live) == 1 for y in (x, doubled, exposed))
    assert [a.to_jax() is theirs for a in live].count(True) == 1
    assert handle is exposed.to_jax() and all(type(a) is Array for a in live)


def test_from_jax_takes_arrays_only() -> None:
    for wrong in (np.zeros(2), 1.0, jax.random.key(0)):
        with pytest.raises(ArgumentError, match=naming("Array.from_jax", "concrete jax.Array")):
            Array.from_jax(wrong)
    with pytest.raises(ArgumentError, match="Tracer"):
        jax.jit(lambda x: Array.from_jax(x))(1.0)
    x = put(np.zeros(4))
    assert Array.from_jax(x) is x


def test_sharding_of_a_jax_array_is_always_a_jax_class() -> None:
    handle = jax.device_put(np.zeros(4), ROWS)
    assert type(handle.sharding) is NamedSharding
    x = Array.from_jax(handle)
    assert type(x.to_jax().sharding) is jax.sharding.NamedSharding
    assert x.sharding == ROWS


@pytest.mark.devices(8)
@pytest.mark.slow
def test_live_arrays_list_a_buffer_once() -> None:
    gc.collect()
    before = len(xlashard.live_arrays())
    x = put(value(np.float32), named("x", "y"))
    shards = x.addressable_shards
    np.asarray(x)
    again = Array.from_jax(x.to_jax())
    rows = x[:4]
    live = xlashard.live_arrays()
    assert len(live) == before + 2
    assert any(a is x or a is again for a in live)
    assert not any(a.to_jax() is shards[0].data.to_jax() for a in live)
    del live, shards, again
    x.delete()
    assert len(xlashard.live_arrays()) == before + 1
    del rows
    assert len(xlashard.live_arrays()) == before
    keys = device_put(jax.random.split(jax.random.key(0), 8), ROWS)
    assert len(xlashard.live_arrays()) == before + 1
    del keys
    with pytest.raises(RuntimeError, match="nonsense"):
        xlashard.live_arrays("nonsense")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(protocol: int) -> None:
    x = put(value(jnp.bfloat16), named("x", "y"))
    assert same(pickle.loads(pickle.dumps(x, protocol)), np.asarray(x))


def test_out_of_band_pickling_copies_nothing() -> None:
    x = put(value(np.float32), named("x", "y"))
    buffers: list[Any] = []
    data = pickle.dumps(x, 5, buffer_callback=buffers.append)
    assert len(data) < x.nbytes and len(buffers) == 1
    assert same(pickle.loads(data, buffers=buffers), np.asarray(x))


def test_deleted_arrays_can_be_neither_pickled_nor_copied() -> None:
    x = put(np.zeros((4, 2)))
    x.delete()
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(DeletedError, match=r"delete\(\)"):
            use(x)


def test_copies_keep_sharding_and_commitment() -> None:
    for x in (
        put(value(np.float32), named("x", "y")),
        put(value(np.float32), named("x", memory_kind="pinned_host")),
        device_put(1.0),
        device_put(value(np.int32)),
    ):
        for other in (copy.copy(x), copy.deepcopy(x), x.copy()):
            assert other.sharding.is_equivalent_to(x.sharding, x.ndim)
            assert (other.committed, other.weak_type) == (x.committed, x.weak_type)
    a, b = copy.deepcopy([x, x])
    assert a is b
