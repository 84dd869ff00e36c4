"""Bytes of HBM and of the host link, against figures computed by hand."""

import re

import pytest

from xlashard.hlo import read
from xlashard.hlo.text_reader import read_shape
from xlashard.predict.costs.cost_analysis import analyze_cost
from xlashard.predict.costs.memory_traffic import hbm_bytes, host_bytes, slice_bytes, vmem_bytes

# As TPU's compiler writes it for v6e: the sequencer of the SparseCores starts their tiles.
OFFLOADED = """HloModule m, is_scheduled=true

%fused (p: f32[16384,128256], q: s32[16384]) -> f32[16384] {
  %p = f32[16384,128256]{1,0:T(8,128)} parameter(0)
  %q = s32[16384]{0:T(1024)} parameter(1)
  %r = s32[16384,1]{1,0:T(8,128)} reshape(%q)
  %i = s32[16384,1]{1,0:T(8,128)} iota(), iota_dimension=0
  %places = s32[16384,2]{1,0:T(8,128)} concatenate(%i, %r), dimensions={1}
  ROOT %g = f32[16384]{0:T(1024)} gather(%p, %places), offset_dims={}, collapsed_slice_dims={0,1},
    start_index_map={0,1}, index_vector_dim=1, slice_sizes={1,1}
}

%on_tiles (p.1: f32[16384,128256], q.1: s32[16384]) -> f32[16384] {
  %p.1 = f32[16384,128256]{1,0:T(8,128)} parameter(0)
  %q.1 = s32[16384]{0:T(1024)} parameter(1)
  ROOT %f = f32[16384]{0:T(1024)} fusion(%p.1, %q.1), kind=kCustom, calls=%fused,
    backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
}

%on_sequencer (p.2: f32[16384,128256], q.2: s32[16384]) -> f32[16384] {
  %p.2 = f32[16384,128256]{1,0:T(8,128)} parameter(0)
  %q.2 = s32[16384]{0:T(1024)} parameter(1)
  %s = ((f32[16384,128256]{1,0:T(8,128)}, s32[16384]{0:T(1024)}), f32[16384]{0:T(1024)},
    u32[]{:S(8)}) call-start(%p.2, %q.2), to_apply=%on_tiles
  ROOT %d = f32[16384]{0:T(1024)} call-done(%s)
}

ENTRY %main (t: f32[16384,128256], n: s32[16384]) -> f32[16384] {
  %t = f32[16384,128256]{1,0:T(8,128)} parameter(0)
  %n = s32[16384]{0:T(1024)} parameter(1)
  %start = ((), (), (s32[1]{0:S(2)})) call-start(), to_apply=%on_sequencer
  %update = ((f32[16384,128256]{1,0:T(8,128)}, s32[16384]{0:T(1024)}), f32[16384]{0:T(1024)})
    call-update(%start, %t, %n)
  ROOT %done = f32[16384]{0:T(1024)} call-done(%update)
}
"""


FORMATTED = """HloModule m, is_scheduled=true

%on_tiles (p: bf16[64,128,256]) -> bf16[64,128,256] {
  %p = bf16[64,128,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %c = bf16[64,128,256]{2,0,1:T(8,128)(2,1)} copy(%p)
}

%on_sequencer (p.1: bf16[64,128,256]) -> bf16[64,128,256] {
  %p.1 = bf16[64,128,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %s = ((bf16[64,128,256]{2,1,0}), bf16[64,128,256]{2,0,1}, u32[]) call-start(%p.1),
    to_apply=%on_tiles
  ROOT %d = bf16[64,128,256]{2,0,1:T(8,128)(2,1)} call-done(%s)
}

ENTRY %main (t: bf16[64,128,256]) -> bf16[64,128,256] {
  %t = bf16[64,128,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %sparse-core-data-format-call = ((), (), (s32[1]{0:S(2)})) call-start(),
    to_apply=%on_sequencer
  %u = ((bf16[64,128,256]{2,1,0}), bf16[64,128,256]{2,0,1})
    call-update(%sparse-core-data-format-call, %t)
  ROOT %r = bf16[64,128,256]{2,0,1:T(8,128)(2,1)} call-done(%u)
}
"""


def one_line(text):
    """Return HLO text with one instruction a line."""
    return re.sub(r"\n    ", " ", text)


def test_sparse_core_gather_reads_a_granule_per_element():
    work = analyze_cost(read(one_line(OFFLOADED)))
    # Elements, their numbers, and the result: not the 8.4 GB of the table.
    assert work.hbm_bytes == 16384 * 32 + 16384 * 4 + 16384 * 4


def test_sparse_core_format_call_reads_and_writes_the_array_once():
    assert analyze_cost(read(one_line(FORMATTED))).hbm_bytes == 2 * 64 * 128 * 256 * 2


