import os
import signal
import threading

import pytest

from xlashard.train.interrupt import stop_on_interrupt


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupt_is_a_request() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as stop:
        assert not stop.asked
        interrupt()
        assert stop.asked
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_interrupt_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_on_interrupt():
        interrupt()
        interrupt()
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_change_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with stop_on_interrupt() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.asked))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
