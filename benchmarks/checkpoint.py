"""Checkpoints: how long a run waits for one, and the cost of digests, beside orbax alone.

The state has the size `--mb`, sharded by rows over eight emulated devices, and after each save a
step donates it: buffers that the save still holds cost that step a copy. Both ours and orbax write
to disk, with fsync.

    python -m benchmarks.checkpoint [--mb N] [--rounds N] [--json PATH] [--strict]
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._devices import emulated

os.environ.update(emulated(8))

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks._measure import Report, interleave, read_options
from xlashard import Mesh, NamedSharding, P, device_put, pjit
from xlashard.train.checkpoint import Checkpoints, RunMetadata

LEAVES = 12
COLUMNS = 1024


class Stopwatch:
    """Clock that stops during work that a run does not wait for."""

    def __init__(self) -> None:
        self._left_out = 0.0

    def __call__(self) -> float:
        """Return the time in seconds, without the excluded work."""
        return time.perf_counter() - self._left_out

    def leave_out(self, work: Callable[[], object]) -> None:
        """Do work that is not timed."""
        started = time.perf_counter()
        work()
        self._left_out += time.perf_counter() - started


class Run:
    """State with a step that replaces it.

    Args:
        megabytes: Size of the state.
        folder: Folder of its checkpoints.
        clock: Clock of the measurement.
    """

    def __init__(self, megabytes: int, folder: Path, clock: Stopwatch) -> None:
        mesh = Mesh(np.array(jax.devices()), ("d",))
        rows = NamedSharding(mesh, P("d"))
        shape = (max(megabytes * 2**20 // (4 * COLUMNS * LEAVES) // 8 * 8, 8), COLUMNS)
        rng = np.random.default_rng(0)
        self.state = {
            f"w{n}": device_put(rng.standard_normal(shape, np.float32), rows) for n in range(LEAVES)
        }
        self.like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), self.state
        )
        self._next = pjit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
        self._done = 0
        self._clock = clock
        self._orbax = folder / "orbax"
        self._checkpoints = Checkpoints(folder / "ours", keep=1)
        self.save_and_wait()
        self.orbax_asynchronous()

    def step(self) -> None:
        """Run a step that donates the state."""
        self.state = jax.block_until_ready(self._next(self.state))

    def _save(self) -> None:
        self._done += 1
        self._checkpoints.save(self.state, RunMetadata(self._done, {}, "", {"d": 8}))

    def save_and_wait(self) -> None:
        """Save, and wait for the save."""
        self._save()
        self._checkpoints.wait()
        self.step()

    def save(self) -> None:
        """Save asynchronously, beside further steps."""
        self._save()
        self.step()
        self._clock.leave_out(self._checkpoints.wait)

    def _orbax_save(self) -> ocp.AsyncCheckpointer:
        shutil.rmtree(self._orbax, ignore_errors=True)
        checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        checkpointer.save(self._orbax.absolute(), args=ocp.args.StandardSave(self.state))
        return checkpointer

    def orbax_synchronous(self) -> None:
        """Save synchronously with orbax alone."""
        self._orbax_save().close()
        self.step()

    def orbax_asynchronous(self) -> None:
        """Save asynchronously with orbax alone."""
        checkpointer = self._orbax_save()
        self.step()
        self._clock.leave_out(checkpointer.close)

    def restore(self) -> None:
        """Verify and read a checkpoint."""
        jax.block_until_ready(self._checkpoints.restore(self.like).state)

    def orbax_restore(self) -> None:
        """Read a checkpoint with orbax."""
        with ocp.StandardCheckpointer() as checkpointer:
            jax.block_until_ready(checkpointer.restore(self._orbax.absolute(), self.like))


def main() -> int:
    """Measure and print all tables."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--mb", type=int, default=256, help="size of the state in MiB")
    options = read_options("Saving and restoring a sharded state", rounds=9, own=own)
    megabytes = own.parse_known_args()[0].mb
    report = Report("checkpoint")
    clock = Stopwatch()
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
    try:
        run = Run(megabytes, folder, clock)
        title = f"A save and the next step, {megabytes} MiB: what the run waits for"
        candidates = {
            "synchronous": run.save_and_wait,
            "xlashard": run.save,
            "orbax, synchronous": run.orbax_synchronous,
            "orbax": run.orbax_asynchronous,
            "the step alone": run.step,
        }
        measured = interleave(candidates, rounds=options.rounds, inner=1, warmup=1, clock=clock)
        goals = {"xlashard": 0.5}
        report.add(title, measured, baseline="synchronous", goals=goals)
        candidates = {"orbax": run.orbax_restore, "xlashard": run.restore}
        measured = interleave(candidates, rounds=options.rounds, inner=1, warmup=1, clock=clock)
        title = f"A restore, {megabytes} MiB, with all digests verified"
        report.add(title, measured, baseline="orbax", goals={"xlashard": 2.0})
    finally:
        shutil.rmtree(folder)
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
