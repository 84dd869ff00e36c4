"""Modules from sources other than JAX: how they are read, and which parts are kept."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest

from tests.core.program.helpers import named, plan, text_of, tiles
from tests.goldens import check_golden, check_no_others, join_sections
from xlashard._jax import stablehlo_modules as modules
from xlashard._jax import stablehlo_parse
from xlashard.core.program.parsed_module import lower_parsed_module, parse_module, partitioner_for
from xlashard.core.program.plan import Partitioner
from xlashard.errors import ModuleError, PlanError

GOLDENS = Path(__file__).parent / "goldens" / "modules"

PLAIN = """func.func @main(%x: tensor<8x4xf32>, %n: tensor<i32>) -> tensor<8x4xf32> {
  return %x : tensor<8x4xf32>
}"""

SHARDY = """module @net attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @grid = <["x"=2, "y"=4]>
  func.func @main(
      %a: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@grid, [{"x"}, {"y"}]>,
                           tf.aliasing_output = 1 : i32},
      %b: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@grid, [{"y"}, {}]>},
      %c: tensor<8x8xf32>)
      -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@grid, [{}, {"x"}]>,
                           jax.result_info = "out.w"},
          tensor<8x8xf32>) {
    %0 = sdy.sharding_constraint %c <@grid, [{"x"}, {?}]> : tensor<8x8xf32>
    %1 = stablehlo.add %a, %0 : tensor<8x8xf32>
    %2 = stablehlo.add %b, %1 : tensor<8x8xf32>
    return %2, %1 : tensor<8x8xf32>, tensor<8x8xf32>
  }
}"""

GSPMD = """module @net attributes {mhlo.num_partitions = 8 : i32} {
  func.func @main(
      %a: tensor<8x8xf32> {mhlo.sharding = "{devices=[2,4]<=[8]}", jax.buffer_donor = true},
      %b: tensor<8x8xf32> {mhlo.sharding = "{devices=[8,1]<=[8]}"},
      %c: tensor<8x8xf32> {mhlo.memory_kind = "pinned_host", mhlo.layout_mode = "{0,1}"})
      -> (tensor<8x8xf32> {mhlo.sharding = "{replicated}"}, tensor<8x8xf32>) {
    %0 = stablehlo.custom_call @Sharding(%c)
        {mhlo.sharding = "{devices=[1,8]<=[8]}"} : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %1 = stablehlo.add %a, %0 : tensor<8x8xf32>
    %2 = stablehlo.add %b, %1 : tensor<8x8xf32>
    return %2, %1 : tensor<8x8xf32>, tensor<8x8xf32>
  }
}"""


def main(args="%a: tensor<8xf32>", attributes="", before=""):
    return f"module attributes {{{attributes}}} {{ {before} func.func @main({args}) {{ return }} }}"


ERRORS = {
    "an unknown operation": PLAIN.replace("return %x", "stablehlo.nothing %x"),
    "an undeclared value": PLAIN.replace("return %x", "return %y"),
    "a type that does not fit": PLAIN.replace("-> tensor<8x4xf32>", "-> tensor<8x8xf32>"),
    "a line that ends early": "func.func @main(",
    "bytes that are nothing": b"\x00\x01\x02",
    "an empty text": "",
    "no entry": "func.func private @f() { return }\nfunc.func private @g() { return }",
    "two entries": "func.func @f() { return }\nfunc.func @g() { return }",
    "an unknown size": main("%a: tensor<8xf32>, %b: tensor<8x?xf32>"),
    "an unknown rank": main("%a: tensor<*xf32>"),
    "a token": main("%a: !stablehlo.token"),
    "a tuple": main("%a: tuple<tensor<f32>>"),
    "elements of no array": main("%a: tensor<4xindex>"),
    "partitions that are no number": main(attributes='mhlo.num_partitions = "8"'),
    "a function that calls itself": main("").replace("return", "call @main() : () -> () return"),
    "functions that call each other": (
        "func.func @main() { call @f() : () -> () return }\n"
        "func.func private @f() { call @g() : () -> () return }\n"
        "func.func private @g() { call @f() : () -> () return }"
    ),
    "replicas": main(attributes="mhlo.num_replicas = 2 : i32"),
    "both notations": main(
        '%a: tensor<8xf32> {sdy.sharding = #sdy.sharding<@m, [{"x"}]>, '
        'mhlo.sharding = "{replicated}"}',
        before='sdy.mesh @m = <["x"=8]>',
    ),
}

REFUSED = {
    "partitions for other devices": main(attributes="mhlo.num_partitions = 4 : i32"),
    "a mesh for other devices": main(before='sdy.mesh @m = <["x"=2, "y"=2]>'),
    "tiles for other devices": main('%a: tensor<8xf32> {mhlo.sharding = "{devices=[4]<=[4]}"}'),
    "tiles on no device": main('%a: tensor<8xf32> {mhlo.sharding = "{maximal device=9}"}'),
    "tuples for other devices": main(
        '%a: tensor<8xf32> {mhlo.sharding = "{{replicated}, {devices=[4]<=[4]}}"}'
    ),
    "tiles of another rank": main('%a: tensor<8x8xf32> {mhlo.sharding = "{devices=[8]<=[8]}"}'),
    "uneven tiles": main('%a: tensor<7xf32> {mhlo.sharding = "{devices=[8]<=[8]}"}'),
    "all on one device": main('%a: tensor<8xf32> {mhlo.sharding = "{maximal device=3}"}'),
    "tiles that the program handles": main('%a: tensor<8xf32> {mhlo.sharding = "{manual}"}'),
    "no sharding": main('%a: tensor<8xf32> {mhlo.sharding = "{devices=[8]<=8}"}'),
}


def planned(parsed, overrides=()):
    """Return the plan of a module on eight devices, with shardings for some arguments."""
    args = [value.plan for value in parsed.args]
    for i, sharding in dict(overrides).items():
        args[i] = replace(args[i], sharding=sharding, annotated=False)
    return plan(
        args,
        [value.plan for value in parsed.results],
        parsed.partitioner or Partitioner.SHARDY,
        aliased=parsed.aliased,
    )


@pytest.mark.devices(8)
def test_errors(update_goldens):
    found = {}
    for name, source in ERRORS.items():
        with pytest.raises(ModuleError) as caught:
            parse_module(source)
        found[name] = str(caught.value)
    for name, source in REFUSED.items():
        parsed = parse_module(source)
        with pytest.raises(ModuleError) as caught:
            lower_parsed_module(parsed, planned(parsed))
        found[name] = str(caught.value)
    check_golden(GOLDENS / "errors.txt", join_sections(found), update=update_goldens)


CASES = {
    "plain": (PLAIN, {}),
    "plain_overridden": (PLAIN, {0: lambda: named("x")}),
    "shardy": (SHARDY, {}),
    "shardy_overridden": (
        SHARDY,
        {1: lambda: named(None, "x"), 2: lambda: tiles("{devices=[8,1]<=[8]}")},
    ),
    "gspmd": (GSPMD, {}),
    "gspmd_overridden": (GSPMD, {1: lambda: named(None, "x"), 2: lambda: named("y")}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.devices(8)
def test_overrides_replace_only_their_own_attributes(case, update_goldens):
    source, overrides = CASES[case]
    parsed = parse_module(source)
    planned_program = planned(parsed, {i: make() for i, make in overrides.items()})
    text = text_of(lower_parsed_module(parsed, planned_program))
    check_golden(GOLDENS / f"{case}.mlir", text, update=update_goldens)


def test_each_golden_file_has_a_case(update_goldens):
    check_no_others(GOLDENS, {"errors.txt", *(f"{c}.mlir" for c in CASES)}, update=update_goldens)


def test_properties_of_a_module():
    parsed = parse_module(GSPMD)
    assert (parsed.name, parsed.num_partitions) == ("net", 8)
    assert parsed.partitioner is Partitioner.GSPMD
    assert [v.plan.annotated for v in parsed.args] == [True, True, False]
    assert [v.donated for v in parsed.args] == [True, False, False]
    last = parsed.args[2].plan
    assert (last.memory_kind, last.layout) == ("pinned_host", "{0,1}")
    assert [v.plan.annotated for v in parsed.results] == [True, False]
    shardy = parse_module(SHARDY)
    assert shardy.partitioner is Partitioner.SHARDY
    assert shardy.aliased == (1,)
    assert [v.plan.name for v in shardy.results] == ["out.w", "results[1]"]


def test_unannotated_module_uses_the_partitioner_of_the_jax_config():
    before = jax.config.jax_use_shardy_partitioner
    try:
        for shardy, partitioner in ((True, Partitioner.SHARDY), (False, Partitioner.GSPMD)):
            jax.config.update("jax_use_shardy_partitioner", shardy)
            assert partitioner_for(parse_module(PLAIN)) is partitioner
            assert partitioner_for(parse_module(GSPMD)) is Partitioner.GSPMD
            assert partitioner_for(parse_module(SHARDY)) is Partitioner.SHARDY
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.parametrize(
    ("meshes", "named_by"),
    [
        ([], None),
        (['<["x"=2, "y"=4]>'], (("x", 2), ("y", 4))),
        (['<["x"=2, "y"=4]>', "<[]>"], (("x", 2), ("y", 4))),
        (['<["x"=2, "y"=4]>', '<["a"=8]>'], None),
        (['<["x"=2, "y"=4], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]>'], None),
        (['<["x"=2, "y"=2]>'], None),
    ],
)
@pytest.mark.devices(8)
def test_mesh_of_the_module_names_the_axes(meshes, named_by):
    symbols = "\n".join(f"sdy.mesh @m{i} = {mesh}" for i, mesh in enumerate(meshes))
    found = parse_module(main(before=symbols)).mesh_on(jax.devices()[:8])
    assert (found and tuple(found.shape.items())) == named_by


def test_a_private_entry_becomes_public():
    source = PLAIN.replace("func.func @main", "func.func private @main")
    parsed = parse_module(source)
    assert "func.func public @main" in text_of(lower_parsed_module(parsed, planned(parsed)))


def test_text_bytecode_and_artifact_parse_to_equal_modules():
    exported = jax.export.export(jax.jit(lambda x: x + 1))(jax.ShapeDtypeStruct((8,), np.float32))
    text = exported.mlir_module()
    bytecode = modules.to_bytecode(stablehlo_parse.read_module(text))
    found = [
        parse_module(source)
        for source in (text, text.encode(), bytecode, exported.mlir_module_serialized)
    ]
    assert len({modules.to_text(f.module) for f in found}) == 1
    assert {(v.plan.shape, v.plan.dtype) for f in found for v in f.args} == {((8,), "float32")}


@pytest.mark.parametrize(
    ("element", "dtype"),
    [
        ("i1", "bool"),
        ("i8", "int8"),
        ("i64", "int64"),
        ("ui32", "uint32"),
        ("i4", "int4"),
        ("ui2", "uint2"),
        ("f16", "float16"),
        ("bf16", "bfloat16"),
        ("f64", "float64"),
        ("complex<f32>", "complex64"),
        ("complex<f64>", "complex128"),
        ("f8E4M3FN", "float8_e4m3fn"),
        ("f8E5M2", "float8_e5m2"),
        ("f8E8M0FNU", "float8_e8m0fnu"),
        ("f4E2M1FN", "float4_e2m1fn"),
    ],
)
def test_dtypes_of_elements(element, dtype):
    (value,) = parse_module(main(f"%a: tensor<4x{element}>")).args
    assert value.plan.dtype == dtype
    assert value.aval.dtype == np.dtype(dtype)


def test_a_plan_of_another_arity_is_refused():
    parsed = parse_module(PLAIN)
    planned_program = planned(parsed)
    short = plan(planned_program.args[:1], planned_program.results, planned_program.partitioner)
    with pytest.raises(PlanError, match="@main .*2 arguments.* 1"):
        lower_parsed_module(parsed, short)
