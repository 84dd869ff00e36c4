import hashlib
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.examples import MESHES, devices, over, settings
from tests.waiting import wait_for
from xlashard import GlobalBatches, multihost
from xlashard.train.config.settings import DataSettings
from xlashard.train.data import (
    Corpus,
    Text,
    TrainingWindows,
    held_out_starts,
    plan_batch,
    read_corpus,
    training_starts,
)
from xlashard.train.errors import DataError
from xlashard.train.model.layout import Layout, build_mesh
from xlashard.train.model.programs import batch_sharding

TEXT = Text.joined([np.arange(251, dtype=np.uint8)])


def training_windows(text: Text, step: int, count: int, length: int, seed: int) -> np.ndarray:
    return text.windows(training_starts(len(text), step, count, length, seed), length + 1)


def held_out_windows(text: Text, batch: int, count: int, length: int) -> np.ndarray:
    return text.windows(held_out_starts(len(text), batch, count, length), length + 1)


def refusal(*paths: Path | str, fraction: float = 0.5, length: int = 4) -> str:
    with pytest.raises(DataError) as caught:
        read_corpus(DataSettings(tuple(map(str, paths)), fraction), length)
    return str(caught.value)


def test_default_text_is_the_python_documentation() -> None:
    corpus = read_corpus(DataSettings(), 128)
    whole = corpus.train.tobytes() + corpus.held_out.tobytes()
    assert b"The assert statement" in whole or b"assert" in whole
    assert len(whole) > 300_000
    assert len(corpus.held_out) == int(len(whole) * 0.05)


def test_repeated_reads_return_equal_bytes() -> None:
    first, second = (read_corpus(DataSettings(), 8).train.tobytes() for _ in range(2))
    assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest()


def test_files_and_folders_are_joined_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second part")
    (tmp_path / "a.md").write_text("first part")
    (tmp_path / "c.bin").write_bytes(b"\0\0")
    single = tmp_path / "sub" / "d.anything"
    single.parent.mkdir()
    single.write_text("third part")
    corpus = read_corpus(DataSettings((str(tmp_path), str(single)), 0.5), 4)
    whole = corpus.train.tobytes() + corpus.held_out.tobytes()
    assert whole == b"first part\n\nsecond part\n\nthird part"


def test_held_out_part_is_the_end_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a" * 80 + "b" * 20)
    corpus = read_corpus(DataSettings((str(path),), 0.2), 4)
    assert set(corpus.train.tobytes()) == {ord("a")}
    assert corpus.held_out.tobytes() == b"b" * 20


def test_error_of_a_missing_path_suggests_a_similar_path(tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text("x")
    text = refusal(tmp_path / "nuvel.txt")
    assert f"{tmp_path / 'nuvel.txt'}" in text
    assert f"did you mean {tmp_path / 'novel.txt'}?" in text
    assert "--data PATH" in text


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    assert f"nor a folder {tmp_path / 'no'}" in refusal(tmp_path / "no" / "novel.txt")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("  \n")
    text = refusal(path)
    assert f"{path} is empty" in text
    assert "--data PATH" in text


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"abc")
    assert f"the folder {tmp_path} has no .txt, .md, .rst file" in refusal(tmp_path)


def test_file_with_a_zero_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"abc\0def")
    assert f"{path} is not text: byte 3 is zero" in refusal(path)


