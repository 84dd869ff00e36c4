"""Leaves that processes exchange, agreement on a call that all make together, named barriers.

If one process skips a call or passes a different tree, the others would wait forever. Processes
therefore exchange a description of the call first, and all of them raise the same error.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from xlashard._jax import originals
from xlashard._jax.runtime import coordination
from xlashard._jax.runtime.transfer import HandleType, Tracer
from xlashard._jax.tree_definitions import leaf_paths
from xlashard.core.array import Array
from xlashard.core.array.array_class.base import check_alive
from xlashard.core.array.array_class.handles import is_key_array, key_handle, keys_over
from xlashard.core.array.placement.put import as_host_value
from xlashard.core.array.placement.read import read_value, start_read
from xlashard.core.array.placement.target import at_path
from xlashard.core.processes import (
    RENDEZVOUS,
    Barrier,
    BarrierTimeoutError,
    NamedValue,
    ValueDifference,
    checked_seconds,
    differences,
)
from xlashard.core.processes.store import quote_key
from xlashard.errors import ArgumentError, ProcessesError, XlashardError
from xlashard.support.formatting import format_by_process, format_processes, typed
from xlashard.support.lazily import dataclass
from xlashard.support.tracebacks import short_tracebacks


@dataclass(eq=False)
class HostLeaf:
    """One leaf of a pytree.

    Attributes:
        path: Path of the leaf, as source text.
        value: Host value in its own dtype; for PRNG keys their key data. None for an array that
            spans processes and was not read.
        array: The device array, if the leaf was one; for PRNG keys the array of their key data.
        keys: The PRNG keys, if the leaf was an array of keys.
    """

    path: str
    value: np.ndarray | None = None
    array: Array | None = None
    keys: Any = None

    @property
    def type(self) -> str:
        """Description that must be equal in all processes."""
        x: Any = self.array if self.value is None else self.value
        text = typed(x.dtype.name, x.shape)
        text = text if self.keys is None else f"keys of {jax.random.key_impl(self.keys)}, {text}"
        return f"a global array {text}" if self.value is None else text

    @property
    def ndim(self) -> int:
        """Number of dimensions, without the dimension of the key data."""
        return next(x for x in (self.keys, self.value, self.array) if x is not None).ndim

    def like(self, value: np.ndarray) -> Any:
        """Return a value of this leaf's kind: PRNG keys if the leaf was an array of keys."""
        return value if self.keys is None else keys_over(value, self.keys)


