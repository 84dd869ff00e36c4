"""All specs of a mesh, and a slow definition of host-local arrays, element by element."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xlashard import P


def all_specs(axes: Sequence[str], ndim: int) -> Iterator[P]:
    """Yield every spec of arrays of a rank: any axes, in any order, over any dimensions."""
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            for dims in itertools.combinations_with_replacement(range(ndim), count):
                entries: list[Any] = [
                    tuple(a for a, d in zip(chosen, dims, strict=True) if d == dim)
                    for dim in range(ndim)
                ]
                yield P(*(entry or None for entry in entries))


def axes_of(spec: P, ndim: int) -> Iterator[tuple[str, ...]]:
    """Yield the axes of each dimension."""
    for entry in (*spec, *(None,) * (ndim - len(spec))):
        yield entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def blocks(
    spec: P, shape: Sequence[int], sizes: dict[str, int], at: dict[str, int]
) -> tuple[slice, ...]:
    """Return the tiles of the device at some coordinates of a mesh, numbered in order."""
    out = []
    for length, axes in zip(shape, axes_of(spec, len(shape)), strict=True):
        tile, tiles = 0, 1
        for axis in axes:
            tile, tiles = tile * sizes[axis] + at[axis], tiles * sizes[axis]
        assert length % tiles == 0
        out.append(slice(tile * length // tiles, (tile + 1) * length // tiles))
    return tuple(out)


def local_sizes(mesh: Any, process: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return by axis the number of a process's device coordinates, and the first of them."""
    coordinates = [
        at for at, device in np.ndenumerate(mesh.devices) if device.process_index == process
    ]
    columns = dict(zip(mesh.axis_names, zip(*coordinates, strict=True), strict=True))
    return {a: len(set(c)) for a, c in columns.items()}, {a: min(c) for a, c in columns.items()}


def host_local_part(whole: np.ndarray, mesh: Any, spec: P, process: int) -> np.ndarray:
    """Return the host-local part of an array: the shards of a process, in mesh order."""
    sizes, first = local_sizes(mesh, process)
    shape = []
    for length, axes in zip(whole.shape, axes_of(spec, whole.ndim), strict=True):
        for axis in axes:
            length = length // mesh.shape[axis] * sizes[axis]
        shape.append(length)
    out = np.zeros(shape, whole.dtype)
    for at, device in np.ndenumerate(mesh.devices):
        if device.process_index == process:
            there = dict(zip(mesh.axis_names, at, strict=True))
            here = {axis: c - first[axis] for axis, c in there.items()}
            piece = whole[blocks(spec, whole.shape, mesh.shape, there)]
            out[blocks(spec, shape, sizes, here)] = piece
    return out
