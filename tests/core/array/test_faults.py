"""Failures while arrays are made, read or deleted: clear errors, nothing left behind."""

import gc
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.core.array.cases import DEVICES, SHARDINGS, named, same, value
from tests.message_patterns import naming
from xlashard import Array, device_get, device_put, make_array_from_callback, pjit
from xlashard.core.array import constructors
from xlashard.core.array.placement import put
from xlashard.errors import DeletedError, OutOfMemoryError, PlacementError

ROOT = Path(__file__).resolve().parents[3]
V = value(np.float32)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail if a test leaves more buffers alive than before."""
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    yield
    gc.collect()
    assert [array for array in jax.live_arrays() if id(array) not in before] == []


def failing_at(number: int, error: BaseException) -> Callable[[Any], np.ndarray]:
    """Return a callback that raises instead of returning the piece of this number."""
    calls: list[Any] = []

    def read_a_piece(index: Any) -> np.ndarray:
        calls.append(index)
        if len(calls) > number:
            raise error
        return V[index]

    return read_a_piece


@pytest.mark.usefixtures("nothing_left")
class TestCallbacks:
    @pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
    def test_exception_of_the_callback_propagates(self, sharding: Any) -> None:
        pieces = len({str(i) for i in sharding.devices_indices_map(V.shape).values()})
        for number in {0, pieces - 1}:
            error = OSError("disk gone")
            with pytest.raises(OSError, match="^disk gone") as caught:
                make_array_from_callback(V.shape, sharding, failing_at(number, error))
            assert caught.value is error
            frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert frames[-1] == "read_a_piece"
            (note,) = caught.value.__notes__
            assert "data_callback's piece for index [" in note
            del caught, error

    @pytest.mark.devices(8)
    def test_the_note_names_the_index(self) -> None:
        with pytest.raises(KeyError) as caught:
            make_array_from_callback(V.shape, named("x"), failing_at(1, KeyError("w")))
        assert caught.value.__notes__ == [
            "data_callback's piece for index [4:8, :] is missing: data_callback raised this error"
        ]

    @pytest.mark.devices(8)
    def test_piece_of_a_different_shape_or_dtype_is_refused(self) -> None:
        pieces = iter([V[:4], V[4:, :8]])
        with pytest.raises(
            PlacementError, match=naming("index [4:8, :]", "shape (4, 8)", "shape (4, 16)")
        ):
            make_array_from_callback(V.shape, named("x"), lambda index: next(pieces))
        pieces = iter([V[:4], V[4:].astype(np.int32)])
        with pytest.raises(PlacementError, match=naming("index [4:8, :]", "int32", "float32")):
            make_array_from_callback(V.shape, named("x"), lambda index: next(pieces))

    @pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
    def test_callback_may_reuse_its_buffers(self, sharding: Any) -> None:
        given: list[np.ndarray] = []

        def piece(index: Any) -> np.ndarray:
            for earlier in given:
                earlier[:] = -1
            given.append(V[index].copy())
            return given[-1]

        x = make_array_from_callback(V.shape, sharding, piece)
        for earlier in given:
            earlier[:] = -2
        assert same(x, V)
        del x

    @pytest.mark.devices(8)
    def test_interrupt_in_the_callback_propagates(self) -> None:
        with pytest.raises(KeyboardInterrupt) as caught:
            make_array_from_callback(V.shape, named("x"), failing_at(1, KeyboardInterrupt()))
        del caught


class TestInterrupts:
    def test_interrupted_device_put_of_a_tree_leaves_no_arrays(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = device_put(V, named("x"))
        gc.collect()
        before = len(jax.live_arrays())
        real = put.copy_all

        def interrupted(copies: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(put, "copy_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            device_put([kept, np.zeros((64, 1024), np.float32)], named("x"), donate=True)
        monkeypatch.setattr(put, "copy_all", real)
        gc.collect()
        assert len(jax.live_arrays()) == before
        assert same(kept, V)
        assert same(device_put(V, named("y")), V)


def outcomes(use: Callable[[], Any], v: np.ndarray) -> Any:
    """Return "value" or "deleted"; any other result is wrong."""
    try:
        got = use()
    except DeletedError:
        return "deleted"
    return "value" if np.array_equal(got, v) else f"garbage: {got!r}"


READS: dict[str, Callable[[Array], Any]] = {
    "asarray": np.asarray,
    "device_get": device_get,
    "to_host": lambda x: x.to_host("gather"),
    "tolist": lambda x: np.array(x.tolist(), np.float32),
    "shards": lambda x: x.addressable_data(0) if x.is_fully_replicated else np.asarray(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("spec", [("x", "y"), ("y",), ()], ids=str)
def test_reads_during_deletion_return_the_value_or_raise(read: Any, spec: Any) -> None:
    v = value(np.float32, (64, 64))
    for _ in range(12):
        x = device_put(v, named(*spec))
        start = threading.Barrier(5)
        seen: list[Any] = []

        def reader(x: Array = x, start: Any = start, seen: list[Any] = seen) -> None:
            start.wait()
            for _ in range(4):
                seen.append(outcomes(lambda: read(x), v))

        threads = [threading.Thread(target=reader) for _ in range(4)]
        for thread in threads:
            thread.start()
        start.wait()
        x.delete()
        for thread in threads:
            thread.join()
        assert len(seen) == 16 and set(seen) <= {"value", "deleted"}
        assert outcomes(lambda x=x: np.asarray(x), v) == "deleted"


@pytest.mark.devices(8)
@pytest.mark.parametrize("number", [0, 3])
def test_deleting_one_shard_deletes_the_array(number: int) -> None:
    x = device_put(V, named("x", "y"))
    total = pjit(lambda x: x.sum())
    kept = x.addressable_shards[1].data
    piece = np.array(kept)
    expected = float(total(device_put(V, named("x", "y"))))
    (x.addressable_shards[number].data if number else x.addressable_data(0)).delete()
    for use in (
        lambda: np.asarray(x),
        lambda: total(x),
        lambda: x + 1,
        lambda: x.addressable_shards,
        lambda: device_put(x, named()),
        lambda: jax.jit(lambda x: x + 1)(x),
    ):
        with pytest.raises(DeletedError, match=naming("float32[8,16]", "delete()", "shard")):
            use()
    assert x.is_deleted()
    # The other shards, and programs over all devices, still work.
    np.testing.assert_array_equal(kept, piece)
    assert float(total(device_put(V, named("x", "y")))) == expected


def test_value_read_before_deletion_stays_valid(many: int = 8) -> None:
    for spec in (("x", "y"), ()):
        x = device_put(np.full((256, 256), 7, np.float32), named(*spec))
        window = np.asarray(x)
        x.delete()
        others = [device_put(np.zeros((256, 256), np.float32), named(*spec)) for _ in range(many)]
        assert (window == 7).all() and len(others) == many


@pytest.mark.usefixtures("nothing_left")
class TestMemory:
    @pytest.mark.devices(8)
    @pytest.mark.skipif(DEVICES[0].platform != "cpu", reason="the limit is on the host's memory")
    @pytest.mark.slow
    def test_array_too_large_for_memory_is_refused_without_leaks(self) -> None:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("little_memory.py"))],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert "all well" in done.stdout, done.stdout + done.stderr

    @pytest.mark.devices(8)
    def test_exhausted_device_memory_raises_out_of_memory_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def exhausted(*_: Any, **__: Any) -> None:
            raise jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 7 bytes.")

        x = device_put(V, named("x"))
        monkeypatch.setattr(put, "put", exhausted)
        with pytest.raises(OutOfMemoryError, match=r"^x: .*float32\[8,16\].*\b256 bytes\)"):
            device_put(V, named("x"))
        monkeypatch.setattr(constructors, "stage_piece", exhausted)
        with pytest.raises(
            OutOfMemoryError, match=r"^(?!x: ).*float32\[8,16\].*\b256 bytes"
        ) as caught:
            make_array_from_callback(V.shape, named("x"), lambda index: V[index])
        assert caught.value.bytes_per_device == 256
        assert same(x, V)
        del x, caught

    def test_other_runtime_errors_propagate_unchanged(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise jax.errors.JaxRuntimeError("INTERNAL: link down")

        monkeypatch.setattr(put, "put", broken)
        with pytest.raises(jax.errors.JaxRuntimeError, match="link down"):
            device_put(V, named("x"))

    def test_memory_error_of_the_callback_propagates_unchanged(self) -> None:
        with pytest.raises(MemoryError, match="^mine") as caught:
            make_array_from_callback(V.shape, named("x"), failing_at(0, MemoryError("mine")))
        assert not isinstance(caught.value, OutOfMemoryError)
        del caught
