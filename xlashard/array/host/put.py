"""From host memory to devices."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import Handle, assemble, aval_of, make_aval, put, separate
from xlashard.array.host.copying import Copy, copy_all, private_copy
from xlashard.array.host.staging import MemoryPool, StagingBuffer
from xlashard.array.placement.oom import as_out_of_memory_error, memory_required
from xlashard.array.placement.target import ResolvedSharding
from xlashard.errors import ArgumentError
from xlashard.sharding import SingleDeviceSharding


class HostValue(NamedTuple):
    """A value in the host's memory.

    Attributes:
        value: As it was given, as a NumPy array.
        dtype: What it becomes on a device.
        weak_type: Whether that is weak, as of a Python number.
    """

    value: np.ndarray
    dtype: np.dtype
    weak_type: bool


def as_host_value(x: Any, name: Callable[[], str]) -> HostValue:
    """Anything that NumPy and JAX take for a value.

    Args:
        x: A NumPy array or number, a Python number, or nested lists of those.
        name: Gives what to call it in an error.

    Raises:
        ArgumentError: It is no such thing.
    """
    try:
        if type(x) is np.ndarray:
            return HostValue(x, _device_dtype(x.dtype, jax.config.jax_enable_x64), False)
        x = np.asarray(x) if isinstance(x, list | tuple) else x
        aval, value = aval_of(x), np.asarray(x)
        if value.dtype == object:  # It has a shape and a dtype, and no elements.
            raise TypeError
        return HostValue(value, aval.dtype, aval.weak_type)
    except (TypeError, ValueError, AttributeError):
        raise ArgumentError(f"{name()} is {_not_a_value(x)}") from None


def _not_a_value(x: Any) -> str:
    """What something is that no device can hold, and what to give instead."""
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array, and devices hold no masks: write x.filled(0)"
    if isinstance(x, np.ndarray) and x.dtype.byteorder not in "=|":
        native = f"x.astype({x.dtype.newbyteorder('=').name!r})"
        return f"of dtype {x.dtype}, whose bytes are in the other order: write {native}"
    described = f"dtype {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
    return (
        f"of {described}, which no device can hold: give numbers or booleans, as NumPy arrays, "
        "Arrays or Python numbers"
    )


@lru_cache(maxsize=256)
def _device_dtype(dtype: np.dtype, wide: bool) -> np.dtype:
    """What JAX makes of a dtype; whether 64 bits are allowed is part of the question."""
    return aval_of(np.empty(0, dtype)).dtype


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
    given = as_host_value(x, name)
    return np.asarray(given.value, given.dtype), given.weak_type


# Up to so many bytes in one call jaxlib's own copies are as fast as ours; and it can use its own
# memory again where the array is donated.
_LEFT_TO_JAXLIB = 1 << 16


class HostRoute:
    """How host values of one shape and dtype get to one place; made once for all of them.

    Args:
        target: Where to.
        dtype: What the values become.
        weak_type: Whether that is weak.
        committed: Whether computations must stay there.

    Attributes:
        target: The place.
        written: The bytes that one value takes in the memories of this process's devices.
    """

    def __init__(
        self, target: ResolvedSharding, dtype: Any, weak_type: bool = False, committed: bool = True
    ) -> None:
        self.target = target
        self._dtype = dtype
        self._aval = target.aval(dtype, weak_type)
        self._committed = committed
        self._stage = StagingBuffer(target) if target.on_host else None
        self._whole = target.tiling.is_replicated
        self._copies = target.tiling.num_replicas > 1
        self.written = math.prod(target.shard_shape) * dtype.itemsize * len(target.devices)

    def staged(
        self, value: np.ndarray, memory: MemoryPool, later: list[Copy]
    ) -> list[np.ndarray] | None:
        """A block of memory for each device; None where devices have memory of their own.

        Args:
            value: The whole value.
            memory: Gives the blocks.
            later: Takes the copies that fill them.
        """
        stage = self._stage
        return None if stage is None else stage.pieces(value, self._dtype, memory, later)

    @property
    def needed(self) -> tuple[ResolvedSharding, int, str]:
        """The place, the bytes on one device, and the type of the arrays in words."""
        return memory_required(self.target, self._dtype)

    def put(self, value: np.ndarray, alias: bool) -> Handle:
        """Cuts a value and puts each piece on its device.

        Args:
            value: The whole value.
            alias: Allows buffers that are its memory.
        """
        value = np.asarray(value, self._dtype)
        if self._whole:
            value = private_copy(value) if self._copies and not alias else value
            return self.put_pieces([value] * len(self.target.devices), alias or self._copies)
        pieces = [value[index] for index in self.target.indices]
        if alias:
            return self.put_pieces(pieces, True)
        if self._copies:
            return self.put_pieces(_private(pieces, self.target.tiles), True)
        told_apart = value.size and 0 not in value.strides
        return self.put_pieces(pieces if told_apart else separate(pieces), False)

    def put_pieces(self, pieces: Sequence[np.ndarray], alias: bool) -> Handle:
        """Puts one piece on each device; the buffers may be the pieces' memory if `alias`."""
        target = self.target
        return put(
            self._aval,
            target.jax_sharding,
            pieces,
            target.devices,
            committed=self._committed,
            alias=alias,
        )


