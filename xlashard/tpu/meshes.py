"""Meshes laid on the torus of a topology, and where the axes of any mesh lie on it."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from xlashard.errors import TopologyError
from xlashard.tpu.layout import Dimension, Part, lay_out, part


def resolved_sizes(axes: Mapping[str, int], devices: int, where: str) -> dict[str, int]:
    """The sizes of mesh axes, with a number in place of -1.

    Raises:
        TopologyError: If they are not sizes, or not as many devices as there are.
    """
    if not isinstance(axes, Mapping) or not axes:
        raise TopologyError(
            f"the axes of a mesh are names with sizes, not {axes!r}", axes={"data": devices}
        )
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise TopologyError(
                f"mesh axis {name!r} has the size {size!r}; it is a number of devices, at least 1, "
                "or -1 for those that the other axes leave",
                axes=dict(axes) | {name: 1 if -1 in axes.values() else -1},
            )
    free = [name for name, size in axes.items() if size == -1]
    if len(free) > 1:
        raise TopologyError(
            f"mesh axes {free[0]!r} and {free[1]!r} are both -1; one of them can take what the "
            "others leave",
            axes=dict(axes) | dict.fromkeys(free[1:], 1),
        )
    said = math.prod(size for size in axes.values() if size != -1)
    if devices % said if free else said != devices:
        raise _mismatch(axes, devices, where)
    return {name: devices // said if size == -1 else size for name, size in axes.items()}


def mesh_grid(
    grid: npt.NDArray[np.object_],
    dimensions: Sequence[Dimension],
    sizes: Mapping[str, int],
    order: Sequence[str] | None,
) -> npt.NDArray[np.object_]:
    """The devices of a mesh.

    Args:
        grid: All devices by their coordinates.
        dimensions: Of the grid: slices first, the torus, the devices of a chip last.
        sizes: Of the axes, together as many as there are devices.
        order: The axes, the one that talks most first; None for the last axis first.
    """
    names = _by_talk(sizes, order)
    digits = _digits(dimensions, {name: sizes[name] for name in names})
    # Every dimension is cut into what each axis has of it, the part with the longest steps first.
    cuts = [
        sorted(
            ((p.stride, name, p.size) for name, p in digits if p.dimension == dimension.name),
            reverse=True,
        )
        for dimension in dimensions
    ]
    flat = [(name, size) for cut in cuts for _, name, size in cut]
    fine = grid.reshape([size for _, size in flat])
    places = [i for name in sizes for i, (owner, _) in enumerate(flat) if owner == name]
    return fine.transpose(places).reshape(tuple(sizes.values()))


def _digits(dimensions: Sequence[Dimension], sizes: Mapping[str, int]) -> list[tuple[str, Part]]:
    """What each axis has of each dimension; the axes come as they talk, the most first."""
    slices, *torus, cores = dimensions
    left = dict(sizes)
    outer = _shared(slices, left, reversed(left))
    inner = _shared(cores, left, left)
    laid = lay_out(torus, tuple(left.values()))
    middle = [(name, p) for name, parts in zip(left, laid, strict=True) for p in parts]
    return [*outer, *middle, *inner]


def _shared(
    dimension: Dimension, left: dict[str, int], names: Iterable[str]
) -> list[tuple[str, Part]]:
    """Deals one dimension out to the axes, each as much as it can take, and takes it from them."""
    parts, remaining = [], dimension.size
    for name in tuple(names):
        factor = math.gcd(remaining, left[name])
        if factor > 1:
            remaining //= factor
            left[name] //= factor
            parts.append((name, part(dimension, factor, remaining)))
    return parts


def _by_talk(sizes: Mapping[str, int], order: Sequence[str] | None) -> tuple[str, ...]:
    if order is None:
        return tuple(sizes)[::-1]
    if isinstance(order, str) or sorted(order) != sorted(sizes):
        raise TopologyError(
            f"order is {order!r}; it names each mesh axis once, the one that sends the most "
            f"first: order={list(sizes)[::-1]}"
        )
    return tuple(order)


def _mismatch(axes: Mapping[str, int], devices: int, where: str) -> TopologyError:
    said = " x ".join(f"{name}={size}" for name, size in axes.items())
    product = math.prod(size for size in axes.values() if size != -1)
    counts = f"a mesh of {said} has {product:,} devices, and {where} has {devices:,}"
    if -1 in axes.values():
        counts = f"mesh axes {said}: {product:,} doesn't divide the {devices:,} devices of {where}"
    # The first axis that comes out whole is the one to change.
    for name, size in axes.items():
        others = product // size
        if size != -1 and devices % others == 0:
            fitting = devices // others
            if -1 in axes.values():
                fitting = min(_divisors(fitting), key=lambda divisor: abs(divisor - size))
            return TopologyError(counts, axes=dict(axes) | {name: fitting})
    return TopologyError(
        f"{counts}; the size of an axis divides that: {_listed(_divisors(devices))}",
        axes=dict.fromkeys(list(axes)[:1], devices),
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) <= 12:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:8]))}, ... {numbers[-1]}"
