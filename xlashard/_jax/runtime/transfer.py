"""Move values between host memory, buffers, handles and DLPack, and reshard handles in place."""

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xlashard._jax import originals
from xlashard._jax.error_classes import find_error_class
from xlashard._jax.private import (
    core,
    dlpack,
    lib_jax,
    pxla,
    read_lazily,
    sharding_impls,
    xc,
)
from xlashard._jax.runtime.global_state import WIDE
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.topologies import check_can_hold_arrays

type Handle = Any
type Aval = Any
type JaxSharding = jax.sharding.Sharding

if TYPE_CHECKING:
    Tracer = core.Tracer
else:
    Tracer = jax.core.Tracer

if TYPE_CHECKING:
    HandleType: Any
    """Class of buffer handles."""
else:
    __getattr__ = read_lazily(globals(), {"HandleType": lambda: xc.ArrayImpl})


def is_unnamed_result(error: BaseException) -> bool:
    """Return True for JAX's error for a result without a spec on the mesh of the arguments."""
    known = find_error_class("IndivisibleError")
    return known is not None and isinstance(error, known)


ALIGNMENT = 64
"""Alignment of the CPU client's zero-copy buffers, in bytes."""

# Bytes; unused blocks are freed before a new block of this size is allocated.
_WORTH_COLLECTING = 1 << 20


@lru_cache(maxsize=4096)
def make_aval(
    shape: tuple[int, ...], dtype: Any, sharding: JaxSharding, weak_type: bool = False
) -> Aval:
    """Return the abstract value of an array; it contains a mesh with explicit axes."""
    aval = jax.core.ShapedArray(shape, dtype, weak_type=weak_type)
    return core.update_aval_with_sharding(aval, sharding)


def aval_of(value: Any) -> Aval:
    """Return the abstract value of an array for JAX; raises `TypeError` for any other object."""
    return jax.typeof(value)


def default_device() -> Device:
    """Return the device of uncommitted values."""
    return pxla.get_default_device()


def split(handle: Handle) -> Sequence[Handle]:
    """Return one handle per addressable device, in the device assignment's order; shares memory."""
    return handle._arrays


_ONE_DEVICE = re.compile(r"\{maximal device=(\d+)\}")


def callback_result(value: Any) -> Any:
    """Replicate a result of a callback in `jax.jit`, whose data is on one of its devices only.

    XLA places the result as maximal: buffers exist on all devices, and one of them is written.
    Other values, and a result whose device belongs to another process, come back as they are.
    """
    if type(value) is not xc.ArrayImpl or type(value.sharding) is not sharding_impls.GSPMDSharding:
        return value
    sharding = value.sharding
    match = _ONE_DEVICE.search(str(sharding._hlo_sharding))
    if match is None or sharding.num_devices == 1 or value.is_deleted():
        return value
    device = sharding._device_assignment[int(match[1])]
    pieces = [shard.data for shard in value.addressable_shards if shard.device == device]
    if not pieces:
        return value
    whole = sharding_impls.GSPMDSharding.get_replicated(
        sharding._device_assignment, memory_kind=sharding.memory_kind
    )
    return originals.device_put(pieces[0], whole)


def base_handle(value: Any) -> Handle | None:
    """Return the handle of a handle or of a key array, and None for any other value."""
    if type(value) is xc.ArrayImpl:
        return value
    base = getattr(value, "_base_array", None)
    return base if type(base) is xc.ArrayImpl else None


def lacks_buffer(handle: Handle) -> bool:
    """Return True if a handle is deleted, or if one of its shards was deleted or donated alone."""
    # The runtime looks at the first of the buffers only. A deleted handle has none, as has one
    # without devices in this process.
    return any([part.is_deleted() for part in handle._arrays or (handle,)])


def list_buffers(handles: Sequence[Handle]) -> list[Sequence[Handle]]:
    """Return the shards of each handle in this process; for one without shards the handle."""
    return [handle._arrays or (handle,) for handle in handles]


