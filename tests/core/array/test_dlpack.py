"""DLPack in both directions: ownership and lifetime of memory, and refused inputs."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import xlashard
from tests.core.array.cases import DEVICES, named, same, value
from tests.message_patterns import naming
from xlashard import Array, SingleDeviceSharding, device_put, from_dlpack, pjit
from xlashard.errors import ArgumentError, DLPackError

DLPACK_DTYPES = ("bool", "int8", "uint16", "int32", "float16", "float32", "complex64")
WIDER_DTYPES = (*DLPACK_DTYPES, "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
SUB_BYTE = ("int4", "uint4", "int2", "uint2")


def aligned(v: Any, offset: int = 0) -> np.ndarray:
    """Return a copy that begins `offset` bytes after a multiple of 64."""
    v = np.asarray(v)
    block = np.zeros(v.nbytes + 128, np.uint8)
    start = -block.ctypes.data % 64 + offset
    out = block[start : start + v.nbytes].view(v.dtype).reshape(v.shape)
    out[...] = v
    return out


def shares(x: Array, v: np.ndarray) -> bool:
    return x.unsafe_buffer_pointer() == v.ctypes.data


class Producer:
    """Array of a library other than NumPy, with a `__dlpack__` of its era."""

    def __init__(self, v: np.ndarray) -> None:
        self.v = v

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.v.__dlpack_device__()


class OldProducer(Producer):
    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.v.__dlpack__(stream=stream)


class NewProducer(Producer):
    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, copy: Any = None) -> Any:
        return self.v.__dlpack__(stream=stream, max_version=max_version, copy=copy)


class Elsewhere(Producer):
    """Array in the memory of an Intel device, which DLPack numbers 14."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 14, 0

    def __dlpack__(self, **how: Any) -> Any:
        raise AssertionError


V = value(np.float32)


@pytest.mark.parametrize("kind", [lambda v: v, OldProducer, NewProducer])
@pytest.mark.parametrize(
    ("v", "is_shared"),
    [
        (aligned(V), True),
        (aligned(V).T, True),
        (np.asfortranarray(aligned(V)), None),
        (aligned(V, 4), False),
        (aligned(V)[1:], None),
        (aligned(np.float32(3)), True),
    ],
)
def test_aligned_memory_is_shared(kind: Any, v: np.ndarray, is_shared: bool | None) -> None:
    is_shared = v.ctypes.data % 64 == 0 if is_shared is None else is_shared
    x = from_dlpack(kind(v))
    assert type(x) is Array and same(x, v) and x.committed
    assert shares(x, v) is is_shared
    if is_shared:
        assert shares(from_dlpack(kind(v), copy=False), v)
    else:
        with pytest.raises(DLPackError, match=naming("64 bytes", "copy=False")):
            from_dlpack(kind(v), copy=False)
    own = from_dlpack(kind(v), copy=True)
    assert same(own, v) and not shares(own, v)


@pytest.mark.parametrize(
    "v",
    [
        aligned(V)[:, ::2],
        aligned(V)[::-1],
        aligned(V)[::-2, ::-1],
        np.lib.stride_tricks.as_strided(aligned(V[0]), (4, 16), (0, 4)),
    ],
)
@pytest.mark.parametrize("kind", [lambda v: v, NewProducer])
def test_memory_with_gaps_is_copied(kind: Any, v: np.ndarray) -> None:
    for copy in (None, True):
        x = from_dlpack(kind(v), copy=copy)
        assert same(x, v) and not shares(x, v)
    with pytest.raises(DLPackError, match=naming("gaps or overlaps", "copy=False")):
        from_dlpack(kind(v), copy=False)


def test_gaps_need_a_producer_that_copies() -> None:
    with pytest.raises(DLPackError, match=naming("OldProducer", "gaps", "copy=True")):
        from_dlpack(OldProducer(V[:, ::2]))


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_no_elements_are_shared_by_themselves(shape: tuple[int, ...]) -> None:
    for copy in (None, True, False):
        assert from_dlpack(np.zeros(shape, np.float32), copy=copy).shape == shape
    assert np.from_dlpack(device_put(np.zeros(shape, np.float32))).shape == shape


