"""Optimised HLO of other platforms and in other syntaxes, from shortened files."""

from pathlib import Path

import pytest

from xlashard.geometry import MeshGrid
from xlashard.hlo import CollectiveTotal, read, read_collectives, summarize
from xlashard.hlo.collectives import along_text

GRID = MeshGrid(("x", "y"), (2, 4))


def hlo(name):
    """Return a whole module's text."""
    return (Path(__file__).parent / "texts" / f"{name}.txt").read_text()


def one(line, *, types=("f32[4]{0}",)):
    """Return a module whose entry holds one collective of parameters `%p0`, `%p1`, ..."""
    parameters = "".join(f"  %p{i} = {t} parameter({i})\n" for i, t in enumerate(types))
    entry = f"ENTRY %e (p: f32[4]) -> f32[4] {{\n{parameters}  {line}\n}}\n"
    return f"HloModule m, num_partitions=8\n\n{entry}"


def traffic(*collectives):
    """Return kind, axes, and operand, result and sent bytes per device."""
    return [
        (c.kind, along_text(c, GRID), c.operand_bytes, c.result_bytes, c.sent_bytes)
        for c in collectives
    ]


def test_text_without_a_module_has_no_collectives():
    assert read_collectives("") == ()
    assert read_collectives("HloModule m") == ()


def test_tpu_loops_and_fused_reduce_scatters_are_parsed():
    gather, scatter = sorted(read_collectives(hlo("tpu_loop")), key=lambda c: c.kind)
    assert traffic(gather, scatter) == [
        ("all-gather", "x", 512 * 256 * 2, 1024 * 256 * 2, 512 * 256 * 2),
        ("reduce-scatter", "x", 1024 * 256 * 2, 512 * 256 * 2, 512 * 256 * 2),
    ]
    assert (gather.times, gather.times_known) == (scatter.times, scatter.times_known) == (5, True)
    # The fusion has its name and source lines.
    assert scatter.op_name == "jit(f)/while/body/transpose"
    lines = [("step.<locals>.layer", 13), ("step", 16), ("<module>", 30)]
    assert [(f.function, f.line) for f in scatter.frames] == lines
    assert {f.file for f in gather.frames} == {"/home/me/train.py"}


def test_tpu_collective_spread_over_fusions_counts_once():
    found = read_collectives(hlo("tpu_spread"))
    assert [(c.name, c.asynchronous, c.times) for c in found] == [
        ("all-gather.34", True, 1),
        ("all-gather.71", False, 1),
    ]
    assert {(c.operand_bytes, c.result_bytes) for c in found} == {(2048, 8192)}


def test_start_and_done_count_as_one_collective():
    found = {c.name: c for c in read_collectives(hlo("starts"))}
    on = MeshGrid(("a", "b"), (2, 2))
    assert {
        name: (c.kind, along_text(c, on), c.operand_bytes, c.result_bytes, c.asynchronous)
        for name, c in found.items()
    } == {
        "exchange": ("all-to-all", "a, b", 32, 32, True),
        "scatter": ("reduce-scatter", "a, b", 32, 8, True),
        "gather": ("all-gather", "a, b", 24, 96, True),
        "reduce": ("all-reduce", "b", 32, 32, True),
        "pass": ("collective-permute", "b", 32, 32, True),
        "spread": ("collective-broadcast", "b", 32, 32, False),
    }


def test_older_hlo_syntax_is_parsed():
    (found,) = read_collectives(hlo("older"))
    assert (found.operand_bytes, found.result_bytes) == (64, 256)
    assert found.op_name == 'jit(f)/say "hi"'
    assert [(f.file, f.line) for f in found.frames] == [("/home/me/model.py", 12)]


@pytest.mark.parametrize(
    ("types", "nbytes"),
    [
        (["f32[4]{0}", "bf16[3,5]{1,0}"], 16 + 30),
        (["pred[7]{0}"], 7),
        (["c64[2]{0}"], 16),
        (["f8e4m3fn[5]{0}"], 5),
        (["s4[6]{0}"], 6),
        (["s4[6]{0:T(8,128)E(4)}"], 3),
        (["f64[]"], 8),
        (["u8[0,4]{1,0}"], 0),
        (["f32[<=16]{0}"], 64),
    ],
)
def test_collective_bytes_follow_from_element_types(types, nbytes):
    operands = ", ".join(f"%p{i}" for i in range(len(types)))
    line = f"ROOT %r = ({', '.join(types)}) all-reduce({operands}), replica_groups=[1,8]<=[8]"
    (found,) = read_collectives(one(line, types=types))
    assert found.operand_bytes == found.result_bytes == nbytes


def test_replica_groups_with_a_channel_span_all_partitions():
    line = "ROOT %r = f32[4]{0} all-reduce(%p0), channel_id=1, replica_groups={{0}}"
    (everyone,) = read_collectives(one(line))
    assert along_text(everyone, GRID) == "x, y"
    (silent,) = read_collectives(one(line.replace(" channel_id=1,", "")))
    assert silent.sent_bytes == 0


