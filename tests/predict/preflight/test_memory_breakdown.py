"""Memory breakdowns, against the compiler's own figures and verdicts."""

import jax
import jax.numpy as jnp
import pytest

from tests.predict.preflight.programs import MIB, compile_stage, first_of, on, training_step
from xlashard import NamedSharding, P, pjit
from xlashard._jax.runtime.executables import compiled_memory
from xlashard.analysis.explain.model import ValueReport
from xlashard.analysis.programs.program import Compilation
from xlashard.errors import ProgramTooLargeError
from xlashard.predict.preflight.memory_breakdown import describe_memory, describe_values
from xlashard.predict.preflight.report.preflight_model import MemoryBreakdown
from xlashard.tpu import Topology, topology

GIB = 1024 * MIB
LARGE = 32768, 12, 65536


@pytest.fixture(scope="module")
def large_step() -> tuple[Compilation, Topology]:
    """Return a training step that takes 158 GiB of chips with 16 GiB."""
    return training_step(*LARGE)


@pytest.fixture(scope="module")
def large(large_step: tuple[Compilation, Topology]) -> MemoryBreakdown:
    return describe_memory(*large_step)


def values(compilation: Compilation) -> dict[str, ValueReport]:
    """Return arguments and results by path."""
    inputs, outputs = describe_values(compilation, compilation.module)
    return {v.path: v for v in (*inputs, *outputs)}


