"""Transfers from host memory to devices, and their errors when memory does not suffice."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from xlashard._jax.runtime.global_state import active_guards, cleared_with_jax
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import (
    Handle,
    aligned_blocks,
    assemble,
    aval_of,
    collect_garbage,
    is_out_of_memory,
    make_aval,
    put,
    separate,
)
from xlashard.core.array.placement.copying import (
    Copy,
    MemoryPool,
    StagingBuffer,
    copy_all,
    private_copy,
)
from xlashard.core.array.placement.target import ResolvedSharding
from xlashard.core.sharding import SingleDeviceSharding
from xlashard.errors import ArgumentError, OutOfMemoryError, counted
from xlashard.support.formatting import in_bytes, typed


class HostValue(NamedTuple):
    """A value in host memory.

    Attributes:
        value: The value as a NumPy array.
        dtype: Its dtype on a device.
        weak_type: Whether the dtype is weak, as of a Python number.
    """

    value: np.ndarray
    dtype: np.dtype
    weak_type: bool


def as_host_value(x: Any, name: Callable[[], str]) -> HostValue:
    """Convert a value that NumPy and JAX accept.

    Args:
        x: A NumPy array or number, a Python number, or nested lists of those.
        name: Returns the name of the value in errors.

    Raises:
        ArgumentError: No device can hold the value.
    """
    try:
        if type(x) is np.ndarray:
            return HostValue(x, _device_dtype(x.dtype, jax.config.jax_enable_x64), False)
        x = np.asarray(x) if isinstance(x, list | tuple) else x
        aval, value = aval_of(x), np.asarray(x)
        if value.dtype == object:  # with a shape and a dtype, but without elements
            raise TypeError
        return HostValue(value, aval.dtype, aval.weak_type)
    except (TypeError, ValueError, AttributeError):
        raise ArgumentError(f"{name()} is {_not_a_value(x)}") from None


def _not_a_value(x: Any) -> str:
    """Describe a value that no device can hold, and its replacement."""
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array, and devices hold no masks: write x.filled(0)"
    if isinstance(x, np.ndarray) and x.dtype.byteorder not in "=|":
        native = f"x.astype({x.dtype.newbyteorder('=').name!r})"
        return f"of dtype {x.dtype} with non-native byte order: write {native}"
    described = f"dtype {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
    return (
        f"of {described}, which no device can hold: give numbers or booleans, as NumPy arrays, "
        "Arrays or Python numbers"
    )


@lru_cache(maxsize=256)
def _device_dtype(dtype: np.dtype, wide: bool) -> np.dtype:
    """Return the dtype on devices; `wide` makes the 64-bit setting a part of the key."""
    return aval_of(np.empty(0, dtype)).dtype


def host_value(x: Any, name: Callable[[], str]) -> tuple[np.ndarray, bool]:
    """Convert a value that NumPy and JAX accept to the dtype that JAX gives it.

    Args:
        x: A NumPy array or number, a Python number, or nested lists of those.
        name: Returns the name of the value in errors.

    Returns:
        The value, and whether its dtype is weak.

    Raises:
        ArgumentError: No device can hold the value.
    """
    value, dtype, weak_type = as_host_value(x, name)
    return np.asarray(value, dtype), weak_type


# Up to this many bytes per call jaxlib's own copies are as fast, and it can reuse its memory when
# the array is donated.
_LEFT_TO_JAXLIB = 1 << 16


class HostRoute:
    """Transfer of host values of one shape and dtype to one sharding, cached.

    Args:
        target: The sharding.
        dtype: The dtype on devices.
        weak_type: Whether the dtype is weak.
        committed: Whether the array is committed.

    Attributes:
        target: The sharding.
        dtype: The dtype on devices.
        stage: Staging buffer; None if the devices have memory of their own.
        written: Bytes that one value takes on the devices of this process.
    """

    def __init__(
        self, target: ResolvedSharding, dtype: Any, weak_type: bool = False, committed: bool = True
    ) -> None:
        self.target = target
        self.dtype = dtype
        self._aval = target.aval(dtype, weak_type)
        self._committed = committed
        self.stage = StagingBuffer(target) if target.on_host else None
        self._whole = target.tiling.is_replicated
        self._copies = target.tiling.num_replicas > 1
        self.written = math.prod(target.shard_shape) * dtype.itemsize * len(target.devices)

    def put(self, value: np.ndarray, alias: bool) -> Handle:
        """Slice a value and put each slice on its device.

        Args:
            value: The whole value.
            alias: Whether buffers may alias its memory.
        """
        value = np.asarray(value, self.dtype)
        if self._whole:
            value = private_copy(value) if self._copies and not alias else value
            return self.put_pieces([value] * len(self.target.devices), alias or self._copies)
        pieces = [value[index] for index in self.target.indices]
        if alias:
            return self.put_pieces(pieces, True)
        if self._copies:
            return self.put_pieces(_private(pieces, self.target.tiles), True)
        distinct = value.size and 0 not in value.strides
        return self.put_pieces(pieces if distinct else separate(pieces), False)

    def put_pieces(self, pieces: Sequence[np.ndarray], alias: bool) -> Handle:
        """Put one piece on each device."""
        target = self.target
        return put(
            self._aval,
            target.jax_sharding,
            pieces,
            target.devices,
            committed=self._committed,
            alias=alias,
        )


host_route = cleared_with_jax(lru_cache(maxsize=4096)(HostRoute))
"""Cache of `HostRoute`s."""


class HostPut(NamedTuple):
    """Request to put one host value on devices.

    Attributes:
        value: The whole value; it may be changed after the transfer, unless `alias`.
        route: The transfer.
        alias: Whether buffers may alias the value's memory.
    """

    value: np.ndarray
    route: HostRoute
    alias: bool = False


def put_value(
    value: np.ndarray, target: ResolvedSharding, *, weak_type: bool = False, alias: bool = False
) -> Handle:
    """Put a host value on devices in one transfer.

    Args:
        value: The whole value. It may be changed on return, unless `alias`.
        target: The sharding.
        weak_type: Whether the dtype is weak.
        alias: Whether buffers may alias the value's memory.
    """
    return put_values([HostPut(value, host_route(target, value.dtype, weak_type), alias)])[0]


def put_values(values: Sequence[HostPut]) -> list[Handle]:
    """Put host values on devices.

    For CPU devices all copies are made together, by several threads.

    Raises:
        OutOfMemoryError: The memory does not suffice; no value was placed.
    """
    return place_within_memory(
        lambda: _put_together(values),
        lambda: [memory_required(route.target, route.dtype) for _, route, _ in values],
    )


def _put_together(values: Sequence[HostPut]) -> list[Handle]:
    total = sum([value.route.written for value in values])
    if total <= _LEFT_TO_JAXLIB:
        return [route.put(value, alias) for value, route, alias in values]
    later: list[Copy] = []
    memory = MemoryPool(total)
    staged = [
        None
        if alias or route.stage is None
        else route.stage.pieces(value, route.dtype, memory, later)
        for value, route, alias in values
    ]
    copy_all(later)
    return [
        route.put(value, alias) if pieces is None else route.put_pieces(pieces, True)
        for (value, route, alias), pieces in zip(values, staged, strict=True)
    ]


def _private(pieces: list[np.ndarray], tiles: list[int]) -> list[np.ndarray]:
    """Return private copies, one per tile, which all devices of the tile may alias."""
    copies: dict[int, np.ndarray] = {}
    for tile, piece in zip(tiles, pieces, strict=True):
        if tile not in copies:
            copies[tile] = private_copy(piece)
    return [copies[tile] for tile in tiles]


def stage_piece(
    value: Any, target: ResolvedSharding, numbers: list[int], *, alias: bool = False
) -> dict[int, Any]:
    """Copy one piece out of its producer's memory, onto its devices or next to them.

    Args:
        value: A NumPy array, which may be changed on return unless `alias`, or a single-device
            handle.
        target: Sharding of the whole array.
        numbers: Numbers of the devices of this process that hold the piece.
        alias: Whether buffers may alias the memory of a NumPy array.

    Returns:
        Buffers by device number; for CPU devices the host memory that becomes them.
    """
    devices, kind = target.devices, target.sharding.memory_kind
    if isinstance(value, np.ndarray):
        if not alias and (target.on_host or len(numbers) > 1):
            value = private_copy(value)
            alias = True  # of the copy, which no caller has
        if target.on_host:
            return dict.fromkeys(numbers, value)
    return {n: put_on(devices[n], value, memory_kind=kind, alias=alias) for n in numbers}


class SmallTiles:
    """Host memory for the small tiles of one array, which become the buffers of CPU devices.

    Up to `_LEFT_TO_JAXLIB` bytes the cost is that of the calls for each tile, not of the copies.

    Args:
        target: Sharding of the whole array.
        count: Number of tiles.
    """

    def __init__(self, target: ResolvedSharding, count: int) -> None:
        self._count = count
        self._shape = target.shard_shape
        self._left = count if target.on_host else 0
        self._blocks: np.ndarray | None = None

    def copy(self, value: Any, dtype: Any) -> np.ndarray | None:
        """Return a copy of a tile; None for a tile that must be checked or converted.

        Args:
            value: The tile.
            dtype: Dtype of the array; None for that of the first tile.
        """
        if not self._left or type(value) is not np.ndarray or value.shape != self._shape:
            return None
        if self._blocks is None and not self._allocate(value, dtype):
            self._left = 0
            return None
        blocks: Any = self._blocks
        if value.dtype != blocks.dtype or active_guards() is not None:
            return None
        self._left -= 1
        block = blocks[self._left, ...]
        np.copyto(block, value)
        return block

    def _allocate(self, value: np.ndarray, dtype: Any) -> bool:
        """Allocate the memory if the tiles are small, and of a dtype that devices can hold."""
        if not 0 < value.nbytes * self._count <= _LEFT_TO_JAXLIB or dtype not in (
            None,
            value.dtype,
        ):
            return False
        with suppress(ArgumentError):
            if as_host_value(value, lambda: "it").dtype == value.dtype:
                self._blocks = aligned_blocks(self._count, self._shape, value.dtype)
        return self._blocks is not None


def put_on(
    device: Device,
    value: Any,
    *,
    memory_kind: str | None = None,
    weak_type: bool = False,
    alias: bool = False,
) -> Handle:
    """Put one value on one device.

    Args:
        device: The device.
        value: A NumPy array or a single-device handle.
        memory_kind: Memory of the device; the default one if None.
        weak_type: Whether the dtype is weak.
        alias: Whether the buffer may alias the value's memory.
    """
    alone = SingleDeviceSharding(device, memory_kind=memory_kind).jax_sharding()
    aval = make_aval(value.shape, value.dtype, alone, weak_type)
    return put(aval, alone, [value], [device], alias=alias)


def gather_pieces(pieces: list[Any], dtype: Any, target: ResolvedSharding) -> Handle:
    """Assemble staged pieces, one per device of this process in order, into one handle."""
    aval = target.aval(dtype)
    if not any([isinstance(piece, np.ndarray) for piece in pieces]):
        return assemble(aval, target.jax_sharding, pieces)
    if target.tiling.is_replicated and any(piece is not pieces[0] for piece in pieces):
        # jaxlib would put the first piece on every device; different replicas stay different.
        kind = target.sharding.memory_kind
        where = zip(target.devices, pieces, strict=True)
        alone = [put_on(device, piece, memory_kind=kind, alias=True) for device, piece in where]
        return assemble(aval, target.jax_sharding, alone)
    return put(aval, target.jax_sharding, pieces, target.devices, alias=True)


type MemoryRequired = tuple[ResolvedSharding, int, str]
"""A sharding, the bytes of an array on one device of it, and the array's type as text."""


