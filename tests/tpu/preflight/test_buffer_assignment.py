"""XLA's buffer assignment, read from small texts of the kinds that libtpu writes."""

from xlashard.tpu.preflight.buffer_assignment import HBM, HOST, read_buffers

TEXT = """BufferAssignment:
allocation 0: size 512, page 0, constant:
 value: <22 constant.1..sunk @0> (size=512,offset=0): s32[]{:T(128)}
allocation 1: size 4096, page 0, parameter 3, shape |f32[8,128]| at ShapeIndex {}, maybe-live-out:
 value: <4 param.3 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
 value: <9 fusion.2{1} @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 2: size 8192, color 5, page 0, parameter 1, shape |bf16[4096]| at ShapeIndex {}:
 value: <5 param.1 @5> (size=8192,offset=0): bf16[4096]{0:T(1024)(128)(2,1)S(5)}
allocation 3: size 512, page 0, output shape is |(f32[8,128], s32[])|, maybe-live-out:
 value: <7 tuple.6{} @0> (size=512,offset=0): (f32[8,128]{1,0:T(8,128)}, s32[]{:T(128)})
allocation 4: size 66048, page 0, preallocated-temp:
 value: <1 wide.param.2{2} (phi) @0> (size=512,offset=65536): s32[]{:T(128)}
 value: <3 copy-start.1{} @0> (size=512,offset=0): (f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)})
allocation 5: size 4, color 2, page 0, preallocated-temp:
allocation 6: size 512, page 0, thread-local:
"""


def test_kinds_of_allocations() -> None:
    constant, argument, offloaded, table, heap, scalar, local = read_buffers(TEXT)
    assert constant.constant and not constant.is_temporary
    assert (argument.parameter, argument.holds_result, argument.memory) == (3, True, HBM)
    assert (offloaded.parameter, offloaded.memory, offloaded.holds_result) == (1, HOST, False)
    assert table.holds_result and table.parameter is None
    assert heap.is_temporary and heap.size == 66048
    assert scalar.memory == 2 and not scalar.values
    assert local.is_temporary


def test_values_have_names_parts_and_places() -> None:
    heap = read_buffers(TEXT)[4]
    state, start = heap.values
    assert (state.name, state.index, state.offset, state.is_phi) == (
        "wide.param.2",
        (2,),
        65536,
        True,
    )
    assert (start.name, start.index, start.is_phi) == ("copy-start.1", (), False)
    assert start.type == "(f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)})"
    assert read_buffers(TEXT)[0].values[0].name == "constant.1..sunk"


def test_arguments_in_one_tuple() -> None:
    text = """
allocation 0: size 512, page 0, parameter 0, shape |(f32[8], (constant))| at ShapeIndex {}:
allocation 1: size 4096, page 0, parameter 0, shape |f32[8]| at ShapeIndex {2087}, maybe-live-out:
allocation 2: size 4096, page 0, parameter 0, shape |f32[8]| at ShapeIndex {7,1}:
"""
    whole, part, nested = read_buffers(text)
    assert (whole.parameter, whole.index, whole.constant) == (0, (), False)
    assert (part.index, part.holds_result) == ((2087,), True)
    assert nested.index == (7, 1)


def test_unknown_lines_are_left_out() -> None:
    text = """Some heading of tomorrow
allocation 0: size 1024, page 7, something-new, flavour |x| of y, color 0:
 value: <1 a @0> (size=512,offset=0): f32[8]
 value: <2 b @0> (size=unknown)
   a remark
 uses: c

allocation X: size many
 value: <3 c @0> (size=256,offset=512, alignment=8): f32[8]
"""
    (only,) = read_buffers(text)
    assert only.size == 1024 and only.is_temporary
    assert [value.name for value in only.values] == ["a"]
    assert read_buffers("") == ()
