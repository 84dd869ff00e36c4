"""Between host memory, buffers and handles: what jaxlib offers to move and to dress them."""

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax._src import core, dtypes
from jax._src.interpreters import pxla
from jax._src.lib import xla_client as xc
from jax._src.sharding import IndivisibleError
from jax._src.sharding_impls import GSPMDSharding

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.topologies import check_can_hold_arrays

type Handle = Any
type Aval = Any
type JaxSharding = jax.sharding.Sharding

HandleType: Any = xc.ArrayImpl
"""The class of buffer handles."""

Tracer = core.Tracer

UnnamedResultError = IndivisibleError
"""What JAX raises where no spec on the mesh of the arguments says how a result came out."""

ALIGNMENT = 64
"""Zero-copy buffers of the CPU client must start at a multiple of this address."""

# Bytes; a new block of this size should not stand beside others that nobody needs any more.
_WORTH_COLLECTING = 1 << 20


@lru_cache(maxsize=4096)
def make_aval(
    shape: tuple[int, ...], dtype: Any, sharding: JaxSharding, weak_type: bool = False
) -> Aval:
    """The abstract value of an array that lies so: a mesh with explicit axes shows in it."""
    aval = core.ShapedArray(shape, dtype, weak_type=weak_type)
    return core.update_aval_with_sharding(aval, sharding)


def aval_of(x: Any) -> Aval:
    """The abstract value of anything that JAX takes for an array.

    Raises:
        TypeError: If JAX doesn't.
    """
    return core.typeof(x)


def default_device() -> Device:
    """Where uncommitted values go."""
    return pxla.get_default_device()


def split(handle: Handle) -> Sequence[Handle]:
    """One handle per addressable device, in the order of the device assignment; shares memory."""
    return handle._arrays


_ONE_DEVICE = re.compile(r"\{maximal device=(\d+)\}")


def callback_result(value: Any) -> Any:
    """Replicate a result of a callback in `jax.jit`, whose data is on one of its devices only.

    XLA places the result as maximal: buffers exist on all devices, and one of them is written.
    Other values, and a result whose device belongs to another process, come back as they are.
    """
    if type(value) is not HandleType or type(value.sharding) is not GSPMDSharding:
        return value
    sharding = value.sharding
    found = _ONE_DEVICE.search(str(sharding._hlo_sharding))
    if found is None or sharding.num_devices == 1 or value.is_deleted():
        return value
    device = sharding._device_assignment[int(found[1])]
    pieces = [shard.data for shard in value.addressable_shards if shard.device == device]
    if not pieces:
        return value
    whole = GSPMDSharding.get_replicated(
        sharding._device_assignment, memory_kind=sharding.memory_kind
    )
    return jax.device_put(pieces[0], whole)


def base_handle(value: Any) -> Handle | None:
    """Return the handle of a handle or of a key array, and None for any other value."""
    if type(value) is HandleType:
        return value
    base = getattr(value, "_base_array", None)
    return base if type(base) is HandleType else None


def lacks_buffer(handle: Handle) -> bool:
    """Return True if a handle is deleted, or if one of its shards was deleted or donated alone."""
    # The runtime looks at the first of the buffers only.
    return handle.is_deleted() or any([part.is_deleted() for part in split(handle)])


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
    kinds = {_piece_kind(handles[i]) for i in donated}
    first: dict[Any, int] = {}
    alive = []
    for i, handle in enumerate(handles):
        if _piece_kind(handle) not in kinds:
            continue
        if lacks_buffer(handle):
            return i, i
        for part in split(handle):
            key, buffer = _buffer_key(part)
            alive.append(buffer)  # else another one could get its address
            j = first.setdefault(key, i)
            if j != i and (i in donated or j in donated):
                return j, i
    return None


def _piece_kind(handle: Handle) -> tuple[Any, ...]:
    return handle.dtype, handle.sharding.shard_shape(handle.shape)


def _buffer_key(part: Handle) -> tuple[Any, Any]:
    """Return what identifies the buffer of a single-device handle, and an object that keeps it so.

    Two buffers may be windows on one block of the host's memory, which XLA copies before it writes:
    an address in memory is used only where the runtime does not expose its buffers.
    """
    try:
        buffer = part.unsafe_raw_buffer()
    except (AttributeError, jax.errors.JaxRuntimeError):
        return (part.sharding, part.unsafe_buffer_pointer()), part
    return buffer.ptr, buffer


