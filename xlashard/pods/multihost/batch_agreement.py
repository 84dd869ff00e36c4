"""Agreement of processes on batches: positions, types, rows, and which of them have ended."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xlashard.core.array.placement.target import parse_sharding
from xlashard.core.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, digest, minority
from xlashard.core.sharding import XLACompatibleSharding
from xlashard.errors import ProcessesError, UnequalError, counted
from xlashard.pods.multihost.host_batches import HostBatch
from xlashard.support.documents import JsonRecord
from xlashard.support.formatting import format_by_process, format_processes, group_by_value
from xlashard.support.lazily import dataclass


@dataclass(frozen=True)
class BatchReport(JsonRecord):
    """Batches that a process has read since the last comparison.

    Attributes:
        position: Number of batches read before.
        rows: Rows of each batch.
        full: Rows of a full batch; 0 if unknown.
        types: Path and type of each leaf; in the first comparison only.
        pieces: For each leaf a name of the piece of the global array that this process holds, and
            a digest of its data; in the first comparison only.
        failure: Error that ended the batches; empty without one.
    """

    position: int
    rows: tuple[int, ...]
    full: int
    types: tuple[str, ...] = ()
    pieces: tuple[tuple[str, str], ...] = ()
    failure: str = ""


def list_pieces(batch: HostBatch, shardings: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Return the name and digest of this process's piece of each leaf.

    Pieces of one name have the same elements of the global array.
    """
    pieces = []
    for leaf, entry in zip(batch.leaves, shardings, strict=True):
        sharding, _ = parse_sharding(entry, "sharding")
        if not isinstance(sharding, XLACompatibleSharding):
            return ()
        tiles = sharding.rank_tiling(leaf.ndim).coordinates(sharding.addressable_positions)
        pieces.append((digest(np.unique(tiles, axis=0)).hex()[:16], digest(leaf).hex()[:32]))
    return tuple(pieces)


class ClosedError(Exception):
    """The iterator was closed while its thread waited for other processes."""


def exchange_reports(
    report: BatchReport,
    processes: tuple[int, ...],
    series: str,
    timeout: float,
    closed: threading.Event,
) -> dict[int, BatchReport]:
    """Exchange the reports of some processes.

    Args:
        report: Report of this process.
        processes: The processes.
        series: Series of the barrier.
        timeout: How long to wait, in seconds.
        closed: Event that ends the wait.

    Raises:
        ProcessesError: Some processes did not read their batches in time.
        ClosedError: The event was set.
    """

    def check_open(missing: tuple[int, ...], seconds: float) -> None:
        if closed.is_set():
            raise ClosedError  # no-catalogue: needs several processes

    what = f"batch {report.position + 1} of GlobalBatches"
    barrier = Barrier(processes, series, timeout, check_open, what)
    try:
        texts = RENDEZVOUS.exchange(barrier, report.to_json())
    except BarrierTimeoutError as error:
        missing = error.missing(f"closed the iterator or did not read it in {timeout:g} s")
        raise ProcessesError(  # no-catalogue: needs several processes
            f"{what} is incomplete: {missing}; read as many batches in all processes",
            processes=error.processes,
        ) from None
    return {process: BatchReport.from_json(text) for process, text in texts.items()}


def check_first_reports(reports: Mapping[int, BatchReport], pads: bool) -> None:
    """Check the reports of the first comparison.

    Args:
        reports: Report of each process.
        pads: Whether processes that have ended pad batches.

    Raises:
        ProcessesError: Positions or types differ, or a process cannot pad.
        UnequalError: Processes that hold the same rows of a global array have read other data.
    """
    positions = {process: f"{report.position:,}" for process, report in reports.items()}
    if odd := minority(positions):
        raise ProcessesError(  # no-catalogue: needs several processes
            f"GlobalBatches continues after different numbers of batches: "
            f"{format_by_process(positions)}; set the states of one checkpoint in all processes",
            processes=odd,
        )
    types = {process: report.types for process, report in reports.items() if report.types}
    if odd := minority(types):
        usual, own = set(group_by_value(types)[0][0]), set(types[odd[0]])
        texts = ["; ".join(sorted(x)) or "fewer leaves" for x in (own - usual, usual - own)]
        raise ProcessesError(  # no-catalogue: needs several processes
            f"batches of {format_processes(odd)} have {texts[0]}, and those of others {texts[1]}: "
            "yield the same leaves, dtypes and shapes in all processes",
            processes=odd,
        )
    without = [process for process in reports if process not in types]
    if pads and types and without:
        raise ProcessesError(  # no-catalogue: needs several processes
            f"{format_processes(without)} ended before the first batch, whose type the padding "
            "has: pass a batch as GlobalBatches(..., like=batch)",
            processes=without,
        )
    paths = [text.partition(":")[0] for text in next(iter(types.values()), ())]
    for number, path in enumerate(paths):
        pieces = {p: report.pieces[number] for p, report in reports.items() if report.pieces}
        for name in {name for name, _ in pieces.values()}:
            digests = {p: value for p, (piece, value) in pieces.items() if piece == name}
            if odd := minority(digests):
                raise UnequalError(  # no-catalogue: needs several processes
                    f"{path} differs in {format_processes(odd)}, but "
                    f"{format_processes([*digests])} hold the same rows of the global array: read "
                    "the same data in them",
                    processes=odd,
                    paths=(path,),
                )


def describe_repeated_rows(reports: Mapping[int, BatchReport]) -> str:
    """Describe processes that have read the same rows for different pieces of a global array."""
    pieces = {process: report.pieces for process, report in reports.items() if report.pieces}
    digests = {p: tuple(value for _, value in own) for p, own in pieces.items()}
    for _, processes in group_by_value(digests):
        if len({pieces[process][0][0] for process in processes}) > 1:
            return (
                f"{format_processes(processes)} have read the same first batch for different rows "
                "of the global one: shard the source by jax.process_index()"
            )
    return ""


def describe_end(ended: Sequence[int], others: Sequence[int], position: int) -> str:
    """Describe processes that end while others have a full batch."""
    return (
        f"{format_processes(ended)} ended after {counted(position, 'batch', 'batches')}, and the "
        f"rest of {format_processes(others)} is dropped: write last='pad' to use it, or shard the "
        "source evenly"
    )
