"""Arrays that stand in for results of programs that are not run, until a value of them is read.

A call that is deferred holds its arguments. Reading a value of its results runs it on the emulated
devices, after the calls before it, and writes the values into the buffers that stand in, so that
whatever shares them has the values too. Where it can't run, zeros stay, which are remembered.
"""

import ctypes
import functools
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from xlashard._jax import originals
from xlashard._jax.runtime.tracebacks import script_line
from xlashard._jax.runtime.transfer import HandleType
from xlashard._jax.trace.jaxprs import is_ref
from xlashard._jax.trace.observed_programs import unobserved


@dataclass(frozen=True)
class StandInRead:
    """A place where a script read results of a program that was not run.

    Attributes:
        program: The program.
        nbytes: Bytes of its arguments and results on all devices.
        reason: Why it can't run on the CPU; empty if its bytes are the reason.
        line: File and line of the script.
    """

    program: Any
    nbytes: int
    reason: str
    line: tuple[str, int]


@dataclass(eq=False)
class DeferredCall:
    """A call of a program that runs once a value of its results is read.

    Attributes:
        program: The program, for the note of a read.
        run: Runs it, and returns the results; None once it has run, or if it can't.
        parents: Deferred calls whose results are among its arguments.
        number: Its number in the order of the script.
        nbytes: Bytes of its arguments and results on all devices.
        results: The arrays that stand in.
        unrun: The call, this or an earlier one, that makes the results zeros; None if they are not.
        reason: Why it can't run on the CPU.
    """

    program: Any
    run: Callable[[], list[Any]] | None
    parents: "Sequence[DeferredCall]"
    number: int
    nbytes: int
    results: Sequence["weakref.ref[Any]"]
    unrun: "DeferredCall | None" = None
    reason: str = ""

    @property
    def has_run(self) -> bool:
        """Return True once its results have their values."""
        return self.run is None and self.unrun is None


class _ReportingThread(threading.local):
    """State of a thread: whether it lowers programs for reports."""

    is_reporting: bool = False


_THREAD = _ReportingThread()

_ALIGNMENT = 64
"""Bytes at whose multiples a CPU device takes the memory of an array without a copy."""

_CALL = "_xlashard_deferred"
"""Attribute of an array: the call that it is a result of, until that has run."""


@contextmanager
def reporting() -> Iterator[None]:
    """Let arrays that stand in have values that differ in this thread, as constants of a module.

    XLA folds a constant whose values are equal, so that zeros would give another program.
    """
    before, _THREAD.is_reporting = _THREAD.is_reporting, True
    try:
        yield
    finally:
        _THREAD.is_reporting = before


