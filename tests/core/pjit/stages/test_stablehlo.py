"""Programs from StableHLO text, bytecode and artifacts, called with arrays."""

import threading

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import xlashard
from tests.core.pjit.helpers import f32, make_mesh
from tests.core.program.test_parsed_modules import GSPMD, SHARDY
from tests.message_patterns import naming
from xlashard import (
    UNSPECIFIED,
    Array,
    GSPMDSharding,
    NamedSharding,
    P,
    Sharding,
    compile_stablehlo,
)
from xlashard.errors import (
    ArgumentError,
    CompileError,
    DeletedError,
    DonationError,
    DonationWarning,
    ModuleError,
)

MATMUL = """func.func @main(%x: tensor<8x4xf32>, %w: tensor<4x2xf32>)
    -> (tensor<8x2xf32>, tensor<f32>) {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<8x4xf32>, tensor<4x2xf32>) -> tensor<8x2xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %sum = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<8x2xf32>, tensor<f32>) -> tensor<f32>
  return %y, %sum : tensor<8x2xf32>, tensor<f32>
}"""


def double(kind):
    return f"""func.func @main(%x: tensor<{kind}>) -> tensor<{kind}> {{
      %y = stablehlo.add %x, %x : tensor<{kind}>
      return %y : tensor<{kind}> }}"""


X, W = f32(8, 4), f32(4, 2)


def check(results):
    assert [type(r) for r in results] == [Array, Array]
    np.testing.assert_allclose(results[0], X @ W, rtol=1e-5)
    np.testing.assert_allclose(results[1], (X @ W).sum(), rtol=1e-5)


def test_module_without_annotations_runs_on_one_device():
    program = compile_stablehlo(MATMUL)
    check(program(X, W))
    assert program.devices == (jax.devices()[0],)
    assert not program(X, W)[0].committed
    assert repr(program) == (
        "StableHLOProgram(stablehlo: (float32[8,4], float32[4,2]) -> (float32[8,2], float32[]))"
    )


@pytest.mark.parametrize(
    "kind", [Array.from_jax, np.asarray, lambda x: x], ids=["ours", "np", "jax"]
)
def test_program_accepts_every_kind_of_array(kind):
    program = compile_stablehlo(MATMUL)
    check(program(kind(jnp.asarray(X)), kind(jnp.asarray(W))))


@pytest.mark.devices(8)
def test_specs_on_a_mesh(partitioner, mesh):
    program = compile_stablehlo(
        MATMUL,
        in_shardings=(P("x"), P(None, "y")),
        out_shardings=(P("x", "y"), None),
        mesh=mesh,
        name="layer",
    )
    assert program.input_shardings == (
        NamedSharding(mesh, P("x")),
        NamedSharding(mesh, P(None, "y")),
    )
    assert program.output_shardings[0] == NamedSharding(mesh, P("x", "y"))
    assert program.output_shardings[1].is_fully_replicated
    assert program.name == "layer"
    assert ("sdy.sharding" in program.as_text("stablehlo")) is (partitioner == "shardy")
    for _ in range(3):
        results = program(X, W)
        check(results)
        assert results[0].sharding.spec == P("x", "y")


def test_specs_on_the_mesh_in_force(partitioner, mesh):
    with mesh:
        program = compile_stablehlo(MATMUL, in_shardings=P("x"))
    assert program.input_shardings == (NamedSharding(mesh, P("x")),) * 2
    check(program(X, W))


@pytest.mark.devices(8)
def test_unspecified_shardings_are_chosen_and_named_on_the_mesh(partitioner, mesh):
    program = compile_stablehlo(MATMUL, in_shardings=[NamedSharding(mesh, P("x")), UNSPECIFIED])
    assert program.output_shardings[0].spec == P("x")
    assert program.input_shardings[1].is_fully_replicated
    check(program(X, W))


def test_gspmd_and_user_defined_in_shardings(partitioner):
    class Rows(Sharding):
        """Sharding of rows in turn, the last device first."""

        @property
        def devices(self):
            return tuple(jax.devices())

        def devices_indices_map(self, shape):
            step = shape[0] // 8
            return {d: (slice((7 - i) * step, (8 - i) * step),) for i, d in enumerate(self.devices)}

    program = compile_stablehlo(
        MATMUL,
        in_shardings=(Rows(), GSPMDSharding(jax.devices(), "{devices=[4,2]<=[8]}")),
    )
    check(program(X, W))
    assert program.input_shardings[0].devices_indices_map((8, 4))[jax.devices()[7]][0] == slice(
        0, 1
    )


