"""Work of kernels: counted in their Mosaic modules, against formulas and the authors' estimates."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from tests.predict.preflight.scheduled import scheduled
from xlashard import NamedSharding, P
from xlashard.core.sharding import Mesh
from xlashard.hlo import read
from xlashard.hlo.call_graph import find_call_sites
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.costs.kernel_work import is_kernel, is_ragged, kernel_estimate, kernel_work
from xlashard.predict.costs.operation import OperationModel, padding
from xlashard.predict.costs.rates import borrowed_rates, rates_of
from xlashard.predict.costs.schedule import walk_schedule
from xlashard.predict.preflight.error_bar import (
    KernelSpread,
    error_bar,
    error_parts,
    measure_kernel_spread,
)
from xlashard.predict.targets.tpu.generations import BY_NAME
from xlashard.tpu import topology


def arrays(*shapes, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def kernels_in(module):
    """Return the computation and call of each kernel that runs, in their order."""
    reached = find_call_sites(module)
    return [
        (computation, call)
        for computation in module.computations.values()
        for call in computation.instructions.values()
        if is_kernel(call) and computation.name in reached
    ]


def module_of(function, *arguments):
    """Return the HLO of a function before compilation."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    return read(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())


def works_of(function, *arguments, given=None):
    module = module_of(function, *arguments)
    return [kernel_work(module, *kernel, given) for kernel in kernels_in(module)]


def accumulate(x, w, semantics=None):
    """Multiply blocks `[256, 512]` and `[512, 256]`, and write the tanh of their sum."""

    def kernel(x, w, out, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            out[...] = jnp.tanh(total[...]).astype(out.dtype)

    (m, k), n = x.shape, w.shape[1]
    return pl.pallas_call(
        kernel,
        grid=(m // 256, n // 256, k // 512),
        in_specs=[
            pl.BlockSpec((256, 512), lambda i, j, k: (i, k)),
            pl.BlockSpec((512, 256), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((256, 256), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((256, 256), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        name="accumulate",
    )(x, w)


def test_matmul_kernel_counts_blocks_of_all_grid_steps():
    (work,) = works_of(accumulate, *arrays((512, 1024), (1024, 768)))
    assert work.matmul_flops == {"bfloat16": 2 * 512 * 1024 * 768}
    assert work.products == {("bfloat16", 256, 512, 256): 2 * 3 * 2}
    assert work.transcendentals == 512 * 768
    # Additions in each step, and the conversion of the result.
    assert work.vector_ops == 2 * 512 * 768 + 512 * 768
    # The left operand is read for each of 3 columns of blocks, the right one for each of 2 rows.
    assert work.hbm_bytes == 2 * (3 * 512 * 1024 + 2 * 1024 * 768 + 512 * 768)
    assert (work.steps, work.origin) == (12, "module")
    assert (work.upper_bound, work.unknown_loops) == (False, 0)


@pytest.mark.parametrize(
    ("semantics", "steps", "busy"),
    [
        (None, 1, 1 / 2),
        (("arbitrary", "arbitrary", "arbitrary"), 1, 1 / 2),
        (("parallel", "arbitrary", "arbitrary"), 2, 1),
        # One core takes two of three columns of blocks.
        (("arbitrary", "parallel", "arbitrary"), 3, 3 / 4),
    ],
)
def test_cores_divide_a_kernel_along_a_parallel_dimension(semantics, steps, busy):
    call = functools.partial(accumulate, semantics=semantics)
    (work,) = works_of(call, *arrays((512, 1024), (1024, 768)))
    assert work.parallel_steps == steps
    assert (work.busy_share(1), work.busy_share(2)) == (1, busy)


def test_kernel_of_unknown_grid_keeps_all_cores_busy():
    given = {"accumulate": KernelCost(seconds=1.0)}
    (work,) = works_of(accumulate, *arrays((512, 512), (512, 256)), given=given)
    assert work.busy_share(2) == 1


def test_one_core_of_v5p_multiplies_ragged_rows_of_a_single_column_of_tiles():
    rates = rates_of(BY_NAME["v5p"])

    def rate(columns):
        sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
        module = module_of(
            lambda x, w, g: gmm(x, w, g, jnp.bfloat16, (512, 512, 512)),
            *arrays((4096, 512), (8, 512, columns)),
            sizes,
        )
        ((computation, call),) = kernels_in(module)
        # The compiler names the call after the function that it inlines.
        call = replace(call, name="gmm.3")
        return columns / OperationModel(module, rates).of(computation, call).matrix

    assert rate(1024) == pytest.approx(2 * rate(512))
    # The last tile reaches over the end, and is multiplied as a whole.
    assert rate(768) == pytest.approx(3 / 4 * rate(1024))


def test_repeated_block_is_copied_once_and_last_block_without_padding():
    def kernel(x, w, out):
        out[...] = x[...] + w[...]

    def call(x, w):
        return pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[
                pl.BlockSpec((256, 128), lambda i: (i, 0)),
                pl.BlockSpec((1, 128), lambda i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((256, 128), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(x, w)

    (work,) = works_of(call, *arrays((1000, 128), (1, 128), dtype=jnp.float32))
    assert work.hbm_bytes == 4 * (1000 * 128 + 128 + 1000 * 128)
    assert work.vector_ops == 4 * 256 * 128


def attention(causal):
    # Blocks of 128 x 128 positions.
    def function(q, k, v):
        blocks = BlockSizes.get_default(1, 1, 1024, 1024, 128)
        return flash_attention(q, k, v, causal=causal, block_sizes=blocks)

    return function


@pytest.mark.slow
def test_flash_attention_flops_match_its_estimate_and_skip_masked_blocks():
    shapes = arrays(*[(1, 2, 1024, 128)] * 3)
    module = module_of(attention(False), *shapes)
    ((computation, call),) = kernels_in(module)
    full = kernel_work(module, computation, call)
    estimate = kernel_estimate(call)
    assert full.matmul_flops == {"bfloat16": 2 * 2 * 2 * 1024 * 1024 * 128}
    assert full.matmul_flops["bfloat16"] == pytest.approx(estimate["flops"], rel=0.01)
    # Of each block of 128 x 128 scores, and of the 128 lanes that correct its rows' sums.
    assert full.transcendentals == 2 * estimate["transcendentals"] == 2 * 2 * 1024 * 1024
    (causal,) = works_of(attention(True), *shapes)
    assert causal.matmul_flops["bfloat16"] / full.matmul_flops["bfloat16"] == (8 * 9 / 2) / 8**2
    assert not causal.upper_bound
    # The estimate counts each array once; keys and values are read for each block of queries.
    assert full.hbm_bytes > 3 * estimate["bytes_accessed"]


def splash(q, k, v):
    length = q.shape[1]
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.CausalMask((length, length)) for _ in range(q.shape[0])]
    )
    sizes = splash_attention_kernel.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), 256),
        **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), 256),
        **dict.fromkeys(("block_q_dq", "block_kv_dq"), 256),
    )
    return splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes)(q, k, v)


@pytest.mark.slow
def test_splash_attention_skips_masked_blocks_also_in_a_scan_over_layers():
    def loss(weights, x):
        def layer(x, w):
            y = jnp.einsum("hsd,de->hse", x, w)
            return x + splash(y, y, y), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0])

    heads, length, size = 2, 1024, 128
    shapes = arrays((3, size, size), (heads, length, size))
    works = works_of(jax.grad(loss), *shapes)
    # 10 of 16 blocks are not above the diagonal. The backward pass recomputes the scores in both
    # of its kernels.
    product = 2 * heads * 10 * 256 * 256 * size
    forward, *backward = (work.matmul_flops["bfloat16"] / product for work in works)
    assert forward == 2
    assert sorted(backward) == [2, 3, 4]
    assert not any(work.upper_bound for work in works)


