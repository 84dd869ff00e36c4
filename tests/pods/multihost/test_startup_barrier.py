"""Arriving, missing and conflicting processes, simulated by threads with sockets."""

import errno
import re
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from threading import Event
from typing import Any

import pytest

from tests.core.processes import ROOT, free_port
from tests.grouped_cases import Together
from xlashard.pods.multihost.connections import (
    Connection,
    LivenessMonitor,
    ProcessIdentity,
    connect,
    listen,
)
from xlashard.pods.multihost.startup_barrier import (
    MissingProcessesError,
    ProcessConflictError,
    StartupBarrier,
    wait_for_all,
)

LOOPBACK = "127.0.0.1"


def calls(count: int, **changes: Any) -> list[StartupBarrier]:
    """Return the calls of all processes."""
    address = LOOPBACK, free_port()
    return [
        StartupBarrier(
            ProcessIdentity(process, count, f"host{process}", 1000 + process),
            address,
            address,
            changes.get("alone", 30.0),
            changes.get("timeout", 30.0),
            changes.get("reported", lambda missing, seconds: None),
        )
        for process in range(count)
    ]


def outcomes(calls: list[StartupBarrier]) -> list[Any]:
    """Return the result of each call: its connections, or the error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        done = [pool.submit(wait_for_all, call) for call in calls]
        results = [one.exception() or one.result() for one in done]
    return results


@pytest.fixture
def opened() -> Iterator[list[Connection]]:
    """Connections to close after a test."""
    made: list[Connection] = []
    yield made
    for connection in made:
        connection.close()


@pytest.mark.slow
def test_address_is_released_after_the_barrier(opened: list[Connection]) -> None:
    all_calls = calls(4)
    # A service takes over the address, which the arriving processes wait for.
    with ThreadPoolExecutor(3) as pool:
        guests = [pool.submit(wait_for_all, call) for call in all_calls[1:]]
        host = wait_for_all(all_calls[0])
        with listen(all_calls[0].bind):
            remote = [guest.result() for guest in guests]
    opened += [*host.values(), *(one[0] for one in remote)]
    assert sorted(host) == [1, 2, 3]
    assert [sorted(one) for one in remote] == [[0]] * 3
    assert str(host[2].caller) == "pid 1002 on host2"


@pytest.mark.slow
def test_missing_processes_are_reported_to_all() -> None:
    reported: dict[int, list[tuple[tuple[int, ...], float]]] = {0: [], 2: []}
    everybody = calls(4)

    def on_wait(process: int, missing: tuple[int, ...], seconds: float) -> None:
        reported[process].append((missing, seconds))
        if all(reported.values()):
            # The wait ends when both have reported, however long a busy machine takes for it.
            object.__setattr__(waiting[0], "timeout", 0.0)

    waiting = [replace(everybody[p], on_wait=partial(on_wait, p)) for p in reported]
    errors = outcomes(waiting)
    assert all(
        type(error) is MissingProcessesError and error.processes == (1, 3) for error in errors
    ), errors
    assert {missing for reports in reported.values() for missing, _ in reports} == {(1, 3)}
    seconds = [0.0, *(seconds for _, seconds in reported[0])]
    assert all(later - earlier > 0.99 for earlier, later in pairwise(seconds)), "once a second"


@pytest.mark.slow
def test_single_process_times_out_earlier() -> None:
    host, guest = calls(2, alone=0.3)
    (error,) = outcomes([host])
    assert type(error) is MissingProcessesError and error.processes == (1,) and error.seconds < 25
    (error,) = outcomes([guest])
    assert type(error) is MissingProcessesError and error.processes == (0,)
    assert "refused" in error.reason


@pytest.mark.slow
def test_error_names_an_unresolvable_coordinator_as_the_reason() -> None:
    call = replace(calls(2, alone=0.2)[1], coordinator=("no-such-host.invalid", 1234))
    (error,) = outcomes([call])
    assert type(error) is MissingProcessesError and error.reason


def test_duplicate_process_ids_name_both_processes() -> None:
    host, guest, _ = calls(3)
    double = replace(guest, me=replace(guest.me, host="elsewhere", pid=7))
    errors = outcomes([host, guest, double])
    assert {type(error) for error in errors} == {ProcessConflictError}
    for error in errors:
        assert "process_id 1:" in str(error)
        assert "pid 1001 on host1" in str(error) and "pid 7 on elsewhere" in str(error)


@pytest.mark.parametrize(
    ("process", "count", "text"),
    [
        (1, 3, r"process 1 \(pid 9 on b\) .*3.* process 0 \(pid 1000 on host0\) .*2"),
        (5, 2, r"pid 9 on b.* process_id 5.* 0 to 1"),
        (-1, 2, r"process_id -1.* 0 to 1"),
    ],
)
def test_conflicts_are_raised_in_both_processes(process: int, count: int, text: str) -> None:
    host, guest = calls(2)
    errors = outcomes([host, replace(guest, me=ProcessIdentity(process, count, "b", 9))])
    assert {type(error) for error in errors} == {ProcessConflictError}
    assert all(re.search(text, str(error)) for error in errors), errors


def test_tls_must_be_used_by_all_processes() -> None:
    host, guest = calls(2)
    errors = outcomes([host, replace(guest, me=replace(guest.me, secured=True))])
    assert len(errors) == 2
    for error in errors:
        secured, unsecured = str(error).split("tls=", 1)
        assert "process 1 (pid 1001 on host1)" in secured
        assert "process 0 (pid 1000 on host0)" in unsecured


def test_host_with_another_jax_is_named_in_all_processes() -> None:
    host, guest, other = calls(3)
    host, guest = (replace(c, me=replace(c.me, versions="jax 0.12.0.1")) for c in (host, guest))
    other = replace(other, me=replace(other.me, versions="jax 0.11.2"))
    errors = outcomes([host, guest, other])
    assert any(isinstance(error, ProcessConflictError) for error in errors)
    named = [str(error) for error in errors if isinstance(error, ProcessConflictError)]
    text = r"process 2 \(pid 1002 on host2\) has jax 0.11.2, .* host0\) has jax 0.12.0.1: install"
    assert all(re.search(text, each) for each in named), errors


def test_host_with_other_code_is_named_and_admitted(
    opened: list[Connection], caplog: pytest.LogCaptureFixture
) -> None:
    code = {"__main__ (train.py)": "5096f3cd", "network (network.py)": "97c3a485"}
    other = {**code, "network (network.py)": "409f619d", "plots (plots.py)": "aa"}
    host, *guests = (replace(c, me=replace(c.me, code=code)) for c in calls(4))
    guests[1] = replace(guests[1], me=ProcessIdentity(2, 4, "host-2", 4713, code=other))
    with ThreadPoolExecutor(3) as pool:
        guesting = [pool.submit(wait_for_all, guest) for guest in guests]
        opened += wait_for_all(host).values()
        with listen(host.bind):
            opened += [one.result()[0] for one in guesting]
    (text,) = set(caplog.messages)
    assert len(caplog.messages) == 4
    assert f"\n{text}\n" in (ROOT / "docs/guides/pods.md").read_text(encoding="utf-8")


def test_foreign_and_closed_connections_are_ignored(opened: list[Connection]) -> None:
    host, *guests = calls(3)
    with ThreadPoolExecutor(3) as pool:
        hosting = pool.submit(wait_for_all, host)
        for words in (b"\x00\x00 PRI * HTTP/2.0", b"[1, 2]\n", b'{"process": 1}\n', b"{broken\n"):
            stranger = _connected(host)
            stranger.sendall(words)
            assert stranger.recv(10) == b"", "it is sent away"
            stranger.close()
        early = Connection(_connected(host))
        early.send(process=1, count=3, host="host1", pid=1)
        assert early.receive(), "it receives the missing processes"
        early.close()
        guesting = [pool.submit(wait_for_all, guest) for guest in guests]
        opened += hosting.result().values()
        with listen(host.bind):
            opened += [one.result()[0] for one in guesting]
        assert hosting.result()[1].caller == guests[0].me


BAD_LINES = {
    "nested deep": b'{"process": ' + b"[" * 100_000 + b"\n",
    "a text for a number": b'{"process": "1", "count": 3, "host": "a", "pid": 1}\n',
    "a list for a number": b'{"process": [1], "count": 3, "host": "a", "pid": 1}\n',
    "true for a number": b'{"process": true, "count": 3, "host": "a", "pid": 1}\n',
    "a long number": b'{"process": %s, "count": 3, "host": "a", "pid": 1}\n' % (b"9" * 400),
    "a number for a name": b'{"process": 1, "count": 3, "host": 7, "pid": 1}\n',
    "a name of 10,000 letters": b'{"process":1,"count":3,"host":"%s","pid":1}\n' % (b"a" * 10_000),
    "a null": b'{"process": 1, "count": 3, "host": null, "pid": 1}\n',
    "no keys": b"{}\n",
    "another key": b'{"process": 1, "count": 3, "host": "a", "pid": 1, "secured": "no"}\n',
    "no UTF-8": b'{"process": "\xff"}\n',
    "a request of HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a line without an end": b"{" + b" " * (1 << 21),
    "random bytes": bytes(range(1, 256)),
}


def test_invalid_messages_are_dropped_and_logged(
    opened: list[Connection], caplog: pytest.LogCaptureFixture
) -> None:
    host, *guests = calls(3)
    with ThreadPoolExecutor(3) as pool, Together() as together:
        hosting = pool.submit(wait_for_all, host)
        for name, line in BAD_LINES.items():
            with together.case(name), _connected(host) as stranger:
                with suppress(ConnectionError):
                    stranger.sendall(line)
                    assert stranger.recv(10) == b"", "it is sent away"
                assert not hosting.done(), hosting.exception()
            assert caplog.text.count(LOOPBACK) == 1, "the first of each host is logged"
        guesting = [pool.submit(wait_for_all, guest) for guest in guests]
        opened += hosting.result().values()
        with listen(host.bind):
            opened += [one.result()[0] for one in guesting]
    assert "dropped a connection from 127.0.0.1:" in caplog.text
    assert "for processes 1, 2" in caplog.text


def test_host_names_are_printable() -> None:
    host, guest, _ = calls(3)
    guest = replace(guest, me=replace(guest.me, host="\x1b[31mred"))
    errors = outcomes([host, guest, replace(guest, me=replace(guest.me, pid=7))])
    for error in errors:
        assert "\x1b" not in str(error) and "on \\x1b[31mred" in str(error)


@pytest.mark.slow
def test_duplicate_of_a_silent_program_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reported by the process with the same index, once it arrives; or soon without it."""
    hello = asdict(ProcessIdentity(1, 2, "elsewhere", 7))
    host, guest = calls(2)
    with ThreadPoolExecutor(2) as pool:
        hosting = pool.submit(wait_for_all, host)
        stranger = Connection(_connected(host))
        stranger.send(**hello)
        assert stranger.receive(), "it has the place"
        (error,) = outcomes([guest])
        assert type(error) is type(hosting.exception()) is ProcessConflictError
        assert "process_id 1: pid 7 on elsewhere and pid 1001" in str(error)
        stranger.close()
        monkeypatch.setattr("xlashard.pods.multihost.startup_barrier._CONFIRM", 0.5)
        (host, _) = calls(2)
        hosting = pool.submit(wait_for_all, host)
        stranger = Connection(_connected(host))
        stranger.send(**hello)
        error = hosting.exception()
        stranger.close()
        assert type(error) is ProcessConflictError
        assert "process 1 of 2 (pid 7 on elsewhere, at 127.0.0.1:" in str(error)


