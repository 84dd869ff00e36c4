"""Run in each process of a pod of three: barriers, and liveness of peers."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xlashard
from tests.core.processes import expect, listening_addresses
from xlashard import multihost
from xlashard.core.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, store, wait_graph
from xlashard.errors import DeadlockError, ProcessesError

LOG: list[str] = []


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LOG.append(record.getMessage())


logging.getLogger("xlashard").addHandler(_Keep())
POD = multihost.initialize(heartbeat=60)
ME = POD.process


def check_place() -> None:
    assert (POD.count, POD.found_by) == (3, "an emulated pod")
    assert POD.process == jax.process_index() and jax.process_count() == 3
    assert multihost.initialize() is POD
    assert multihost.initialize(processes=3, process_id=ME) is POD
    error = expect(ProcessesError, "", lambda: multihost.initialize(processes=4))
    assert f"joined as number {ME} of 3" in str(error) and "processes=4" in str(error)


def check_nothing_listens_elsewhere() -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec("x"))
    x = xlashard.make_array_from_callback((3,), everywhere, lambda index: np.ones(1, np.float32))
    assert float(xlashard.pjit(lambda x: x.sum())(x)) == 3  # gloo has connected
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    addresses = listening_addresses()
    assert addresses and addresses <= loopback, addresses


def check_barriers() -> None:
    for _ in range(3):
        multihost.barrier("counted")
    if ME < 2:
        multihost.barrier("of two / with a slash", processes=(0, 1))
    names = [f"thread {number}" for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        # Each process reaches the barriers in a different order, and each thread one of them.
        ordered = names[ME:] + names[:ME]
        list(pool.map(multihost.barrier, ordered))
    multihost.sync_global_devices("all agree")
    error = expect(
        ProcessesError, "", lambda: multihost.sync_global_devices("zero" if ME == 0 else "other")
    )
    assert "processes 1, 2: 'other'; process 0: 'zero'" in str(error)


def check_a_timeout_names_the_missing() -> None:
    if ME != 1:
        wait_graph._FIRST = 1.0
        began = time.monotonic()
        error = expect(
            ProcessesError,
            r"barrier 'early' waited 2\.5 s, and process 1 of 3 did not call it",
            lambda: multihost.barrier("early", timeout=2.5),
        )
        lines = [line for line in LOG if line.startswith("barrier 'early': still waiting for")]
        first = r"barrier 'early': still waiting for process 1 \(\d+ s\)"
        assert re.match(first, lines[0]), LOG
        assert len(lines) <= 2, "the second after twice the time"
        assert error.processes == (1,) and not isinstance(error, DeadlockError)
        assert time.monotonic() - began < 60
        store.write(f"early/{ME}", b"")
    else:
        assert store.read("early/0", 30) is not None and store.read("early/2", 30) is not None
    multihost.barrier("counted")


def check_crossing_barriers_raise_everywhere() -> None:
    began = time.monotonic()
    error = expect(DeadlockError, "", lambda: multihost.barrier("left" if ME == 0 else "right"))
    assert time.monotonic() - began < 60
    why = r"process 0 waits at barrier 'left' \(pod_liveness.py:\d+\), process [12] waits at "
    assert re.search(why + r"barrier 'right' \(pod_liveness.py:\d+\)", str(error)), error
    # All processes have the same report.
    store.write(f"why/{ME}", str(error).partition(": ")[2].encode())
    multihost.barrier("counted")
    assert len(set(store.listed("why").values())) == 1


def check_threads_that_wait_are_no_deadlock() -> None:
    # Process 0 waits at one barrier, and reaches the other, at which its peers wait, in a thread,
    # late: an apparent cycle that is no deadlock.
    if ME == 0:
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(lambda: (store.read("go", 30), multihost.barrier("by a thread")))
            multihost.barrier("by the main thread")
            late.result()
    else:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(multihost.barrier, "by the main thread")
            waiting = pool.submit(time.sleep, 0)  # the pool's only thread is busy until then
            if ME == 1:
                store.write("go", b"")
            multihost.barrier("by a thread")
            other.result()
            waiting.result()


def check_meetings() -> None:
    def meet(subject: str, series: str = "test", processes: tuple[int, ...] = (0, 1, 2)) -> None:
        came = RENDEZVOUS.exchange(Barrier(processes, series, 30), subject)
        assert came == {p: f"{subject.partition(' ')[0]} {p}" for p in processes}, came

    for number in range(3):
        meet(f"{number} {ME}")
        meet(f"other{number} {ME}", series="other/series")
    if ME != 1:
        meet(f"part {ME}", processes=(0, 2))
    large = os.urandom(3 << 20)
    if ME == 0:
        assert store.write("large", large) and not store.write("large", b"later")
        store.write("folder/a", b"1")
        store.write("folder/b/c", b"2")
    multihost.barrier("counted")
    assert len(store.read("large") or b"") == 3 << 20
    assert store.listed("folder") == {"a": b"1", "b/c": b"2"}
    assert store.read("nothing") is None and store.read("nothing", 0.01) is None
    multihost.barrier("counted")
    if ME == 2:
        store.drop("folder")
        store.drop("large")
    multihost.barrier("counted")
    assert store.listed("folder") == {} and store.read("large") is None
    # A late process detects that its peers have continued, and joins them.
    if ME == 2:
        store.read("gave-up/0", 30)
        store.read("gave-up/1", 30)
        meet(f"late {ME}", series="late")
        return
    error = expect(
        BarrierTimeoutError,
        "",
        lambda: RENDEZVOUS.exchange(Barrier((0, 1, 2), "late", 0.5), "early"),
    )
    assert error.processes == (2,)
    store.write(f"gave-up/{ME}", b"")
    meet(f"late {ME}", series="late")


def check_an_interrupted_wait_ends_for_all() -> None:
    def interrupt(missing: tuple[int, ...], seconds: float) -> None:
        raise KeyboardInterrupt

    if ME == 2:
        # It arrives when both others have waited and given up.
        store.read("interrupted", 30)
    elif ME == 1:
        invitation = Barrier((0, 1, 2), "interrupted", 30, interrupt)
        try:
            RENDEZVOUS.exchange(invitation, "")
        except KeyboardInterrupt:
            store.write("interrupted", b"")
    else:
        error = expect(
            BarrierTimeoutError,
            "",
            lambda: RENDEZVOUS.exchange(Barrier((0, 1, 2), "interrupted", 30), ""),
        )
        assert error.processes == (1,)
    multihost.barrier("counted")


def check_the_watchdog(folder: Path) -> None:
    pids = {p: int(store.read(f"pid/{p}", 30) or b"") for p in range(3) if not _publish_pid()}
    mesh = Mesh(np.array(jax.devices()), ("x",))
    x = jax.make_array_from_callback(
        (3,), NamedSharding(mesh, PartitionSpec("x")), lambda index: np.ones(1, np.float32)
    )
    step = jax.jit(lambda x: x.sum())
    float(step(x))
    held = threading.Lock()
    held.acquire()

    over = threading.Event()

    def sleep() -> None:
        if ME == 1:
            while not over.is_set():
                time.sleep(0.2)

    def lock() -> None:
        if ME == 1:
            while not over.is_set():
                held.acquire(timeout=0.2)

    def stop() -> None:
        if ME == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def go_on_when_reported(trouble: str, words: str) -> None:
        """Resume process 1 when the others have reported it."""
        if ME == 1:
            for process in (0, 2):
                store.read(f"reported/{trouble}/{process}", 60)
            over.set()
            return
        until(lambda: words in "\n".join(LOG))
        store.write(f"reported/{trouble}/{ME}", b"")
        if ME == 0 and trouble == "stop":
            store.read("reported/stop/2", 60)
            os.kill(pids[1], signal.SIGCONT)

    expected = {
        sleep: "process 1 is stuck in pod_liveness.py:",
        lock: "process 1 is stuck in pod_liveness.py:",
        stop: "is stopped by a signal (SIGSTOP) or a debugger: kill -CONT",
    }
    for trouble, words in expected.items():
        LOG.clear()
        multihost.barrier("counted")
        # Slow steps, but no slower than the watchdog allows, are not reported.
        with multihost.Watchdog(timeout=2.5, folder=folder / trouble.__name__) as watchdog:
            for number in range(3):
                time.sleep(0.4)
                float(step(x))
                watchdog.step(number)
            assert not [line for line in LOG if "stuck" in line or "no step" in line], LOG
            over.clear()
            hearing = threading.Thread(target=go_on_when_reported, args=(trouble.__name__, words))
            hearing.start()
            trouble()
            float(step(x))
            watchdog.step()
            hearing.join()
        if ME == 1:
            continue
        report = "\n".join(LOG)
        assert words in report, report
        assert "processes 0, 2 wait in pod_liveness.py:" in report, report
        assert "float(step(x)) at step 2" in report, report
        assert re.search(f"process {ME} of 3: no step for \\d+ s, since step 2", report), report
        if trouble is not stop:
            assert f"in {trouble.__name__}: " in report, report
        files = sorted((folder / trouble.__name__).glob(f"watchdog-{ME}-*.txt"))
        assert files and words in files[0].read_text()
    _check_pauses(folder)


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not reached() and time.monotonic() < end:
        time.sleep(0.05)


def _check_pauses(folder: Path) -> None:
    LOG.clear()
    multihost.barrier("counted")
    busy = "process 1 is busy with evaluation: pod_liveness.py:"
    # Process 1 is busy; it is not reported itself, and the others' reports end no process.
    with multihost.Watchdog(timeout=1.5, crash=True, folder=folder / "paused") as watchdog:
        if ME == 1:
            with watchdog.paused("evaluation"):
                for process in (0, 2):
                    store.read(f"reported/busy/{process}", 60)
        else:
            threading.Thread(target=report_when_logged, args=(busy,)).start()
        multihost.barrier("after the evaluation")
    if ME == 1:
        assert not [line for line in LOG if "no step" in line], LOG
    else:
        report = "\n".join(LOG)
        assert busy in report, report
        assert "waits at barrier 'after the evaluation'" in report or "wait in" in report, report


def report_when_logged(words: str) -> None:
    until(lambda: words in "\n".join(LOG))
    store.write(f"reported/busy/{ME}", b"")


def _publish_pid() -> bool:
    store.write(f"pid/{ME}", str(os.getpid()).encode())
    return False


if __name__ == "__main__":
    check_place()
    check_nothing_listens_elsewhere()
    check_barriers()
    check_a_timeout_names_the_missing()
    check_crossing_barriers_raise_everywhere()
    check_threads_that_wait_are_no_deadlock()
    check_meetings()
    check_an_interrupted_wait_ends_for_all()
    check_the_watchdog(Path(os.environ["XLASHARD_TEST_FOLDER"]))
    multihost.barrier("all is well")
    print("all is well")
