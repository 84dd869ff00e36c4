"""Live values at the peak of a heap: generated heaps, against a brute-force count."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.hlo.buffers import Allocation, BufferValue, buffers_at_peak
from xlashard.hlo.hlo_program import read
from xlashard.hlo.shapes import Shape
from xlashard.predict.preflight.memory_breakdown import describe_temporaries

NOWHERE = SourceLocator("", "")
F32 = Shape("f32", (64,))


type Lives = dict[str, tuple[int, int]]


def heap(*values: tuple[str, int, int], lives: Lives) -> Allocation:
    """Return a heap of values, each with its offset and its size."""
    made = tuple(
        BufferValue(name, (), size, offset, F32, lives.get(name)) for name, offset, size in values
    )
    return Allocation(0, max((v.offset + v.size for v in made), default=0), values=made)


def names(*values: tuple[str, int, int], **lives: tuple[int, int]) -> list[tuple[int, list[str]]]:
    held = buffers_at_peak(heap(*values, lives=lives))
    return [(h.nbytes, sorted(v.name for v in h.values)) for h in held]


def test_buffers_at_peak_are_live_at_the_fullest_moment() -> None:
    values = ("a", 0, 100), ("b", 100, 50), ("c", 100, 80), ("d", 0, 60)
    found = names(*values, a=(0, 4), b=(1, 2), c=(3, 6), d=(5, 9))
    assert found == [(100, ["a"]), (80, ["c"])]


def test_in_place_updates_count_once() -> None:
    values = ("x", 0, 100), ("tanh", 0, 100), ("y", 100, 10)
    assert names(*values, x=(0, 3), tanh=(3, 5), y=(3, 4)) == [(100, ["tanh", "x"]), (10, ["y"])]


def test_aliased_loop_state_counts_once() -> None:
    values = ("init", 0, 64), ("param", 0, 64), ("update", 0, 64), ("loop", 0, 64)
    found = names(*values, init=(0, 2), param=(2, 5), update=(5, 8), loop=(8, 9))
    assert sum(nbytes for nbytes, _ in found) == 64


def test_part_of_a_larger_value_adds_no_bytes() -> None:
    values = ("gathered", 0, 100), ("own", 20, 10), ("beyond", 90, 40)
    found = names(*values, gathered=(0, 5), own=(0, 5), beyond=(0, 5))
    assert found == [(100, ["gathered"]), (30, ["beyond"])]


def test_values_without_a_live_range_are_left_out() -> None:
    assert names(("a", 0, 10), ("b", 10, 90), a=(0, 1)) == [(10, ["a"])]
    assert names(("a", 0, 10)) == []


_VALUE = st.tuples(
    st.integers(0, 30), st.integers(1, 20), st.integers(0, 12), st.integers(0, 6)
)  # offset, size, start, length


@pytest.mark.slow
@given(st.lists(_VALUE, min_size=1, max_size=12))
def test_buffers_at_peak_equal_the_brute_force_maximum(
    values: list[tuple[int, int, int, int]],
) -> None:
    lives = {f"v{i}": (start, start + n) for i, (_, _, start, n) in enumerate(values)}
    placed = ((f"v{i}", offset, size) for i, (offset, size, _, _) in enumerate(values))
    allocation = heap(*placed, lives=lives)
    taken = np.zeros((20, 60), bool)
    for offset, size, start, length in values:
        taken[start : start + length + 1, offset : offset + size] = True
    named = sum(held.nbytes for held in buffers_at_peak(allocation))
    assert named == taken.sum(axis=1).max()
    assert named <= allocation.size


HLO = """HloModule jit_f, is_scheduled=true

FileNames
1 "model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[], f32[64]) parameter(0)
  %next = s32[] add(%p#0, %p#0), metadata={op_name="f/while/body/add"}
  %grown = f32[64] add(%p#1, %p#1), metadata={op_name="f/while/body/grow" stack_frame_id=1}
  %moved = f32[64] copy(%grown)
  ROOT %given = (s32[], f32[64]) tuple(%next, %moved)
}

%done (q: (s32[], f32[64])) -> pred[] {
  %q = (s32[], f32[64]) parameter(0)
  ROOT %less = pred[] compare(%q#0, %q#0), direction=LT
}

%fused (a: f32[64]) -> f32[64] {
  %a = f32[64] parameter(0)
  ROOT %twice = f32[64] multiply(%a, %a), metadata={op_name="f/mul" stack_frame_id=1}
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64] parameter(0), metadata={op_name="x"}
  %room = f32[64] custom-call(), custom_call_target="AllocateBuffer", metadata={op_name="f/zeros"}
  %zero = s32[] constant(0)
  %state = (s32[], f32[64]) tuple(%zero, %room)
  %loop = (s32[], f32[64]) while(%state), condition=%done, body=%body, metadata={op_name="f/while"}
  %fusion = f32[64] fusion(%x), kind=kLoop, calls=%fused
  %other = f32[64] fusion(%x), kind=kLoop, calls=%fused
  %copied = f32[64] copy(%x)
  %unnamed = f32[64] copy(%strange)
  %used = f32[64] negate(%unnamed), metadata={op_name="f/neg"}
  ROOT %sum = f32[64] add(%fusion, %loop#1), metadata={op_name="f/add"}
}
"""


def temporaries(
    *values: str, index: tuple[int, ...] = (), arguments: Mapping[str, str] | None = None
) -> list[tuple[str, int, int, int | None]]:
    """Return the reports of values that are live at the same time."""
    held = (BufferValue(v, index, 512, 512 * i, F32, (0, 1)) for i, v in enumerate(values))
    module = read(HLO)
    assert module.not_understood == {}
    heap = Allocation(0, 9999, values=tuple(held))
    found = describe_temporaries(replace(module, allocations=(heap,)), NOWHERE, arguments or {})
    assert all(t.type == "f32[64]" for t in found)
    return [(t.op_name, t.device_bytes, t.count, t.source and t.source.line) for t in found]


def test_temporary_is_attributed_to_its_producer() -> None:
    assert temporaries("grown") == [("f/while/body/grow", 512, 1, 7)]


def test_copy_of_an_argument_has_the_users_path() -> None:
    ((path, *_),) = temporaries("grown", arguments={"f/while/body/grow": "model.kernel"})
    assert path == "model.kernel"


def test_equal_temporaries_of_fusions_are_counted() -> None:
    assert temporaries("fusion", "grown", "other") == [
        ("f/mul", 1024, 2, 7),
        ("f/while/body/grow", 512, 1, 7),
    ]


def test_loop_state_is_attributed_to_the_loop_body() -> None:
    for value, index in (("p", (1,)), ("loop", (1,)), ("moved", ())):
        assert temporaries(value, index=index) == [("f/while/body/grow", 512, 1, 7)]


def test_allocated_buffer_is_listed_by_its_own_op_name() -> None:
    assert temporaries("room") == [("f/zeros", 512, 1, None)]


def test_copies_are_attributed_to_their_source_or_user() -> None:
    assert temporaries("copied") == [("x", 512, 1, None)]
    assert temporaries("unnamed") == [("f/neg", 512, 1, None)]
    assert temporaries("unheard-of") == [("", 512, 1, None)]