@pytest.mark.slow
def test_kernel_with_a_dynamic_grid_uses_its_cost_estimate():
    m, k, n, groups = 1024, 512, 256, 8
    (work,) = works_of(
        lambda x, w, sizes: gmm(x, w, sizes, tiling=(128, 128, 128)),
        *arrays((m, k), (groups, k, n)),
        *arrays((groups,), dtype=jnp.int32),
    )
    assert work.matmul_flops == {"bfloat16": pytest.approx(2 * m * k * n)}
    # At most one more block of rows than there are for each boundary between groups.
    assert work.steps == (k // 128) * (n // 128) * (m // 128 + groups - 1)
    assert work.origin == "estimate"


def conditional(limit, trips, x):
    def kernel(limit, trips, x, out):
        out[...] = x[...]

        @pl.when(limit[0] > 3)
        def _():
            out[...] = jnp.exp(x[...])

        def body(n, _):
            out[...] += x[...]
            return 0

        jax.lax.fori_loop(0, trips[0], body, 0)
        jax.lax.fori_loop(0, 5, body, 0)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(2,),
            in_specs=[pl.BlockSpec((8, 128), lambda i, *_: (i, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, *_: (i, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name="conditional",
    )(limit, trips, x)


def test_data_dependent_control_flow_makes_an_upper_bound():
    (x,) = arrays((16, 128), dtype=jnp.float32)
    (scalar,) = arrays((1,), dtype=jnp.int32)
    (work,) = works_of(conditional, scalar, scalar, x)
    assert (work.upper_bound, work.unknown_loops) == (True, 1)
    assert (work.transcendentals, work.vector_ops) == (16 * 128, 6 * 16 * 128)

    def known(limit, trips):
        return lambda x: conditional(np.int32([limit]), np.int32([trips]), x)

    (work,) = works_of(known(4, 7), x)
    assert (work.upper_bound, work.unknown_loops) == (False, 0)
    assert (work.transcendentals, work.vector_ops) == (16 * 128, 12 * 16 * 128)
    (work,) = works_of(known(3, 0), x)
    assert (work.transcendentals, work.vector_ops) == (0, 5 * 16 * 128)


def test_explicit_dma_copies_of_a_kernel_count():
    def kernel(x, out, buffer, semaphore):
        def body(n, _):
            copy = pltpu.make_async_copy(x.at[pl.ds(n * 8, 8)], buffer, semaphore)
            copy.start()
            copy.wait()
            out[...] += buffer[...]
            return 0

        jax.lax.fori_loop(0, x.shape[0] // 8, body, 0)

    def call(x):
        return pl.pallas_call(
            kernel,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
            scratch_shapes=[pltpu.VMEM((8, 128), x.dtype), pltpu.SemaphoreType.DMA],
        )(x)

    (work,) = works_of(call, *arrays((64, 128), dtype=jnp.float32))
    assert work.hbm_bytes == 4 * (64 * 128 + 8 * 128)
    assert work.vector_ops == 64 * 128


@pytest.mark.parametrize(
    ("dtype", "precision", "multiplied"),
    [
        (jnp.float32, None, "bfloat16"),
        (jnp.float32, "highest", "bfloat16 x6"),
        (jnp.int8, None, "int8"),
        (jnp.float8_e4m3fn, None, "float8_e4m3fn"),
    ],
)
def test_flops_are_counted_by_the_dtype_of_the_matrix_unit(dtype, precision, multiplied):
    total = jnp.int32 if dtype == jnp.int8 else jnp.float32

    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...], precision=precision, preferred_element_type=total)

    def call(x, w):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((256, 256), total))(x, w)

    (work,) = works_of(call, *arrays((256, 128), (128, 256), dtype=dtype))
    assert work.matmul_flops == {multiplied: 2 * 256 * 128 * 256}


def test_given_cost_has_precedence_and_matches_every_kernel_name():
    shapes = arrays((512, 1024), (1024, 768))
    cost = KernelCost(seconds=1e-3, flops=7.0, dtype="int8", hbm_bytes=5.0)
    module = module_of(accumulate, *shapes)
    ((computation, call),) = kernels_in(module)
    for name in ("accumulate", call.name, call.op_name, "pallas_call"):
        work = kernel_work(module, computation, call, {name: cost})
        assert (work.seconds, work.matmul_flops, work.hbm_bytes) == (1e-3, {"int8": 7.0}, 5.0)
        assert work.origin == "given"
    assert kernel_work(module, computation, call, {"other": cost}).origin == "module"


CALL = """HloModule m

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  ROOT %k = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", CONFIG
}
"""


@pytest.mark.parametrize(
    ("config", "flops"),
    [
        ('backend_config={"custom_call_config":{"body":"bm90IE1MSVI="}}', None),
        ('backend_config={"custom_call_config":{"body":"***"}}', None),
        ('backend_config={"custom_call_config":{"cost_estimate":{"flops":"12"}}}', 12),
        ("backend_config={}", None),
    ],
)
def test_unreadable_kernel_module_falls_back_to_the_estimate(config, flops):
    module = read(CALL.replace("CONFIG", config))
    ((computation, call),) = kernels_in(module)
    work = kernel_work(module, computation, call)
    assert (None if work is None else sum(work.matmul_flops.values())) == flops


@pytest.mark.slow
def test_xla_ragged_dot_counts_by_its_shapes():
    mesh = Mesh(topology("v5e:2x2").devices[:1], ("one",))
    whole = NamedSharding(mesh, P())
    m, k, n, groups = 2048, 1024, 512, 4

    def gradients(x, w, sizes):
        def loss(x, w):
            product = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
            return jnp.sum(product**2)

        return jax.grad(loss, (0, 1))(x, w)

    shapes = [*arrays((m, k), (groups, k, n)), *arrays((groups,), dtype=jnp.int32)]
    placed = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole) for s in shapes]
    module = scheduled(gradients, *placed).module
    works = {
        call.name: (kernel_work(module, computation, call), kernel_estimate(call))
        for computation, call in kernels_in(module)
    }
    products = [(w, e) for w, e in works.values() if w is not None and w.matmul_flops]
    assert len(products) == 3
    for work, estimate in products:
        assert sum(work.matmul_flops.values()) == 2 * m * k * n == estimate["flops"]
        assert not work.upper_bound
        # A block of rows that spans several groups is multiplied by each.
        executed = sum(2 * a * b * c * runs for (_, a, b, c), runs in work.products.items())
        assert 2 * m * k * n < executed < 2 * (2 * m * k * n)
    # XLA's own kernels run at the rates of its operations, their steps on both cores of a v5p.
    for name, cores in (("v5p", 2), ("tpu7x", 1)):
        rates = rates_of(BY_NAME[name])
        for computation, call in kernels_in(module):
            work = kernel_work(module, computation, call)
            if work is None or not work.matmul_flops:
                continue
            time = OperationModel(module, rates).of(computation, call)
            steps = work.steps * rates.kernel_step_seconds / cores
            executed = sum(
                rates.product_seconds(2 * a * b * c * runs, "bfloat16")
                * padding(a, b, c, rates.matrix_size, turned=False)
                for (_, a, b, c), runs in work.products.items()
            )
            assert time.matrix == pytest.approx(executed + steps)
            assert time.hbm == pytest.approx(work.hbm_bytes / rates.hbm_bytes)
    # Calls without an estimate find the groups, and have no vector operations.
    assert all(w.vector_ops == 0 for w, estimate in works.values() if not estimate)