@cleared_with_jax
@lru_cache(maxsize=4096)
def host_route(
    target: ResolvedSharding, dtype: Any, weak_type: bool = False, committed: bool = True
) -> HostRoute:
    """The route of host values of a dtype to a place."""
    return HostRoute(target, dtype, weak_type, committed)


class HostPut(NamedTuple):
    """One host value to be put on devices.

    Attributes:
        value: The whole value; it may change again once it is put, unless `alias`.
        route: How it gets there.
        alias: Allows buffers that are the value's own memory.
    """

    value: np.ndarray
    route: HostRoute
    alias: bool = False


def put_value(
    value: np.ndarray, target: ResolvedSharding, *, weak_type: bool = False, alias: bool = False
) -> Handle:
    """Cuts a host value and puts each piece on its devices, in one transfer.

    Args:
        value: The whole value. It may change again as soon as this returns, unless `alias`.
        target: Where to.
        weak_type: Whether its dtype is weak.
        alias: Allows buffers that are the value's own memory.
    """
    return put_values([HostPut(value, host_route(target, value.dtype, weak_type), alias)])[0]


def put_values(values: Sequence[HostPut]) -> list[Handle]:
    """Puts host values on devices.

    Where the devices' memory is the host's own, all copies are made together, by several threads.

    Raises:
        OutOfMemoryError: The memory does not suffice; then nothing was placed.
    """
    total = sum([value.route.written for value in values])
    try:
        if total <= _LEFT_TO_JAXLIB:
            return [route.put(value, alias) for value, route, alias in values]
        return _put_together(values, total)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        scarce = as_out_of_memory_error(error, [route.needed for _, route, _ in values])
        if scarce is None:
            raise
    raise scarce  # no-catalogue: needs a process with little memory


def _put_together(values: Sequence[HostPut], total: int) -> list[Handle]:
    later: list[Copy] = []
    memory = MemoryPool(total)
    staged = [
        None if alias else route.staged(value, memory, later) for value, route, alias in values
    ]
    copy_all(later)
    return [
        route.put(value, alias) if pieces is None else route.put_pieces(pieces, True)
        for (value, route, alias), pieces in zip(values, staged, strict=True)
    ]


def _private(pieces: list[np.ndarray], tiles: list[int]) -> list[np.ndarray]:
    """Copies that nobody else knows, one per tile: all its devices may take that very memory."""
    copies: dict[int, np.ndarray] = {}
    for tile, piece in zip(tiles, pieces, strict=True):
        if tile not in copies:
            copies[tile] = private_copy(piece)
    return [copies[tile] for tile in tiles]


def stage_piece(value: Any, target: ResolvedSharding, numbers: list[int]) -> dict[int, Any]:
    """Takes one piece out of its maker's hands, to the devices that hold it or nearly there.

    Args:
        value: A NumPy array, which may change again on return, or a single-device handle.
        target: Where the whole goes.
        numbers: Which of this process's devices take it.

    Returns:
        By those numbers the buffers; for devices whose memory is the host's, what becomes them.
    """
    devices, kind = target.devices, target.sharding.memory_kind
    if isinstance(value, np.ndarray):
        copied = len(numbers) > 1 or devices[numbers[0]].platform == "cpu"
        value = private_copy(value) if copied else value
        if devices[numbers[0]].platform == "cpu":
            return dict.fromkeys(numbers, value)
        return {n: put_on(devices[n], value, memory_kind=kind, alias=copied) for n in numbers}
    return {n: put_on(devices[n], value, memory_kind=kind) for n in numbers}


def put_on(
    device: Device,
    value: Any,
    *,
    memory_kind: str | None = None,
    weak_type: bool = False,
    alias: bool = False,
) -> Handle:
    """Puts one value on one device.

    Args:
        device: The device.
        value: A NumPy array or a single-device handle.
        memory_kind: Which memory of it; the default one if None.
        weak_type: Whether the dtype is weak.
        alias: Allows a buffer that is the value's own memory.
    """
    alone = SingleDeviceSharding(device, memory_kind=memory_kind).twin()
    aval = make_aval(value.shape, value.dtype, alone, weak_type)
    return put(aval, alone, [value], [device], alias=alias)


def gather_pieces(pieces: list[Any], dtype: Any, target: ResolvedSharding) -> Handle:
    """One handle of staged pieces, one per device of this process in order."""
    aval = target.aval(dtype)
    if not any(isinstance(piece, np.ndarray) for piece in pieces):
        return assemble(aval, target.jax_sharding, pieces)
    if target.tiling.is_replicated and any(piece is not pieces[0] for piece in pieces):
        # jaxlib would put the first on every device; a caller who made others wants those there.
        kind = target.sharding.memory_kind
        where = zip(target.devices, pieces, strict=True)
        alone = [put_on(device, piece, memory_kind=kind, alias=True) for device, piece in where]
        return assemble(aval, target.jax_sharding, alone)
    return put(aval, target.jax_sharding, pieces, target.devices, alias=True)