def _connected(call: StartupBarrier) -> socket.socket:
    while True:
        try:
            return connect(call.coordinator)
        except ConnectionRefusedError:
            continue


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (
            b"\x00\x00\x12\x04 settings",
            ProcessConflictError,
            "is not served by the startup barrier of process 0",
        ),
        (b"", MissingProcessesError, "it closed the connection"),
    ],
)
def test_foreign_server_at_the_address_is_reported(
    answer: bytes, kind: type[Exception], text: str
) -> None:
    guest = calls(2)[1]
    with listen(guest.coordinator) as listener, ThreadPoolExecutor(1) as pool:
        guesting = pool.submit(wait_for_all, guest)
        accepted, _ = listener.accept()
        accepted.recv(1 << 16)
        accepted.sendall(answer)
        accepted.close()
        error = guesting.exception()
    assert type(error) is kind
    assert text in (error.reason if isinstance(error, MissingProcessesError) else str(error))


@pytest.mark.slow
def test_silent_server_at_the_address_times_out() -> None:
    guest = calls(2, alone=0.5)[1]
    with listen(guest.coordinator):
        (error,) = outcomes([guest])
    assert type(error) is MissingProcessesError and error.reason == "it sends nothing"


def test_address_in_use_raises_oserror() -> None:
    host = calls(2)[0]
    with listen(host.bind):
        (error,) = outcomes([host])
    assert isinstance(error, OSError) and "in use" in str(error)