@pytest.mark.slow
def test_only_pure_matmul_kernels_overlap_with_their_copies():
    rates = rates_of(topology("tpu7x:2x2x1").generation)
    groups = jax.ShapeDtypeStruct((8,), jnp.int32)
    shapes = arrays((2048, 1024), (8, 1024, 512))
    module = module_of(lambda x, w, g: gmm(x, w, g, jnp.bfloat16), *shapes, groups)
    ((computation, call),) = kernels_in(module)
    work = kernel_work(module, computation, call)
    products = OperationModel(module, rates).of(computation, call)
    assert work is not None
    assert products.hbm == pytest.approx(
        work.hbm_bytes / rates.hbm_bytes / rates.product_kernel_hbm_share
    )
    (shape, runs), *others = work.products.items()
    assert not others
    steps = work.steps * rates.kernel_step_seconds
    whole = padding(*shape[1:], rates.matrix_size, turned=False)
    executed = rates.product_seconds(2 * np.prod(shape[1:]) * runs * whole, "bfloat16")
    # Copies continue between the steps of the grid.
    assert products.matrix == pytest.approx(executed / rates.product_kernel_matrix_share + steps)
    assert products.seconds == pytest.approx(
        (products.matrix**2.5 + products.hbm**2.5) ** 0.4 + products.launch
    )
    module = module_of(accumulate, *arrays((512, 1024), (1024, 512)))
    ((computation, call),) = kernels_in(module)
    other = OperationModel(module, rates).of(computation, call)
    assert other.seconds == pytest.approx(other.matrix + other.hbm + other.kernel + other.launch)
    # The steps of its grid are the kernel's own time.
    assert other.kernel > 0 and other.launch == rates.hbm_seconds


