"""Saves in processes that are killed: `python killed.py FOLDER SEED [random KILLS | each]`.

Everything is imported once; each process that saves is forked from here before JAX starts. It
restores first, checks every number, and then saves step after step until it is killed. It prints
each committed step, which the next process must find.
"""

import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xlashard import Mesh, NamedSharding, P, device_put
from xlashard.train.checkpoint import Checkpoints, RunMetadata

FOLDER = Path(sys.argv[1])
KEEP = 2
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "open"}


def values(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 8), step, np.float32), "step": np.full(3, step, np.int32)}


class Saver:
    """Work of a forked process."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        mesh = Mesh(np.array(jax.devices()), ("x",))
        self._place = NamedSharding(mesh, P("x"))
        self._whole = NamedSharding(mesh, P())

    def check(self, checkpoints: Checkpoints) -> int:
        """Return the last committed step, after a check of all steps."""
        for step in checkpoints.steps():
            like = {
                "w": jax.ShapeDtypeStruct((64, 8), np.float32, sharding=self._place),
                "step": jax.ShapeDtypeStruct((3,), np.int32, sharding=self._whole),
            }
            restored = checkpoints.restore(like, step)
            for name, x in values(step).items():
                np.testing.assert_array_equal(np.asarray(restored.state[name]), x)
            assert restored.metadata.data == {"next": step}
        last = checkpoints.latest() or 0
        self._say(f"found {last}")
        return last

    def save(self, checkpoints: Checkpoints, step: int) -> None:
        state = {
            name: device_put(x, self._place if name == "w" else self._whole)
            for name, x in values(step).items()
        }
        metadata = RunMetadata(step, {"next": step}, "", {"x": len(jax.devices())})
        checkpoints.save(state, metadata)
        checkpoints.wait()
        self._say(f"committed {step}")


@contextmanager
def forked(work: Callable[[Saver], None]) -> Iterator["Child"]:
    """Fork a process that works with a saver; kill it at the end."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(reader)
            work(Saver(lambda line: (os.write(writer, f"{line}\n".encode()), None)[1]))
            os._exit(0)
        except BaseException as error:
            os.write(writer, f"failed {type(error).__name__}: {error}\n".encode())
            os._exit(1)
    os.close(writer)
    child = Child(process, reader)
    try:
        yield child
    finally:
        child.kill()
        os.close(reader)


class Child:
    """Forked process, with its output."""

    def __init__(self, process: int, reader: int) -> None:
        self._process: int | None = process
        self._reader = reader
        self._text = b""
        self.status: int | None = None

    def listen(self, until: str, seconds: float = 60) -> None:
        """Wait for a word, for the end, or for some time."""
        end = time.monotonic() + seconds
        while until not in self._text.decode() and (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self._reader], [], [], left)
            values = os.read(self._reader, 4096) if ready else None
            if values == b"":
                break
            self._text += values or b""

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process, signal.SIGKILL)
            _, self.status = os.waitpid(self._process, 0)
            self._process = None
            self.listen("no such word")

    def values(self, word: str) -> list[int]:
        """Return the numbers that followed a word."""
        lines = self._text.decode().splitlines()
        assert not [line for line in lines if line.startswith("failed")], lines
        return [int(line.split()[1]) for line in lines if line.startswith(word)]


def save_for_ever(saver: Saver) -> None:
    with Checkpoints(FOLDER, keep=KEEP) as checkpoints:
        step = saver.check(checkpoints)
        while True:
            step += 1
            saver.save(checkpoints, step)


def save_until_event(number: int) -> Callable[[Saver], None]:
    """Save once, and be killed just before a given change of the folder."""

    def work(saver: Saver) -> None:
        left = [number]

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event not in CHANGES or not str(args[0]).startswith(str(FOLDER)):
                return
            if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
                return
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        with Checkpoints(FOLDER, keep=KEEP) as checkpoints:
            last = saver.check(checkpoints)
            sys.addaudithook(hook)
            saver.save(checkpoints, last + 1)
            saver._say(f"unharmed {last + 1}")

    return work


class Ledger:
    """Record of committed steps, compared with the restored ones."""

    def __init__(self) -> None:
        self.committed = 0
        self.found: list[int] = []

    def enter(self, child: Child) -> None:
        (step,) = child.values("found")
        assert self.committed <= step <= self.committed + 1, (self.committed, step)
        self.found.append(step)
        self.committed = max([step, *child.values("committed")])


def kill_at_random(kills: int, rng: random.Random) -> str:
    ledger, halves = Ledger(), 0
    for _ in range(kills):
        with forked(save_for_ever) as child:
            child.listen("committed")
            child.listen("no such word", rng.uniform(0, 0.3))
            child.kill()
            ledger.enter(child)
        halves += any(path.name.startswith(".") for path in FOLDER.iterdir())
    with forked(save_until_event(10**9)) as child:
        child.listen("unharmed")
        ledger.enter(child)
    assert not [path for path in FOLDER.iterdir() if path.name.startswith(".")]
    return f"{kills} kills, {halves} in the middle of a save, {ledger.committed} steps"


def kill_at_each() -> str:
    ledger = Ledger()
    for _ in range(KEEP + 1):  # so that old ones are deleted, too
        with forked(save_until_event(10**9)) as child:
            child.listen("unharmed")
            ledger.enter(child)
    for number in range(1000):
        with forked(save_until_event(number)) as child:
            child.listen("unharmed")
            unharmed = child.values("unharmed")
            ledger.enter(child)
        if unharmed:
            return f"killed before each of {number} changes, {ledger.committed} steps"
    raise AssertionError("it never came to an end")


if __name__ == "__main__":
    if sys.argv[3] == "each":
        print(kill_at_each())
    else:
        print(kill_at_random(int(sys.argv[4]), random.Random(int(sys.argv[2]))))
