"""Reduction of results of several processes; real processes are in test_pod.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from xlashard.core.processes import RENDEZVOUS, BarrierTimeoutError
from xlashard.train.checkpoint.arrays import ArrayFiles
from xlashard.train.checkpoint.process_sync import (
    MissingProcessError,
    ProcessSync,
    SyncResult,
    find_reason,
)
from xlashard.train.errors import CheckpointError


def test_exchange_of_one_process_returns_its_own_problem() -> None:
    sync = ProcessSync("test", 1.0)
    assert sync.first
    result = sync.exchange("save step 1", "no room", "token")
    assert (str(result), dict(result.problems), result.first) == (
        "no room",
        {0: "no room"},
        "token",
    )
    assert str(sync.exchange("save step 1")) == ""


def test_equal_problems_of_several_processes_share_a_clause() -> None:
    full = "No space left on device"
    result = SyncResult({3: "File too large", 4: full, 5: full}, "")
    assert str(result) == f"processes 4, 5: {full}; process 3: File too large"


def in_vain(calls: list[str]) -> Callable[..., dict[int, str]]:
    def meet(invitation: object, subject: str) -> dict[int, str]:
        calls.append(subject)
        raise BarrierTimeoutError((1, 2), "process 1 waits at barrier 'epoch' (train.py:3)")

    return meet


def test_barrier_is_not_retried_after_a_missing_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(RENDEZVOUS, "exchange", in_vain(calls))
    text = r"save step 1: processes 1, 2 did not arrive within 5 s \(process 1 waits at barrier"
    with pytest.raises(MissingProcessError, match=text):
        ProcessSync("test", 5.0).exchange("save step 1")
    arrays = ArrayFiles(5.0)
    arrays._report_failure(MissingProcessError("gone"))
    assert len(calls) == 1
    with pytest.raises(MissingProcessError):
        arrays._report_failure(ValueError("full"))
    assert len(calls) == 2 and "full" in calls[1]


def test_reasons_are_one_readable_line() -> None:
    assert find_reason(FileNotFoundError(2, "No such file", "a/b")) == "No such file: a/b"
    assert find_reason(OSError(28, "No space left on device")) == "No space left on device"
    spec = 'DATA_LOSS: a is short [tensorstore_spec={"driver": "zarr"}]\nmore'
    assert find_reason(ValueError(spec)) == "DATA_LOSS: a is short"
    assert find_reason(CheckpointError("first\nsecond")) == "first"
    assert find_reason(AttributeError("no attribute x")) == "AttributeError: no attribute x"
    assert find_reason(MemoryError()) == "MemoryError"