@dataclass
class StandInValues:
    """The arrays that stand in for results in this process.

    Attributes:
        reads: The first read of each program that was not run, in their order.
        read_programs: Programs that ran because a result was read.
    """

    reads: list[StandInRead] = field(default_factory=list)
    read_programs: set[Any] = field(default_factory=set)
    _waiting: "weakref.WeakSet[DeferredCall]" = field(default_factory=weakref.WeakSet)
    _count: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _shared: mmap.mmap | None = None

    def begin(self) -> Callable[[], None]:
        """Notice reads of values from now on.

        Returns:
            A function that ends it.
        """
        undo = ExitStack()
        for name in ("_value", "_arrays"):
            kept = getattr(HandleType, name)
            undo.callback(setattr, HandleType, name, kept)
            setattr(HandleType, name, property(self._reading(kept.__get__, name)))
        for name in ("__buffer__", "__dlpack__", "_single_device_array_to_np_array_did_copy"):
            kept = getattr(HandleType, name)
            undo.callback(setattr, HandleType, name, kept)
            setattr(HandleType, name, self._reading(kept, name))
        put = jax.device_put
        undo.callback(setattr, jax, "device_put", put)
        jax.device_put = self._putting(put)
        return undo.close

    def _putting(self, put: Callable[..., Any]) -> Callable[..., Any]:
        """Return `device_put`, whose results have values once those of its arguments are read."""

        @functools.wraps(put)
        def device_put(x: Any, *args: Any, **kwargs: Any) -> Any:
            arrays = jax.tree.leaves(x)
            parents = self.calls(arrays)
            if parents and kwargs.get("donate"):
                self.settle(arrays)
            result = put(x, *args, **kwargs)
            leaves = jax.tree.leaves(result)
            if self.calls(arrays) and not any(isinstance(y, jax.core.Tracer) for y in leaves):
                again = functools.partial(put, x, *args, **kwargs)
                self.defer(parents[0].program, lambda: jax.tree.leaves(again()), arrays, leaves)
            return result

        return device_put

    def _reading(self, read: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a method or a getter of arrays, in front of which their values are computed."""

        def reading(array: Any, *args: Any, **kwargs: Any) -> Any:
            if hasattr(array, _CALL):
                if not _THREAD.is_reporting:
                    self.settle([array])
                elif name == "_value":
                    return different_values(array.shape, array.dtype)
            return read(array, *args, **kwargs)

        return reading

    def calls(self, arguments: Iterable[Any]) -> list[DeferredCall]:
        """Return the deferred calls whose results are among the arguments of another."""
        calls = (getattr(_base(each), _CALL, None) for each in arguments)
        return [c for c in dict.fromkeys(calls) if c is not None and not c.has_run]

    def defer(
        self,
        program: Any,
        run: Callable[[], list[Any]] | None,
        arguments: Sequence[Any],
        results: list[Any],
        reason: str = "",
    ) -> list[Any]:
        """Return arrays as results of a call that runs once one of their values is read.

        Args:
            program: Its program.
            run: Runs it; None if it can't run.
            arguments: Its arguments.
            results: The arrays that stand in, whose buffers are their own if it can run.
            reason: Why it can't run; empty if its bytes are the reason.
        """
        arrays = list(map(_base, results))
        references = [each for each in arguments if is_ref(each)]
        nbytes = sum(map(bytes_on_devices, (*map(_base, arguments), *arrays)))
        with self._lock:
            self._count += 1
            call = DeferredCall(
                *(program, run, self.calls(arguments), self._count, nbytes),
                list(map(weakref.ref, arrays)),
                reason=reason,
            )
            if run is None:
                unrun = (parent.unrun for parent in call.parents)
                call.unrun = next((each for each in unrun if each is not None), call)
            else:
                self._waiting.add(call)
            for array in (*arrays, *references):
                # A program returns an argument as it is.
                if not hasattr(array, _CALL) or is_ref(array):
                    setattr(array, _CALL, call)
        return results

    def settle(self, arguments: Iterable[Any]) -> None:
        """Compute the values of arrays that stand in, and note those that stay zeros."""
        with self._lock:
            for call in self.calls(arguments):
                self._run_up_to(call.number)
                self.read_programs.add(call.program)
                if call.unrun is not None:
                    self._note(call.unrun)

    def settle_all(self) -> None:
        """Run all calls that wait, before another one deletes the arguments that it is donated."""
        with self._lock:
            self._run_up_to(self._count)

    def _run_up_to(self, number: int) -> None:
        # In the order of the script: a later call may donate what an earlier one takes.
        earlier = [each for each in self._waiting if each.number <= number]
        for each in sorted(earlier, key=lambda each: each.number):
            self._run(each)

    def _note(self, call: DeferredCall) -> None:
        if all(read.program is not call.program for read in self.reads):
            line = script_line()
            self.reads.append(StandInRead(call.program, call.nbytes, call.reason, line))

    def _run(self, call: DeferredCall) -> None:
        """Run a call, or note why it can't run."""
        run, call.run = call.run, None
        self._waiting.discard(call)
        call.unrun = next((p.unrun for p in call.parents if p.unrun is not None), None)
        call.parents = ()
        if run is None or call.unrun is not None:
            return
        try:
            with unobserved():
                values = list(map(_base, run()))
            self.read_programs.add(call.program)
        except Exception as error:
            # For instance a kernel for the topology's chips.
            call.unrun, call.reason = call, first_line(error)
            return
        for result, value in zip(call.results, values, strict=True):
            array = result()
            if array is not None and array is not value:
                _write(array, value)

    def zeros(self, aval: Any, sharding: Any, *, is_shared: bool) -> Any:
        """Return a committed array of zeros, which takes no memory until it is written.

        Args:
            aval: Its type; of a PRNG key, its keys are zeros.
            sharding: Its sharding, on emulated devices.
            is_shared: Whether its shards may share read-only memory, which is never written.
        """
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            key_shape = aval.dtype._impl.key_shape
            physical = jax.ShapeDtypeStruct((*aval.shape, *key_shape), np.uint32)
            data = self.zeros(physical, sharding, is_shared=is_shared)
            return jax.random.wrap_key_data(data, impl=aval.dtype._impl.name)
        shape = tuple(sharding.shard_shape(tuple(aval.shape)))
        devices = sharding._addressable_device_assignment
        blocks = self._blocks(shape, np.dtype(aval.dtype), len(devices), is_shared=is_shared)
        shards = list(map(originals.device_put, blocks, devices))
        return originals.make_array_from_single_device_arrays(tuple(aval.shape), sharding, shards)

    def _blocks(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], count: int, *, is_shared: bool
    ) -> list[np.ndarray[Any, Any]]:
        """Return zeros for the shards of an array, which a CPU device takes without a copy."""
        size = int(np.prod(shape, dtype=np.int64))
        nbytes = size * dtype.itemsize
        if nbytes < mmap.PAGESIZE:
            return [np.zeros(shape, dtype) for _ in range(count)]
        # One mapping for all shards: the kernel allows a process 65,530.
        step = 0 if is_shared else -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self._shared if is_shared else None
        if memory is None or len(memory) < nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            access = mmap.PROT_READ if is_shared else mmap.PROT_READ | mmap.PROT_WRITE
            memory = mmap.mmap(-1, step * (count - 1) + nbytes, flags=flags, prot=access)
            if is_shared:
                self._shared = memory
        offsets = [step * number for number in range(count)]
        return [np.frombuffer(memory, dtype, size, offset).reshape(shape) for offset in offsets]


