"""The time of a schedule, held against sums by hand."""

import math

import pytest

from xlashard.hlo import read
from xlashard.tpu.cost.network_model import NetworkCost
from xlashard.tpu.cost.operation import OperationModel, padding
from xlashard.tpu.cost.rates import Rates
from xlashard.tpu.cost.schedule import StepSchedule, walk_schedule
from xlashard.tpu.cost.time_estimate import KernelSpread, error_bar

RATES = Rates(
    matrix_size=128,
    matrix_flops=(("bfloat16", 100e12),),
    hbm_bytes=1e12,
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


def schedule(body: str, computations: str = "") -> StepSchedule:
    module = read(
        f"HloModule m, is_scheduled=true\n{computations}\nENTRY main {{\n"
        f"p = {ARRAY} parameter(0)\n{body}\n}}\n"
    )
    return walk_schedule(module, [], OperationModel(module, RATES), RATES)


def test_a_sequence_adds_up() -> None:
    found = schedule(f"a = {ARRAY} negate(p)\nROOT b = {ARRAY} exponential(a)")
    negate = math.hypot(STREAM, 2**20 / 1e12) + 1e-6
    exponential = math.hypot(STREAM, 2**20 / 0.25e12) + 1e-6
    assert found.seconds == pytest.approx(negate + exponential)
    assert [operation.resource for operation, _ in found] == ["hbm", "hbm"]


def test_a_change_of_layout_is_slower_than_a_copy() -> None:
    turned = "f32[1024,1024]{0,1:T(8,128)}"
    assert schedule(f"ROOT a = {ARRAY} copy(p)").seconds == pytest.approx(STREAM + 1e-6)
    assert schedule(f"ROOT a = {turned} copy(p)").seconds == pytest.approx(2 * STREAM + 1e-6)


def test_products_are_padded_to_matrix_units() -> None:
    body = (
        "q = bf16[4096,64]{1,0:T(8,128)(2,1)} parameter(1)\n"
        "k = bf16[64,192]{1,0:T(8,128)(2,1)} parameter(2)\n"
        "ROOT s = f32[4096,192]{1,0:T(8,128)} convolution(q, k), dim_labels=bf_io->bf"
    )
    # The 4096 rows stay in the units, so that the 192 columns need no padding.
    matrix = 2 * 4096 * 128 * 192 / 100e12
    hbm = (4096 * 128 * 2 + 64 * 256 * 2 + 4096 * 256 * 4) / 1e12
    assert schedule(body).seconds == pytest.approx(math.hypot(matrix, hbm) + 1e-6)


@pytest.mark.parametrize(("turned", "ratio"), [(True, 1.0), (False, 4.0)])
def test_kernels_keep_their_second_operand_in_the_matrix_units(
    *, turned: bool, ratio: float
) -> None:
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


def test_a_loop_repeats_its_body() -> None:
    body = (
        f"zero = s32[] constant(0)\nstate = (s32[], {ARRAY}) tuple(zero, p)\n"
        f"loop = (s32[], {ARRAY}) while(state), condition=condition, body=body\n"
        f"ROOT r = {ARRAY} get-tuple-element(loop), index=1"
    )
    found = schedule(body, LOOP)
    assert found.runs["body"] == 7
    assert found.seconds == pytest.approx(7 * found.lengths["body"])
    assert sum(found.by_resource().values()) == pytest.approx(found.seconds)


def test_copies_between_memories_hide_behind_arithmetic() -> None:
    fast = "f32[1024,1024]{1,0:T(8,128)S(1)}"
    copy = f"c = ({fast}, {ARRAY}, u32[]) copy-start(p)"
    hidden = (
        f"{copy}\na = {fast} exponential(f)\nd = {fast} copy-done(c)\nROOT r = {fast} add(d, a)"
    )
    argument = f"f = {fast} parameter(1)\n"
    arithmetic = 2**20 / 0.25e12 + 2**20 / 1e12
    assert schedule(argument + hidden).seconds == pytest.approx(arithmetic)
    exposed = f"{copy}\nd = {fast} copy-done(c)\nROOT r = {fast} add(d, f)"
    found = schedule(argument + exposed)
    assert found.seconds == pytest.approx(NBYTES / 1e12 + 2**20 / 1e12)
    assert found.by_resource()["hbm"] == pytest.approx(NBYTES / 1e12)


def test_transfers_to_the_host_occupy_its_link() -> None:
    host = "f32[1024,1024]{1,0:T(8,128)S(5)}"
    found = schedule(
        f"c = ({host}, {ARRAY}, u32[]) copy-start(p)\na = {ARRAY} negate(p)\n"
        f"d = {host} copy-done(c)\nROOT r = ({host}, {ARRAY}) tuple(d, a)"
    )
    assert found.seconds == pytest.approx(NBYTES / 10e9)
    assert found.by_resource()["host"] == pytest.approx(
        NBYTES / 10e9 - math.hypot(STREAM, 2**20 / 1e12) - 1e-6
    )


@pytest.mark.parametrize(("second", "together"), [("x-", True), ("x+", False)])
def test_transfers_wait_for_links_of_their_own_direction(second: str, *, together: bool) -> None:
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


def test_the_bar_widens_with_what_is_less_certain() -> None:
    """Waiting for links and hosts, transfers between slices, and kernels of unknown cost."""
    assert error_bar({"matrix": 6.0, "hbm": 2.0}) == pytest.approx((-0.2, 0.16))
    waiting = {"matrix": 6.0, "ici": 1.5, "host": 0.5}
    assert error_bar(waiting) == pytest.approx((-0.2 - 0.3 / 4, 0.16 + 0.2 / 4))
    # Transfers that overlap today may take 73.7 / 32.2 of their time, those that show less.
    ratio = 73.7 / 32.2
    below, above = error_bar({"matrix": 6.0, "dcn": 2.0}, dcn=4.0)
    assert below == pytest.approx(-0.2 - (1 - 1 / ratio) / 4)
    assert above == pytest.approx(0.16 + (ratio - 1) / 2)
    lower_bound = error_bar({"matrix": 8.0}, kernels=KernelSpread(unknown=True))
    assert lower_bound == (pytest.approx(-0.2), None)
