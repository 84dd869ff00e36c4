"""Copies by several threads: the same bytes as one thread's, and none made after an error."""

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlashard.core.array.placement import copying
from xlashard.core.array.placement.copying import copy_all, private_copy


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split even small copies into chunks of a few bytes for four threads."""
    monkeypatch.setattr(copying, "_BYTES_PER_THREAD", 8)
    monkeypatch.setattr(copying, "_CONTIGUOUS_STRETCH", 64)
    monkeypatch.setattr(copying, "_STRIPED_STRETCH", 16)
    monkeypatch.setattr(copying, "_threads_for", lambda total: 4)


def views(dtype: Any) -> dict[str, np.ndarray]:
    """Return arrays with every memory layout that views of views have."""
    base = np.arange(7 * 12 * 5).reshape(7, 12, 5).astype(dtype)
    return {
        "whole": base,
        "a column": base[:, 3:5],
        "backwards": base[::-1, ::-2],
        "transposed": base.T,
        "broadcast": np.broadcast_to(base[:1], (7, 12, 5)),
        "one element": base[2:3, 4:5, 1:2],
        "empty": base[:, 3:3],
        "no dimensions": base[1, 2, 3, ...],
        "one row": base[2],
    }


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.complex128, ml_dtypes.bfloat16, bool])
@pytest.mark.parametrize("way", views(np.int8))
def test_every_byte_arrives(way: str, dtype: Any) -> None:
    source = views(dtype)[way]
    plain = np.empty(source.shape, dtype)
    striped = np.zeros((*source.shape, 2), dtype)
    copy_all([(plain, source), (striped[..., 0], source)])
    np.testing.assert_array_equal(plain, source)
    np.testing.assert_array_equal(striped[..., 0], source)
    assert not striped[..., 1].any()


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    order=st.permutations(range(4)),
    limit=st.integers(1, 200),
)
def test_stretches_make_up_the_copy(shape: tuple[int, ...], order: list[int], limit: int) -> None:
    source = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    source = source.transpose([d for d in order if d < len(shape)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_CONTIGUOUS_STRETCH", limit)
        patch.setattr(copying, "_STRIPED_STRETCH", limit)
        out = np.full(source.shape, -1)
        stretches = copying._stretches(out, source)
        assert all(to.nbytes <= max(limit, out.itemsize) for to, _ in stretches)
        assert sum(to.size for to, _ in stretches) == out.size
        for to, part in stretches:
            np.copyto(to, part)
    np.testing.assert_array_equal(out, source)


@pytest.mark.usefixtures("many_threads")
def test_no_thread_writes_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = threading.current_thread()
    source, out = np.ones(4096, np.int32), np.zeros(4096, np.int32)
    pressed, real = threading.Event(), np.copyto

    def interrupted(to: np.ndarray, value: np.ndarray) -> None:
        if threading.current_thread() is caller:
            pressed.set()
            raise KeyboardInterrupt
        assert pressed.wait(60)
        real(to, value)

    monkeypatch.setattr(copying.np, "copyto", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_all([(out, source)])
    assert not [t for t in threading.enumerate() if t.name == "xlashard copy"]


@pytest.mark.usefixtures("many_threads")
def test_errors_of_copy_threads_are_raised_in_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(to: np.ndarray, value: np.ndarray) -> None:
        raise MemoryError("no page left")

    monkeypatch.setattr(copying.np, "copyto", fails)
    with pytest.raises(MemoryError, match="no page left"):
        copy_all([(np.zeros(4096), np.ones(4096))])


@pytest.mark.usefixtures("many_threads")
def test_a_process_that_may_have_no_threads_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    source = np.arange(999.0)
    assert np.array_equal(private_copy(source), source)


def test_private_copies_are_aligned_and_contiguous() -> None:
    for size in (0, 1, 17, 1000):
        copy = private_copy(np.ones(size, np.float32))
        assert copy.ctypes.data % 64 == 0 and copy.flags.c_contiguous and copy.sum() == size
