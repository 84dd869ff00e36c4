"""Times of operations and collectives on GPUs, held against formulas and published times."""

import jax
import numpy as np
import pytest

from tests.predict.costs.gpu.test_cuda_calls import ATTENTION, PRODUCT
from xlashard.core.sharding import Mesh
from xlashard.geometry.groups import ReplicaGroups, SourceTargetPairs
from xlashard.hlo import read
from xlashard.hlo.collective_kinds import CollectiveKind
from xlashard.hlo.collectives import Collective
from xlashard.hlo.text_reader import read_shape
from xlashard.predict.costs.cost_analysis import analyze_cost
from xlashard.predict.costs.gpu.gpu_operation import (
    GpuOperationModel,
    find_multipliers,
    find_unrated,
    gpu_rates,
)
from xlashard.predict.costs.gpu.nccl import NcclModel
from xlashard.predict.costs.models_by_target import network_for, operations_for, rates_for
from xlashard.predict.costs.network_model import NetworkCost
from xlashard.predict.costs.operation import OperationTime
from xlashard.predict.costs.rates import Rates
from xlashard.predict.costs.schedule import walk_schedule
from xlashard.predict.preflight.time_estimate import compute_seconds, count_unrated
from xlashard.predict.targets.gpu.gpu_models import BY_NAME
from xlashard.predict.targets.gpu.topologies import GpuTopology

MIB, GIB = 2**20, 2**30
H100 = BY_NAME["h100"]


def cluster(name: str, nodes: int, gpus: int, rates: Rates | None = None) -> NcclModel:
    """Return the network of GPUs, with CPU devices for them, along one mesh axis."""
    devices = tuple(jax.devices()[: nodes * gpus])
    model = BY_NAME[name]
    bandwidth = model.network_bandwidth
    topology = GpuTopology(f"{name}:{nodes}x{gpus}", 1, model, devices, nodes, gpus, bandwidth)
    mesh = Mesh(np.array(devices), ("all",))
    found = network_for(topology, mesh, rates)
    assert isinstance(found, NcclModel)
    return found


def collective(
    kind: CollectiveKind, groups: ReplicaGroups | SourceTargetPairs, nbytes: int
) -> Collective:
    value = (read_shape(f"u8[{nbytes}]"),)
    return Collective(
        kind=kind, name="c", computation="main", operands=value, results=value, groups=groups
    )


def cost(network: NcclModel, kind: CollectiveKind, nbytes: int, *groups: list[int]) -> NetworkCost:
    return network.of(collective(kind, ReplicaGroups.of_list(list(groups)), nbytes))


def operation(text: str, name: str) -> OperationTime:
    module = read(text)
    main = module.computations[module.entry]
    model = operations_for(module, rates_for(H100))
    assert isinstance(model, GpuOperationModel)
    return model.of(main, main.instructions[name])


@pytest.mark.parametrize(
    ("chip", "nbytes", "microseconds"),
    [
        # Azure/AI-benchmarking-guide@8fd0c6e: nccl-tests in place.
        ("a100-80gb", 2 * MIB, 68.55),
        ("a100-80gb", 512 * MIB, 4240),
        ("h100", 4 * MIB, 57.0),
        ("h100", 128 * MIB, 586),
        ("h200", 4 * GIB, 15744),
    ],
)
def test_all_reduces_within_a_node_match_published_times(
    chip: str, nbytes: int, microseconds: float
) -> None:
    found = cost(cluster(chip, 1, 8), "all-reduce", nbytes, list(range(8)))
    assert found.expected_seconds * 1e6 == pytest.approx(microseconds, rel=0.15)
    assert found.sent_bytes == 2 * nbytes * 7 / 8
    assert found.dcn_bytes == 0