def spread_on(name, module):
    generation = BY_NAME[name]
    rates = rates_of(generation)
    schedule = walk_schedule(module, [], OperationModel(module, rates), rates)
    (kernel,) = [operation for operation, _ in schedule if is_kernel(operation.instruction)]
    computation = module.computations[kernel.computation]
    time = OperationModel(module, rates).of(computation, kernel.instruction)
    return measure_kernel_spread(module, schedule, generation), time, rates


def test_chip_without_published_kernels_widens_the_error_bar():
    module = module_of(accumulate, *arrays((1024, 1024), (1024, 1024)))
    assert spread_on("v5p", module)[0] == KernelSpread()
    spread, time, rates = spread_on("v4", module)
    matrix, hbm = time.matrix * rates.kernel_matrix_share, time.hbm * rates.kernel_hbm_share
    shares = {(r.kernel_matrix_share, r.kernel_hbm_share) for r in borrowed_rates(BY_NAME["v4"])}
    assert len(shares) == 3
    worst = max(matrix / share + hbm / other for share, other in shares)
    assert spread.slower == pytest.approx(worst - time.matrix - time.hbm)
    assert spread.faster == pytest.approx(0, abs=1e-12)
    shares = {"kernel": time.seconds}
    below, above = error_bar(error_parts(shares))
    assert error_bar(error_parts(shares, kernels=spread)) == pytest.approx(
        (below, above + spread.slower / time.seconds)
    )


def test_ragged_matmuls_widen_the_error_bar():
    sizes = arrays((8,), dtype=jnp.int32)
    ((_, call),) = kernels_in(module_of(gmm, *arrays((1024, 512), (8, 512, 256)), *sizes))
    # The compiler names the call after the function that it inlines.
    assert is_ragged(replace(call, name="gmm.3")) and not is_ragged(replace(call, name="mix.3"))
    shares = {"matrix": 3.0, "hbm": 1.0}
    below, above = error_bar(error_parts(shares))
    wider = error_bar(error_parts(shares, kernels=KernelSpread(ragged=2.0)))
    assert wider[0] < below and above < wider[1]
