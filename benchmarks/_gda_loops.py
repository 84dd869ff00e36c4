"""Construction of `GlobalDeviceArray` as of the end of 2022: one Python step per device.

The slices of each dimension are multiplied out into an array of tuples, which is transposed and
repeated until it has the shape of the mesh. Then a loop over all devices of the mesh counts, by
the hash of each index, how often that index occurred before. Arrays are put on their devices one
by one.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

type Index = tuple[slice, ...]


def indices_in_loops(shape: Sequence[int], mesh: Any, spec: Sequence[Any]) -> list[Index]:
    """Return the index of every device of a mesh, in mesh order."""
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    cuts: list[list[slice]] = []
    used: list[str] = []
    for dim, size in enumerate(shape):
        entry = spec[dim] if dim < len(spec) else None
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        used.extend(names)
        if not names:
            cuts.append([slice(None)])
            continue
        parts = int(np.prod([sizes[name] for name in names]))
        step = size // parts
        cuts.append([slice(n * step, (n + 1) * step) for n in range(parts)])
    tiles = np.empty(int(np.prod([len(c) for c in cuts])), dtype=object)
    for number, index in enumerate(itertools.product(*cuts)):
        tiles[number] = index
    tiles = tiles.reshape([sizes[name] for name in used])
    copied = [name for name in mesh.axis_names if name not in used]
    tiles = np.broadcast_to(tiles, [sizes[name] for name in copied] + list(tiles.shape))
    order = [(copied + used).index(name) for name in mesh.axis_names]
    return list(tiles.transpose(order).flat)


def shard_shape_in_loops(shape: Sequence[int], mesh: Any, spec: Sequence[Any]) -> tuple[int, ...]:
    """Return the shard shape."""
    out = []
    for dim, size in enumerate(shape):
        entry = spec[dim] if dim < len(spec) else None
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        out.append(size // int(np.prod([mesh.shape[name] for name in names])))
    return tuple(out)


def indices_replica_ids_in_loops(
    shape: Sequence[int], mesh: Any, spec: Sequence[Any]
) -> dict[Any, tuple[Index, int]]:
    """Return the index of every device, and the number of earlier devices with the same index.

    Raises:
            RuntimeError: The number of distinct indices differs from the number of tiles.
    """
    seen: Counter[int] = Counter()
    different = 0
    out: dict[Any, tuple[Index, int]] = {}
    for device, index in zip(mesh.devices.flat, indices_in_loops(shape, mesh, spec), strict=True):
        key = hash(tuple((cut.start, cut.stop) for cut in index))
        copy = seen[key]
        if copy == 0:
            different += 1
        seen[key] += 1
        out[device] = (index, copy)
    sizes = zip(shape, shard_shape_in_loops(shape, mesh, spec), strict=True)
    if different != int(np.prod([whole // part for whole, part in sizes])):
        raise RuntimeError(f"{different} different indices")
    return out


def from_callback_in_loops(
    shape: Sequence[int], sharding: Any, data_callback: Callable[[Index], Any]
) -> jax.Array:
    """Return an array of shards that are put on their devices one after the other.

    A CPU device aliases NumPy's memory where it can, so the memory must not change afterwards.
    """
    places = indices_replica_ids_in_loops(shape, sharding.mesh, sharding.spec)
    pieces = [
        jax.device_put(data_callback(places[device][0]), device)
        for device in sharding.mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, pieces)