@pytest.mark.devices(8)
def test_gpus_of_a_node_share_the_traffic_between_nodes() -> None:
    network = cluster("h100", 2, 4)
    whole = cost(network, "all-gather", 64 * MIB, list(range(8)))
    assert whole.sent_bytes == 64 * MIB * 7 / 8
    assert whole.seconds == 64 * MIB * 7 / 8 / 450e9
    assert whole.dcn_bytes == 64 * MIB / 2 / 4
    assert whole.dcn_seconds == 64 * MIB / 8 / 50e9
    # One GPU per node: its own network interface takes everything.
    pairs = cost(network, "all-reduce", 64 * MIB, *([n, n + 4] for n in range(4)))
    assert (pairs.sent_bytes, pairs.dcn_bytes) == (0, 64 * MIB)
    assert pairs.expected_seconds > pairs.dcn_seconds
    exchange = cost(network, "all-to-all", 64 * MIB, list(range(8)))
    assert (exchange.sent_bytes, exchange.dcn_bytes) == (8 * MIB * 3, 8 * MIB * 4)


@pytest.mark.devices(8)
def test_the_whole_value_of_a_broadcast_passes() -> None:
    network = cluster("h100", 2, 4)
    cast = cost(network, "collective-broadcast", 64 * MIB, list(range(8)))
    gather = cost(network, "all-gather", 64 * MIB, list(range(8)))
    assert (cast.sent_bytes, cast.dcn_bytes) == (gather.sent_bytes, gather.dcn_bytes)
    assert cast.seconds == 64 * MIB / 450e9
    assert cast.dcn_seconds == 64 * MIB / 4 / 50e9


@pytest.mark.devices(8)
def test_permutation_uses_the_network_if_a_pair_crosses_nodes() -> None:
    network = cluster("h100", 2, 4)
    within = network.of(collective("collective-permute", SourceTargetPairs(((0, 1), (4, 5))), MIB))
    assert (within.sent_bytes, within.dcn_bytes) == (MIB, 0)
    around = network.of(collective("collective-permute", SourceTargetPairs(((3, 4), (0, 1))), MIB))
    assert (around.sent_bytes, around.dcn_bytes) == (MIB, MIB)
    assert (
        network.of(collective("collective-permute", SourceTargetPairs(((2, 2),)), MIB))
        == NetworkCost()
    )


@pytest.mark.devices(8)
def test_small_all_reduce_over_many_nodes_uses_a_tree() -> None:
    network = cluster("h100", 8, 1)
    small = cost(network, "all-reduce", 1024, list(range(8)))
    gather = cost(network, "all-gather", 1024, list(range(8)))
    # Six steps up and down a tree of 8 nodes; a ring has 14 of them.
    assert small.expected_seconds - gather.expected_seconds < 7 * 2.7e-6
    large = cost(network, "all-reduce", GIB, list(range(8)))
    assert large.expected_seconds == pytest.approx(large.dcn_seconds / 0.8, rel=0.02)


def test_matmul_time_rounds_up_to_full_waves_of_tiles() -> None:
    rates = gpu_rates(H100)
    large = rates.padding(1, 16384, 8192, 16384)
    assert 1.0 <= large < 1.05
    # 132 tiles of 256 x 128 fill the multiprocessors; one more takes a second wave.
    assert rates.padding(1, 256 * 12, 8192, 128 * 11) == pytest.approx(1 + 96 / 8192)
    assert rates.padding(133, 256, 300, 128) > 1.2 * rates.padding(132, 256, 300, 128)
    # A product of few rows uses a part of its tiles; splits of its depth help.
    assert rates.padding(1, 16, 8192, 4096) > 4
    assert rates.padding(1, 256, 65536, 128) < 132 / 7
    found = operation(PRODUCT, "call")
    work = 2 * 4 * 1024 * 2048 * 64 * rates.padding(4, 1024, 64, 2048)
    assert found.matrix == pytest.approx(work / dict(rates.matrix_flops)["bfloat16"])