def any_deleted(buffers: Sequence[Sequence[Handle]]) -> bool:
    """Return True if one of the buffers of some handles is deleted."""
    # A call of Python for each handle would take as long as the reads.
    return any(map(xc.ArrayImpl.is_deleted, chain.from_iterable(buffers)))


def any_lacks_buffer(handles: Sequence[Handle]) -> bool:
    """Return True if one of some handles lacks a buffer."""
    return any_deleted(list_buffers(handles))


def shared_pair(handles: Sequence[Handle], donated: Collection[int]) -> tuple[int, int] | None:
    """Return the positions of two handles that share a buffer, of which one is donated.

    Waits for no result that is still being computed.

    Args:
        handles: The handles.
        donated: The positions of the donated ones.

    Returns:
        The two positions in order; twice the same one for a handle that lacks one of its buffers;
        None if there are neither.
    """
    # A buffer has one shape, so pieces of other shapes need no look.
    kinds = list(map(_piece_kind, handles))
    donated_kinds = {kinds[i] for i in donated}
    first: dict[Any, int] = {}
    alive = []
    for i, handle in enumerate(handles):
        if kinds[i] not in donated_kinds:
            continue
        if lacks_buffer(handle):
            return i, i
        buffers = _buffers_by_key(handle)
        alive.append(buffers)  # else another one could get its address
        for key in buffers:
            j = first.setdefault(key, i)
            if j != i and (i in donated or j in donated):
                return j, i
    return None


def any_shared(first: Handle, second: Handle) -> bool:
    """Return True if two handles share a buffer."""
    return first is second or not _buffers_by_key(first).keys().isdisjoint(_buffers_by_key(second))


def _piece_kind(handle: Handle) -> tuple[Any, ...]:
    return handle.dtype, handle.sharding.shard_shape(handle.shape)


def _buffers_by_key(handle: Handle) -> dict[Any, Any]:
    """Return objects that keep the buffers of a handle alive, by what identifies each buffer.

    Two buffers may be windows on one block of the host's memory, which XLA copies before it writes:
    an address in memory is used only where the runtime does not expose its buffers.
    """
    parts = handle._arrays
    try:
        buffers = [part.unsafe_raw_buffer() for part in parts]
    except (AttributeError, jax.errors.JaxRuntimeError):
        return {(part.sharding, part.unsafe_buffer_pointer()): part for part in parts}
    return {buffer.ptr: buffer for buffer in buffers}


def assemble(
    aval: Aval, sharding: JaxSharding, buffers: Sequence[Handle], *, committed: bool = True
) -> Handle:
    """Return a handle over single-device handles in the order of the device assignment.

    Nothing is checked or copied; shares memory.
    """
    return xc.ArrayImpl(aval, sharding, list(buffers), committed=committed, _skip_checks=True)


def put(
    aval: Aval,
    sharding: JaxSharding,
    pieces: Sequence[Any],
    devices: Sequence[Device],
    *,
    committed: bool = True,
    alias: bool = False,
    fresh: bool = False,
) -> Handle:
    """Put one piece on each device in one call, and return a handle over them.

    Args:
        aval: The abstract value of the whole.
        sharding: JAX's sharding, with the memory kind.
        pieces: NumPy arrays, `separate` ones unless they may be aliased, or single-device handles.
        devices: The local devices of the sharding, in its order.
        committed: True if computations must stay on these devices.
        alias: True if the buffers may be the host memory itself, which then must never change.
            Otherwise the host memory is free for other use on return.
        fresh: True to copy also handles that are on their device already; else they are shared.
    """
    semantics = xc.HostBufferSemantics
    kept = semantics.ZERO_COPY if alias else semantics.IMMUTABLE_ONLY_DURING_CALL
    args = aval, sharding, list(pieces), list(devices), committed, fresh, kept
    try:
        if aval.dtype in WIDE and not jax.config.jax_enable_x64:
            # It was created under enable_x64; jaxlib would transfer half of its bits.
            with jax.enable_x64(True):
                return xc.batched_device_put(*args)
        return xc.batched_device_put(*args)
    except jax.errors.JaxRuntimeError:
        check_can_hold_arrays(devices)
        raise


