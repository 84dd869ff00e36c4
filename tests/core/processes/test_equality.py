"""Digests, and differences of values, in threads that stand for processes."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlashard.core.processes import (
    Barrier,
    NamedValue,
    ValueDifference,
    differences,
    digest,
    equality,
    minority,
)

DTYPES = [np.float32, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16, ml_dtypes.int4]
SHAPES = [(), (1,), (7,), (3, 5), (40, 50), (3, 1, 33)]


class Room:
    """Barriers between threads, each of which stands for a process."""

    def __init__(self, count: int) -> None:
        self.held = 0
        self._here: dict[int, str] = {}
        self._barrier = threading.Barrier(count)
        self._me = threading.local()

    def enter(self, process: int) -> None:
        self._me.process = process

    def exchange(self, barrier: Barrier, subject: str) -> dict[int, str]:
        self._here[self._me.process] = subject
        self._barrier.wait(20)
        came = dict(self._here)
        if self._barrier.wait(20) == 0:
            self.held += 1
        return came


def compared(values: Sequence[Sequence[NamedValue]]) -> tuple[tuple[ValueDifference, ...], int]:
    """Return the differences, which every process must report alike, and the number of barriers."""
    room = Room(len(values))

    def run(process: int) -> tuple[ValueDifference, ...]:
        room.enter(process)
        return differences(Barrier((0, 1), "test", 20), values[process])

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(values)) as threads:
        patch.setattr(equality, "RENDEZVOUS", room)
        reports = list(threads.map(run, range(len(values))))
    assert len(set(reports)) == 1
    return reports[0], room.held


def some(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) % 5).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 3)])
def test_equal_values_have_equal_digests(shape: tuple[int, ...], dtype: type) -> None:
    v = some(shape, dtype)
    assert digest(v) == digest(v.copy(order="F"))
    assert digest(v) != digest(v[None])
    if dtype is not np.float32:
        assert digest(v) != digest(np.real(v).astype(np.float32))


@given(st.integers(1, 3 << 20), st.integers(0, 7), st.data())
@settings(max_examples=25, deadline=None)
def test_flipped_bit_changes_the_digest(size: int, bit: int, data: st.DataObject) -> None:
    v = np.zeros(size, np.uint8)
    before = digest(v)
    v[data.draw(st.integers(0, size - 1))] ^= 1 << bit
    assert digest(v) != before


def test_large_values_are_summed_by_several_threads() -> None:
    v = np.arange(5 << 20, dtype=np.uint32)
    whole = digest(v)
    v[[1, -1]] = v[[-1, 1]]
    assert digest(v) != whole


@pytest.mark.slow
@given(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(2, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_first_differing_element_is_found(
    dtype: type, shape: tuple[int, ...], count: int, data: st.DataObject
) -> None:
    right = some(shape, dtype)
    place = data.draw(st.integers(0, right.size - 1))
    odd = data.draw(st.integers(0, count - 1))
    wrong = right.copy()
    for later in {place, right.size - 1}:
        wrong.flat[later] = 1 - np.asarray(wrong.flat[later]).astype(np.int32) % 2
    values = [
        [NamedValue("x['a']", right), NamedValue("x['b']", wrong if p == odd else right)]
        for p in range(count)
    ]
    if wrong.tobytes() == right.tobytes():
        assert compared(values) == ((), 1)
        return
    (difference,), meetings = compared(values)
    assert difference.path == "x['b']"
    # Of two, the first is taken to be right.
    assert difference.processes == ((odd,) if count > 2 else (1,))
    first = np.flatnonzero(right.reshape(-1) != wrong.reshape(-1))[0]
    index = [int(n) for n in np.unravel_index(first, shape)]
    assert difference.text.startswith(f"at {index} it is " if shape else "it is ")
    assert f"{wrong.flat[first]!s} in process {odd}" in difference.text
    assert meetings <= 5


def test_format_differences_lists_five_and_counts_the_rest() -> None:
    a, b = np.zeros(3), np.ones((2, 2))
    (first, second), _ = compared(
        [
            [
                NamedValue("x[0]", a + n % 2),
                NamedValue("x[1]", b, "under P()" if n else "under P('d')"),
            ]
            for n in (0, 2, 3)
        ]
    )
    assert first == ValueDifference(
        "x[0]", (2,), "at [0] it is 0.0 in processes 0, 1, 1.0 in process 2"
    )
    assert second.processes == (0,)
    assert second.text == "it is under P() in processes 1, 2, under P('d') in process 0"
    wide, narrow = (NamedValue("x", np.ones(n), "under P()") for n in (8, 4))
    (shapes,), _ = compared([[wide], [narrow]])
    assert shapes.text == "it is float64[8] in process 0, float64[4] in process 1"
    (tree,), meetings = compared([[NamedValue("x['a']", a)], [NamedValue("x['b']", a)]])
    assert tree.text == "leaf 0 is x['a'] in process 0, x['b'] in process 1" and meetings == 2
    (sign,), _ = compared([[NamedValue("x", np.zeros(()))], [NamedValue("x", -np.zeros(()))]])
    assert "0.0 in process 0, -0.0 in process 1" in sign.text
    nan = [np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001)]
    (bits,), _ = compared([[NamedValue("x", v)] for v in nan])
    assert "nan (bits 0000c07f) in process 0" in bits.text


def test_minority_returns_the_processes_that_differ_from_most() -> None:
    assert minority({0: "a", 1: "b", 2: "b"}) == (0,)
    assert minority({0: "a", 1: "b"}) == (1,)
    assert minority({0: "a", 1: "a"}) == ()
    assert minority({0: "a", 1: "b", 2: "c", 3: "a"}) == (1, 2)