@pytest.mark.parametrize(
    ("mask", "microseconds"),
    # openxla/tokamax@783ea95: 4 sequences of 16 heads, here 2 of 32.
    [("NO_MASK", 810), ("CAUSAL", 462)],
)
def test_cudnn_attention_matches_published_times(mask: str, microseconds: float) -> None:
    found = operation(ATTENTION.format(target="Softmax", mask=mask, window=0), "call")
    assert found.seconds * 1e6 == pytest.approx(microseconds, rel=0.1)
    assert found.bound == "matrix"


DTYPES = {
    # Operands and precision; the vendor's figures of H100 in TFLOP/s, real products per product.
    "bfloat16": ("bf16", "bf16", "default", 989.4, 1),
    "float32": ("f32", "f32", "default", 494.7, 1),
    "mixed": ("bf16", "f32", "default", 494.7, 1),
    "float32, highest": ("f32", "f32", "highest", 66.9, 1),
    "float64": ("f64", "f64", "default", 66.9, 1),
    "float8": ("f8e4m3fn", "f8e5m2", "default", 1978.9, 1),
    "int8": ("s8", "s8", "default", 1978.9, 1),
    "int32": ("s32", "s32", "default", 66.9, 1),
    "complex64": ("c64", "c64", "default", 494.7, 4),
    "complex64, highest": ("c64", "c64", "highest", 66.9, 4),
    "complex128": ("c128", "c128", "default", 66.9, 4),
}


@pytest.mark.parametrize(
    ("left", "right", "precision", "peak", "parts"), DTYPES.values(), ids=DTYPES
)
def test_products_have_the_peak_of_their_dtype(
    left: str, right: str, precision: str, peak: float, parts: int
) -> None:
    precisions = f"rhs_contracting_dims={{0}}, operand_precision={{{precision},{precision}}}"
    text = f"""
HloModule product, is_scheduled=true

ENTRY main {{
  a = {left}[8192,8192]{{1,0}} parameter(0)
  b = {right}[8192,8192]{{1,0}} parameter(1)
  ROOT c = {left}[8192,8192]{{1,0}} dot(a, b), lhs_contracting_dims={{1}}, {precisions}
}}
"""
    module = read(text)
    work = analyze_cost(module, on_gpu=True)
    seconds = parts * 2 * 8192**3 / (peak * 1e12)
    assert compute_seconds(work.matmul_flops, H100) == pytest.approx(seconds)
    main = module.computations["main"]
    found = GpuOperationModel(module, gpu_rates(H100)).of(main, main.instructions["c"])
    # The best shapes reach 80 % of the peak, large products nine tenths of it, in whole waves.
    assert found.matrix == pytest.approx(seconds / 0.72, rel=0.05)


def test_all_reduce_in_an_xla_kernel_takes_the_time_of_the_collective() -> None:
    text = """
HloModule kernel, is_scheduled=true

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

summed {
  x = f32[8192]{0} parameter(0)
  ROOT y = f32[8192]{0} all-reduce(x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=add
}

ENTRY main {
  x = f32[8192]{0} parameter(0)
  start = ((f32[8192]{0}), f32[8192]{0}) fusion-start(x), kind=kCustom, calls=summed
  ROOT y = f32[8192]{0} fusion-done(start)
}
"""
    module, rates = read(text), gpu_rates(H100)
    network = cluster("h100", 1, 8)
    costs = [(c, network.of(c)) for c in module.collectives]
    found = walk_schedule(module, costs, GpuOperationModel(module, rates), rates)
    assert found.seconds == costs[0][1].expected_seconds > 0


def test_collectives_occupy_multiprocessors_of_matmuls() -> None:
    text = """
HloModule beside, is_scheduled=true

add {
  a = bf16[] parameter(0)
  b = bf16[] parameter(1)
  ROOT c = bf16[] add(a, b)
}

ENTRY main {
  x = bf16[4194304]{0} parameter(0)
  a = bf16[8192,8192]{1,0} parameter(1)
  b = bf16[8192,8192]{1,0} parameter(2)
  start = bf16[4194304]{0} all-reduce-start(x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=add
  c = bf16[8192,8192]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  done = bf16[4194304]{0} all-reduce-done(start)
  ROOT both = (bf16[8192,8192]{1,0}, bf16[4194304]{0}) tuple(c, done)
}
"""
    module, rates = read(text), gpu_rates(H100)
    network = cluster("h100", 1, 8)
    costs = [(c, network.of(c)) for c in module.collectives]
    model = GpuOperationModel(module, rates)
    main = module.computations[module.entry]
    alone = model.of(main, main.instructions["c"]).seconds
    running = costs[0][1].expected_seconds
    assert running < alone
    taken = rates.collective_cores
    found = walk_schedule(module, costs, model, rates)
    assert found.seconds == pytest.approx(alone + running * taken)


