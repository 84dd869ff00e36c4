"""Batches of data loaders as global arrays: their values, their order, their position."""

import gc
import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.processes import ROOT, pod_python
from tests.documents import program
from tests.message_patterns import naming
from tests.train.loop.pods import run_watched, signalled
from tests.waiting import wait_for
from xlashard import GlobalBatches, Mesh, NamedSharding, P, make_array_from_process_local_data
from xlashard.errors import ArgumentError, PlacementError
from xlashard.multihost import GONE_EXIT_CODE
from xlashard.pods.testing.launcher import LaunchPlan, PodSize

type Batch = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def rows() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P("data"))


def list_batches(count: int, last: int = 8) -> list[Batch]:
    """Return batches of 8 rows, which are numbered through; the last one may have fewer."""
    sizes = [*[8] * (count - 1), last]
    return [
        {
            "id": np.arange(8 * n, 8 * n + size, dtype=np.int32),
            "x": np.full((size, 3), n, np.float32),
        }
        for n, size in enumerate(sizes)
    ]


def read_ids(batches: Iterable[Any]) -> list[list[int]]:
    return [np.asarray(batch["id"]).tolist() for batch in batches]


def prefetching_threads() -> int:
    return sum(thread.name == "GlobalBatches" for thread in threading.enumerate())


class StatefulIterator:
    """Iterator with a state, as of grain's datasets."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches
        # One object, as of loaders that return the state that they change.
        self._state = {"next": 0}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._state["next"] == len(self._batches):
            raise StopIteration
        self._state["next"] += 1
        return self._batches[self._state["next"] - 1]

    def get_state(self) -> Any:
        return self._state

    def set_state(self, state: Any) -> None:
        self._state = dict(state)


class BytesIterator(StatefulIterator):
    """Iterator whose state are bytes, as of grain's DataLoader."""

    def get_state(self) -> Any:
        return json.dumps(self._state).encode()

    def set_state(self, state: Any) -> None:
        super().set_state(json.loads(state))


class BytesLoader:
    """Loader whose iterators have states, as grain's DataLoader."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return BytesIterator(self._batches)


class StatefulLoader:
    """Loader with a state of its own for its next iterator, as of torchdata."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches, self._position, self._begin = batches, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        self._position, self._begin = self._begin, 0
        return self._read()

    def _read(self) -> Iterator[Batch]:
        for number in range(self._position, len(self._batches)):
            self._position = number + 1
            yield self._batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin = state["yielded"]


KINDS = (list, iter, StatefulIterator, BytesLoader, StatefulLoader)
"""Sources: without a state, as an iterable and as an iterator, and with states."""


def test_batches_are_global_arrays_on_their_shardings(rows: NamedSharding) -> None:
    everywhere = NamedSharding(rows.mesh, P())
    source = [(batch["id"], [batch["x"], n]) for n, batch in enumerate(list_batches(3))]
    batches = list(GlobalBatches(source, (rows, everywhere)))
    assert len(batches) == 3
    for (ids, (x, number)), (own_ids, (own_x, own_number)) in zip(batches, source, strict=True):
        assert (ids.sharding, x.sharding, number.sharding) == (rows, everywhere, everywhere)
        np.testing.assert_array_equal(ids, own_ids)
        np.testing.assert_array_equal(x, own_x)
        assert int(number) == own_number


def test_short_batches_are_dropped_wherever_they_are(rows: NamedSharding) -> None:
    source = list_batches(2) + list_batches(2, last=5) + list_batches(1)
    assert read_ids(GlobalBatches(source, rows)) == read_ids([*source[:3], source[4]])


def test_short_batches_are_padded_with_a_mask(rows: NamedSharding) -> None:
    source = [batch | {"number": n} for n, batch in enumerate(list_batches(3, last=5))]
    shardings = {"id": rows, "x": rows, "number": NamedSharding(rows.mesh, P())}
    *full, (batch, mask) = GlobalBatches(source, shardings, last="pad")
    assert int(batch["number"]) == 2
    assert all(np.asarray(mask).all() for _, mask in full) and len(full) == 2
    assert batch["x"].shape == (8, 3) and mask.sharding == rows
    assert np.asarray(mask).tolist() == [True] * 5 + [False] * 3
    np.testing.assert_array_equal(batch["id"], [16, 17, 18, 19, 20, 0, 0, 0])


