"""Temporary dump folders are removed, also those of killed processes."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.without_jax import HAS_JAX
from xlashard.predict.sweep.axis_ranges import AxisRange
from xlashard.predict.sweep.sweep_report import SweepProgress
from xlashard.tpu import topology
from xlashard.workers import dump_folder
from xlashard.workers.dump_folder import remove_abandoned_folders, temporary_dump_folder
from xlashard.workers.job_pool import JobPool, WorkerLimits

if HAS_JAX:
    import jax
    import jax.numpy as jnp

    from tests.predict.preflight.programs import compile_stage, on
    from xlashard import P, pjit
    from xlashard.predict.sweep import sweep_run

# The module needs only the standard library, so the process needs no JAX.
_HOLD = """
import runpy, sys
with runpy.run_path(sys.argv[1])["temporary_dump_folder"]() as folder:
    (folder / "module.txt").write_text("half of it")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary directory of this process and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextmanager
def another() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield a process that works in a folder, and the folder."""
    words = [sys.executable, "-c", _HOLD, str(dump_folder.__file__)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_dump_folder_is_removed_after_its_block(temporary: Path) -> None:
    with pytest.raises(ValueError, match="in the middle"), temporary_dump_folder() as folder:
        assert [*temporary.iterdir()] == [folder]
        (folder / "module.txt").touch()
        raise ValueError("in the middle")
    assert not [*temporary.iterdir()]


def test_only_folders_of_ended_processes_are_removed(temporary: Path) -> None:
    foreign = temporary / "xlashard-sweep-of-mine"
    foreign.mkdir()
    with another() as (_, living), another() as (killed, left):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (left / "module.txt").exists()
        with temporary_dump_folder() as own:
            remove_abandoned_folders()
            assert {*temporary.iterdir()} == {foreign, living, own}
            assert (living / "module.txt").exists()


def test_removal_does_not_follow_symlinks(temporary: Path) -> None:
    kept = temporary / "kept"
    kept.mkdir()
    (kept / "thesis.txt").touch()
    (temporary / f"{dump_folder._PREFIX}x").symlink_to(kept)
    remove_abandoned_folders()
    assert (kept / "thesis.txt").exists()


@pytest.mark.slow
def test_threads_do_not_remove_folders_of_other_threads() -> None:
    def work(_: int) -> None:
        for number in range(50):
            with temporary_dump_folder() as folder:
                (folder / "module.txt").write_text(str(number))
                remove_abandoned_folders()
                assert (folder / "module.txt").read_text() == str(number)

    with ThreadPoolExecutor(4) as pool:
        assert len([*pool.map(work, range(4))]) == 4


@pytest.mark.needs_jax
def test_a_compilation_removes_its_dump_folder(temporary: Path) -> None:
    left = temporary / f"{dump_folder._PREFIX}of-a-process-that-is-gone"
    left.mkdir()
    _, mesh = on("v5e:2x2", a=4)
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((8,), jnp.float32)
        lowered = pjit(lambda x: x + 1, in_shardings=P("a")).lower(x)
    assert compile_stage(lowered).module.allocations
    assert not left.exists()
    # The worker process waits for another program, with libtpu's log files in a folder of its own.
    kept = temporary.glob(f"{dump_folder._PREFIX}*/*")
    assert all(file.name.startswith("tpu_driver") for file in kept)


@pytest.mark.needs_jax
def test_sweep_removes_dump_folders_of_its_processes(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = temporary / f"{dump_folder._PREFIX}of-a-process-that-was-ended"
    monkeypatch.setattr(JobPool, "run", lambda *_: (answer for answer in ()))
    sweep = sweep_run.Sweep("t", "t", (topology("v5e-4"),), {"data": AxisRange()})
    left.mkdir()
    limits, progress = WorkerLimits(workers=1), SweepProgress(shown=False)
    with sweep_run.SweepRunner(temporary / "sweep", limits, progress) as runner:
        sweep_run.run_sweep(sweep, runner)
    assert not left.exists()
