"""From host memory to devices."""

from collections.abc import Callable
from typing import Any

import numpy as np

from xlashard._jax.transfer import Handle, aligned_copy, assemble, aval_of, make_aval, put
from xlashard.array.placement import Places
from xlashard.errors import ArgumentError
from xlashard.sharding import SingleDeviceSharding


def host_value(x: Any, name: Callable[[], str]) -> tuple[np.ndarray, bool]:
    """Anything that NumPy and JAX take for a value, in the dtype that JAX gives it.

    Args:
        x: A NumPy array or number, a Python number, or nested lists of those.
        name: Gives what to call it in an error.

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
            f"{name()} is of {described}, which no device can hold: give numbers or booleans, as "
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


def stage_piece(value: Any, target: Places, numbers: list[int]) -> dict[int, Any]:
    """Takes one piece out of its maker's hands, to the devices that hold it or nearly there.

    Args:
        value: A NumPy array, which may change again on return, or a single-device handle.
        target: Where the whole goes.
        numbers: Which of this process's devices take it.

    Returns:
        By those numbers the buffers; for devices whose memory is the host's, what becomes them.
    """
    devices = target.devices
    if isinstance(value, np.ndarray):
        copied = len(numbers) > 1 or devices[numbers[0]].platform == "cpu"
        value = aligned_copy(value) if copied else value
        if devices[numbers[0]].platform == "cpu":
            return dict.fromkeys(numbers, value)
        return {n: _put_one(value, devices[n], target, alias=copied) for n in numbers}
    return {n: _put_one(value, devices[n], target) for n in numbers}


def _put_one(value: Any, device: Any, target: Places, *, alias: bool = False) -> Handle:
    twin = SingleDeviceSharding(device, memory_kind=target.sharding.memory_kind).twin()
    return put(make_aval(value.shape, value.dtype, twin), twin, [value], [device], alias=alias)


def gather_pieces(pieces: list[Any], dtype: Any, target: Places) -> Handle:
    """One handle of staged pieces, one per device of this process in order."""
    aval = make_aval(target.shape, dtype, target.twin)
    if any(isinstance(piece, np.ndarray) for piece in pieces):
        return put(aval, target.twin, pieces, target.devices, alias=True)
    return assemble(aval, target.twin, pieces)
