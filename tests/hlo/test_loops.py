"""Trip counts, from text: with and without the compiler's own annotation."""

import pytest

from tests.hlo.test_text import hlo
from xlashard.hlo import read, read_collectives
from xlashard.hlo.call_graph import constant_of

LOOP = """\
HloModule m, num_partitions=4

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %step = s32[] constant(STEP)
  %next = s32[] GROW
  %sum = f32[8]{0} all-reduce(%x), replica_groups=[1,4]<=[4]
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %sum)
}

%condition (s.1: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %limit = s32[] constant(LIMIT)
  ROOT %more = pred[] compare(COMPARE
}

ENTRY %e (x.2: f32[8]) -> f32[8] {
  %x.2 = f32[8]{0} parameter(0)
  %start = s32[] constant(START)
  %t.2 = (s32[], f32[8]{0}) tuple(%start, %x.2)
  %w = (s32[], f32[8]{0}) while(%t.2), condition=%condition, body=%body
  ROOT %r = f32[8]{0} get-tuple-element(%w), index=1
}
"""

UP, DOWN = "add(%i, %step)", "subtract(%i, %step)"


def loop(start, step, limit, compare, grow=UP):
    text = LOOP.replace("START", str(start)).replace("STEP", str(step))
    text = text.replace("LIMIT", str(limit)).replace("COMPARE", compare).replace("GROW", grow)
    (found,) = read_collectives(text)
    return found.times if found.times_known else None


def compared(direction, turned=False):
    operands = "%limit, %i.1" if turned else "%i.1, %limit"
    return f"{operands}), direction={direction}"


@pytest.mark.parametrize(
    ("arguments", "python"),
    [
        ((0, 1, 5, compared("LT")), range(0, 5)),
        ((2, 3, 9, compared("LT")), range(2, 9, 3)),
        ((2, 3, 8, compared("LE")), range(2, 9, 3)),
        ((9, 2, 0, compared("GT"), DOWN), range(9, 0, -2)),
        ((9, -2, 1, compared("GE")), range(9, 0, -2)),
        ((0, 1, 7, compared("GT", turned=True)), range(0, 7)),
        ((0, 2, 7, compared("GE", turned=True)), range(0, 8, 2)),
        ((5, 1, 5, compared("LT")), range(5, 5)),
        ((0, 1, 5, compared("LT"), "add(%step, %i)"), range(0, 5)),
    ],
)
def test_trip_count_with_constant_bounds_equals_python_range(arguments, python):
    assert loop(*arguments) == len(python)


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 1, 5, compared("NE")),
        (0, -1, 5, compared("LT")),
        (0, 1, 5, compared("LT"), "multiply(%i, %step)"),
        (0, 1, 5, compared("LT"), "subtract(%step, %i)"),
        (0, 1, 5, compared("LT"), "add(%i, %i)"),
        ("{1}", 1, 5, compared("LT")),
    ],
)
def test_unsupported_loop_forms_have_unknown_trip_count(arguments):
    assert loop(*arguments) is None


def test_known_trip_count_annotation_overrides_the_loop_condition():
    annotated = 'body=%body, backend_config={"known_trip_count":{"n":"11"}}'
    text = LOOP.replace("body=%body", annotated).replace("COMPARE", compared("NE"))
    assert [c.times for c in read_collectives(text)] == [11]


def test_shared_computation_adds_the_trip_counts_of_its_callers():
    text = hlo("tpu_loop").replace(
        "  ROOT %get-tuple-element.150",
        "  %again = bf16[512,256]{1,0:T(8,128)(2,1)} fusion(%param.4), kind=kCustom, "
        "calls=%all-reduce-scatter.1.clone.1\n  ROOT %get-tuple-element.150",
    )
    times = {c.kind: c.times for c in read_collectives(text)}
    assert times == {"all-gather": 5, "reduce-scatter": 6}


CARRIED = """HloModule m

%body (s: (s32[], s32[2], s32[2])) -> (s32[], s32[2], s32[2]) {
  %s = (s32[], s32[2], s32[2]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %kept = s32[2] get-tuple-element(%s), index=1
  %changed = s32[2] get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %sum = s32[2] add(%changed, %kept)
  ROOT %t = (s32[], s32[2], s32[2]) tuple(%next, %kept, %sum)
}

%condition (s.1: (s32[], s32[2], s32[2])) -> pred[] {
  %s.1 = (s32[], s32[2], s32[2]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %changed.1 = s32[2] get-tuple-element(%s.1), index=2
  %kept.1 = s32[2] get-tuple-element(%s.1), index=1
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main () -> (s32[2], s32[2]) {
  %zero = s32[] constant(0)
  %values = s32[2] constant({3, -4})
  %copy = s32[2] copy(%values)
  %start = (s32[], s32[2], s32[2]) tuple(%zero, %copy, %values)
  %loop = (s32[], s32[2], s32[2]) while(%start), condition=%condition, body=%body
  %kept.2 = s32[2] get-tuple-element(%loop), index=1
  %changed.2 = s32[2] get-tuple-element(%loop), index=2
  ROOT %r = (s32[2], s32[2]) tuple(%kept.2, %changed.2)
}
"""


@pytest.mark.parametrize(
    ("computation", "name", "constant"),
    [
        ("main", "copy", "values"),
        ("main", "kept.2", "values"),
        ("main", "changed.2", None),
        ("body", "kept", "values"),
        ("body", "changed", None),
        ("body", "i", None),
        ("body", "s", None),
        ("condition", "kept.1", "values"),
        ("condition", "changed.1", None),
    ],
)
def test_a_constant_is_found_through_state_that_a_loop_does_not_change(computation, name, constant):
    module = read(CARRIED)
    found = constant_of(module, module.computations[computation], name)
    assert (None if found is None else found.name) == constant
    if found is not None:
        assert found.attributes.integers == (3, -4)