def matmul(name: str) -> tuple[Compilation, MemoryBreakdown]:
    """Return a product that its argument `w` is replaced by, and a sum, with shapes that need
    padding.
    """
    place, mesh = on(name, data=2, model=2)

    def scaled(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y = jnp.tanh(x @ w)
        return w * 2, y, y.sum()

    w = jax.ShapeDtypeStruct((512, 100), jnp.float32, sharding=NamedSharding(mesh, P("model")))
    x = jax.ShapeDtypeStruct((60, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    lowered = pjit(scaled, donate_argnums=0, out_shardings=(w.sharding, None, None)).lower(w, x)
    compilation = compile_stage(lowered)
    return compilation, describe_memory(compilation, place)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1"])
def test_memory_sums_equal_the_compiler_statistics(name: str) -> None:
    compilation, memory = matmul(name)
    assert compilation.executable is not None
    stats = compiled_memory(compilation.executable)
    assert memory.argument_bytes == stats.argument_size_in_bytes
    assert memory.alias_bytes == stats.alias_size_in_bytes
    assert memory.result_bytes == stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert memory.code_bytes == stats.generated_code_size_in_bytes
    assert memory.host_bytes == 0
    parts = memory.argument_bytes + memory.result_bytes + memory.temporary_bytes
    assert memory.total_bytes == parts + memory.constant_bytes + memory.code_bytes
    in_dump = sum(a.size for a in compilation.module.allocations if a.memory == 0)
    assert memory.total_bytes - memory.code_bytes == in_dump
    # Older versions of jaxlib don't report these separately.
    whole = getattr(stats, "total_allocation_bytes", in_dump)
    assert in_dump == whole
    assert memory.fits and memory.spare_bytes == memory.available_bytes - memory.total_bytes


@pytest.mark.slow
def test_leaf_sizes_include_tile_padding() -> None:
    compilation, memory = matmul("v5e:2x2")
    held = values(compilation)
    # 256 rows of 100 numbers lie in tiles of 8 by 128, whichever dimension comes first.
    padded = held["w"].device_bytes
    assert padded in (256 * 128 * 4, 104 * 256 * 4)
    # Those of 30 rows, of numbers of two bytes, in tiles of 16.
    assert held["x"].device_bytes == 32 * 512 * 2
    assert held["result[1]"].device_bytes >= 30 * 100 * 2
    assert held["result[2]"].device_bytes == 512
    assert (held["w"].donated, held["w"].aliased) == (True, "result[0]")
    assert (held["result[0]"].aliased, held["result[0]"].device_bytes) == ("w", padded)
    assert (held["x"].donated, held["x"].aliased, held["x"].spec) == (False, "", "P('data')")
    assert held["w"].device_bytes + held["x"].device_bytes == memory.argument_bytes
    own = held["result[1]"].device_bytes + held["result[2]"].device_bytes
    assert 0 <= memory.result_bytes - own <= 1024  # The table of the results.


def test_program_too_large_for_hbm_has_a_full_breakdown(
    large: MemoryBreakdown, large_step: tuple[Compilation, Topology]
) -> None:
    assert not large.fits
    assert large.total_bytes > 150 * GIB
    assert large.spare_bytes == large.available_bytes - large.total_bytes < -130 * GIB
    assert large.code_bytes == 0
    width, depth, rows = LARGE
    leaf = depth * width * 2 * width * 4 // 4
    held = values(large_step[0])
    assert held["params['up']"].device_bytes == held["params['down']"].device_bytes == leaf
    assert held["x"].device_bytes == rows * width * 2 // 2
    assert large.alias_bytes == 2 * leaf
    assert large.argument_bytes == 2 * leaf + rows * width
    assert held["result[0]['up']"].aliased == "params['up']"
    assert held["params['down']"].aliased == "result[0]['down']"


def test_temporaries_add_up_to_the_heap(large: MemoryBreakdown) -> None:
    named = sum(t.device_bytes for t in large.temporaries)
    assert 0.98 * large.temporary_bytes < named <= large.temporary_bytes
    sizes = [t.device_bytes for t in large.temporaries]
    assert sizes == sorted(sizes, reverse=True)


def test_temporaries_name_their_operation_and_source(large: MemoryBreakdown) -> None:
    width, depth, rows = LARGE
    stacked = [t for t in large.temporaries if t.type == f"bf16[{depth},{rows // 2},{width}]"]
    # The input of each layer is kept for the backward pass, and no other value of the forward pass.
    assert [t.device_bytes for t in stacked] == [depth * rows // 2 * width * 2]
    assert stacked[0].op_name.startswith("step/jvp()/while/body")
    assert stacked[0].source is not None
    assert stacked[0].source.file.endswith("programs.py")
    assert stacked[0].source.in_user_file
    gradients = [t for t in large.temporaries if t.type.startswith(f"f32[{depth},")]
    assert len(gradients) == 2
    assert all("transpose" in t.op_name for t in gradients)
    cast = {t.op_name: t.type for t in large.temporaries if t.name.startswith("convert.")}
    assert cast["params['up']"] == f"bf16[{depth},{width // 2},{width}]"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x2", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x1x1"])
def test_fits_equals_the_verdict_of_the_compiler(name: str) -> None:
    available = topology(name).generation.available_bytes
    compilation, place = first_of(name, available - MIB)
    below = describe_memory(compilation, place)
    assert compilation.executable is not None and below.fits
    assert 0 <= below.spare_bytes < MIB

    # The argument fits, but not with the program's code.
    compilation, place = first_of(name, available - 16 * 1024)
    code = describe_memory(compilation, place)
    assert compilation.executable is None and not code.fits
    assert code.code_bytes > 0
    assert code.total_bytes == code.available_bytes + 1

    compilation, place = first_of(name, available + MIB)
    above = describe_memory(compilation, place)
    assert compilation.executable is None and not above.fits
    assert above.code_bytes == 0
    assert MIB <= -above.spare_bytes < 2 * MIB


@pytest.mark.slow
def test_vmem_overflow_raises_program_too_large_error() -> None:
    _, mesh = on("v5e:2x2", data=4)
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    lowered = pjit(lambda x: x @ x.T).lower(x)
    with pytest.raises(ProgramTooLargeError, match="memory space vmem") as raised:
        compile_stage(lowered, {"xla_tpu_scoped_vmem_limit_kib": "1"})
    text = str(raised.value)
    facts = ("<lambda>", "HBM", "xla_tpu_scoped_vmem_limit_kib", "TPU v5 lite")
    assert all(fact in text for fact in facts)
    assert "\n" not in text


def test_host_memory_takes_no_hbm() -> None:
    place, mesh = on("v5e:2x2", data=2, model=2)
    rows = NamedSharding(mesh, P("data"))
    in_host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    shape = 128 * 1024, 64 * 1024

    def added(x: jax.Array, kept: jax.Array) -> jax.Array:
        return x + jax.device_put(kept, rows)

    lowered = pjit(added).lower(
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows),
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=in_host),
    )
    compilation = compile_stage(lowered)
    memory, held = describe_memory(compilation, place), values(compilation)
    assert (held["x"].device_bytes, held["x"].spec) == (16 * GIB, "P('data')")
    assert (held["kept"].device_bytes, held["kept"].spec) == (0, "P('data') in pinned_host")
    assert memory.argument_bytes == memory.host_bytes == 16 * GIB


@pytest.mark.slow
def test_arguments_passed_as_one_tuple_keep_sizes_and_aliases() -> None:
    place, mesh = on("v5e:2x2", all=4)
    whole = NamedSharding(mesh, P())
    many = [jax.ShapeDtypeStruct((2048, 1024 + 128 * (i % 3)), jnp.float32) for i in range(2001)]

    def f(state: jax.Array, many: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state * 2, many[4] + 1

    state = jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
    made = pjit(f, in_shardings=whole, out_shardings=whole, donate_argnums=0, keep_unused=True)
    compilation = compile_stage(made.lower(state, many))
    memory = describe_memory(compilation, place)
    assert (2001,) in {a.index for a in compilation.module.allocations}
    assert not memory.fits
    held = values(compilation)
    assert held["state"].aliased == "result[0]" and held["state"].donated
    assert held["result[0]"].aliased == "state"
    assert held["many[4]"].device_bytes == held["result[1]"].device_bytes == 2048 * 1152 * 4
    assert held["many[2000]"].device_bytes == 2048 * 1280 * 4
    arguments = [v.device_bytes for path, v in held.items() if not path.startswith("result")]
    assert len(arguments) == 2002
    table = memory.argument_bytes - sum(arguments)
    assert 0 < table < MIB
