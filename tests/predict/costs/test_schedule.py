"""The time of a schedule, held against sums by hand."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.without_jax import HAS_JAX
from xlashard.hlo import read
from xlashard.predict.costs.network_model import NetworkCost, NetworkModel
from xlashard.predict.costs.operation import OperationModel, padding
from xlashard.predict.costs.rates import Rates, rates_of
from xlashard.predict.costs.schedule import StepSchedule, walk_schedule
from xlashard.predict.preflight.error_bar import error_bar, error_parts
from xlashard.predict.preflight.time_estimate import schedule_step, slowest_slice_seconds
from xlashard.predict.targets.gpu.gpu_models import BY_NAME
from xlashard.predict.targets.tpu.generations import BY_NAME as TPUS
from xlashard.tpu import topology

if HAS_JAX:
    import jax
    import jax.numpy as jnp

    from tests.predict.preflight.scheduled import scheduled
    from xlashard import NamedSharding, P

RATES = Rates(
    cores=1,
    scoped_vmem_bytes=24 * 2**20,
    matrix_size=128,
    matrix_flops=(("bfloat16", 100e12),),
    hbm_bytes=1e12,
    vmem_bytes=10e12,
    relayout=0.5,
    vector_ops=1e12,
    transcendentals=0.25e12,
    operation_seconds=0.0,
    hbm_seconds=1e-6,
    link_share=1.0,
    torus_reduction_share=1.0,
    hop_seconds=0.0,
    collective_seconds=0.0,
    dcn_share=1.0,
    host_bytes=10e9,
    kernel_matrix_share=1.0,
    kernel_hbm_share=1.0,
    product_kernel_matrix_share=1.0,
    product_kernel_hbm_share=1.0,
    kernel_vector_ops=4e12,
    kernel_transcendentals=1e12,
    kernel_step_seconds=0.0,
)
ARRAY = "f32[1024,1024]{1,0:T(8,128)}"
NBYTES = 1024 * 1024 * 4
STREAM = 2 * NBYTES / 1e12
"""Seconds to read and write the array in HBM."""


def overlapped(*seconds: float) -> float:
    """Return the time of units that overlap, though not entirely."""
    return sum(unit**2.5 for unit in seconds) ** (1 / 2.5)


def schedule(body: str, computations: str = "") -> StepSchedule:
    module = read(
        f"HloModule m, is_scheduled=true\n{computations}\nENTRY main {{\n"
        f"p = {ARRAY} parameter(0)\n{body}\n}}\n"
    )
    return walk_schedule(module, [], OperationModel(module, RATES), RATES)


def test_sequential_operations_add_up() -> None:
    found = schedule(f"a = {ARRAY} negate(p)\nROOT b = {ARRAY} exponential(a)")
    negate = overlapped(STREAM, 2**20 / 1e12) + 1e-6
    exponential = overlapped(STREAM, 2**20 / 0.25e12) + 1e-6
    assert found.seconds == pytest.approx(negate + exponential)
    assert [operation.resource for operation, _ in found] == ["hbm", "hbm"]


def test_layout_change_is_slower_than_a_copy() -> None:
    turned = "f32[1024,1024]{0,1:T(8,128)}"
    assert schedule(f"ROOT a = {ARRAY} copy(p)").seconds == pytest.approx(STREAM + 1e-6)
    assert schedule(f"ROOT a = {turned} copy(p)").seconds == pytest.approx(2 * STREAM + 1e-6)


WIDE = """
x = f32[8192,4096]{1,0:T(8,128)} parameter(1)
w = bf16[4096,65536]{1,0:T(8,128)(2,1)} parameter(2)
ROOT y = f32[8192,65536]{1,0:T(8,128)} convolution(x, w), dim_labels=bf_io->bf
"""


def test_matmul_reads_its_operands_again_for_each_tile() -> None:
    """Tiles of 1024 x 1024 in float32 take a sixth of 24 MiB."""
    matrix = 2 * 8192 * 4096 * 65536 / 100e12
    read = 64 * 8192 * 4096 * 4 + 8 * 4096 * 65536 * 2
    hbm = (read + 8192 * 65536 * 4) / 1e12
    assert schedule(WIDE).seconds == pytest.approx(overlapped(matrix, hbm) + 1e-6)


def test_operation_fused_with_an_operand_is_recomputed_per_tile() -> None:
    fused = """scale {
a = f32[8192,4096]{1,0:T(8,128)} parameter(0)
ROOT b = f32[8192,4096]{1,0:T(8,128)} exponential(a)
}
product {
x = f32[8192,4096]{1,0:T(8,128)} parameter(0)
w = bf16[4096,65536]{1,0:T(8,128)(2,1)} parameter(1)
z = f32[8192,4096]{1,0:T(8,128)} fusion(x), kind=kLoop, calls=scale
ROOT y = f32[8192,65536]{1,0:T(8,128)} convolution(z, w), dim_labels=bf_io->bf
}
"""
    body = WIDE.replace("convolution(x, w), dim_labels=bf_io->bf", "fusion(x, w), calls=product")
    matrix = 2 * 8192 * 4096 * 65536 / 100e12
    vector = 64 * 8192 * 4096 / 0.25e12
    hbm = (64 * 8192 * 4096 * 4 + 8 * 4096 * 65536 * 2 + 8192 * 65536 * 4) / 1e12
    assert schedule(body, fused).seconds == pytest.approx(overlapped(matrix, vector, hbm) + 1e-6)


def test_an_operand_that_fits_into_vmem_is_read_once() -> None:
    """The first operand takes 4 MiB, and all rows are in one tile of 1024 columns."""
    body = WIDE.replace("8192,4096", "1024,1024").replace("8192,", "1024,")
    body = body.replace("4096,65536", "1024,65536")
    matrix = 2 * 1024 * 1024 * 65536 / 100e12
    hbm = (1024 * 1024 * 4 + 1024 * 65536 * (2 + 4)) / 1e12
    assert schedule(body).seconds == pytest.approx(overlapped(matrix, hbm) + 1e-6)


@pytest.mark.needs_jax
def test_more_vmem_makes_larger_tiles() -> None:
    def times(**options: str) -> float:
        module = read(f"HloModule m, is_scheduled=true\nENTRY main {{\n{WIDE}}}\n")
        program: Any = SimpleNamespace(module=module, options=tuple(options.items()))
        place = topology("v6e:1x1")
        return schedule_step(program, place, place.mesh({"one": 1})).seconds

    assert times(xla_tpu_scoped_vmem_limit_kib="65536") < times()


def test_matmuls_are_padded_to_the_matrix_unit_size() -> None:
    body = (
        "q = bf16[4096,64]{1,0:T(8,128)(2,1)} parameter(1)\n"
        "k = bf16[64,192]{1,0:T(8,128)(2,1)} parameter(2)\n"
        "ROOT s = f32[4096,192]{1,0:T(8,128)} convolution(q, k), dim_labels=bf_io->bf"
    )
    # The 4096 rows stay in the units, so that the 192 columns need no padding.
    matrix = 2 * 4096 * 128 * 192 / 100e12
    hbm = (4096 * 128 * 2 + 64 * 256 * 2 + 4096 * 256 * 4) / 1e12
    assert schedule(body).seconds == pytest.approx(overlapped(matrix, hbm) + 1e-6)


@pytest.mark.parametrize(("turned", "ratio"), [(True, 1.0), (False, 4.0)])
def test_kernel_padding_depends_on_the_stationary_operand(*, turned: bool, ratio: float) -> None:
    # Values [512, 64] of a head of 64 features: XLA keeps the 1024 rows of scores in the units.
    assert padding(1024, 512, 64, 256, turned=turned) == ratio


LOOP = f"""
body {{
  s = (s32[], {ARRAY}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = {ARRAY} get-tuple-element(s), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  y = {ARRAY} negate(x)
  ROOT t = (s32[], {ARRAY}) tuple(next, y)
}}
condition {{
  s = (s32[], {ARRAY}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(7)
  ROOT less = pred[] compare(i, n), direction=LT
}}
"""


def test_loop_time_is_trip_count_times_body() -> None:
    body = (
        f"zero = s32[] constant(0)\nstate = (s32[], {ARRAY}) tuple(zero, p)\n"
        f"loop = (s32[], {ARRAY}) while(state), condition=condition, body=body\n"
        f"ROOT r = {ARRAY} get-tuple-element(loop), index=1"
    )
    found = schedule(body, LOOP)
    assert found.runs["body"] == 7
    assert found.seconds == pytest.approx(7 * found.lengths["body"])
    assert sum(found.by_resource().values()) == pytest.approx(found.seconds)


CALLED = f"""
apart {{
  x = {ARRAY} parameter(0)
  ROOT y = {ARRAY} exponential(x)
}}
"""


@pytest.mark.parametrize("work", ["", f"a = {ARRAY} negate(p)\n"])
def test_asynchronous_call_counts_only_as_the_wait_for_its_result(work: str) -> None:
    found = schedule(
        f"c = (({ARRAY}), {ARRAY}, s32[]) call-start(p), to_apply=apart\n{work}"
        f"ROOT d = {ARRAY} call-done(c)",
        CALLED,
    )
    assert found.runs["apart"] == 1
    assert found.seconds == pytest.approx(found.lengths["apart"])
    assert sum(found.by_resource().values()) == pytest.approx(found.seconds)


def test_copies_between_memories_overlap_with_arithmetic() -> None:
    fast = "f32[1024,1024]{1,0:T(8,128)S(1)}"
    copy = f"c = ({fast}, {ARRAY}, u32[]) copy-start(p)"
    hidden = (
        f"{copy}\na = {fast} exponential(f)\nd = {fast} copy-done(c)\nROOT r = {fast} add(d, a)"
    )
    argument = f"f = {fast} parameter(1)\n"
    exponential = overlapped(2**20 / 0.25e12, 2 * NBYTES / 10e12)
    addition = overlapped(2**20 / 1e12, 3 * NBYTES / 10e12)
    assert schedule(argument + hidden).seconds == pytest.approx(exponential + addition)
    exposed = f"{copy}\nd = {fast} copy-done(c)\nROOT r = {fast} add(d, f)"
    found = schedule(argument + exposed)
    # The copy waits for HBM alone, and counts nothing in VMEM.
    assert found.seconds == pytest.approx(NBYTES / 1e12 + addition)
    assert found.by_resource()["hbm"] == pytest.approx(NBYTES / 1e12)


FAST = "f32[1024,1024]{1,0:T(8,128)S(1)}"


@pytest.mark.parametrize(
    ("operation", "hbm", "vmem", "vector", "bound"),
    [
        (f"{FAST} copy(f)", 0, 2, 0, "vmem"),
        (f"{FAST} add(f, f)", 0, 3, 2**20, "vmem"),
        (f"{FAST} exponential(f)", 0, 2, 4 * 2**20, "vector"),
        (f"{FAST} copy(p)", 1, 1, 0, "hbm"),
        (f"{ARRAY} negate(f)", 1, 1, 2**20, "hbm"),
        (f"{FAST} fusion(f, p), kind=kLoop, calls=both", 1, 2, 2**20, "hbm"),
        # One of 1024 rows is read from VMEM and written to HBM.
        ("f32[1,1024]{1,0:T(1,128)} slice(f), slice={[3:4]}", 2**-10, 2**-10, 0, "launch"),
    ],
)
def test_values_in_vmem_use_the_vmem_bandwidth(
    operation: str, hbm: float, vmem: float, vector: float, bound: str
) -> None:
    both = f"both {{\na = {FAST} parameter(0)\nb = {ARRAY} parameter(1)\n"
    both += f"ROOT c = {FAST} add(a, b)\n}}\n"
    found = schedule(f"f = {FAST} parameter(1)\nROOT r = {operation}", both)
    units = overlapped(hbm * NBYTES / 1e12, vmem * NBYTES / 10e12, vector / 1e12)
    assert found.seconds == pytest.approx(units + 1e-6 * bool(hbm))
    assert [each.resource for each, _ in found] == [bound]


def test_host_transfers_occupy_the_host_link() -> None:
    host = "f32[1024,1024]{1,0:T(8,128)S(5)}"
    found = schedule(
        f"c = ({host}, {ARRAY}, u32[]) copy-start(p)\na = {ARRAY} negate(p)\n"
        f"d = {host} copy-done(c)\nROOT r = ({host}, {ARRAY}) tuple(d, a)"
    )
    assert found.seconds == pytest.approx(NBYTES / 10e9)
    assert found.by_resource()["host"] == pytest.approx(
        NBYTES / 10e9 - overlapped(STREAM, 2**20 / 1e12) - 1e-6
    )


@pytest.mark.parametrize(("second", "together"), [("x-", True), ("x+", False)])
def test_transfers_wait_only_for_links_of_equal_direction(second: str, *, together: bool) -> None:
    pairs = "source_target_pairs={{0,1},{1,0}}"
    module = read(
        "HloModule m, is_scheduled=true, num_partitions=2\nENTRY main {\n"
        f"p = {ARRAY} parameter(0)\n"
        f"s = ({ARRAY}, {ARRAY}) collective-permute-start(p), channel_id=1, {pairs}\n"
        f"t = ({ARRAY}, {ARRAY}) collective-permute-start(p), channel_id=2, {pairs}\n"
        f"a = {ARRAY} collective-permute-done(s)\n"
        f"ROOT b = {ARRAY} collective-permute-done(t)\n}}\n"
    )
    links = {"s": ("x+",), "t": (second,)}
    costs = [
        (c, NetworkCost(links=links[c.name], expected_seconds=1e-3)) for c in module.collectives
    ]
    found = walk_schedule(module, costs, OperationModel(module, RATES), RATES)
    assert found.seconds == pytest.approx(1e-3 if together else 2e-3)


def test_error_bar_widens_with_uncertain_shares() -> None:
    """Waiting for links and hosts, and transfers between slices."""
    low, high = error_bar(error_parts({"matrix": 6.0}))
    assert low < 0 < high

    def widening(shares: dict[str, float], **known: float) -> tuple[float, float]:
        below, above = error_bar(error_parts(shares, **known))
        return low - below, above - high

    waiting = {"matrix": 6.0, "ici": 1.5, "host": 0.5}
    assert min(widening(waiting)) > 0
    assert min(widening({"matrix": 6.0, "hbm": 2.0})) > 0
    # Transfers that overlap today may take 73.7 / 32.2 of their time, those that show less.
    ratio = 73.7 / 32.2
    assert widening({"matrix": 6.0, "dcn": 2.0}, dcn=4.0) == pytest.approx(
        ((1 - 1 / ratio) / 4, (ratio - 1) / 2)
    )
    assert min(widening({"matrix": 6.0}, slowest_slice=0.5)) > 0
    # One of the chips of which most runs are published.
    narrow = error_bar(error_parts({"matrix": 6.0}, chip=TPUS["v6e"]))
    assert narrow[1] - narrow[0] < high - low
    below, above = error_bar(
        error_parts({"matrix": 6.0, "dcn": 2.0}, dcn=4.0, chip=BY_NAME["h100"])
    )
    assert (below, above) == pytest.approx((-0.2 - (1 - 1 / 1.6) / 4, 0.3 + (1.6 - 1) / 2))
    # On GPUs, values in HBM may be fused.
    bar = error_bar(error_parts({"matrix": 6.0, "hbm": 2.0}, chip=BY_NAME["h100"]))
    assert bar == pytest.approx((-0.2 - 0.15 / 4, 0.3))


@pytest.mark.needs_jax
def test_slices_wait_for_the_slowest_of_them() -> None:
    """Losses of MaxText's 32B on v5e from 2 to 32 slices, of which no constant was made."""
    reduction = [(Mock(), NetworkCost(dcn_bytes=1.0))]
    for slices, lost in ((2, 0.031), (4, 0.048), (8, 0.056), (16, 0.073), (32, 0.109)):
        place = topology("v5e-256", slices)
        assert slowest_slice_seconds(1.0, reduction, place) == pytest.approx(lost, abs=0.03)
        assert slowest_slice_seconds(1.0, [(Mock(), NetworkCost())], place) == 0
    assert slowest_slice_seconds(1.0, reduction, topology("v5e-256")) == 0


@pytest.mark.slow
def test_tiny_collectives_are_bound_by_latency() -> None:
    """100 all-reduces of 8 KiB on 256 chips: their bytes would take 8 microseconds."""
    tiny = "f32[2048]{0:T(1024)}"
    loop = LOOP.replace(ARRAY, tiny).replace("constant(7)", "constant(100)")
    loop = loop.replace(
        "negate(x)", "all-reduce(x), replica_groups=[1,256]<=[256], channel_id=1, to_apply=sum"
    )
    total = "sum {\na = f32[] parameter(0)\nb = f32[] parameter(1)\nROOT c = f32[] add(a, b)\n}\n"
    module = read(
        f"HloModule m, is_scheduled=true\n{total}{loop}\nENTRY main {{\np = {tiny} parameter(0)\n"
        f"zero = s32[] constant(0)\nstate = (s32[], {tiny}) tuple(zero, p)\n"
        f"loop = (s32[], {tiny}) while(state), condition=condition, body=body\n"
        f"ROOT r = {tiny} get-tuple-element(loop), index=1\n}}\n"
    )
    pod = topology("v6e-256")
    mesh, rates = pod.mesh({"all": 256}), rates_of(pod.generation)
    network = NetworkModel(pod, mesh)
    found = [(c, network.of(c)) for c in module.collectives_on(mesh)]
    step = walk_schedule(module, found, OperationModel(module, rates), rates)
    # To the far side of two rings of 16 chips and back, and four microseconds to launch.
    latency = 2 * (8 + 8) * 1e-6 + 4e-6
    assert step.by_resource()["ici"] == pytest.approx(100 * latency, rel=0.01)
    assert step.seconds < 1.2 * 100 * latency


def test_convolution_counts_only_window_positions_inside_the_image() -> None:
    """A layer of ResNet-50: 64 channels of 56 x 56 points, a window of 3 x 3."""
    image = "bf16[256,56,56,64]{3,2,1,0:T(8,128)(2,1)}"
    body = (
        f"x = {image} parameter(1)\n"
        "w = bf16[3,3,64,64]{3,2,1,0:T(8,128)(2,1)} parameter(2)\n"
        f"ROOT y = {image} convolution(x, w), window={{size=3x3 pad=1_1x1_1}}, "
        "dim_labels=b01f_01io->b01f"
    )
    # Two of the three places of the window at an edge; 64 channels fill half of 128 rows.
    places = (3 * 56 - 2) ** 2
    matrix = 2 * 256 * places * 128 * 64 / 100e12
    # The 64 channels are padded to 128 lanes in HBM.
    hbm = (2 * 256 * 56 * 56 * 128 + 9 * 64 * 128) * 2 / 1e12
    assert schedule(body).seconds == pytest.approx(overlapped(matrix, hbm) + 1e-6)


@pytest.mark.slow
def test_a_decode_step_reads_weights_and_cache_once() -> None:
    """One token of 8 sequences with a cache of 4096 positions, 4 layers, on one v5e chip."""
    layers, batch, width, hidden, room = 4, 8, 4096, 16384, 4096

    def layer(x: jax.Array, slices: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        up, down, keys, values = slices
        shares = jax.nn.softmax(jnp.einsum("bw,btw->bt", x, keys), axis=-1)
        x += jnp.einsum("bt,btw->bw", shares, values)
        return x + jax.nn.silu(x @ up) @ down, None

    def decode(x: jax.Array, slices: tuple[jax.Array, ...]) -> jax.Array:
        return jax.lax.scan(layer, x, slices)[0]

    pod = topology("v5e-1")
    mesh, rates = pod.mesh({"one": 1}), rates_of(pod.generation)

    def whole(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    weights = whole(layers, width, hidden), whole(layers, hidden, width)
    cache = whole(layers, batch, room, width)
    compilation = scheduled(decode, whole(batch, width), (*weights, cache, cache))
    step = schedule_step(compilation, pod, mesh)
    nbytes = 2 * layers * (2 * width * hidden + 2 * batch * room * width)
    least = nbytes / rates.hbm_bytes
    assert least < step.seconds < 1.15 * least
    assert step.by_resource()["hbm"] > 0.9 * step.seconds