def _base(value: Any) -> Any:
    """Return the array of an `Array` or of PRNG keys; other values as they are."""
    value = getattr(value, "_handle", value)
    return getattr(value, "_base_array", value)


def _write(array: Any, value: Any) -> None:
    """Write values into the buffers of an array, of the same type and on the same devices."""
    if not value.sharding.is_equivalent_to(array.sharding, array.ndim):
        with jax.ensure_compile_time_eval():
            value = originals.device_put(value, array.sharding)
    with suppress(AttributeError):
        delattr(array, _CALL)
    if array.is_deleted():
        return
    jax.block_until_ready(value)
    sources = {source.device: source for source in value._arrays}
    for target in array._arrays:
        source = sources[target.device]
        ctypes.memmove(
            target.unsafe_buffer_pointer(),
            source.unsafe_buffer_pointer(),
            source.on_device_size_in_bytes(),
        )


def bytes_on_devices(value: Any) -> int:
    """Return the bytes of an array on all its devices; 0 for a value that has none."""
    sharding, dtype = getattr(value, "sharding", None), getattr(value, "dtype", None)
    if dtype is None or not isinstance(dtype, np.dtype):
        return 0
    shape = tuple(value.shape)
    if sharding is None:
        return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    shard = sharding.shard_shape(shape)
    return int(np.prod(shard, dtype=np.int64)) * dtype.itemsize * sharding.num_devices


def different_values(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """Return an array whose values are not all equal, if it has several."""
    return np.resize(np.arange(1, 252), tuple(shape)).astype(dtype)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