def test_a_short_first_batch_is_padded_up_to_a_full_one(rows: NamedSharding) -> None:
    source = list_batches(1, last=5)
    like = {"id": jax.ShapeDtypeStruct((16,), np.int32), "x": np.zeros((16, 3), np.float32)}
    ((batch, mask),) = GlobalBatches(source, rows, last="pad", like=like)
    assert batch["id"].shape == (16,) and np.asarray(mask).sum() == 5
    assert list(GlobalBatches(source, rows, like=like)) == []
    with pytest.raises(PlacementError, match=naming("batch['id']", "size 5", "4 tiles")):
        next(GlobalBatches(source, rows, last="pad"))


class Tensor:
    """Tensor of another library, with `__array__`, as of TensorFlow and PyTorch."""

    def __init__(self, value: np.ndarray) -> None:
        self._value = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._value, dtype)


class Bfloat16Tensor:
    """Tensor of a dtype that NumPy lacks, as of PyTorch."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("Got unsupported ScalarType BFloat16")

    def __dlpack__(self, **options: Any) -> Any:
        return self._value.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._value.__dlpack_device__()


def test_tensors_of_other_libraries_become_arrays(rows: NamedSharding) -> None:
    value = np.arange(8, dtype=np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        half = Bfloat16Tensor(jnp.arange(8, dtype=jnp.bfloat16))
    tensors = {"x": Tensor(value), "h": half}
    (batch,) = GlobalBatches([tensors], rows)
    for made in (batch, make_array_from_process_local_data(rows, tensors)):
        assert made["x"].sharding == made["h"].sharding == rows
        assert (made["x"].dtype, made["h"].dtype) == (np.float32, jnp.bfloat16)
        np.testing.assert_array_equal(made["x"], value)
        np.testing.assert_array_equal(np.asarray(made["h"]).astype(np.float32), value)


def test_a_source_may_use_the_memory_of_a_batch_again(rows: NamedSharding) -> None:
    memory = np.zeros(2**16, np.int32)

    def fill() -> Iterator[Batch]:
        for number in range(6):
            memory[:] = number
            yield {"id": memory}

    batches = list(GlobalBatches(fill(), rows, prefetch=6))
    assert [set(np.asarray(batch["id"]).tolist()) for batch in batches] == [{n} for n in range(6)]


def test_the_64_bit_setting_of_the_reader_holds_in_the_thread(rows: NamedSharding) -> None:
    source = [{"id": np.arange(8) + 2**40}]
    with jax.enable_x64(True):
        (batch,) = GlobalBatches(source, rows)
        assert batch["id"].dtype == np.int64 and np.asarray(batch["id"])[1] == 2**40 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_state_does_not_count_batches_that_were_read_ahead(kind: Any, rows: NamedSharding) -> None:
    source = list_batches(7)
    with GlobalBatches(kind(source), rows, prefetch=4) as batches:
        assert batches.get_state()["batches"] == 0
        first = read_ids(next(batches) for _ in range(2))
        wait_for(lambda: batches._source.position == 6, "reading ahead")
        state = json.loads(json.dumps(batches.get_state()))
    assert state["batches"] == 2
    restored = GlobalBatches(kind(source), rows)
    restored.set_state(state)
    assert restored.get_state() == state
    assert first + read_ids(restored) == read_ids(source)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data(), st.sampled_from([kind for kind in KINDS if kind is not iter]))
def test_no_batch_is_lost_or_read_twice_over_restores(data: Any, kind: Any) -> None:
    rows = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), P("data"))
    source = list_batches(data.draw(st.integers(2, 9)), last=data.draw(st.integers(1, 8)))
    expected = [ids for ids in read_ids(source) if len(ids) == 8]
    steps: list[list[int]] = []
    batches, saved = GlobalBatches(kind(source), rows), steps
    state = batches.get_state()
    for _ in range(data.draw(st.integers(1, 4), "launches")):
        for _ in range(data.draw(st.integers(0, 3), "steps")):
            steps = steps + read_ids([batch for batch in [next(batches, None)] if batch])
            if data.draw(st.booleans(), "a checkpoint"):
                state, saved = json.loads(json.dumps(batches.get_state())), steps
        if data.draw(st.booleans(), "another process"):
            batches = GlobalBatches(kind(source), rows, prefetch=data.draw(st.integers(0, 3)))
        batches.set_state(state)
        steps = saved
    assert steps + read_ids(batches) == expected


def test_a_source_is_read_no_further_than_its_batches_are_needed(rows: NamedSharding) -> None:
    source = iter(list_batches(9))
    with GlobalBatches(source, rows, prefetch=2) as batches:
        next(batches)
        wait_for(lambda: batches._source.position == 3, "reading ahead")
    assert read_ids(source) == read_ids(list_batches(9)[3:])


def failing_after(count: int) -> Iterator[Batch]:
    yield from list_batches(count)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_error_of_a_source_is_raised_where_its_batch_is_due(
    prefetch: int, rows: NamedSharding
) -> None:
    batches = GlobalBatches(failing_after(3), rows, prefetch=prefetch)
    assert len(read_ids(next(batches) for _ in range(3))) == 3
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone") as caught:
            next(batches)
        assert "GlobalBatches was at batch 3" in "".join(caught.value.__notes__)
    assert batches.get_state()["batches"] == 3
    wait_for(lambda: not prefetching_threads(), "end of the thread")


def test_threads_end_with_their_iterators(rows: NamedSharding) -> None:
    source = list_batches(9)
    with GlobalBatches(source, rows) as batches:
        next(batches)
        assert prefetching_threads() == 1
    assert prefetching_threads() == 0 and list(batches) == []
    for _ in GlobalBatches(source, rows):
        break  # The iterator is left without being closed.
    gc.collect()
    wait_for(lambda: not prefetching_threads(), "end of the thread")
    assert read_ids(GlobalBatches(source, rows, prefetch=0)) == read_ids(source)
    assert prefetching_threads() == 0


def test_an_iterator_without_state_is_positioned_before_it_is_read(rows: NamedSharding) -> None:
    batches = GlobalBatches(iter(list_batches(4)), rows)
    batches.set_state({"batches": 1})
    batches.set_state({"batches": 2})
    assert read_ids([next(batches)]) == read_ids(list_batches(4)[2:3])
    with pytest.raises(ArgumentError, match=naming("state of GlobalBatches.set_state", "iterator")):
        batches.set_state({"batches": 0})


def test_a_last_batch_is_short_even_if_it_is_the_first_after_a_restart(rows: NamedSharding) -> None:
    source = list_batches(3, last=4)
    batches = GlobalBatches(source, rows)
    assert len(list(batches)) == 2
    restored = GlobalBatches(source, rows)
    restored.set_state(batches.get_state())
    assert list(restored) == []


@pytest.mark.integration
def test_a_pod_with_kills_reads_each_example_once(tmp_path: Path) -> None:
    """Run the guide's program: what it has seen is saved with the position in the data."""
    script = tmp_path / "train.py"
    script.write_text(program((ROOT / "docs/guides/data.md").read_text(encoding="utf-8")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FOLDER": str(tmp_path / "run")}
    size, chance = PodSize(4, 2), random.Random(11)
    command = [*pod_python(size, environment), str(script)]
    plan = LaunchPlan(command, size, environment=environment, one_stream=True)
    # Killed as a new run, and as a restored one.
    for begin, end in ((1, 20), (20, 31)):
        victim, step = chance.randrange(4), chance.randrange(begin, end)
        pod = run_watched(plan, signalled(f"step {step}\n", signal.SIGKILL, victim))
        assert pod.codes.pop(victim) == -signal.SIGKILL, pod.report()
        assert set(pod.codes.values()) == {GONE_EXIT_CODE}, pod.report()
    pod = run_watched(plan)
    assert set(pod.codes.values()) == {0}, pod.report()
    for text in pod.texts.values():
        assert re.search(r"^restored step (10|15|20|25|30)$", text, re.M), pod.report()
        assert "each of 1000 examples was seen once: True" in text, pod.report()