@pytest.mark.devices(8)
def test_shardy_annotations_of_the_module_are_used():
    program = compile_stablehlo(SHARDY)
    grid = make_mesh((2, 4), ("x", "y"))
    assert program.input_shardings[:2] == (
        NamedSharding(grid, P("x", "y")),
        NamedSharding(grid, P("y")),
    )
    assert program.output_shardings[0] == NamedSharding(grid, P(None, "x"))
    a, b, c = f32(8, 8), 2 * f32(8, 8), 3 * f32(8, 8)
    out, mid = program(a, b, c)
    np.testing.assert_array_equal(out, a + b + c)
    np.testing.assert_array_equal(mid, a + c)
    assert out.sharding.spec == P(None, "x")
    assert program.donate_argnums == (0,)


@pytest.mark.slow
def test_gspmd_annotations_of_the_module_are_used(mesh):
    program = compile_stablehlo(GSPMD, mesh=make_mesh((2, 4), ("x", "y")))
    assert [s.rank_tiling(2).counts for s in program.input_shardings] == [(2, 4), (8, 1), (1, 8)]
    assert program.input_shardings[0].spec == P("x", "y")
    assert program.input_shardings[2].memory_kind == "pinned_host"
    a, b, c = f32(8, 8), 2 * f32(8, 8), 3 * f32(8, 8)
    out, _ = program(a, b, c)
    np.testing.assert_array_equal(out, a + b + c)
    assert out.sharding.is_fully_replicated


@pytest.mark.devices(8)
def test_in_shardings_override_module_annotations(mesh):
    program = compile_stablehlo(SHARDY, in_shardings=(UNSPECIFIED, P(None, "y"), UNSPECIFIED))
    grid = make_mesh((2, 4), ("x", "y"))
    assert program.input_shardings[:2] == (
        NamedSharding(grid, P("x", "y")),
        NamedSharding(grid, P(None, "y")),
    )


@pytest.mark.devices(8)
def test_exported_functions_round_trip(partitioner, mesh):
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    exported = jax.export.export(
        jax.jit(lambda x, w: (x @ w, (x @ w).sum()), in_shardings=(sharding, None))
    )(X, W)
    for source in (exported.mlir_module(), exported.mlir_module_serialized):
        program = compile_stablehlo(source, mesh=mesh)
        assert program.input_shardings[0].spec == P("x")
        check(program(X, W))


def test_memories_and_layouts(mesh):
    there = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    program = compile_stablehlo(double("8xf32"), in_shardings=there, out_shardings=there)
    (result,) = program(f32(8))
    assert result.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(result, 2 * f32(8))
    layout = jax.experimental.layout.Layout((1, 0))
    turned = jax.experimental.layout.Format(layout, there.with_memory_kind("device").jax_sharding())
    program = compile_stablehlo(double("8x4xf32"), in_shardings=turned, out_shardings=turned)
    (result,) = program(f32(8, 4))
    assert result.format.layout.major_to_minor == (1, 0)
    np.testing.assert_array_equal(result, 2 * f32(8, 4))


def test_donation(mesh):
    sharding = NamedSharding(mesh, P("x"))
    program = compile_stablehlo(
        double("8xf32"), in_shardings=sharding, out_shardings=sharding, donate_argnums=-1
    )
    assert program.donate_argnums == (0,)
    x = xlashard.device_put(f32(8), sharding)
    (result,) = program(x)
    np.testing.assert_array_equal(result, 2 * f32(8))
    assert x.is_deleted()
    with pytest.raises(DeletedError, match=naming("args[0] (float32[8])", "donated", "stablehlo")):
        program(x)


def test_useless_donation_warns():
    with pytest.warns(
        DonationWarning,
        match=naming(
            "args[0]: float32[8,4]", "[8, 4]", "128 bytes", "results[0]: float32[8,2], 64"
        ),
    ):
        compile_stablehlo(MATMUL, donate_argnums=0)


def test_passing_a_donated_array_twice_raises():
    source = """func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> tensor<8xf32> {
      %z = stablehlo.add %x, %y : tensor<8xf32>
      return %z : tensor<8xf32> }"""
    program = compile_stablehlo(source, donate_argnums=0)
    x = xlashard.device_put(f32(8))
    with pytest.raises(DonationError, match=r"args\[0\] and as args\[1\]"):
        program(x, x)


@pytest.mark.parametrize("value", [3, 2.5, True, np.float32(1.5), np.ones((), np.float32)])
def test_python_numbers_are_cast_to_the_parameter_dtype(value):
    program = compile_stablehlo(double("f32"))
    for _ in range(3):
        (result,) = program(value)
        assert float(result) == 2 * float(value)
        assert result.dtype == np.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint32", "bool", "complex64"])
