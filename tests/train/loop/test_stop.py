import os
import signal
import threading
from concurrent.futures import Future

import pytest

from xlashard.train.errors import PeerError, RunError
from xlashard.train.loop.stop import Group, OwnCalls, Stop, StopMessage, describe_error


class Watched:
    """Stop of one process, with its output."""

    def __init__(self) -> None:
        self.calls = OwnCalls()
        self.reason: list[str] = []
        self.agreed = threading.Event()
        self.left: list[tuple[int, str]] = []
        self.stop = Stop(Group(), self.calls, self._show, lambda *how: self.left.append(how))

    def _show(self, line: str) -> None:
        self.reason.append(line)
        self.agreed.set()


def test_reached_returns_true_only_after_a_stop_request() -> None:
    watched = Watched()
    with watched.stop.listening():
        assert [watched.stop.reached() for _ in range(3)] == [False] * 3
        os.kill(os.getpid(), signal.SIGTERM)
        assert watched.agreed.wait(10)
        # It stops at the next call of `reached`, and at all later ones on the way out.
        assert [watched.stop.reached() for _ in range(3)] == [True] * 3
    assert watched.reason == ["SIGTERM: stopping ..."]
    assert watched.stop.call == StopMessage("stop", 0, "SIGTERM")


def test_only_the_first_stop_request_is_effective() -> None:
    watched = Watched()
    with watched.stop.listening():
        watched.stop.request("SIGTERM")
        assert watched.agreed.wait(10)
        watched.stop.request("SIGINT")
    assert watched.stop.call == StopMessage("stop", 0, "SIGTERM")
    assert len(watched.reason) == 1


@pytest.mark.slow
def test_unless_stopped_waits_for_a_future_until_a_stop() -> None:
    watched = Watched()
    with watched.stop.listening():
        work: Future[int] = Future()
        threading.Timer(0.1, work.set_result, [7]).start()
        assert watched.stop.unless_stopped(work) == 7
        never: Future[int] = Future()
        threading.Timer(0.1, watched.stop.request, ["SIGTERM"]).start()
        assert watched.stop.unless_stopped(never) is None
        assert watched.stop.reached()


def test_unless_stopped_raises_the_error_of_its_future() -> None:
    watched = Watched()
    with pytest.raises(ZeroDivisionError), watched.stop.listening():
        work: Future[int] = Future()
        work.set_exception(ZeroDivisionError())
        watched.stop.unless_stopped(work)


def test_stop_at_the_end_leaves_no_thread_waiting() -> None:
    watched = Watched()
    with watched.stop.listening():
        assert not watched.stop.reached()
        watched.stop.request("SIGTERM")
    # The signal arrives after the end, and no thread is left waiting.
    assert watched.stop.call is not None
    assert not [x for x in threading.enumerate() if x.name.endswith(("calls", "signals"))]


def test_failure_of_a_peer_raises_a_peer_error() -> None:
    watched = Watched()
    group = Group("run", 1, 2)
    stop = Stop(group, watched.calls, watched._show, lambda *how: watched.left.append(how))
    watched.calls.send(StopMessage("fail", 0, "no more data"))
    with pytest.raises(PeerError, match="process 0 failed: no more data"), stop.listening():
        stop.unless_stopped(Future())
    with pytest.raises(PeerError):
        stop.reached()
    watched.calls.send(StopMessage("end", 0))
    assert watched.left == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (RunError("one\ntwo"), "one"),
        (KeyboardInterrupt(), "a second signal ended it at once"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_failures_are_reported_in_one_line(error: BaseException, line: str) -> None:
    assert describe_error(error) == line