@pytest.mark.parametrize(
    ("opcode", "groups"),
    [
        ("all-reduce", "replica_groups=<new>"),
        ("all-reduce", "replica_groups=[3,2]<=[8]"),
        ("all-gather", "replica_groups={{0,1},{1,2}}"),
        ("collective-permute", "source_target_pairs={{0,1,2}}"),
    ],
)
def test_invalid_groups_are_counted(opcode, groups):
    line = f"ROOT %r = f32[4]{{0}} {opcode}(%p0), {groups}"
    program = read(one(line))
    permutes = opcode == "collective-permute"
    what = (
        "source-target pairs, taken as none" if permutes else "replica groups, taken as all devices"
    )
    assert program.not_understood == {what: 1}
    (found,) = program.collectives
    assert found.kind == opcode and found.payload_bytes == 16
    if not permutes:
        assert along_text(found, GRID) == "x, y"
    assert read(one(line.replace(groups, "replica_groups={}"))).not_understood == {}


def test_totals_merge_equal_collectives_and_sort_by_bytes():
    small = "%r0 = f32[4]{0} all-reduce(%p0), replica_groups=[2,4]<=[8]\n"
    same = "  %r1 = f32[8]{0} all-reduce(%p1), replica_groups={{0,1,2,3},{4,5,6,7}}\n"
    other = "  ROOT %r2 = f32[64]{0} all-reduce(%p2), replica_groups={{0,7},{1,6},{2,5},{3,4}}"
    text = one(small + same + other, types=["f32[4]{0}", "f32[8]{0}", "f32[64]{0}"])
    assert summarize(read_collectives(text), GRID) == (
        CollectiveTotal("all-reduce", "4 groups of 2 devices", 1, 1, 256, 256, 256, 256),
        CollectiveTotal("all-reduce", "y", 2, 2, 48, 48, 48, 72),
    )


def test_only_the_data_of_a_ragged_all_to_all_counts():
    types = ["f32[8,4]{1,0}", "f32[16,4]{1,0}", *["s32[8]{0}"] * 4]
    operands = ", ".join(f"%p{i}" for i in range(6))
    groups = "replica_groups={{0,1,2,3,4,5,6,7}}"
    line = f"ROOT %r = f32[16,4]{{1,0}} ragged-all-to-all({operands}), {groups}"
    (found,) = read_collectives(one(line, types=types))
    assert (found.kind, found.operand_bytes, found.result_bytes) == ("ragged-all-to-all", 128, 256)


def test_collective_without_frames_gets_frames_of_its_nearest_user():
    where = 'metadata={op_name="f/dot" source_file="model.py" source_line=3}'
    lines = [
        "%g = f32[4]{0} all-gather(%p0), replica_groups=[2,4]<=[8]",
        "  %c = f32[4]{0} copy(%g)",
        "  %other = f32[4]{0} negate(%p0), " + where.replace("dot", "neg"),
        "  ROOT %d = f32[4]{0} add(%other, %c), " + where,
    ]
    (found,) = read_collectives(one("\n".join(lines)))
    assert (found.op_name, found.frames, found.needed_by) == ("", (), "f/dot")
    assert [(f.file, f.line) for f in found.needed_by_frames] == [("model.py", 3)]
    (unused,) = read_collectives(one("ROOT " + lines[0]))
    assert (unused.needed_by, unused.needed_by_frames) == ("", ())


def test_short_tuple_element_syntax_equals_get_tuple_element():
    text = """HloModule m, num_partitions=2

%body (s: (s32[], (f32[2], f32[4]))) -> (s32[], (f32[2], f32[4])) {
  %s = (s32[]{:T(128)}, /*index=1*/(f32[2]{0}, f32[4]{0})) parameter(0)
  %one = s32[] constant(1)
  %i = s32[] add(%s#0, %one)
  %r = f32[4]{0} all-reduce(%s#1#1), replica_groups={{0,1}}, to_apply=%add
  %t = (f32[2]{0}, f32[4]{0}) tuple(%s#1#0, %r)
  ROOT %n = (s32[], (f32[2], f32[4])) tuple(%i, %t)
}

%more (s: (s32[], (f32[2], f32[4]))) -> pred[] {
  %s = (s32[]{:T(128)}, /*index=1*/(f32[2]{0}, f32[4]{0})) parameter(0)
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%s#0, %five), direction=LT
}

ENTRY %main (p: (f32[2], f32[4])) -> (f32[2], f32[4]) {
  %p = (f32[2]{0}, f32[4]{0}) parameter(0)
  %zero = s32[] constant(0)
  %state = (s32[], (f32[2], f32[4])) tuple(%zero, %p)
  %loop = (s32[], (f32[2], f32[4])) while(%state), condition=%more, body=%body
  ROOT %out = f32[4]{0} copy(%loop#1#1)
}
"""
    (reduce,) = read_collectives(text)
    assert (reduce.times, reduce.times_known, reduce.operand_bytes) == (5, True, 16)
