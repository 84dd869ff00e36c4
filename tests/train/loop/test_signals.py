import os
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from xlashard.support.background import SIGNALS
from xlashard.train.loop import stop
from xlashard.train.loop.stop import exit_code, on_signal


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_requests_a_stop(number: signal.Signals) -> None:
    before = [signal.getsignal(x) for x in SIGNALS]
    asked: Future[str] = Future()
    with on_signal(asked.set_result):
        send(number)
        assert asked.result(10) == number.name
    assert [signal.getsignal(x) for x in SIGNALS] == before


def test_copies_of_a_signal_request_one_stop() -> None:
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    with on_signal(requests.put):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            send(number)
        assert requests.get(timeout=10) == "SIGTERM"
    assert requests.empty()


@pytest.mark.parametrize("second", SIGNALS)
def test_second_signal_raises_keyboard_interrupt(
    second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "_SAME_SIGNAL", 0.0)
    before = [signal.getsignal(x) for x in SIGNALS]
    with pytest.raises(KeyboardInterrupt), on_signal(lambda name: None):
        send(signal.SIGTERM)
        send(second)
    assert [signal.getsignal(x) for x in SIGNALS] == before


def test_other_threads_install_no_signal_handler() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with on_signal(lambda name: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


BUSY = """
import os, signal, threading
from xlashard.support import background
from xlashard.train.loop import stop

def kill():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        heard.wait()

stop._SAME_SIGNAL, stop._SIGNAL_TIMEOUT = 0.0, 0.1
heard = threading.Event()
killer = threading.Thread(target=kill)

def ask(name):
    print("asked by", name, flush=True)
    heard.set()

with stop.on_signal(ask):
    killer.start()
    # The main thread stays in C, as in a collective with a missing peer: no Python handler runs.
    signal.pthread_sigmask(signal.SIG_BLOCK, background.SIGNALS)
    threading.Event().wait()
"""


@pytest.mark.slow
def test_signal_is_handled_while_main_is_busy_and_a_repeat_exits() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("asked by SIGTERM\n", 143), done.stderr


def test_exit_codes_equal_those_of_a_shell() -> None:
    assert [exit_code(number.name) for number in SIGNALS] == [130, 143]
