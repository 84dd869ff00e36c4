"""Shardings, values and constructors of arrays, for all tests of arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from xlashard import (
    Array,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    P,
    PmapSharding,
    Sharding,
    SingleDeviceSharding,
)

DEVICES = jax.devices()
# On one device, arrays have one shard.
MESH = Mesh(np.array(DEVICES).reshape((2, 4) if len(DEVICES) > 1 else (1, 1)), ("x", "y"))
HALF = Mesh(np.array(DEVICES[4:] or DEVICES), ("z",))

DTYPES = {
    name: jnp.dtype(name)
    for name in (
        "float32",
        "int32",
        "bool",
        "bfloat16",
        "complex64",
        "float8_e4m3fn",
        "int4",
        "uint8",
    )
}


class Stripes(Sharding):
    """User-defined sharding: rows over devices in an order of its own."""

    def __init__(self, devices: Sequence[Any], order: Sequence[int]) -> None:
        self._devices = tuple(devices)
        self.order = tuple(order)

    @property
    def devices(self) -> tuple[Any, ...]:
        return self._devices

    def devices_indices_map(self, shape: Sequence[int]) -> Mapping[Any, tuple[slice, ...]]:
        extent = shape[0] // len(self._devices)
        return {
            device: (slice(n * extent, (n + 1) * extent), *(slice(None) for _ in shape[1:]))
            for device, n in zip(self._devices, self.order, strict=True)
        }


class Columns(jax.sharding.Sharding):
    """User-defined sharding by JAX's interface: columns over devices, without a hash."""

    memory_kind = None

    def __init__(self, devices: Sequence[Any]) -> None:
        super().__init__()
        self._devices = tuple(devices)

    @property
    def device_set(self) -> set[Any]:
        return set(self._devices)

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Any, tuple[slice, ...]]:
        extent = global_shape[1] // len(self._devices)
        cuts = [slice(n * extent, (n + 1) * extent) for n in range(len(self._devices))]
        return {device: (slice(None), cut) for device, cut in zip(self._devices, cuts, strict=True)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and self._devices == other._devices


def named(*spec: Any, mesh: Mesh = MESH, **rest: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*spec), **rest)


class _Shardings(dict[str, Any]):
    """Shardings by name, without those that need more devices than there are."""

    def __missing__(self, name: str) -> Any:
        pytest.skip(f"{name} needs eight devices", allow_module_level=True)


SHARDINGS = _Shardings(
    {
        "rows": named(("x", "y")),
        "columns": named(None, "y"),
        "both": named("x", "y"),
        "partly replicated": named("y"),
        "replicated": named(),
        "single": SingleDeviceSharding(DEVICES[:4][-1]),
        "half the devices": NamedSharding(HALF, P("z")),
        "permuted mesh": NamedSharding(Mesh(MESH.devices.T[::-1], ("y", "x")), P("x", "y")),
        "pinned": named("x", memory_kind="pinned_host"),
        "jax's own": jax.sharding.NamedSharding(MESH, P("x")),
    }
)
if len(DEVICES) == 8:
    SHARDINGS |= {
        "bare tiles": GSPMDSharding(DEVICES, "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"),
        "listed tiles": GSPMDSharding(DEVICES, "{devices=[4,2]3,1,0,2,7,5,6,4}"),
        "pmap": PmapSharding.default((8, 16), devices=DEVICES),
        "pmap unstacked": PmapSharding.default((8, 16), devices=DEVICES[::-1], unstacked=True),
        "own": Stripes(DEVICES[:4], (2, 0, 3, 1)),
        "own of JAX's interface": Columns(DEVICES[7::-2]),
    }

SHAPE = (8, 16)


def value(dtype: Any, shape: Sequence[int] = SHAPE) -> np.ndarray:
    """Return distinct numbers where the dtype has enough of them."""
    count = int(np.prod(shape))
    numbers = np.arange(count) % 7 if np.dtype(dtype).itemsize == 1 else np.arange(count)
    if dtype == np.complex64:
        numbers = numbers + 2j * numbers
    return numbers.astype(dtype).reshape(shape)


def by_callback(v: np.ndarray, s: Any) -> Array:
    return xlashard.make_array_from_callback(v.shape, s, lambda index: v[index])


def by_single_device_arrays(v: np.ndarray, s: Any) -> Array:
    kind = getattr(s, "memory_kind", None)
    pieces = [
        xlashard.device_put(v[index], SingleDeviceSharding(device, memory_kind=kind))
        for device, index in s.devices_indices_map(v.shape).items()
    ]
    return xlashard.make_array_from_single_device_arrays(v.shape, s, pieces[::-1])


def by_local_data(v: np.ndarray, s: Any) -> Array:
    return xlashard.make_array_from_process_local_data(s, v)


def by_device_put(v: np.ndarray, s: Any) -> Array:
    return xlashard.device_put(v, s)


def by_moving(v: np.ndarray, s: Any) -> Array:
    return xlashard.device_put(xlashard.device_put(v, named(None, "x")), s)


def by_moving_jax(v: np.ndarray, s: Any) -> Array:
    return xlashard.device_put(jnp.asarray(v), s)


def by_dlpack(v: np.ndarray, s: Any) -> Array:
    return xlashard.from_dlpack(v, device=s)


CONSTRUCTORS: dict[str, Callable[[np.ndarray, Any], Array]] = {
    "callback": by_callback,
    "single-device arrays": by_single_device_arrays,
    "process-local data": by_local_data,
    "device_put": by_device_put,
    "moved": by_moving,
    "moved from jax": by_moving_jax,
    "dlpack": by_dlpack,
}


def same(x: Any, v: Any) -> bool:
    """Return whether values are bitwise equal, including dtype and shape."""
    got = np.asarray(x)
    return got.dtype == v.dtype and got.shape == v.shape and got.tobytes() == v.tobytes()