def memory_required(target: ResolvedSharding, dtype: np.dtype) -> MemoryRequired:
    """Return the memory that an array of a dtype requires under a sharding."""
    size = math.prod(target.shard_shape) * dtype.itemsize
    return target, size, typed(dtype.name, target.shape)


def place_within_memory[R](
    place: Callable[[], R], needed: Callable[[], Sequence[MemoryRequired]]
) -> R:
    """Place arrays, and return what the function returns that places them.

    Args:
        place: Places the arrays.
        needed: Returns the memory that each array requires.

    Raises:
        OutOfMemoryError: The memory does not suffice.
    """
    try:
        return place()
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        scarce = _as_out_of_memory_error(error, needed())
        if scarce is None:
            raise
    raise scarce  # no-catalogue: needs a process with little memory


def _as_out_of_memory_error(
    error: BaseException, needed: Sequence[MemoryRequired]
) -> OutOfMemoryError | None:
    """Return the error to raise instead of an out-of-memory error; None for any other error.

    The frames of the error are dropped with everything that they hold, so that the memory is free
    while the error is handled.

    Args:
        error: The original error.
        needed: Memory that each array requires.
    """
    if not is_out_of_memory(error):
        return None
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__, seen = None, seen.__context__
    collect_garbage()
    each = sum(size for _, size, _ in needed)
    target, _, text = max(needed, key=lambda one: one[1])
    what = (
        f"an Array {text}" if len(needed) == 1 else f"{len(needed):,} Arrays, {text} the largest,"
    )
    devices = counted(len(target.devices), "device")
    shared = ", which share this machine's memory," if target.on_host else ""
    less = (
        "give smaller values, delete() arrays that are not needed, or shard the arrays over more "
        "devices, for example NamedSharding(mesh, P('data'))"
    )
    return OutOfMemoryError(
        f"not enough memory to place {what} on {devices}{shared}: it takes {in_bytes(each)} "
        f"({each:,} bytes) on each; nothing was placed: {less}",
        bytes_per_device=each,
    )
