"""Global batches of a data loader, compared between processes and put on devices ahead."""

import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from xlashard.core.array.constructors import (
    is_shape,
    make_process_local_arrays,
)
from xlashard.core.array.placement.target import is_target, parse_sharding
from xlashard.core.array.placement.tree_prefix import broadcast_prefix
from xlashard.core.processes import processes_of
from xlashard.core.sharding import NamedSharding, PartitionSpec
from xlashard.errors import PlacementError, ProcessesError, counted
from xlashard.pods.multihost.batch_agreement import (
    BatchReport,
    check_first_reports,
    describe_end,
    describe_repeated_rows,
    exchange_reports,
    list_pieces,
)
from xlashard.pods.multihost.host_batches import DataSource, HostBatch
from xlashard.support.background import end_thread, start_background
from xlashard.support.formatting import error_line, format_processes
from xlashard.support.lazily import dataclass


@dataclass(frozen=True)
class BatchRequest:
    """Arguments of a `GlobalBatches`.

    Attributes:
        pads: Whether batches that are not full are padded.
        template: Full batch of this process; None if the first one is.
    """

    sharding: Any
    global_shape: Any
    pads: bool
    template: HostBatch | None
    prefetch: int
    check_every: int
    timeout: float

    def list_shardings(self) -> list[Any]:
        """Return the shardings that the request names.

        Raises:
            ArgumentError: One of them is no sharding.
        """
        entries = jax.tree.leaves(self.sharding, is_leaf=is_target)
        return [parse_sharding(entry, "sharding")[0] for entry in entries]


@dataclass(frozen=True)
class ReadyBatch:
    """Batch on the devices, or the end.

    Attributes:
        batch: Global batch, with its mask if batches are padded.
        state: State of the source after the batch; None at the end.
        warning: Text of a warning; empty without one.
    """

    batch: Any = None
    state: dict[str, Any] | None = None
    warning: str = ""


type _Outcome = ReadyBatch | BaseException

_STARTED: dict[tuple[int, ...], int] = {}
"""Number of pipelines that were started, by their processes."""