@pytest.mark.parametrize("name", [*WIDER_DTYPES, *SUB_BYTE, "float4_e2m1fn"])
def test_every_dtype_comes_from_numpy(name: str) -> None:
    v = aligned(value(jnp.dtype(name)))
    x = from_dlpack(v)
    assert x.dtype == v.dtype and same(x, v)
    assert same(from_dlpack(v, copy=True), v)
    if name in WIDER_DTYPES:
        assert shares(x, v) and shares(from_dlpack(v, copy=False), v)


def test_transposed_memory_is_shared_where_numpy_can_describe_its_dtype() -> None:
    v = aligned(value(jnp.bfloat16))
    assert same(from_dlpack(v.T), v.T)
    refused = pytest.raises(DLPackError, match=naming("ndarray bfloat16", "copy=False"))
    try:
        v.__dlpack__()  # Newer releases of NumPy, with newer ones of ml_dtypes.
    except BufferError:
        with refused:
            from_dlpack(v.T, copy=False)
    else:
        assert shares(from_dlpack(v.T, copy=False), v)
    with refused:
        from_dlpack(aligned(v, 2), copy=False)


def test_read_only_memory() -> None:
    v = aligned(V)
    v.flags.writeable = False
    assert shares(from_dlpack(v), v)
    assert not shares(from_dlpack(v, copy=True), v)
    gaps = np.broadcast_to(v[0], (4, 16))
    assert same(from_dlpack(gaps), gaps)
    assert same(from_dlpack(NewProducer(gaps)), gaps)


@pytest.mark.parametrize("wide", [np.int64, np.float64, np.complex128])
def test_64_bits_become_32(wide: Any) -> None:
    v = aligned(np.arange(8).astype(wide))
    x = from_dlpack(v)
    assert x.dtype == jax.dtypes.canonicalize_dtype(wide) and x.tolist() == v.tolist()
    with pytest.raises(DLPackError, match=r"becomes .*32|becomes complex64"):
        from_dlpack(v, copy=False)
    with jax.enable_x64(True):
        assert shares(from_dlpack(v, copy=False), v)


def test_every_cpu_device_shares_aligned_memory() -> None:
    v = aligned(V)
    for place in (DEVICES[2], SingleDeviceSharding(DEVICES[2])):
        x = from_dlpack(v, device=place, copy=False)
        assert x.devices() == {DEVICES[2]} and shares(x, v)
    assert from_dlpack(v).devices() == {DEVICES[0]}
    there = device_put(V, DEVICES[5])
    x = from_dlpack(there)
    assert x.devices() == {DEVICES[5]}
    assert x.unsafe_buffer_pointer() == there.unsafe_buffer_pointer()


def test_from_dlpack_places_the_array_on_any_sharding() -> None:
    v = aligned(V)
    for place in (
        named("x", "y"),
        named(),
        SingleDeviceSharding(DEVICES[1], memory_kind="pinned_host"),
    ):
        x = from_dlpack(v, device=place)
        assert x.sharding == place and same(x, v)
        with pytest.raises(DLPackError, match=naming("from_dlpack", "memory of ", "copy=False")):
            from_dlpack(v, device=place, copy=False)
    by_columns = from_dlpack(v, device=Format(Layout((0, 1)), SingleDeviceSharding(DEVICES[1])))
    assert by_columns.layout.major_to_minor == (0, 1) and same(by_columns, v)


def test_errors_of_invalid_arguments() -> None:
    for wrong in ([1, 2], 1.0, V.__dlpack__()):
        with pytest.raises(
            ArgumentError, match=naming("__dlpack__", "__dlpack_device__", "device_put(x)")
        ):
            from_dlpack(wrong)
    with pytest.raises(ArgumentError, match=naming("device ", "str", "jax.devices()[0]")):
        from_dlpack(V, device="cpu")
    with pytest.raises((TypeError, RuntimeError)):
        from_dlpack(Elsewhere(V))