def separate(pieces: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Return pieces at distinct addresses; copies, if some share their address.

    Empty and broadcast views share an address, and jaxlib fails on them unless it may alias them.
    """
    if len({piece.ctypes.data for piece in pieces}) == len(pieces):
        return pieces
    return [piece.copy() for piece in pieces]


def copy_to(handle: Handle, sharding: JaxSharding, *, fresh: bool = False) -> Handle:
    """Copy shards, in their order, to the devices and the memory of another sharding.

    Args:
        handle: The source.
        sharding: A sharding of as many devices.
        fresh: True to copy also shards that are in place already; else they are shared.
    """
    semantics = xc.ArrayCopySemantics
    how = semantics.ALWAYS_COPY if fresh else semantics.REUSE_INPUT
    if handle.sharding.is_fully_addressable and sharding.is_fully_addressable:
        devices = sharding._internal_device_list
        try:
            return xc.batched_copy_array_to_devices_with_sharding(
                [handle], [devices], [sharding], [how]
            )[0]
        except jax.errors.JaxRuntimeError:
            check_can_hold_arrays(sharding._device_assignment)
            raise
    # jaxlib copies to every device, and supports local devices only.
    kind = sharding.memory_kind
    alone = [
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        for device in sharding._addressable_device_assignment
    ]
    copies = xc.batched_copy_array_to_devices_with_sharding(
        list(split(handle)), [s._internal_device_list for s in alone], alone, [how] * len(alone)
    )
    aval = make_aval(handle.shape, handle.dtype, sharding, handle.weak_type)
    return assemble(aval, sharding, copies, committed=handle.committed)


def with_sharding(
    handle: Handle,
    sharding: JaxSharding,
    *,
    committed: bool | None = None,
    weak_type: bool | None = None,
) -> Handle:
    """Return a handle of the same buffers under an equivalent sharding.

    Args:
        handle: The source.
        sharding: A sharding of the same devices in the same order.
        committed: True if computations must stay on them; by default as the source.
        weak_type: True if the dtype is weak; by default as the source.
    """
    weak = handle.weak_type if weak_type is None else weak_type
    bound = handle.committed if committed is None else committed
    aval = make_aval(handle.shape, handle.dtype, sharding, weak)
    return assemble(aval, sharding, split(handle), committed=bound)


def run_one(executable: Any, handles: Sequence[Handle], handler: Any) -> Handle:
    """Run a program of one result, and return its handle."""
    return executable.execute_sharded(list(handles)).consume_with_handlers([handler])[0]


def deleted_like(handle: Handle) -> Handle:
    """Return a deleted handle of the same type and sharding, with buffers of its own."""
    empty = np.empty(0, handle.dtype) if handle.dtype not in WIDE else np.empty(0, np.int8)
    buffers = [
        originals.device_put(empty, d) for d in handle.sharding._addressable_device_assignment
    ]
    dead = assemble(handle.aval, handle.sharding, buffers, committed=handle.committed)
    dead.delete()
    return dead


def first_replica(handle: Handle) -> Handle:
    """Return one device's buffer of a replicated handle; faster than `split`."""
    return handle._fully_replicated_shard()


def host_view(handle: Handle) -> tuple[np.ndarray, bool]:
    """Return the value of a single-device or replicated handle, and True if it is a copy.

    A value that is no copy (of a CPU's memory) is a view of the buffer and keeps it alive.
    """
    # JAX's own function makes a sharding in Python first, and takes five times as long. Some dtypes
    # are unknown to the buffer protocol.
    if handle.sharding.num_devices == 1 and handle.platform() == "cpu":
        with suppress(BufferError, RuntimeError):
            return np.asarray(memoryview(handle)), False
    return handle._single_device_array_to_np_array_did_copy()


def start_host_copy(handle: Handle) -> None:
    """Start the transfer of a single-device handle to the host."""
    handle._copy_single_device_array_to_host_async()


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return memory that a CPU device can alias."""
    return aligned_blocks(1, shape, dtype)[0, ...]


def aligned_blocks(count: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return several blocks that a CPU device can alias, in one allocation: `[count, *shape]`."""
    dtype = np.dtype(dtype)
    strides = aligned_strides(shape, dtype)
    size = count * strides[0]
    if size >= _WORTH_COLLECTING:
        collect_garbage()
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return np.ndarray((count, *shape), dtype, memory, start, strides)


def aligned_strides(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """Return the strides of aligned blocks of a shape and dtype, in bytes: `[count, *shape]`."""
    strides, size = [], dtype.itemsize
    for extent in reversed(shape):
        strides.append(size)
        size *= extent
    return (-(-size // ALIGNMENT) * ALIGNMENT, *reversed(strides))


def collect_garbage() -> None:
    """Free the host memory of deleted buffers, which jaxlib delays until this call."""
    xc._xla.collect_garbage()


def is_takeable(block: np.ndarray) -> bool:
    """Return True if a CPU device can alias the memory."""
    return block.flags.c_contiguous and block.ctypes.data % ALIGNMENT == 0


@lru_cache(maxsize=256)
def bits_of(dtype: Any) -> int:
    """Return the bits of an element; devices pack elements of less than 8 bits."""
    return jax.dtypes.itemsize_bits(dtype)


# The status alone does not suffice: CPU clients report INTERNAL where a computation allocates, and
# CUDA clients where the driver has none left.
_OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|OUT[ _]OF[ _]MEMORY", re.IGNORECASE)
_REQUESTED = re.compile(r"allocat(?:e|ing) (?:request for )?([\d.]+) ?(bytes|[KMGTP]i?B?)\b")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error reports that the host or a device is out of memory."""
    scarce = isinstance(error, jax.errors.JaxRuntimeError) and _OUT_OF_MEMORY.search(str(error))
    return bool(scarce) or isinstance(error, MemoryError)


def read_requested_bytes(error: BaseException) -> int | None:
    """Return the bytes that an out-of-memory error could not get; None if it has no number."""
    match = _REQUESTED.search(str(error))
    if match is None:
        return None
    return round(float(match[1]) * 1024 ** "bKMGTP".index(match[2][0]))


HOST_MEMORY = 1
"""DLPack's device type of host memory: `kDLCPU`."""


def host_capsule(external: Any, *, copy: bool) -> Any:
    """Return the DLPack capsule of a producer in host memory.

    Args:
        external: Anything with `__dlpack__`.
        copy: True for a contiguous copy that the producer does not share.

    Raises:
        BufferError: If the producer can't export its memory.
    """
    how = {"copy": True} if copy else {}
    try:
        return external.__dlpack__(max_version=dlpack.DLPACK_VERSION, **how)
    except TypeError:
        # The producer predates versions of DLPack.
        return external.__dlpack__(**how)


def handle_of_capsule(capsule: Any, device: Device, *, copy: bool | None) -> Handle:
    """Return a handle over a capsule's memory, and consume the capsule.

    Args:
        capsule: A capsule of host memory.
        device: A CPU device.
        copy: False forbids a copy; None copies unaligned memory.

    Raises:
        ValueError: If the memory is not aligned and `copy` is False.
        RuntimeError: If the memory is not contiguous, or for an unsupported dtype.
    """
    return lib_jax.dlpack_managed_tensor_to_buffer(capsule, device, None, copy, HOST_MEMORY)


def handle_on_device(external: Any, copy: bool | None) -> Handle:
    """Return a handle over the memory of a device, on that device and with its dtype."""
    with jax.enable_x64(True):
        return jax.dlpack.from_dlpack(external, copy=copy)
