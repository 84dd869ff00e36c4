"""Errors of a program that was started on too few hosts, or twice."""

import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.core.processes import free_port
from tests.message_patterns import naming
from xlashard.errors import ProcessesError
from xlashard.pods.multihost import join
from xlashard.pods.multihost.cluster_info import (
    GIVEN,
    SLURM,
    ClusterInfo,
    InitializeRequest,
    LaunchEnvironment,
)
from xlashard.pods.multihost.connections import listen
from xlashard.pods.multihost.join import join_processes
from xlashard.pods.multihost.startup_barrier import StartupBarrier

LOOPBACK = "127.0.0.1"


def come(process: int, port: int, *, timeout: float, environment: LaunchEnvironment = SLURM) -> str:
    """Return the error of one of three processes."""
    place = ClusterInfo(environment, 3, process, f"{LOOPBACK}:{port}", None)
    request = InitializeRequest(None, None, None, timeout, 100, None, None)
    with pytest.raises(ProcessesError) as caught:
        join_processes(place, request, (LOOPBACK, port))
    return str(caught.value)


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "train", "--name=a b"])


@pytest.mark.slow
def test_timeout_shows_the_launch_command() -> None:
    command = "Start it in all 3: srun --ntasks=3 python -m train '--name=a b'"
    text = come(0, free_port(), timeout=0.2)
    head, _, rest = text.partition(" s for ")
    assert re.fullmatch(r"process 0 of 3 has waited \d+", head)
    assert rest == f"processes 1, 2. {command}"
    port = free_port()
    text = come(2, port, timeout=0.2)
    assert re.match(r"process 2 of 3 has waited \d+ s for process 0 \(process 0 at", text)
    assert f"{LOOPBACK}:{port}" in text and "refused" in text and command in text


@pytest.mark.slow
def test_timeout_shows_the_process_ids_to_pass() -> None:
    text = come(1, free_port(), timeout=0.2, environment=GIVEN)
    assert re.search(naming("coordinator", "process_id 0 … 2"), text)


@pytest.mark.slow
def test_missing_processes_are_logged_while_waiting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "_FIRST_LOG_SECONDS", 0.9)
    log_missing, calls = join._WaitLog.log_missing, []

    def ending(log: join._WaitLog, missing: tuple[int, ...], seconds: float) -> None:
        log_missing(log, missing, seconds)
        if caplog.messages:
            # The wait ends with the message, however long a busy machine takes for it.
            object.__setattr__(calls[0], "alone", 0.0)

    def called(*fields: Any) -> StartupBarrier:
        calls.append(StartupBarrier(*fields))
        return calls[-1]

    monkeypatch.setattr(join, "StartupBarrier", called)
    monkeypatch.setattr(join._WaitLog, "log_missing", ending)
    with caplog.at_level(logging.WARNING, "xlashard.multihost"):
        come(0, free_port(), timeout=30)
    (line,) = caplog.messages
    expected = r"process 0 of 3: still waiting for processes 1, 2 \(\d+ s\)\. Start it in"
    assert re.match(expected, line)


def test_wait_messages_are_logged_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    log = join._WaitLog(ClusterInfo(SLURM, 3, 0, "10.0.0.1:8476", None))
    with caplog.at_level(logging.WARNING, "xlashard.multihost"):
        for second in range(60):
            log.log_missing((1, 2), float(second))
    assert [int(re.findall(r"\((\d+) s\)", line)[0]) for line in caplog.messages] == [
        *(5, 10, 20, 40)
    ]
    assert ["Start it in" in line for line in caplog.messages] == [True, False, False, False]


@pytest.mark.slow
def test_duplicate_process_id_is_refused() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        texts = [pool.submit(come, process, port, timeout=30) for process in (0, 1, 1)]
    for text in texts:
        assert "process_id 1: pid" in text.result()
        assert "found by Slurm" in text.result()


def test_port_in_use_and_foreign_bind_address_are_refused() -> None:
    port = free_port()
    with listen((LOOPBACK, port)):
        text = come(0, port, timeout=1)
    assert re.search(naming(f"{LOOPBACK}:{port}", "JAX_COORDINATOR_PORT=8477"), text)
    place = ClusterInfo(SLURM, 2, 0, "192.0.2.1:8476", None)
    request = InitializeRequest(None, None, None, 1, 100, None, None)
    with pytest.raises(ProcessesError, match=r"bind='0\.0\.0\.0:8476'"):
        join_processes(place, request, ("192.0.2.1", 8476))
