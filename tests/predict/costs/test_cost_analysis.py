"""FLOP and HBM bytes of compiled TPU programs: exact for products, loops counted by their trips."""

import itertools
import re
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas

from tests.predict.costs.products import PRODUCTS
from tests.predict.preflight.programs import compile_stage
from tests.predict.preflight.scheduled import scheduled
from xlashard import NamedSharding, P, pjit
from xlashard._jax.runtime.executables import compiled_text
from xlashard.core.sharding import Mesh
from xlashard.hlo import WindowDimension, read
from xlashard.hlo.text_reader import read_shape
from xlashard.predict.costs.cost_analysis import _places, analyze_cost, instruction_flops
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.tpu import topology


@pytest.fixture(scope="module")
def mesh():
    return Mesh(topology("v5e:2x2").devices[:1], ("one",))


def structs(mesh, *shapes, dtype=jnp.bfloat16):
    whole = NamedSharding(mesh, P())
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape in shapes]


def work_of(mesh, function, *shapes, dtype=jnp.bfloat16):
    """Return the cost analysis of a function on one device."""
    return analyze_cost(scheduled(function, *structs(mesh, *shapes, dtype=dtype)).module)


@pytest.fixture(scope="module")
def products(mesh):
    """Return the FLOP by name of the product."""

    def every(*arguments):
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        results = []
        for product, (left, right) in zip(PRODUCTS, pairs, strict=True):
            with jax.named_scope(product.name):
                results.append(product.function(left, right))
        return results

    shapes = itertools.chain.from_iterable((p.left, p.right) for p in PRODUCTS)
    module = scheduled(every, *structs(mesh, *shapes)).module
    counted = defaultdict(float)
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            found = instruction_flops(module, computation, instruction)
            if found.matmul_flops:
                assert found.dtype == "bfloat16"
                counted[instruction.op_name.split("/")[1]] += found.matmul_flops
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_matmul_flops_match_the_formula(products, product):
    assert products[product.name] == pytest.approx(2 * product.multiplications(), rel=0.001)


WINDOWS = st.builds(
    WindowDimension,
    size=st.integers(1, 6),
    stride=st.integers(1, 5),
    before=st.integers(-3, 6),
    base_dilation=st.integers(1, 5),
    window_dilation=st.integers(1, 4),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(WINDOWS, st.integers(0, 7), st.integers(0, 9))
def test_window_counts_only_positions_on_elements(window, size, result):
    elements = {i * window.base_dilation for i in range(size)}
    places = (
        o * window.stride + k * window.window_dilation - window.before
        for o in range(result)
        for k in range(window.size)
    )
    assert _places(window, size, result) == sum(place in elements for place in places)


def loops(x, w):
    def inner(x, _):
        return jnp.tanh(x @ w), None

    def outer(x, _):
        x, _ = jax.lax.scan(inner, x, None, length=3)
        return x + 1, None

    x, _ = jax.lax.scan(outer, x, None, length=5)
    return jax.lax.fori_loop(2, 9, lambda _, x: x @ w, x)


@pytest.mark.slow
def test_loop_body_counts_trip_count_times(mesh):
    lowered = pjit(loops).lower(*structs(mesh, (512, 1024), (1024, 1024)))
    compilation = compile_stage(lowered)
    work = analyze_cost(compilation.module)
    assert work.matmul_flops == {"bfloat16": 2 * 512 * 1024 * 1024 * (5 * 3 + 7)}
    assert work.transcendental == 512 * 1024 * 5 * 3
    assert (work.unknown_loops, work.unknown_calls) == (0, {})
    # The compiler's count ignores trip counts.
    assert compilation.executable.cost_analysis()["flops"] < work.flops / 5
    # The executable's text, with its loops and arrays, has the same costs.
    assert analyze_cost(read(compiled_text(compilation.executable))) == work


def test_a_loop_of_unknown_trip_count_counts_once(mesh):
    def until(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e6, lambda x: x @ w, x)

    work = work_of(mesh, until, (512, 512), (512, 512))
    assert work.unknown_loops == 1
    assert work.matmul_flops == {"bfloat16": 2 * 512**3}


def test_conditional_counts_its_most_expensive_branch(mesh):
    def choose(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

    work = work_of(mesh, choose, (512, 512), (512, 512))
    assert work.matmul_flops == {"bfloat16": 2 * 2 * 512**3}


def test_precision_and_integers_determine_the_dtype(mesh):
    def three(x, w):
        high = jax.lax.dot(x, w, precision="highest")
        integers = x.astype(jnp.int8), w.astype(jnp.int8)
        return x @ w, high, jax.lax.dot(*integers, preferred_element_type=jnp.int32)

    work = work_of(mesh, three, (512, 512), (512, 512), dtype=jnp.float32)
    each = 2 * 512**3
    assert work.matmul_flops == {"bfloat16": each, "bfloat16 x6": each, "int8": each}


def test_kernel_cost_comes_from_its_module_not_its_estimate(mesh):
    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...], preferred_element_type=jnp.float32).astype(out.dtype)

    def call(x, w):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        estimate = pallas.CostEstimate(flops=100, transcendentals=7, bytes_accessed=4096)
        first = pallas.pallas_call(kernel, out_shape=out, cost_estimate=estimate)(x, w)
        return pallas.pallas_call(kernel, out_shape=out)(first, w)

    work = work_of(mesh, call, (512, 512), (512, 512))
    assert work.matmul_flops == {"bfloat16": 2 * 2 * 512**3}
    # The conversions of the results.
    assert (work.transcendental, work.elementwise) == (0, 2 * 512 * 512)
    assert work.unknown_calls == {}