@pytest.mark.parametrize("size", [1, 9])
def test_too_little_text_is_reported_with_numbers(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a" * size)
    text = refusal(path, length=8)
    assert f"{size} bytes of text are not enough" in text
    assert "model.length + 1 = 9" in text


@pytest.mark.slow
@given(st.integers(1, 400), st.floats(0.01, 0.99), st.integers(2, 20))
def test_accepted_text_suffices_for_windows(size: int, fraction: float, length: int) -> None:
    text = Text.joined([np.ones(size, np.uint8)])
    cut = size - int(size * fraction)
    if min(cut, size - cut) <= length:
        return
    assert training_windows(text.part(0, cut), 0, 3, length, 0).all()
    assert held_out_windows(text.part(cut, size), 5, 3, length).all()


def test_windows_are_slices_of_the_text() -> None:
    for windows in (training_windows(TEXT, 7, 20, 9, 3), held_out_windows(TEXT, 2, 20, 9)):
        assert windows.shape == (20, 10)
        assert (np.diff(windows.astype(int), axis=1) == 1).all()


def test_windows_depend_only_on_step_and_seed() -> None:
    def one(step: int, seed: int) -> bytes:
        return training_windows(TEXT, step, 8, 4, seed).tobytes()

    assert one(5, 1) == one(5, 1)
    assert len({one(5, 1), one(6, 1), one(5, 2)}) == 3


def test_windows_can_start_at_every_position() -> None:
    text = Text.joined([np.arange(12, dtype=np.uint8)])
    starts = {w[0] for step in range(60) for w in training_windows(text, step, 4, 4, 0)}
    assert starts == set(range(8))


def test_held_out_windows_spread_over_the_text() -> None:
    starts = np.sort(np.concatenate([held_out_windows(TEXT, i, 8, 4)[:, 0] for i in range(4)]))
    assert np.diff(starts).max() < 20
    assert starts[0] < 20
    assert starts[-1] > 225


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("parts", [1, 2])
def test_batch_on_devices_equals_its_windows(name: str, parts: int) -> None:
    run = settings(**MESHES[name])
    count = run.devices.emulate
    layout = Layout(build_mesh(run.mesh, devices(count)), run.sharding.rules)
    starts = training_starts(len(TEXT), 0, 8 * parts, 4, 0)
    sharding = batch_sharding(layout)
    batch = plan_batch(sharding, 8 * parts, parts, 4).put(TEXT, starts)
    assert isinstance(batch, jax.Array)
    assert batch.sharding == sharding
    np.testing.assert_array_equal(np.asarray(batch), TEXT.windows(starts, 5).reshape(parts, 8, 5))


def test_windows_of_training_continue_at_a_saved_step() -> None:
    run = settings(**MESHES["data"])
    layout = Layout(build_mesh(run.mesh, devices(run.devices.emulate)), run.sharding.rules)
    plan = plan_batch(batch_sharding(layout), 8, 1, 4)
    corpus = Corpus(TEXT.part(0, 200), TEXT.part(200, 251), "numbers")
    windows = TrainingWindows(corpus, plan, seed=3)
    whole = [next(windows) for _ in range(5)]
    for step, batch in enumerate(whole):
        np.testing.assert_array_equal(batch[0], training_windows(corpus.train, step, 8, 4, 3))
    assert windows.get_state() == {"step": 5, "seed": 3, "text": corpus.mark}
    batches = GlobalBatches(windows, plan.sharding, global_shape=plan.shape)
    batches.set_state({"batches": 2, "source": {**windows.get_state(), "step": 2}})
    with batches:
        np.testing.assert_array_equal(next(batches), whole[2])
        next(batches)
        wait_for(lambda: windows.step > 4, "reading ahead")
        state = batches.get_state()
    assert (state["batches"], state["source"]["step"]) == (4, 4)


class Counted(Text):
    """Text that records the windows that were read."""

    def windows(self, starts: np.ndarray, size: int) -> np.ndarray:
        TAKEN.extend(starts.tolist())
        return super().windows(starts, size)


TAKEN: list[int] = []


@pytest.mark.slow
@pytest.mark.pod(processes=2, devices=2)
@pytest.mark.parametrize("parts", [1, 2])
def test_each_process_reads_the_rows_of_its_own_devices(parts: int) -> None:
    run = settings(**over({"data": 2, "tensor": 2}, batch="data"))
    layout = Layout(build_mesh(run.mesh, jax.devices()), run.sharding.rules)
    plan = plan_batch(batch_sharding(layout), 8, parts, 4)
    starts = np.arange(0, 80, 10)
    TAKEN.clear()
    batch = plan.put(Counted.joined([np.arange(251, dtype=np.uint8)]), starts)
    taken = multihost.process_allgather(np.array(TAKEN))
    assert taken.shape == (2, 4)
    assert sorted(taken.reshape(-1)) == starts.tolist()
    whole = TEXT.windows(starts, 5).reshape(parts, 8 // parts, 5)
    for shard in batch.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


@pytest.mark.slow
@pytest.mark.pod(processes=2, devices=2)
def test_every_process_reads_replicated_rows() -> None:
    run = settings(**over({"tensor": 4}))
    layout = Layout(build_mesh(run.mesh, jax.devices()), run.sharding.rules)
    starts = np.arange(0, 80, 10)
    TAKEN.clear()
    batch = plan_batch(batch_sharding(layout), 8, 1, 4).put(
        Counted.joined([np.arange(251, dtype=np.uint8)]), starts
    )
    assert starts.tolist() == TAKEN
    np.testing.assert_array_equal(np.asarray(batch), TEXT.windows(starts, 5)[None])