@pytest.mark.parametrize(
    ("layout", "sizes", "nbytes"),
    [
        # A row of 256 elements is in two tiles, of which each holds 128 of it.
        ("f32[1000,256]{1,0:T(8,128)}", (1, 256), 2 * 512),
        ("f32[1000,256]{1,0:T(8,128)}", (1, 1), 32),
        ("f32[1000,256]{1,0:T(8,128)}", (1, 9), 64),
        ("f32[1000,256]{1,0:T(8,128)}", (3, 256), 3 * 2 * 512),
        # A column: as many granules as rows.
        ("f32[1000,256]{1,0:T(8,128)}", (1000, 1), 1000 * 32),
        ("f32[1000,256]{0,1:T(8,128)}", (1000, 1), 8 * 512),
        # Two rows of bfloat16, four of int8, share the words of a tile.
        ("bf16[1000,256]{1,0:T(8,128)(2,1)}", (1, 256), 2 * 512),
        ("bf16[1000,256]{1,0:T(8,128)(2,1)}", (2, 256), 2 * 512),
        ("s8[1000,256]{1,0:T(32,128)(4,1)}", (1, 256), 2 * 512),
        ("s4[64,256]{1,0:T(64,128)(8,1)E(4)}", (1, 256), 2 * 512),
        ("bf16[4,8,128]{2,1,0:T(8,128)(2,1)}", (2, 8, 128), 2 * 4 * 512),
        # Without tiles, rows are contiguous.
        ("f32[10,20]{1,0}", (3, 20), 256),
        ("f32[10,20]{1,0}", (3, 4), 3 * 32),
        ("f32[5000]{0:T(1024)}", (3,), 32),
        ("f32[]", (), 32),
    ],
)
def test_slice_bytes_are_rounded_up_to_granules(layout, sizes, nbytes):
    assert slice_bytes(read_shape(layout), sizes) == nbytes


GATHERS = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (t: f32[1000,256], i: s32[64,1], u: f32[64,256]) -> f32[1000,256] {
  %t = f32[1000,256]{1,0:T(8,128)} parameter(0)
  %v = f32[1000,256]{1,0:T(8,128)S(1)} copy(%t)
  %i = s32[64,1]{1,0} parameter(1)
  %many = s32[4096,1]{1,0} iota(), iota_dimension=0
  %u = f32[64,256]{1,0:T(8,128)} parameter(2)
  %rows = f32[64,256]{1,0:T(8,128)} gather(%t, %i), offset_dims={1}, SLICES
  %again = f32[4096,256]{1,0:T(8,128)S(1)} gather(%t, %many), offset_dims={1}, SLICES
  %in_vmem = f32[64,256]{1,0:T(8,128)} gather(%v, %i), offset_dims={1}, SLICES
  %columns = f32[64,1000]{1,0:T(8,128)S(1)} gather(%t, %i), offset_dims={1},
    collapsed_slice_dims={1}, start_index_map={1}, index_vector_dim=1, slice_sizes={1000,1}
  ROOT %s = f32[1000,256]{1,0:T(8,128)} scatter(%t, %i, %u), update_window_dims={1},
    inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add
}
"""
SLICES = "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,256}"


@pytest.mark.parametrize(
    ("name", "nbytes", "in_vmem"),
    [
        # Rows, their numbers, and the result.
        ("rows", 64 * 1024 + 64 * 4 + 64 * 1024, 0),
        # A row that is gathered twice is read twice.
        ("again", 4096 * 1024 + 4096 * 4, 4096 * 1024),
        ("in_vmem", 64 * 4 + 64 * 1024, 64 * 1024),
        ("columns", 64 * 1000 * 32 + 64 * 4, 64 * 1024 * 4),
        # The updates, and the rows that they change.
        ("s", 64 * 4 + 64 * 1024 + 2 * 64 * 1024, 0),
    ],
)
def test_gathers_and_scatters_count_their_slices(name, nbytes, in_vmem):
    module = read(one_line(GATHERS.replace("SLICES", SLICES)))
    computation = module.computations["main"]
    assert hbm_bytes(module, computation, computation.instructions[name]) == nbytes
    assert vmem_bytes(module, computation, computation.instructions[name]) == in_vmem


HOST = """HloModule m