KERNEL_IN_LOOP = """HloModule m

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %k.3 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call",
    metadata={op_name="step/while/body/transpose(jvp(double))/pallas_call"}, backend_config=CONFIG
  ROOT %t = (s32[], f32[8]) tuple(%next, %k.3)
}

%condition (s.1: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.1: f32[8]) -> (s32[], f32[8]) {
  %zero = s32[] constant(0)
  %x.1 = f32[8] parameter(0)
  %start = (s32[], f32[8]) tuple(%zero, %x.1)
  ROOT %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
}
""".replace(",\n    ", ", ")


@pytest.mark.parametrize(
    ("config", "costs", "flops", "unknown"),
    [
        ("", {}, {}, {"double": 5}),
        ('"cost_estimate":{"flops":"12"}', {}, {"bfloat16": 60}, {}),
        ("", {"double": KernelCost(flops=3.0, dtype="int8")}, {"int8": 15}, {}),
        ("", {"k": KernelCost(seconds=1.0)}, {}, {}),
    ],
)
def test_opaque_kernel_counts_by_its_estimate_or_by_the_given_cost(config, costs, flops, unknown):
    text = KERNEL_IN_LOOP.replace("CONFIG", f'{{"custom_call_config":{{{config}}}}}')
    work = analyze_cost(read(text), costs)
    assert (work.matmul_flops, work.unknown_calls) == (flops, unknown)


@pytest.mark.slow
def test_hbm_bytes_equal_xla_figures_without_loops_and_vmem_use(mesh):
    def elementwise(x, y):
        return x + y, jnp.exp(x)

    lowered = pjit(elementwise).lower(*structs(mesh, (16384, 8192), (16384, 8192)))
    compilation = compile_stage(lowered)
    work = analyze_cost(compilation.module)
    # Both read x together.
    assert work.hbm_bytes == 4 * 16384 * 8192 * 2
    xla = compilation.executable.cost_analysis()["bytes accessed"]
    assert work.hbm_bytes == pytest.approx(xla, rel=0.01)


def test_matmul_reads_both_operands_and_writes_the_result(mesh):
    # The compiler passes operands through fusions that leave them unchanged.
    work = work_of(mesh, jnp.matmul, (4096, 4096), (4096, 4096))
    assert work.hbm_bytes == pytest.approx(3 * 4096 * 4096 * 2, rel=0.01)


def test_slices_and_updates_count_only_accessed_bytes(mesh):
    def touch(x, row):
        return x.at[3].set(row), jnp.sum(x[5], dtype=jnp.float32)

    arguments = structs(mesh, (64, 1024, 1024), (1024, 1024))
    work = analyze_cost(scheduled(touch, *arguments, donate_argnums=0).module)
    row = 1024 * 1024 * 2
    # One row is read and written elsewhere, one is read for its sum.
    assert 3 * row <= work.hbm_bytes <= 5 * row


@pytest.mark.parametrize(
    ("text", "nbytes", "space"),
    [
        ("bf16[512,4096]{1,0:T(8,128)(2,1)}", 512 * 4096 * 2, 0),
        ("bf16[3,100]{1,0:T(8,128)(2,1)S(1)}", 8 * 128 * 2, 1),
        ("f32[100,3]{0,1:T(8,128)}", 8 * 128 * 4, 0),
        ("f32[10]{0:T(1024)}", 4096, 0),
        ("s4[512,512]{1,0:T(8,128)(8,1)E(4)}", 512 * 512 // 2, 0),
        ("bf16[2,3,4,128]{3,1,2,0:T(8,128)(2,1)}", 2 * 4 * 8 * 128 * 2, 0),
        ("pred[7]{0:T(512)(128)(4,1)}", 512, 0),
        ("f32[0,8]{1,0:T(8,128)}", 0, 0),
        ("f32[4,4]{1,0}", 64, 0),
    ],
)
def test_layouts_have_padding_and_memory_space(text, nbytes, space):
    shape = read_shape(text)
    assert (shape.padded_bytes, shape.memory_space) == (nbytes, space)


def test_softmax_sum_as_a_reduce_window_counts_as_a_plain_sum():
    window = "window={size=1x2047 pad=0_0x1023_1023}"
    text = re.sub(
        r"\n {8}",
        "\n",
        f"""HloModule m

        %add (a: f32[], b: f32[]) -> f32[] {{
          %a = f32[] parameter(0)
          %b = f32[] parameter(1)
          ROOT %sum = f32[] add(%a, %b)
        }}

        ENTRY %main (p: f32[8,1024]) -> f32[8,1024] {{
          %p = f32[8,1024]{{1,0}} parameter(0)
          %zero = f32[] constant(0)
          ROOT %w = f32[8,1024]{{1,0}} reduce-window(%p, %zero), {window}, to_apply=%add
        }}
        """,
    )
    assert analyze_cost(read(text)).elementwise == 8 * 1023
