"""From host memory to devices."""

from typing import Any

import numpy as np

from xlashard._jax.transfer import Handle, aligned_copy, aval_of, make_aval, put
from xlashard.array.placement import Places
from xlashard.errors import ArgumentError
from xlashard.sharding import SingleDeviceSharding


def host_value(x: Any, name: str) -> tuple[np.ndarray, bool]:
    """Anything that NumPy and JAX take for a value, in the dtype that JAX gives it.

    Args:
        x: A NumPy array or number, a Python number, or nested lists of those.
        name: What to call it in an error.

    Returns:
        The value, and whether its dtype is weak.

    Raises:
        ArgumentError: It is no such thing.
    """
    try:
        x = np.asarray(x) if isinstance(x, list | tuple) else x
        aval = aval_of(x)
        return np.asarray(x, aval.dtype), aval.weak_type
    except (TypeError, ValueError, AttributeError):
        described = f"dtype {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
        raise ArgumentError(
            f"{name} is of {described}, which no device can hold: give numbers or booleans, as "
            "NumPy arrays, Arrays or Python numbers"
        ) from None


def put_value(
    value: np.ndarray, target: Places, *, weak_type: bool = False, alias: bool = False
) -> Handle:
    """Cuts a host value and puts each piece on its devices, in one transfer.

    Args:
        value: The whole value. It may change again as soon as this returns, unless `alias`.
        target: Where to.
        weak_type: Whether its dtype is weak.
        alias: Allows buffers that are the value's own memory.
    """
    aval = make_aval(target.shape, value.dtype, target.twin, weak_type)
    devices = target.devices
    if target.tiling.is_replicated:
        pieces = [value] * len(devices)
    else:
        pieces = [value[index] for index in target.indices]
    if not alias and target.tiling.num_replicas > 1:
        pieces, alias = _private(pieces, target.tiles), True
    return put(aval, target.twin, pieces, devices, alias=alias)


def _private(pieces: list[np.ndarray], tiles: list[int]) -> list[np.ndarray]:
    """Copies that nobody else knows, one per tile: all its devices may take that very memory."""
    copies: dict[int, np.ndarray] = {}
    for tile, piece in zip(tiles, pieces, strict=True):
        if tile not in copies:
            copies[tile] = aligned_copy(piece)
    return [copies[tile] for tile in tiles]


def put_piece(
    value: Any, target: Places, numbers: list[int], weak_type: bool = False
) -> dict[int, Handle]:
    """Puts one piece on each of some devices that hold it.

    Args:
        value: The piece, a NumPy array or a single-device handle.
        target: Where the whole goes.
        numbers: Which of this process's devices take it.
        weak_type: Whether the dtype is weak.

    Returns:
        The buffers, by those numbers.
    """
    alias = isinstance(value, np.ndarray) and len(numbers) > 1
    if alias:
        value = aligned_copy(value)
    devices = target.devices
    buffers = {}
    for number in numbers:
        device = devices[number]
        single = _single_twin(device, target)
        aval = make_aval(value.shape, value.dtype, single, weak_type)
        buffers[number] = put(aval, single, [value], [device], alias=alias)
    return buffers


def _single_twin(device: Any, target: Places) -> Any:
    return SingleDeviceSharding(device, memory_kind=target.sharding.memory_kind).twin()