def assemble(
    aval: Aval, sharding: JaxSharding, buffers: Sequence[Handle], *, committed: bool = True
) -> Handle:
    """One handle over single-device ones, which must stand in the order of the device assignment.

    Nothing is checked or moved; shares memory.
    """
    return HandleType(aval, sharding, list(buffers), committed=committed, _skip_checks=True)


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
    """Puts one piece on each device, all in one call, and makes one handle of them.

    Args:
        aval: Of the whole.
        sharding: JAX's; its memory kind says which memory of the devices.
        pieces: NumPy arrays, `separate` ones unless they may be aliased, or single-device handles.
        devices: This process's devices of the sharding, in its order.
        committed: Whether computations must stay on these devices.
        alias: Allows the buffers to be the host memory itself, which then must never change.
            Otherwise host memory is free for other use on return.
        fresh: Copies also handles that are on their device already; otherwise those are shared.
    """
    semantics = xc.HostBufferSemantics
    kept = semantics.ZERO_COPY if alias else semantics.IMMUTABLE_ONLY_DURING_CALL
    args = aval, sharding, list(pieces), list(devices), committed, fresh, kept
    try:
        if aval.dtype in _WIDE and not jax.config.jax_enable_x64:
            # It was made under the setting; jaxlib would put half of its bits there.
            with jax.enable_x64(True):
                return xc.batched_device_put(*args)
        return xc.batched_device_put(*args)
    except jax.errors.JaxRuntimeError:
        check_can_hold_arrays(devices)
        raise


_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def separate(pieces: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Pieces that don't begin at one address, as views do that are empty or broadcast.

    jaxlib fails on several that do, unless it may alias them; those are copied.
    """
    if len({piece.ctypes.data for piece in pieces}) == len(pieces):
        return pieces
    return [piece.copy() for piece in pieces]


def copy_to(handle: Handle, sharding: JaxSharding, *, fresh: bool = False) -> Handle:
    """The same shards, in the same order, on the devices and in the memory of another sharding.

    Args:
        handle: The source.
        sharding: With as many devices as the source has.
        fresh: Copies also what is there already; otherwise that is shared.
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
    # jaxlib wants to copy to every device, and reaches only those of its own process.
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
    """The same buffers under another sharding that says the same of them.

    Args:
        handle: The source.
        sharding: Of the same devices in the same order.
        committed: Whether computations must stay on them; as of the source, if not given.
        weak_type: Whether the dtype is weak; as of the source, if not given.
    """
    weak = handle.weak_type if weak_type is None else weak_type
    bound = handle.committed if committed is None else committed
    aval = make_aval(handle.shape, handle.dtype, sharding, weak)
    return assemble(aval, sharding, split(handle), committed=bound)


def run_one(executable: Any, handles: Sequence[Handle], handler: Any) -> Handle:
    """Runs a program of one result, which a handler makes a handle of."""
    return executable.execute_sharded(list(handles)).consume_with_handlers([handler])[0]


def deleted_like(handle: Handle) -> Handle:
    """Return a deleted handle of the same type and sharding, with buffers of its own."""
    empty = np.empty(0, handle.dtype) if handle.dtype not in _WIDE else np.empty(0, np.int8)
    buffers = [jax.device_put(empty, d) for d in handle.sharding._addressable_device_assignment]
    dead = assemble(handle.aval, handle.sharding, buffers, committed=handle.committed)
    dead.delete()
    return dead


def first_replica(handle: Handle) -> Handle:
    """One device's buffer of a replicated handle; cheaper than `split` into all of them."""
    return handle._fully_replicated_shard()


def host_view(handle: Handle) -> tuple[np.ndarray, bool]:
    """The value of a single-device or replicated handle, and whether it is a copy of its own.

    Where it isn't (a CPU's memory), it is a window on the buffer and keeps that alive.
    """
    return handle._single_device_array_to_np_array_did_copy()


def start_host_copy(handle: Handle) -> None:
    """Starts the transfer of a single-device handle to the host."""
    handle._copy_single_device_array_to_host_async()


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory that a CPU device can take as its buffer without copying it."""
    return aligned_blocks(1, shape, dtype)[0, ...]


def aligned_blocks(count: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Several such, of one shape, in one allocation: `[count, *shape]`."""
    dtype = np.dtype(dtype)
    strides, size = [], dtype.itemsize
    for extent in reversed(shape):
        strides.append(size)
        size *= extent
    step = -(-size // ALIGNMENT) * ALIGNMENT
    if count * step >= _WORTH_COLLECTING:
        collect_garbage()
    memory = np.empty(count * step + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return np.ndarray((count, *shape), dtype, memory, start, (step, *reversed(strides)))


def collect_garbage() -> None:
    """Lets go of host memory that deleted buffers were; jaxlib puts that off until it is called."""
    xc._xla.collect_garbage()


def is_takeable(block: np.ndarray) -> bool:
    """Whether a CPU device can take the memory as its buffer without copying it."""
    return block.flags.c_contiguous and block.ctypes.data % ALIGNMENT == 0


@lru_cache(maxsize=256)
def bits_of(dtype: Any) -> int:
    """How many bits an element has; devices hold several of those under 8 in one byte."""
    return dtypes.itemsize_bits(dtype)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the host or a device has no memory left."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError)