class BatchPipeline:
    """Batches of a source from its position on, made ahead in a thread.

    Args:
        source: Batches of this process.
        request: Arguments of the `GlobalBatches`.
    """

    def __init__(self, source: DataSource, request: BatchRequest) -> None:
        self._source, self._request = source, request
        shardings = request.list_shardings()
        processes = processes_of(device for x in shardings for device in x.devices)
        number = _STARTED[processes] = _STARTED.get(processes, 0) + 1
        self._series = f"batches/{number}"
        own_index = jax.process_index()
        compares = request.check_every > 0 and own_index in processes
        self._processes = processes if compares else (own_index,)
        self._block = request.check_every if len(self._processes) > 1 else 1
        self._template: Any = None
        self._entries: list[Any] = []
        self._full: dict[int, int] = {}
        self._error: Exception | None = None
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._slots = threading.Semaphore(request.prefetch)
        self._closed = threading.Event()
        self._last: _Outcome | None = None
        self._batches = self._make_batches()
        # JAX's settings of a block hold for its thread alone.
        self._wide = bool(jax.config.jax_enable_x64)
        self._thread = (
            start_background(self._run, self.stop, "GlobalBatches") if request.prefetch else None
        )

    def take(self) -> ReadyBatch:
        """Return the next batch, or the end.

        Raises:
            BaseException: An error of the source or of the comparison, in each call.
        """
        outcome = self._last
        if outcome is None:
            outcome = self._outcomes.get() if self._thread else self._make_batch()
            self._slots.release()
        if isinstance(outcome, BaseException):
            self._last = outcome
            raise outcome  # no-catalogue: was raised by the source, or elsewhere here
        if outcome.state is None:
            self._last = ReadyBatch()
        return outcome

    def stop(self) -> None:
        """Let the thread end soon."""
        self._closed.set()
        self._slots.release()

    def close(self) -> None:
        """End the thread, and drop its batches."""
        self._last = self._last or ReadyBatch()
        if self._thread is not None:
            end_thread(self._thread, self.stop)
        self._outcomes = queue.SimpleQueue()

    def _run(self) -> None:
        outcomes, is_last = self._outcomes, False
        with jax.enable_x64(self._wide):
            while not is_last:
                self._slots.acquire()
                if self._closed.is_set():
                    return
                outcome = self._make_batch()
                is_last = isinstance(outcome, BaseException) or outcome.state is None
                outcomes.put(outcome)

    def _make_batch(self) -> _Outcome:
        try:
            return next(self._batches, ReadyBatch())
        except BaseException as error:
            error.add_note(f"GlobalBatches was at batch {self._source.position:,} of its source.")
            return error

    def _make_batches(self) -> Iterator[ReadyBatch]:
        """Yield batches that are on the devices, and an end that has a warning."""
        pads = self._request.pads
        while True:
            position = self._source.position
            batches = self._read_batches()
            reports = self._exchange(batches, position)
            warning = "" if self._full else self._begin(reports)
            for number in range(self._block):
                rows = {p: r.rows[number] for p, r in reports.items() if number < len(r.rows)}
                ended = [process for process in reports if process not in rows]
                self._raise_failure(reports, ended)
                if not rows:
                    return
                full = [process for process in rows if rows[process] == self._full[process]]
                if ended and not pads:
                    end = describe_end(ended, full, position + number) if full else ""
                    yield ReadyBatch(warning=end)
                    return
                if pads or len(full) == len(reports):
                    if number < len(batches):
                        batch, state = batches[number]
                    else:
                        batch, state = self._template, self._source.pass_batch()
                    yield ReadyBatch(self._put(batch), state, warning)
                    warning = ""

    def _read_batches(self) -> list[tuple[HostBatch, dict[str, Any]]]:
        """Return the batches of the next comparison, each with the state after it."""
        batches = []
        try:
            if self._template is None and self._request.template is not None:
                self._set_template(self._request.template)
            while len(batches) < self._block:
                batch = self._source.read()
                if self._template is None:
                    self._set_template(batch)
                self._check_type(batch)
                batches.append((batch, self._source.get_state()))
        except StopIteration:
            pass
        except Exception as error:
            self._error = error
        return batches

    def _set_template(self, batch: HostBatch) -> None:
        sharding, tree = self._request.sharding, batch.pad(batch.rows)
        self._entries = broadcast_prefix(sharding, tree, is_target, "sharding", "batch")
        self._template = batch.remove_rows()
        self._source.full_rows = max(self._source.full_rows, batch.rows)

    def _check_type(self, batch: HostBatch) -> None:
        """Check that a batch has the type of the first one.

        Raises:
            PlacementError: It has other leaves, or more rows than a full batch.
        """
        first, full = self._template.types, self._full.get(jax.process_index(), batch.rows)
        if batch.types != first:
            other = "; ".join(text for text in batch.types if text not in first) or "fewer leaves"
            raise PlacementError(
                f"batch differs from the first one in {other}: yield arrays of one shape "
                "and dtype, except for the number of rows"
            )
        if batch.rows > full:
            raise PlacementError(
                f"batch has {counted(batch.rows, 'row')}, but a full one has {full:,}: pass a full "
                "batch as GlobalBatches(..., like=batch)"
            )

    def _exchange(
        self, batches: list[tuple[HostBatch, dict[str, Any]]], position: int
    ) -> dict[int, BatchReport]:
        """Return the reports of all processes."""
        is_compared = len(self._processes) > 1
        is_first = is_compared and not self._full
        report = BatchReport(
            position,
            tuple(batch.rows for batch, _ in batches),
            self._source.full_rows,
            self._template.types if is_first and self._template else (),
            list_pieces(batches[0][0], self._entries) if is_first and batches else (),
            "" if self._error is None else error_line(self._error),
        )
        if not is_compared:
            return {jax.process_index(): report}
        timeout = self._request.timeout
        return exchange_reports(report, self._processes, self._series, timeout, self._closed)

    def _begin(self, reports: Mapping[int, BatchReport]) -> str:
        """Check the first reports, and set the rows of a full batch; return a warning."""
        request = self._request
        check_first_reports(reports, request.pads)
        self._full = {process: report.full for process, report in reports.items()}
        if request.global_shape is not None:
            return ""
        # All processes hold equal shares of the rows: a smaller first batch is not full.
        self._full = dict.fromkeys(reports, max(self._full.values()))
        return describe_repeated_rows(reports)

    def _raise_failure(self, reports: Mapping[int, BatchReport], ended: list[int]) -> None:
        """Raise the error that ended the batches of a process, if any."""
        if self._error is not None and jax.process_index() in ended:
            raise self._error  # no-catalogue: was raised by the source
        failed = [process for process in ended if reports[process].failure]
        if failed:
            raise ProcessesError(  # no-catalogue: needs several processes
                f"the source of GlobalBatches failed in {format_processes(failed)}: "
                f"{reports[failed[0]].failure}",
                processes=failed,
            )

    def _put(self, batch: HostBatch) -> Any:
        """Return the global batch, on the devices; with its mask if batches are padded."""
        request = self._request
        rows = self._full[jax.process_index()] if request.pads else batch.rows
        tree = batch.pad(rows)
        shape = request.global_shape
        arrays = make_process_local_arrays(request.sharding, tree, shape, "batch")
        if request.pads:
            number = next(n for n, leaf in enumerate(batch.leaves) if leaf.ndim)
            sharding, _ = parse_sharding(self._entries[number], "sharding")
            if isinstance(sharding, NamedSharding):
                sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
            if shape is not None:
                shape = broadcast_prefix(shape, tree, is_shape, "global_shape", "batch")[number][:1]
            mask = np.arange(rows) < batch.rows
            arrays = arrays, make_process_local_arrays(sharding, mask, shape, "mask")
        # Here, so that the source may use the memory of its batch again.
        return jax.block_until_ready(arrays)
