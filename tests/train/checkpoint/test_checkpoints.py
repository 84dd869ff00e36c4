"""One process: saves are restored bitwise under any sharding; damage is reported."""

import asyncio
import dataclasses
import logging
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tests.message_patterns import naming
from tests.train.checkpoint.states import (
    HALF,
    MESH,
    ONE,
    SETTINGS,
    TALL,
    check_same,
    metadata,
    placed,
    restore,
    save,
    state,
    state_types,
    values,
)
from tests.train.checkpoint.write_golden import GOLDENS
from xlashard import Array, NamedSharding, P, device_put, pjit
from xlashard.train.checkpoint import Checkpoints
from xlashard.train.checkpoint.arrays import ArrayFiles
from xlashard.train.checkpoint.manifest import Manifest, digests, read_manifest
from xlashard.train.checkpoint.writing import steps_in
from xlashard.train.errors import CheckpointError, RunError


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MESH, TALL, HALF, ONE], ids=["same", "tall", "half", "one"])
def test_state_is_restored_on_any_mesh(saved: Path, mesh: Any) -> None:
    restored = restore(saved, state_types(mesh))
    check_same(restored.state, 20)
    for x in jax.tree.leaves(restored.state):
        assert type(x) is Array and x.committed
        assert x.sharding.is_equivalent_to(placed(x, mesh), x.ndim)


@pytest.mark.slow
def test_earlier_step_can_be_restored(saved: Path) -> None:
    with Checkpoints(saved) as checkpoints:
        assert (checkpoints.steps(), checkpoints.latest()) == ([10, 20], 20)
        check_same(checkpoints.restore(state_types(), 10).state, 10)


def test_metadata_round_trip(saved: Path) -> None:
    got = restore(saved).metadata
    assert got == metadata(20)
    assert got.data == {"seed": 7, "next": 20} and got.processes == 1
    assert got.versions["jax"] == jax.__version__
    assert set(got.versions) >= {"python", "xlashard", "jaxlib", "orbax-checkpoint", "numpy"}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_save_into_a_renamed_folder_leaves_nothing_in_its_place(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    renamed = [folder, folder.parent][depth]
    away = tmp_path / "away"
    start = ArrayFiles.save

    def save_after_renaming(files: ArrayFiles, place: Path, arrays: Any) -> None:
        renamed.rename(away)
        start(files, place, arrays)

    folder.parent.mkdir()
    (folder.parent / "config.toml").touch()
    save(folder, 10)
    monkeypatch.setattr(ArrayFiles, "save", save_after_renaming)
    with pytest.raises(CheckpointError, match=naming("step 20", str(folder), "renamed")):
        save(folder, 20)
    assert not folder.exists() and list(tmp_path.rglob("checkpoint.json")) == [
        away / ("checkpoints/" * depth + "00000010/checkpoint.json")
    ]
    away.rename(renamed)
    monkeypatch.undo()
    save(folder, 20)
    assert steps_in(folder) == [10, 20]


def test_random_keys_are_restored(tmp_path: Path) -> None:
    keys = device_put(jax.random.split(jax.random.key(7), 8), NamedSharding(TALL, P("x")))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save({"keys": keys}, metadata(1))
        checkpoints.wait()
        like = {"keys": jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=keys.sharding)}
        got = checkpoints.restore(like).state["keys"]
        assert type(got) is type(keys) and got.dtype == keys.dtype
        np.testing.assert_array_equal(*map(np.asarray, map(jax.random.key_data, (got, keys))))
        like = {"keys": jax.ShapeDtypeStruct((8, 2), np.uint32, sharding=keys.sharding)}
        with pytest.raises(
            CheckpointError, match=naming("step 1 ", "  keys ", "key<fry>[8]", "uint32[8,2]")
        ):
            checkpoints.restore(like)


@pytest.mark.slow
def test_state_may_be_donated_while_it_is_saved(tmp_path: Path) -> None:
    step = pjit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    now = jax.tree.map(pjit(lambda x: x + 0), state(1))
    with Checkpoints(tmp_path / "c") as checkpoints:
        for number in (1, 2, 3):
            checkpoints.save(now, metadata(number))
            now = step(now)
    for number, wanted_of in ((1, lambda x: x), (2, lambda x: x * 0 - 1)):
        got = restore(tmp_path / "c", state_types(), number).state
        expected = jax.tree.map(wanted_of, values(1))
        for ours, original in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            np.testing.assert_array_equal(np.asarray(ours), original)


@pytest.mark.slow
def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003", "00000004"]
    with pytest.raises(CheckpointError, match="keep=1"):
        Checkpoints(tmp_path, keep=0)


