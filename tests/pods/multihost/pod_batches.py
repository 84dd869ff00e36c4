"""One of 2 or 4 processes: batches of unequal data loaders as global arrays.

It stops with an error where a result is wrong.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tests.core.processes import expect, join_the_others
from tests.waiting import wait_for
from xlashard import GlobalBatches, Mesh, NamedSharding, P
from xlashard.errors import ProcessesError, UnequalError
from xlashard.multihost import barrier, process_allgather

join_the_others()

N, ME = jax.process_count(), jax.process_index()
LAST = N - 1
MESH = Mesh(np.array(jax.devices()).reshape(N, -1), ("process", "device"))
ROWS = NamedSharding(MESH, P("process"))
FULL = 4


def read(count: int, last: int = FULL) -> Iterator[Any]:
    """Yield batches of this process, of which the last one may be short."""
    for number in range(count):
        rows = FULL if number < count - 1 else last
        yield {"id": np.arange(rows, dtype=np.int32) + 1000 * number + 100 * ME}


def global_ids(number: int) -> np.ndarray:
    own = np.arange(FULL) + 1000 * number
    return np.concatenate([own + 100 * process for process in range(N)])


def collect(source: Iterator[Any], **options: Any) -> tuple[list[Any], list[str]]:
    """Return all batches, and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with GlobalBatches(source, options.pop("sharding", ROWS), **options) as batches:
            values = list(batches)
    return values, [str(warning.message) for warning in caught]


def gather(x: Any) -> np.ndarray:
    return process_allgather(x, tiled=True)


def check_values() -> None:
    for options in ({}, {"check_every": 3}, {"check_every": 0}, {"prefetch": 0}):
        batches, texts = collect(read(5), **options)
        assert not texts and len(batches) == 5
        for number, batch in enumerate(batches):
            np.testing.assert_array_equal(gather(batch["id"]), global_ids(number))
    # Only the share of this process is read where the mesh has its rows elsewhere, too.
    shape = {"id": (N * FULL,)}
    (batch,), _ = collect(iter([{"id": global_ids(0)}]), global_shape=shape)
    np.testing.assert_array_equal(gather(batch["id"]), global_ids(0))


def check_ends() -> None:
    for every in (1, 3):
        batches, texts = collect(read(5 - (ME == LAST)), check_every=every)
        (text,) = texts
        assert len(batches) == 4
        assert text.startswith(f"process {LAST} ended after 4 batches"), text
    batches, texts = collect(read(5, last=3 if ME == 0 else FULL))
    assert len(batches) == 4 and not texts
    counts = [5 - 2 * (process == LAST) for process in range(N)]
    sizes = [3 if process == 0 else FULL for process in range(N)]
    batches, texts = collect(read(counts[ME], sizes[ME]), last="pad")
    assert len(batches) == 5 and not texts
    read_ids = np.concatenate([gather(x["id"])[gather(mask)] for x, mask in batches])
    expected = [
        1000 * number + 100 * process + row
        for process in range(N)
        for number in range(counts[process])
        for row in range(FULL if number < counts[process] - 1 else sizes[process])
    ]
    assert sorted(read_ids.tolist()) == sorted(expected)


def check_restored_ends() -> None:
    """Restore where one process has ended, and the first batch of another one is short."""
    count = 2 + 2 * (ME != LAST)
    batches = GlobalBatches(read(count, last=2), ROWS, last="pad")
    for _ in range(3):
        next(batches)
    state = batches.get_state()
    expected = {"batches": 3, "process": [ME, N], "rows": FULL}
    assert state == expected | ({"ended": True} if ME == LAST else {}), state
    batches.close()
    like = {"id": jax.ShapeDtypeStruct((FULL,), np.int32)}
    restored = GlobalBatches(read(count, last=2), ROWS, last="pad", like=like)
    restored.set_state(state)
    (batch, mask), *rest = restored
    assert not rest and int(mask.sum()) == 2 * LAST
    assert gather(batch["id"])[gather(mask)].tolist() == [
        3000 + 100 * process + row for process in range(LAST) for row in range(2)
    ]


def check_errors() -> None:
    def failing() -> Iterator[Any]:
        yield from read(2)
        if ME == LAST:
            raise OSError("the disk is gone")
        yield from read(2)

    for every in (1, 4):
        batches = GlobalBatches(failing(), ROWS, check_every=every)
        for _ in range(2):
            next(batches)
        kind, text = (
            (OSError, "^the disk is gone")
            if ME == LAST
            else (ProcessesError, f"failed in process {LAST}: OSError: the disk is gone")
        )
        expect(kind, text, lambda batches=batches: next(batches))
        batches.close()

    def refuse(kind: type[Exception], text: str, source: Any, **options: Any) -> None:
        batches = GlobalBatches(source, options.pop("sharding", ROWS), **options)
        if "state" in options:
            batches.set_state(options.pop("state"))
        expect(kind, text, lambda: next(batches))
        batches.close()

    other = np.float32 if ME == LAST else np.int32
    text = rf"process {LAST} have batch\['x'\]: float32\[rows, 2\], and those of others .*int32"
    refuse(ProcessesError, text, [{"x": np.ones((FULL, 2), other)}])
    leaves = {"x": np.ones(FULL), **({"y": np.ones(FULL)} if ME == LAST else {})}
    refuse(ProcessesError, rf"process {LAST} have batch\['y'\]", [leaves])
    text = rf"batch\['id'\] differs in process(es)? .*{LAST}.*the same rows of the global array"
    refuse(UnequalError, text, list(read(1)), sharding=NamedSharding(MESH, P("device")))
    nothing = read(0 if ME == LAST else 2)
    refuse(ProcessesError, f"process {LAST} ended before the first", nothing, last="pad")


def check_positions() -> None:
    batches = GlobalBatches(list(read(5)), ROWS)
    batches.set_state({"batches": 2 + (ME == LAST)})
    expect(ProcessesError, f"process.* 0.*: 2.*process {LAST}: 3", lambda: next(batches))


def check_repeated_rows() -> None:
    _, (text,) = collect(iter([{"id": np.arange(FULL)}]))
    assert "have read the same first batch" in text and "jax.process_index()" in text
    everywhere = NamedSharding(MESH, P())
    (batch,), texts = collect(iter([{"id": np.arange(FULL)}]), sharding=everywhere)
    assert not texts and batch["id"].shape == (FULL,)


def check_early_close() -> None:
    """Close an iterator in one process, whose thread is ahead of the others."""
    batches = GlobalBatches(read(50), ROWS, prefetch=6 if ME == LAST else 1)
    next(batches)
    if ME == LAST:
        wait_for(lambda: batches._source.position == 3, "reading ahead")
        batches.close()
        assert list(batches) == []
    barrier("one has closed it")
    if ME != LAST:
        text = f"process {LAST} closed the iterator or did not read it"
        expect(ProcessesError, text, lambda: list(batches))
    batches.close()


check_values()
check_ends()
check_restored_ends()
check_errors()
check_positions()
check_repeated_rows()
check_early_close()
barrier("all checks are done")
print("all agree")