ENTRY %main (x: f32[8,1024], h: f32[4,8,1024]) -> f32[8,1024] {
  %x = f32[8,1024]{1,0:T(8,128)} parameter(0)
  %h = f32[4,8,1024]{2,1,0:T(8,128)S(5)} parameter(1)
  %zero = s32[] constant(0)
  %out = (f32[8,1024]{1,0:T(8,128)S(5)}, f32[8,1024]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %out.1 = f32[8,1024]{1,0:T(8,128)S(5)} copy-done(%out)
  %in = (f32[8,1024]{1,0:T(8,128)S(1)}, f32[8,1024]{1,0:T(8,128)S(5)}, u32[]) copy-start(%out.1)
  %in.1 = f32[8,1024]{1,0:T(8,128)S(1)} copy-done(%in)
  %prefetch = (f32[8,1024]{1,0:T(8,128)S(1)}, f32[8,1024]{1,0:T(8,128)}, u32[]) copy-start(%x)
  %there = f32[8,1024]{1,0:T(8,128)S(5)} copy(%out.1)
  %x3 = f32[1,8,1024]{2,1,0:T(8,128)} bitcast(%x)
  %save = ((f32[4,8,1024]{2,1,0:T(8,128)S(5)}, f32[1,8,1024]{2,1,0:T(8,128)}, s32[], s32[], s32[]),
    f32[4,8,1024]{2,1,0:T(8,128)S(5)}, u32[]{:S(2)})
    dynamic-update-slice-start(%h, %x3, %zero, %zero, %zero)
  %saved = f32[4,8,1024]{2,1,0:T(8,128)S(5)} dynamic-update-slice-done(%save)
  %load = ((f32[4,8,1024]{2,1,0:T(8,128)S(5)}, s32[], s32[], s32[]),
    f32[1,8,1024]{2,1,0:T(8,128)}, u32[]{:S(2)}) dynamic-slice-start(%saved, %zero, %zero, %zero)
  %loaded = f32[1,8,1024]{2,1,0:T(8,128)} dynamic-slice-done(%load)
  %moved = f32[8,1024]{1,0:T(8,128)} custom-call(%x), custom_call_target="MoveToHost"
  %token = token[] after-all()
  %fed = (f32[8,1024]{1,0:T(8,128)}, token[]) infeed(%token)
  %sent = token[] outfeed(%x, %token)
  ROOT %r = f32[8,1024]{1,0:T(8,128)} bitcast(%loaded)
}
"""
ARRAY = 8 * 1024 * 4


@pytest.mark.parametrize(
    ("name", "host", "hbm"),
    [
        ("out", ARRAY, ARRAY),
        ("out.1", 0, 0),
        # To VMEM.
        ("in", ARRAY, 0),
        ("prefetch", 0, ARRAY),
        ("there", 0, 0),
        ("save", ARRAY, ARRAY),
        ("load", ARRAY, ARRAY + 3 * 4),
        ("loaded", 0, 0),
        ("moved", ARRAY, 2 * ARRAY),
        ("fed", ARRAY, ARRAY),
        ("sent", ARRAY, ARRAY),
    ],
)
def test_host_copies_count_on_the_host_link(name, host, hbm):
    module = read(one_line(HOST))
    computation = module.computations["main"]
    instruction = computation.instructions[name]
    assert host_bytes(computation, instruction) == host
    assert hbm_bytes(module, computation, instruction) == hbm
    # Copies to and from VMEM wait for the other memory.
    assert vmem_bytes(module, computation, instruction) == 0


def fusion_bytes(body: str, dtype: str = "bf16") -> int:
    """HBM bytes of a fusion with parameters: the layers, a position and one layer."""
    module = read(
        "HloModule m, is_scheduled=true\n"
        f"inner {{\n{body}\n}}\n"
        "ENTRY main {\n"
        f"s = {dtype}[80,256,1024] parameter(0)\ni = s32[] parameter(1)\n"
        f"u = {dtype}[1,256,1024] parameter(2)\n"
        f"ROOT f = {dtype}[1,256,1024] fusion(s, i, u), kind=kLoop, calls=inner\n}}\n"
    )
    main = module.computations["main"]
    return hbm_bytes(module, main, main.instructions["f"])


LAYER = 256 * 1024 * 2
INDEX = 4
PARAMETERS = """p = bf16[80,256,1024] parameter(0)
i = s32[] parameter(1)
u = bf16[1,256,1024] parameter(2)
z = s32[] constant(0)
"""


@pytest.mark.parametrize(
    "before",
    ["copy(p)", "bitcast(p)", "pad(p, c), padding=0_0x0_0x0_0"],
)
def test_slice_of_a_fused_operation_reads_only_the_slice(before: str) -> None:
    body = (
        f"{PARAMETERS}c = bf16[] constant(0)\nq = bf16[80,256,1024] {before}\n"
        "ROOT d = bf16[1,256,1024] dynamic-slice(q, i, z, z), dynamic_slice_sizes={1,256,1024}"
    )
    assert fusion_bytes(body) == 2 * LAYER + INDEX


def test_slice_of_converted_layers_reads_the_original_dtype() -> None:
    body = (
        f"{PARAMETERS}q = f32[80,256,1024] convert(p)\n"
        "d = f32[1,256,1024] dynamic-slice(q, i, z, z), dynamic_slice_sizes={1,256,1024}\n"
        "ROOT r = bf16[1,256,1024] convert(d)"
    )
    assert fusion_bytes(body) == 2 * LAYER + INDEX


def test_fusion_that_returns_a_copy_reads_the_whole_operand() -> None:
    body = f"{PARAMETERS}ROOT r = bf16[1,256,1024] copy(u)"
    assert fusion_bytes(body) == 2 * LAYER