def test_dtypes(dtype):
    element = {
        "bfloat16": "bf16",
        "int8": "i8",
        "uint32": "ui32",
        "bool": "i1",
        "complex64": "complex<f32>",
    }[dtype]
    named_type = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    value = np.array([0, 1, 1, 0], named_type)
    (result,) = compile_stablehlo(double(f"4x{element}"))(value)
    assert result.dtype == value.dtype
    np.testing.assert_array_equal(result, value + value)


def test_64_bits():
    with pytest.raises(
        ModuleError,
        match=naming("args[0]", "int64[4]", "jax.config.update('jax_enable_x64', True)"),
    ):
        compile_stablehlo(double("4xi64"))
    value = np.arange(4, dtype=np.int64) << 40
    with jax.enable_x64(True):
        program = compile_stablehlo(double("4xi64"))
        np.testing.assert_array_equal(program(value)[0], 2 * value)
    with pytest.raises(ArgumentError, match=naming("stablehlo", "64-bit", "jax_enable_x64")):
        program(value)


@pytest.mark.parametrize("shape", ["0x8", "8x0"])
def test_zero_sizes(partitioner, mesh, shape):
    program = compile_stablehlo(double(f"{shape}xf32"), in_shardings=P("x"), mesh=mesh)
    size = tuple(map(int, shape.split("x")))
    assert program(np.zeros(size, np.float32))[0].shape == size


def test_no_arguments_and_no_results():
    assert compile_stablehlo("func.func @main() { return }")() == ()


@pytest.mark.devices(8)
def test_properties_of_a_program(partitioner, mesh):
    program = compile_stablehlo(MATMUL, in_shardings=P("x"), mesh=mesh)
    assert "HloModule" in program.as_text()
    assert "stablehlo.dot_general" in program.as_text("stablehlo")
    assert program.cost_analysis()["flops"] > 0
    assert program.memory_analysis().argument_size_in_bytes == 2 * 4 * 4 + 2 * 4
    assert [(i.shape, i.dtype) for i in program.out_info] == [
        ((8, 2), np.float32),
        ((), np.float32),
    ]
    assert program.in_info[0].sharding.spec == P("x")
    assert len(program.runtime_executable().local_devices()) == 8
    with pytest.raises(ArgumentError, match=naming("dialect", "'hlo' or 'stablehlo'", "'mhlo'")):
        program.as_text("mhlo")


def test_program_name_comes_from_the_module_or_the_argument(tmp_path):
    assert compile_stablehlo(f"module @net {{ {MATMUL} }}").name == "net"
    path = tmp_path / "net.mlir"
    path.write_text(MATMUL)
    assert compile_stablehlo(path.read_bytes(), name="file").name == "file"


def test_options():
    assert compile_stablehlo(MATMUL, compiler_options={"xla_cpu_enable_fast_math": True})
    with pytest.raises(CompileError, match="xla_no_such_option"):
        compile_stablehlo(MATMUL, compiler_options={"xla_no_such_option": True})


def test_a_repeated_call_takes_the_fast_path(mesh):
    program = compile_stablehlo(MATMUL, in_shardings=P("x"), mesh=mesh)
    args = [xlashard.device_put(v, s) for v, s in zip((X, W), program.input_shardings, strict=True)]
    for _ in range(3):
        check(program(*args))
    assert program._dispatcher._cache_size() == 1


def test_many_threads(mesh):
    program = compile_stablehlo(MATMUL, in_shardings=P("x"), mesh=mesh)
    failed = []

    def call():
        try:
            for _ in range(10):
                check(program(X, W))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.slow
def test_results_are_accepted_by_jax_and_pjit(partitioner, mesh):
    program = compile_stablehlo(MATMUL, in_shardings=P("x"), mesh=mesh)
    y, _ = program(X, W)
    np.testing.assert_allclose(jnp.sum(y), (X @ W).sum(), rtol=1e-5)
    z = xlashard.pjit(lambda v: v + 1)(y)
    np.testing.assert_allclose(z, X @ W + 1, rtol=1e-5)
    assert z.sharding.spec == y.sharding.spec


@pytest.mark.slow
def test_arguments_with_another_layout_are_converted_at_each_call():
    sharding = NamedSharding(make_mesh((4, 2), ("x", "y")), P("x"))
    program = compile_stablehlo(double("8x4xf32"), in_shardings=(sharding,))
    turned = xlashard.device_put(X, Format(Layout(major_to_minor=(1, 0)), sharding))
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(program(turned)[0]), X * 2)
        np.testing.assert_array_equal(
            np.asarray(program(xlashard.device_put(X, sharding))[0]), X * 2
        )