@pytest.mark.parametrize(
    ("line", "opcode", "matters"),
    [
        ("ROOT r = f32[4194304]{0} sort(x), dimensions={0}, to_apply=less", "sort", True),
        ("ROOT r = f64[4194304]{0} sine(wide)", "sine in float64", True),
        ("ROOT r = f32[4194304]{0} sine(x)", "", False),
        # A small sort beside a pass over 4 GiB stays within the error bar.
        (
            "few = f32[8]{0} sort(short), dimensions={0}, to_apply=less\n"
            "ROOT r = f32[1073741824]{0} negate(large)",
            "sort",
            False,
        ),
    ],
)
def test_operations_without_published_times_are_named_where_they_matter(
    line: str, opcode: str, matters: bool
) -> None:
    text = (
        "HloModule m, is_scheduled=true\nless {\na = f32[] parameter(0)\nb = f32[] parameter(1)\n"
        "ROOT c = pred[] compare(a, b), direction=LT\n}\nENTRY main {\n"
        "x = f32[4194304]{0} parameter(0)\nwide = f64[4194304]{0} parameter(1)\n"
        "large = f32[1073741824]{0} parameter(3)\n"
        f"short = f32[8]{{0}} parameter(2)\n{line}\n}}\n"
    )
    module = read(text)
    main = module.computations["main"]
    found = {find_unrated(module, main, each) for each in main.instructions.values()}
    assert opcode in found
    model, rates = operations_for(module, rates_for(H100)), rates_for(H100)
    runs = count_unrated(module, walk_schedule(module, [], model, rates))
    assert runs == ({opcode: 1} if matters else {})


def test_lanes_of_float64_are_half_of_those_of_float32() -> None:
    times = []
    for dtype in ("f32", "f64"):
        text = f"HloModule m\nENTRY main {{\nx = {dtype}[64] parameter(0)\n" + "".join(
            f"x{n} = {dtype}[64] multiply({'x' if n == 0 else f'x{n - 1}'}, x)\n" for n in range(9)
        )
        module = read(text + f"ROOT r = {dtype}[64] negate(x8)\n}}\n")
        main = module.computations["main"]
        model = operations_for(module, rates_for(H100))
        times.append(sum(model.of(main, each).vector for each in main.instructions.values()))
    assert times[1] == pytest.approx(2 * times[0]) and times[0] > 0


def test_functions_of_float32_take_lanes_beside_the_special_units() -> None:
    found = {}
    for opcode in ("exponential", "log-plus-one", "sine", "rsqrt"):
        text = (
            "HloModule m\nENTRY main {\nx = f32[1048576]{0} parameter(0)\n"
            f"ROOT r = f32[1048576]{{0}} {opcode}(x)\n}}\n"
        )
        found[opcode] = operation(text, "r").vector / MIB
    lanes, special = gpu_rates(H100).vector_ops, gpu_rates(H100).transcendentals
    assert found["rsqrt"] == pytest.approx(1 / special)
    assert found["exponential"] == pytest.approx(9 / lanes + 1 / special)
    assert found["sine"] > found["log-plus-one"] > found["exponential"] > found["rsqrt"]


def test_products_are_counted_by_what_multiplies() -> None:
    module = read(PRODUCT)
    main = module.computations[module.entry]
    names = [n for each in main.instructions.values() for n in find_multipliers(module, main, each)]
    assert names == ["cublas"]