@pytest.mark.slow
def test_a_step_is_not_written_twice(own: Path) -> None:
    before = (own / "00000020" / "checkpoint.json").stat()
    with Checkpoints(own) as checkpoints:
        checkpoints.restore(state_types())
        checkpoints.save(state(20), metadata(20))
        checkpoints.save(state(30), metadata(30))
        checkpoints.save(state(30), metadata(30))
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20, 30]
    after = (own / "00000020" / "checkpoint.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_save_below_the_latest_step_is_refused(own: Path) -> None:
    with Checkpoints(own) as checkpoints:
        checkpoints.restore(state_types(), 10)
        with pytest.raises(CheckpointError, match=rf"(?s)\[20\].*mv {own}/00000020 ELSEWHERE") as e:
            checkpoints.save(state(15), metadata(15))
    assert e.value.step == 15


@pytest.mark.slow
def test_leftovers_of_killed_saves_are_ignored_and_removed(own: Path) -> None:
    os.system(f"cp -r {own}/00000020 {own}/.saving-00000030; mkdir {own}/.deleting-00000005")
    check_same(restore(own).state, 20)
    save(own, 25)
    assert sorted(path.name for path in own.iterdir()) == ["00000010", "00000020", "00000025"]


# Damage. Each is done to step 20; step 10 stays whole.


def test_missing_checkpoint_is_reported(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none has no checkpoint"):
        restore(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"has no checkpoint.* empty"):
        restore(tmp_path)
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(CheckpointError, match=r"has no checkpoint.* weights\.bin"):
        restore(tmp_path)
    with pytest.raises(CheckpointError, match="step 15.* 10, 20"):
        restore(saved, state_types(), 15)


# States of a different structure.


def test_error_of_changed_shapes_names_arrays_and_settings(saved: Path) -> None:
    settings = SETTINGS.replace("16", "32").replace("0.9", "0.95")
    with pytest.raises(CheckpointError) as error:
        restore(saved, state_types(width=32), settings=settings)
    first, *arrays, more, changed, advice = str(error.value).splitlines()
    assert f"step 20 in {saved}" in first
    for line, texts in zip(
        arrays,
        [
            ("optimizer.1.0.mu.half", "bfloat16[16]", "bfloat16[32]"),
            ("optimizer.1.0.mu.layers.up", "float32[16,8]", "float32[32,8]"),
            ("optimizer.1.0.nu.half", "bfloat16[16]", "bfloat16[32]"),
            ("optimizer.1.0.nu.layers.up", "float32[16,8]", "float32[32,8]"),
        ],
        strict=True,
    ):
        assert re.search(naming(*texts), line)
    assert "2 more arrays" in more
    assert "model.width = 16 is 32 now. Write:" in changed
    assert advice == "  --set model.width=16"
    assert isinstance(error.value, RunError)


def test_error_of_a_changed_structure_names_arrays_and_settings(saved: Path) -> None:
    like = state_types()
    like["average"] = like["step"]
    del like["parameters"]["half"]
    settings = SETTINGS.replace("0.9", "0.95")
    with pytest.raises(CheckpointError) as error:
        restore(saved, like, settings=settings)
    assert re.search(r"^  average, int32\[\], ", str(error.value), flags=re.MULTILINE)
    assert re.search(r"^  parameters\.half, bfloat16\[16\], ", str(error.value), flags=re.MULTILINE)
    assert str(error.value).endswith(
        "optimizer.b1 = 0.9 is 0.95 now. Write:\n  --set optimizer.b1=0.9"
    )


def test_checkpoint_of_an_earlier_release_is_restored() -> None:
    """A checkpoint of format 1, written by orbax 0.11.33."""
    restored = restore(GOLDENS)
    check_same(restored.state, 7)
    assert restored.metadata.data == {"seed": 7, "next": 7}
    assert restored.metadata.versions["orbax-checkpoint"] == "0.11.33"


def test_orbax_errors_include_the_versions(own: Path) -> None:
    """Files that are intact, but written by other software."""
    folder = own / "00000020"
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    for file in (folder / "arrays").rglob("manifest.ocdbt"):
        file.unlink()
    left = digests(folder, [name for name in manifest.files if (folder / name).exists()])
    was = dataclasses.replace(metadata(20), versions={"orbax-checkpoint": "9.0"})
    Manifest(was, manifest.arrays, left).write(folder)
    match = r"orbax-checkpoint 9\.0.*: \w+"
    with pytest.raises(CheckpointError, match=match) as error:
        restore(own)
    assert error.value.step == 20 and error.value.__cause__ is not None


def test_metadata_must_be_json_serializable() -> None:
    with pytest.raises(CheckpointError, match=r"next.*int64 is not JSON serializable.*int\(x\)"):
        metadata(1, data={"next": np.int64(3)})
    with pytest.raises(CheckpointError, match="step = -1"):
        metadata(-1)


def test_leaves_without_a_sharding_are_refused(saved: Path, tmp_path: Path) -> None:
    like = state_types()
    like["step"] = jax.ShapeDtypeStruct((), np.int32)
    with pytest.raises(
        CheckpointError, match=r"^step [\s\S]*jax\.ShapeDtypeStruct\(\(\), jnp\.int32, sharding"
    ):
        restore(saved, like)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(
            CheckpointError, match=naming("data.next", "3", "int", "xlashard.device_put(next, ")
        ),
    ):
        checkpoints.save({"data": {"next": 3}}, metadata(1))


# Failures of the disk.


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of all files, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 100, 2000])
def test_full_disk_is_reported_and_the_state_stays_usable(own: Path, size: int) -> None:
    now = state(30)
    with Checkpoints(own) as checkpoints:
        with files_of_at_most(size), pytest.raises(CheckpointError) as error:
            checkpoints.save(now, metadata(30))
            checkpoints.wait()
        assert re.search(rf"step 30 .*{own} .*step 20", str(error.value))
        assert "File too large" in str(error.value) and error.value.step == 30
        assert "\n" not in str(error.value) and len(str(error.value)) < 400
        check_same(now, 30)
        assert checkpoints.steps() == [10, 20]
        checkpoints.save(now, metadata(30))
    check_same(restore(own).state, 30)