def read_leaves(in_tree: Any, use: str, *, whole: bool = False) -> list[HostLeaf]:
    """Read the leaves of a pytree; all transfers start before the first one is awaited.

    Args:
        in_tree: NumPy arrays, numbers, Arrays, JAX arrays and PRNG keys.
        use: Name of the calling function.
        whole: Whether to read fully replicated arrays that span processes as well.

    Raises:
        ArgumentError: A value that no device can hold, or a traced one, with its path.
        DeletedError: A deleted array, with its path.
        TransferGuardError: JAX's transfer guards forbid the transfer.
    """
    return read_named(named_leaves(in_tree, "in_tree"), use, whole=whole)


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the leaves of a pytree with their paths as source text."""
    return list(zip(leaf_paths(tree, name), jax.tree_util.tree_leaves(tree), strict=True))


def read_named(
    named: Sequence[tuple[str, Any]], use: str, *, whole: bool = False
) -> list[HostLeaf]:
    """Read leaves that are given with their paths; see `read_leaves`."""
    leaves = []
    for path, x in named:
        with _at(path):
            leaves.append(_opened(path, x, use))
    read = [leaf for leaf in leaves if leaf.array is not None and _is_read(leaf.array, whole)]
    for leaf in read:
        with _at(leaf.path):
            start_read(leaf.array, explicit=True)
    for leaf in read:
        with _at(leaf.path):
            leaf.value = read_value(leaf.array, explicit=True)
    return leaves


@contextmanager
def _at(path: str) -> Iterator[None]:
    """Prefix errors raised in this block with the path of a leaf."""
    try:
        yield
    except XlashardError as error:
        raise at_path(error, path) from None


def _opened(path: str, x: Any, use: str) -> HostLeaf:
    if isinstance(x, Tracer):
        raise ArgumentError(
            f"it is a traced value, but {use} exchanges concrete values: call it outside of jit, "
            "grad and vmap",
            also=jax.errors.TracerArrayConversionError,
        )
    keys = x if is_key_array(x) else None
    if keys is not None:
        x = key_handle(keys)
    if not isinstance(x, Array | HandleType):
        return HostLeaf(path, value=as_host_value(x, lambda: "it").value)
    check_alive(x)
    return HostLeaf(path, array=x if isinstance(x, Array) else Array.from_jax(x), keys=keys)


def _is_read(array: Array, whole: bool) -> bool:
    return array.is_fully_addressable or (whole and array.is_fully_replicated)


SERIES = "multihost"
"""Barrier series shared by all these functions, so that mismatched calls are detected."""

# Seconds to wait for the peers when this process aborts the call.
_REFUSAL_SECONDS = 30.0


def can_meet() -> bool:
    """Return whether there is a key-value store; TPU hosts can run collectives without one."""
    return coordination.client() is not None


_TIMEOUT = 300.0


@dataclass(frozen=True)
class Contribution:
    """Data that one process contributes to a call.

    Attributes:
        digest: Digest of everything that must be equal in all processes.
        note: Text that may differ.
        data: The values themselves, if they are small.
    """

    digest: str
    note: str = ""
    data: bytes = b""


@dataclass(frozen=True)
class CollectiveCall:
    """A function that all processes call together.

    Attributes:
        name: The function and those of its arguments that must be equal, as source text.
        timeout: How long to wait for the other processes, in seconds.
        processes: Participating processes; all if None.
        series: Barrier series. Calls of one series must be made in the same order.
    """

    name: str
    timeout: float
    processes: tuple[int, ...] | None = None
    series: str = SERIES

    def __post_init__(self) -> None:
        checked_seconds(self.timeout, f"{self.name}: timeout")

    @property
    def barrier(self) -> Barrier:
        """Barrier of this call."""
        group = self.processes or tuple(range(jax.process_count()))
        return Barrier(group, self.series, self.timeout, what=self.name)

    def exchange(self, contribution: Contribution) -> dict[int, Contribution]:
        """Exchange contributions; return them by process.

        Raises:
            ProcessesError: Some processes did not arrive, made another call, or aborted it.
        """
        message = {
            "call": self.name,
            "digest": contribution.digest,
            "note": contribution.note,
            "data": base64.b64encode(contribution.data).decode(),
        }
        everyone = self._meet(message)
        return {
            process: Contribution(they["digest"], they["note"], base64.b64decode(they["data"]))
            for process, they in everyone.items()
        }

    def exchange_text(self, subject: str) -> dict[int, str]:
        """Exchange one text per process; return them by process.

        Raises:
            ProcessesError: Some processes did not arrive.
        """
        with self._timeout_as_error():
            return RENDEZVOUS.exchange(self.barrier, subject)

    @contextmanager
    def abort_together(self) -> Iterator[None]:
        """Send an error raised in this block to the other processes before it propagates."""
        try:
            yield
        except XlashardError as error:
            if can_meet() and jax.process_count() > 1:
                try:
                    brief = replace(self, timeout=min(self.timeout, _REFUSAL_SECONDS))
                    brief._meet({"call": self.name, "refused": str(error)})
                except ProcessesError as others:
                    error.add_note(str(others))
            raise

    def _meet(self, message: dict[str, Any]) -> dict[int, dict[str, Any]]:
        texts = self.exchange_text(json.dumps(message))
        everyone = {process: json.loads(text) for process, text in texts.items()}
        if "refused" not in message:
            self._check_calls(everyone)
        return everyone

    def differences(self, values: Sequence[NamedValue]) -> tuple[ValueDifference, ...]:
        """Return the values that differ between processes.

        Raises:
            ProcessesError: Some processes did not arrive.
        """
        with self._timeout_as_error():
            return differences(self.barrier, values)

    @contextmanager
    def _timeout_as_error(self) -> Iterator[None]:
        """Convert a barrier timeout in this block into an error that names missing processes."""
        try:
            yield
        except BarrierTimeoutError as error:
            waited = error.after(self.timeout, len(self.barrier.processes))
            raise ProcessesError(  # no-catalogue: needs several processes
                f"{self.name} {waited}; every process must, in the same order",
                processes=error.processes,
            ) from None

    def _check_calls(self, everyone: dict[int, dict[str, Any]]) -> None:
        calls = {process: they["call"] for process, they in everyone.items()}
        if len(set(calls.values())) > 1:
            raise ProcessesError(  # no-catalogue: needs several processes
                "processes called different functions at the same time: "
                f"{format_by_process(calls)}; make the same calls in the same order in all "
                "processes, without a condition on the process",
                processes=tuple(calls),
            )
        refused = {p: they["refused"] for p, they in everyone.items() if "refused" in they}
        if refused:
            first, reason = next(iter(refused.items()))
            raise ProcessesError(  # no-catalogue: needs several processes
                f"{self.name} failed in {format_processes(tuple(refused))}; error of process "
                f"{first}: {reason}",
                processes=tuple(refused),
            )

    def exchange_typed(
        self, types: Sequence[tuple[str, str]], note: str = "", data: bytes = b""
    ) -> dict[int, Contribution]:
        """Exchange data about leaves, which must have the same types in all processes.

        Args:
            types: Path and type of each leaf.
            note: Text that may differ.
            data: Values of the leaves, if they are small.

        Raises:
            ProcessesError: The leaves differ.
        """
        digest = hashlib.sha256(json.dumps(types).encode()).hexdigest()[:32]
        contributions = self.exchange(Contribution(digest, note, data))
        if len({they.digest for they in contributions.values()}) < 2:
            return contributions
        blank = np.empty(0, np.uint8)
        unequal = self.differences([NamedValue(path, blank, text) for path, text in types])
        listed = "; ".join(f"{d.path}: {d.text}" for d in unequal)
        raise ProcessesError(  # no-catalogue: needs several processes
            f"{self.name} was called with different trees: {listed}; pass the same leaves with "
            "the same dtypes and shapes in all processes, padded to one shape if needed",
            processes=tuple(sorted({p for d in unequal for p in d.processes})),
        )


def leaf_types(leaves: Sequence[HostLeaf]) -> list[tuple[str, str]]:
    """Return path and type of each leaf."""
    return [(leaf.path, leaf.type) for leaf in leaves]


def barrier(
    name: str, *, timeout: float = _TIMEOUT, processes: tuple[int, ...] | None = None
) -> None:
    """Wait until all processes have called this function with the same name.

    Devices are not involved. While waiting, it logs the missing processes and the barriers at which
    they wait. Barriers of different names are independent, so several threads can use them;
    barriers of the same name are counted.

    Args:
        name: Name of the barrier, also used in messages.
        timeout: How long to wait, in seconds.
        processes: Participating processes, including this one; all by default.

    Raises:
        ProcessesError: Some processes did not arrive in time.
        DeadlockError: Some processes can no longer arrive.

    Example:
        >>> from xlashard import multihost
        >>> multihost.barrier("the data is there")
    """
    with short_tracebacks:
        _check_name("barrier", name)
        all_processes = tuple(range(coordination.process_count()))
        group = all_processes if processes is None else tuple(sorted(set(processes)))
        me = coordination.process_index()
        if me not in group or not set(group) <= set(all_processes):
            raise ProcessesError(
                f"barrier({name!r}, processes={processes}) of process {me} of "
                f"{len(all_processes)}: name processes from 0 to {all_processes[-1]}, "
                "and call it only in those",
                processes=group,
            )
        series = f"barriers/{quote_key(name)}"
        CollectiveCall(f"barrier {name!r}", timeout, group, series).exchange_text("")


def sync_global_devices(name: str, *, timeout: float = _TIMEOUT) -> None:
    """Wait until all processes have arrived and all their devices have finished their work.

    Args:
        name: Must be equal in all processes, which detects calls from different places.
        timeout: How long to wait for the other processes, in seconds.

    Raises:
        ProcessesError: Some processes did not arrive in time, or passed another name.
        DeadlockError: Some processes can no longer arrive.

    Example:
        >>> from xlashard import multihost
        >>> multihost.sync_global_devices("before the measurement")
    """
    with short_tracebacks:
        _check_name("sync_global_devices", name)
        for array in originals.live_arrays():
            array.block_until_ready()
        jax.effects_barrier()
        all_processes = tuple(range(coordination.process_count()))
        call = CollectiveCall(f"sync_global_devices({name!r})", timeout, all_processes, "sync")
        names_by_process = call.exchange_text(name)
        if len(set(names_by_process.values())) > 1:
            names = format_by_process(
                {process: repr(name) for process, name in names_by_process.items()}
            )
            raise ProcessesError(  # no-catalogue: needs several processes
                f"sync_global_devices was called with different names at the same time: {names}; "
                "call it with the same names in the same order in all processes",
                processes=tuple(names_by_process),
            )


def _check_name(function: str, name: object) -> None:
    if not isinstance(name, str):
        raise ArgumentError(
            f"{function}: name must be a text, the same in all processes, not "
            f"{type(name).__name__}: write {function}('the data is there')"
        )