def test_listen_error_omits_the_address() -> None:
    with pytest.raises(OSError, match="assign") as caught:
        listen(("192.0.2.1", 8476))
    assert caught.value.errno == errno.EADDRNOTAVAIL
    assert "192.0.2.1" not in str(caught.value)


def test_address_reserved_by_a_launcher_is_usable() -> None:
    address = calls(2)[0].bind
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind(address)
        with listen(address):
            connect(address).close()


class _Three:
    """Three processes with their monitors; a process 0 that is to be killed has none."""

    def __init__(self, process_0_watches: bool = True) -> None:
        self.gone: dict[int, tuple[int, ...]] = {}
        self.failed: dict[int, tuple[int, str]] = {}
        self.heard = {process: Event() for process in range(3)}
        pairs = {process: socket.socketpair() for process in (1, 2)}
        self.connections = {
            process: (Connection(ours), Connection(remote))
            for process, (ours, remote) in pairs.items()
        }
        host = {process: ours for process, (ours, _) in self.connections.items()}
        self.lines = {}
        if process_0_watches:
            self.lines[0] = LivenessMonitor(
                host, lambda gone, _: self._note(0, gone), self._failing(0)
            )
        for process in (1, 2):
            remote = {0: self.connections[process][1]}
            note = self._noting(process)
            self.lines[process] = LivenessMonitor(remote, note, self._failing(process))

    def _noting(self, process: int) -> Any:
        return lambda gone, _: self._note(process, gone)

    def _failing(self, process: int) -> Any:
        def note(other: int, error: str) -> None:
            self.failed[process] = other, error
            self.heard[process].set()

        return note

    def _note(self, process: int, gone: tuple[int, ...]) -> None:
        self.gone[process] = gone
        self.heard[process].set()

    def kill(self, process: int) -> None:
        """Close the connections of a process, as the kernel does when it dies."""
        for other in (1, 2):
            if process in (0, other):
                self.connections[other][process != 0].socket.shutdown(socket.SHUT_RDWR)