@pytest.mark.parametrize("name", WIDER_DTYPES)
def test_export_and_import_share_one_buffer(name: str) -> None:
    v = value(jnp.dtype(name))
    x = device_put(v, DEVICES[3])
    for back in (from_dlpack(x), jax.dlpack.from_dlpack(x)):
        assert same(back, v)
        assert back.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    if name in DLPACK_DTYPES:
        out = np.from_dlpack(x)
        assert same(out, v) and shares(x, out)


@pytest.mark.parametrize("name", SUB_BYTE)
def test_sub_byte_dtypes_cannot_be_exported(name: str) -> None:
    x = device_put(value(jnp.dtype(name)), DEVICES[0])
    with pytest.raises(DLPackError, match=rf"Array {name}.*x\.astype\('int8'\)"):
        np.from_dlpack(x)


def test_export_honours_the_arguments_of_consumers() -> None:
    x = device_put(V, DEVICES[3])
    shared = np.from_dlpack(x)
    assert not shared.flags.writeable or "dltensor_versioned" not in repr(
        x.__dlpack__(max_version=(1, 0))
    )
    assert shares(x, np.from_dlpack(x, device="cpu", copy=False))
    assert not np.shares_memory(np.from_dlpack(x, copy=True), shared)
    assert "dltensor" in repr(x.__dlpack__(stream=None, max_version=(0, 8)))
    with pytest.raises(DLPackError, match=r"DLPack device \(2, 0\).*device_put\(x, device\)"):
        x.__dlpack__(dl_device=(2, 0))
    assert x.__dlpack_device__() == x.to_jax().__dlpack_device__()


@pytest.mark.devices(8)
def test_export_from_several_devices_is_refused() -> None:
    for sharding, which in ((named("x"), "in pieces"), (named(), "each of which holds all")):
        x = device_put(V, sharding)
        for use in (lambda x: x.__dlpack__(), lambda x: x.__dlpack_device__(), np.from_dlpack):
            with pytest.raises(BufferError, match=f"on 8, {which}") as caught:
                use(x)
            assert "x.addressable_shards[i].data" in str(caught.value)
        shard = x.addressable_shards[3]
        assert same(np.from_dlpack(shard.data), V[shard.index])


def test_memory_outlives_its_producer() -> None:
    x = from_dlpack(aligned(V))
    gc.collect()
    assert same(x, V)
    x = device_put(V, DEVICES[0])
    out, again = np.from_dlpack(x), from_dlpack(x)
    x.delete()
    gc.collect()
    assert same(out, V) and same(again, V)


def test_donation_leaves_exported_memory_unchanged() -> None:
    double = pjit(lambda x: x * 2, donate_argnums=0)
    x = device_put(V, DEVICES[0])
    out = np.from_dlpack(x)
    result = double(x)
    assert same(out, V) and same(result, V * 2)
    assert result.unsafe_buffer_pointer() != out.ctypes.data
    y = from_dlpack(out)
    assert same(double(y), V * 2)
    assert same(out, V)


def test_exporting_a_deleted_array_is_an_error() -> None:
    x = device_put(V, DEVICES[0])
    x.delete()
    for use in (np.from_dlpack, from_dlpack):
        with pytest.raises(RuntimeError, match=r"delete\(\)"):
            use(x)


@pytest.mark.slow
def test_64_bits_under_x64() -> None:
    """In a process of its own, with the environment variable."""
    code = """
import jax, numpy as np, xlashard
jax.config.update("jax_enable_x64", True)
v = np.arange(64.0)
x = xlashard.from_dlpack(v)
assert x.dtype == np.float64 and np.array_equal(np.from_dlpack(x), v)
"""
    root = Path(xlashard.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=300)