def test_late_writes_after_a_failed_write_print_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorStore reports each late write to the event loop of its save, which is closed."""
    reported: list[object] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_value)
    )
    loop = asyncio.new_event_loop()
    loop.close()
    late, other = RuntimeError(), RuntimeError("Event loop is closed")
    try:
        loop.call_soon_threadsafe(print)
    except RuntimeError as error:
        late = error
    before = sys.unraisablehook
    with Checkpoints(tmp_path):
        for error in (late, other):
            trace = error.__traceback__
            unraisable = SimpleNamespace(exc_value=error, exc_traceback=trace, object=None)
            sys.unraisablehook(unraisable)  # pyright: ignore[reportArgumentType]
    assert reported == [other]
    assert sys.unraisablehook is before


def test_background_error_ends_the_block_or_becomes_a_note(own: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="step 30"),
        files_of_at_most(100),
        Checkpoints(own) as checkpoints,
    ):
        checkpoints.save(state(30), metadata(30))
    with (
        pytest.raises(ZeroDivisionError) as error,
        files_of_at_most(100),
        Checkpoints(own) as checkpoints,
    ):
        checkpoints.save(state(30), metadata(30))
        raise ZeroDivisionError
    assert "step 30 could not be written" in error.value.__notes__[0]


@pytest.mark.slow
def test_background_error_is_raised_by_the_next_save(own: Path) -> None:
    with Checkpoints(own) as checkpoints:
        with files_of_at_most(100):
            checkpoints.save(state(30), metadata(30))
            with pytest.raises(CheckpointError, match="of step 30"):
                checkpoints.save(state(40), metadata(40))
        checkpoints.save(state(50), metadata(50))
    check_same(restore(own).state, 50)


@pytest.mark.slow
def test_undeletable_old_checkpoint_is_reported_and_kept(tmp_path: Path) -> None:
    (tmp_path / ".deleting-00000001").write_text("in the way")
    with (
        pytest.warns(RuntimeWarning, match="step 1 .*Not a dir"),
        Checkpoints(tmp_path, keep=1) as checkpoints,
    ):
        for step in (1, 2):
            checkpoints.save(state(step), metadata(step))
            checkpoints.wait()
        assert checkpoints.steps() == [1, 2]


def test_uncreatable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        Checkpoints(tmp_path / "file" / "c") as checkpoints,
        pytest.raises(CheckpointError, match=r"step 1 .*Not a directory: .*file/c"),
    ):
        checkpoints.save(state(1), metadata(1))


# The process around it.


@pytest.mark.slow
def test_save_keeps_signal_handlers_of_the_caller(tmp_path: Path) -> None:
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with Checkpoints(tmp_path) as checkpoints:
            for step in (1, 2, 3):
                sender = threading.Thread(target=signal.raise_signal, args=(signal.SIGTERM,))
                sender.start()
                checkpoints.save(state(step), metadata(step))
                os.kill(os.getpid(), signal.SIGTERM)
                checkpoints.wait()
                sender.join()
    finally:
        ours = signal.signal(signal.SIGTERM, before)
    assert callable(ours) and len(came) >= 3
    assert {n: signal.getsignal(n) for n in handlers} == handlers
    check_same(restore(tmp_path).state, 3)


@pytest.mark.slow
def test_checkpoints_print_nothing(own: Path, capfd: pytest.CaptureFixture, caplog: Any) -> None:
    with Checkpoints(own) as checkpoints:
        caplog.set_level(logging.DEBUG, "absl")
        checkpoints.restore(state_types())
        checkpoints.save(state(30), metadata(30))
        checkpoints.wait()
        with files_of_at_most(100):
            checkpoints.save(state(40), metadata(40))
            with pytest.raises(CheckpointError):
                checkpoints.wait()
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if "orbax" in record.pathname] == []


def test_save_leaves_no_thread_running(own: Path) -> None:
    save(own, 30)
    assert not [t for t in threading.enumerate() if t.name.startswith(("checkpoint", "digests"))]
