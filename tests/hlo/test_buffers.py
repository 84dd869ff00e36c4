"""Buffer assignments, read from small protos of the kinds that libtpu writes."""

import pytest

from tests.hlo.encode import message
from xlashard.errors import ArgumentError
from xlashard.hlo import read
from xlashard.hlo.shapes import HBM, HOST

F32 = {2: 11, 3: (8, 128), 5: {1: (1, 0), 6: [{1: (8, 128)}]}}
PAIR = {2: 13, 4: [F32, {2: 4}]}
# HloInstructionProto: name, opcode, shape, parameter number, id, operands.
MODULE = {
    1: "jit_f",
    2: "main",
    3: {
        1: "main",
        2: [
            {1: "x", 2: "parameter", 3: F32, 35: 1},
            {1: "y", 2: "parameter", 3: F32, 9: 3, 35: 2},
            {1: "twice", 2: "add", 3: F32, 35: 3, 36: (1, 1)},
            {1: "both", 2: "tuple", 3: PAIR, 35: 1 << 32 | 4, 36: (3, 2)},
        ],
        5: 7,
        6: 1 << 32 | 4,
    },
    6: 7,
    15: {1: 1, 2: 4},
}
# Id, and the place that defines the buffer: an instruction and a shape index.
BUFFERS = [
    {1: 10, 3: {4: 1}},
    {1: 11, 3: {4: 2}},
    {1: 12, 3: {4: 3}},
    {1: 13, 3: {4: 1 << 32 | 4}},
    {1: 14, 3: {4: 1 << 32 | 4, 3: (1,)}},
]
ALLOCATIONS = [
    {2: 512, 9: [{1: 14, 3: 512}], 12: 1},
    {1: 1, 2: 4096, 5: 1, 6: 3, 7: 1, 9: [{1: 11, 3: 4096}]},
    {1: 2, 2: 8192, 5: 1, 6: 1, 8: 5, 9: [{1: 10, 3: 4096}]},
    {1: 3, 2: 512, 7: 1, 9: [{1: 13, 3: 512}]},
    {1: 4, 2: 66048, 9: [{1: 12, 2: 65536, 3: 4096}, {1: 13, 3: 512}]},
    {1: 5, 2: 4, 8: 2},
    {1: 6, 2: 4096, 5: 1, 10: (7, 1)},
]
# ALLOC of 12, SHARE_WITH of 13, FREE of 12; the other trace is of a part of the module.
TRACES = [
    {2: 1, 3: 4, 1: [{2: 12}, {1: 2, 2: 13, 5: 12}, {1: 1, 2: 12}]},
    {1: [{2: 10}, {1: 1, 2: 10}]},
]
PROTO = message({1: MODULE, 3: {1: BUFFERS, 3: ALLOCATIONS, 4: TRACES}})


def test_kinds_of_allocations() -> None:
    constant, argument, offloaded, table, heap, scalar, part = read(PROTO).allocations
    assert constant.constant and not constant.is_temporary
    assert (argument.parameter, argument.holds_result, argument.memory) == (3, True, HBM)
    assert (offloaded.parameter, offloaded.memory, offloaded.holds_result) == (1, HOST, False)
    assert table.holds_result and table.parameter is None
    assert heap.is_temporary and heap.size == 66048
    assert scalar.memory == 2 and not scalar.values
    assert (part.parameter, part.index) == (0, (7, 1))


def test_buffer_values_have_name_index_offset_and_live_range() -> None:
    allocations = read(PROTO).allocations
    twice, both = allocations[4].values
    assert (twice.name, twice.index, twice.offset, twice.size) == ("twice", (), 65536, 4096)
    assert (twice.live, both.live) == ((0, 2), (1, 3))
    assert (str(twice.shape), twice.shape.tiles) == ("f32[8,128]", ((8, 128),))
    assert (both.name, str(both.shape)) == ("both", "(f32[8,128], s32[])")
    (element,) = allocations[0].values
    assert (element.name, element.index, str(element.shape)) == ("both", (1,), "s32[]")
    assert allocations[2].values[0].live is None


def test_the_largest_values_at_the_peak_come_first() -> None:
    assert [
        (buffer.nbytes, [value.name for value in buffer.values], buffer.is_table)
        for buffer in read(PROTO).buffers_at_peak()
    ] == [(4096, ["twice"], False), (512, ["both"], True)]
    assert read(message(MODULE)).buffers_at_peak() == []


def test_bare_module_proto_reads_like_a_module_with_buffers() -> None:
    whole, alone = read(PROTO), read(message(MODULE))
    assert alone.allocations == () and alone.entry == whole.entry == "main"
    assert (alone.name, alone.num_partitions, alone.unread) == ("jit_f", 4, {})
    assert list(alone.computations["main"].instructions) == ["x", "y", "twice", "both"]
    assert alone.computations["main"].parameters[1].name == "y"
    root = alone.computations["main"].root
    assert root is not None and root.operands == ("twice", "y")


def test_unsupported_hlo_is_counted() -> None:
    strange = {1: "s", 2: "frobnicate", 3: {2: 99, 3: (4,)}, 35: 5, 38: (12,)}
    # Replica groups: one device is in two of them.
    groups = {1: "g", 2: "all-reduce", 3: F32, 35: 7, 36: (1,), 49: [{1: (0, 1)}, {1: (1, 2)}]}
    more = [strange, {**strange, 1: "t", 35: 6}, groups]
    computation = {**MODULE[3], 2: [*MODULE[3][2], *more]}
    odd = {k: v for k, v in MODULE.items() if k != 15} | {3: computation}
    lost = [*BUFFERS, {1: 15, 3: {4: 99}}]
    heap = [*ALLOCATIONS, {1: 7, 2: 64, 9: [{1: 15, 3: 64}]}]
    assert read(message({1: odd, 3: {1: lost, 3: heap}})).not_understood == {
        "number of devices": 1,
        "buffer of an unknown instruction": 1,
        "dtype type99": 2,
        "opcode frobnicate": 2,
        "missing computation #12": 2,
        "replica groups, taken as all devices": 1,
    }


@pytest.mark.parametrize("data", [PROTO[:-3], b"\xff" * 40, b"\x0b\x0c", message({1: "a", 2: "b"})])
def test_bytes_without_a_module_proto_raise(data: bytes) -> None:
    with pytest.raises(ArgumentError, match="HloModuleProto or HloProto"):
        read(data)