def test_a_peer_that_sends_nothing_is_reported() -> None:
    near, far = socket.socketpair()
    gone: Future[tuple[tuple[int, ...], str]] = Future()
    monitor = LivenessMonitor
    line = monitor({1: Connection(near)}, lambda *noticed: gone.set_result(noticed), timeout=0.1)
    assert gone.result(60) == ((1,), "is gone: it was silent for 0.1 s")
    # It was sent beats meanwhile.
    assert {"beat": True} in (Connection(far).receive() or [])
    line.stop()
    far.close()


def test_beats_are_compared_with_the_timeout() -> None:
    near, far = socket.socketpair()
    gone: list[tuple[int, ...]] = []
    line = LivenessMonitor({1: Connection(near)}, lambda who, _: gone.append(who), timeout=1000)
    line._exchange_beats({1: 5000.0}, 6000.0)
    assert gone == []
    line._exchange_beats({1: 5000.0}, 6001.0)
    line._exchange_beats({1: 5000.0}, 7000.0)
    assert gone == [(1,)]
    line.stop()
    far.close()


def test_killed_processes_are_reported_to_all() -> None:
    pod = _Three()
    pod.kill(2)
    assert pod.heard[0].wait(10) and pod.heard[1].wait(10)
    assert (pod.gone[0], pod.gone[1]) == ((2,), (2,))


def test_stopped_liveness_connection_has_no_thread() -> None:
    pod = _Three()
    line = pod.lines[0]
    assert line._thread.is_alive()
    line.stop()
    assert not line._thread.is_alive() and not pod.gone
    pod.kill(1)
    assert pod.heard[1].wait(10) and 0 not in pod.gone


def test_process_that_sent_goodbye_is_not_reported_as_lost() -> None:
    pod = _Three()
    pod.lines[1].goodbye()
    pod.kill(1)
    pod.kill(2)
    assert pod.heard[0].wait(10)
    assert pod.gone[0] == (2,)


@pytest.mark.parametrize(("failing", "reported"), [(1, (0, 2)), (0, (1, 2))])
def test_failures_are_forwarded_to_all(failing: int, reported: tuple[int, ...]) -> None:
    pod = _Three()
    pod.lines[failing].goodbye(error="ValueError: no such file")
    assert all(pod.heard[process].wait(10) for process in reported)
    assert pod.failed == dict.fromkeys(reported, (failing, "ValueError: no such file"))
    assert not pod.gone


def test_failed_process_is_notified_when_process_0_ends() -> None:
    pod = _Three()
    pod.lines[1].goodbye(error="ValueError")
    assert pod.heard[0].wait(10)
    pod.lines[0].end_failed()
    assert pod.heard[1].wait(10) and pod.gone == {1: (0,)}


def test_losing_the_coordinator_ends_only_running_processes() -> None:
    pod = _Three(process_0_watches=False)
    pod.lines[2].goodbye()
    for ours, _ in pod.connections.values():
        ours.send(goodbye=True)
    pod.kill(0)
    assert pod.heard[1].wait(10) and pod.gone[1] == (0,)
    assert not pod.heard[2].is_set()


def test_coordinator_waits_for_peers_to_end() -> None:
    pod = _Three()
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(pod.lines[0].goodbye, 60)
        pod.lines[1].goodbye()
        pod.kill(2)
        leaving.result(30)


def test_loss_of_the_coordinator_is_reported() -> None:
    pod = _Three(process_0_watches=False)
    pod.kill(0)
    assert pod.heard[1].wait(10) and pod.heard[2].wait(10)
    assert pod.gone[1] == pod.gone[2] == (0,)
