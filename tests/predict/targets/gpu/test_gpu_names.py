"""Names of GPUs: models with numbers, shapes, racks and machine types."""

import pytest

from tests.message_patterns import naming
from xlashard.errors import TopologyError
from xlashard.gpu import GPU_MODELS, MACHINE_TYPES
from xlashard.predict.targets.gpu.gpu_names import common_names, is_gpu_name, parse_gpu_name
from xlashard.predict.targets.tpu.topology_names import _ALIASES


@pytest.mark.parametrize(
    ("name", "text", "gpus"),
    [
        ("h100-32", "h100:4x8", 32),
        ("32xh100", "h100:4x8", 32),
        ("4x8xH100", "h100:4x8", 32),
        ("h100:4x8", "h100:4x8", 32),
        ("h100-sxm-8", "h100:1x8", 8),
        ("h100-4", "h100:1x4", 4),
        ("h100:2x4", "h100:2x4", 8),
        ("8xh200", "h200:1x8", 8),
        ("b200-256", "b200:32x8", 256),
        ("a100-16", "a100-80gb:2x8", 16),
        ("a100-40gb-16", "a100-40gb:2x8", 16),
        ("h100-pcie-8", "h100-pcie:1x8", 8),
        ("gb200-nvl72", "gb200:1x72", 72),
        ("2xgb200-nvl72", "gb200:2x72", 144),
        ("gb200-144", "gb200:2x72", 144),
        ("gb200-32", "gb200:1x32", 32),
        ("p5.48xlarge", "p5.48xlarge", 8),
        (" 4xp5.48xlarge", "4xp5.48xlarge", 32),
        ("a2-megagpu-16g", "a2-megagpu-16g", 16),
        ("Standard_ND96isr_H100_v5", "nd96isr_h100_v5", 8),
        ("2xND_H100_v5", "2xnd96isr_h100_v5", 16),
        ("18xa4x-highgpu-4g", "18xa4x-highgpu-4g", 72),
    ],
)
def test_gpu_names_are_parsed(name: str, text: str, gpus: int) -> None:
    found = parse_gpu_name(name)
    assert (found.text, found.nodes * found.gpus) == (text, gpus)
    assert parse_gpu_name(found.text) == found
    assert parse_gpu_name(name, 2).nodes * parse_gpu_name(name, 2).gpus == 2 * gpus


def test_machines_of_an_nvlink_rack_form_one_node() -> None:
    one, two = parse_gpu_name("18xp6e-gb200.36xlarge"), parse_gpu_name("36xp6e-gb200.36xlarge")
    assert (one.nodes, one.gpus, one.gpus_per_host) == (1, 72, 4)
    assert (two.nodes, two.gpus) == (2, 72)
    assert parse_gpu_name("36xp5.48xlarge").nodes == 36


def test_every_machine_type_is_a_valid_name() -> None:
    for machine in MACHINE_TYPES:
        found = parse_gpu_name(machine.name)
        assert (found.model, found.gpus, found.nodes) == (machine.model, machine.gpus, 1)
        assert 0.5e9 < machine.network_bandwidth <= 50e9
        assert len(machine.source) > 10


def test_every_model_is_a_valid_name() -> None:
    for model in GPU_MODELS:
        assert parse_gpu_name(f"{model.name}-{model.max_node}").text == (
            f"{model.name}:1x{model.max_node}"
        )


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("h100-12", ["12 GPUs", "'h100-8' and 'h100-16'", "h100:2x6"]),
        ("gb200-100", ["100 GPUs", "'gb200-72' and 'gb200-144'", "gb200:2x50"]),
        ("h100:4x16", ["4 nodes of 16", "1 to 8", "'h100:2x8'"]),
        ("gb200:1x70", ["nodes of 70", "machines of 4", "'gb200:1x68'"]),
        ("h100-0", ["0 GPUs", "'h100-8'"]),
        ("h100", ["lacks a number", "'h100-8'", "'h100:4x8'"]),
        ("h10-8", ["'h100'", "p5.48xlarge"]),
        ("p5.48xlarg", ["'p5.48xlarge'"]),
        ("mi300-8", ["unknown GPU topology 'mi300-8'", "h100-32"]),
        (8, ["name=8", "topology('h100-32')"]),
    ],
)
def test_error_of_an_invalid_name_suggests_the_nearest(name: str, facts: list[str]) -> None:
    with pytest.raises(TopologyError, match=naming(*facts)):
        parse_gpu_name(name)


@pytest.mark.parametrize("nodes", [0, -1, True, 2.0])
def test_invalid_node_count_is_refused(nodes: object) -> None:
    with pytest.raises(TopologyError, match=naming(f"nodes={nodes!r}", "nodes=2")):
        parse_gpu_name("h100-8", nodes)


def test_gpu_names_are_distinct_from_tpu_names() -> None:
    assert all(is_gpu_name(name) for name in common_names())
    assert all(parse_gpu_name(name) for name in common_names())
    assert all(map(is_gpu_name, ("h100", "H100-12", "4x8xb200", "p5.48xlarg", "2xstandard_nd1")))
    tpus = [f"{alias}-{size}" for alias in _ALIASES for size in ("16", "2x2")]
    assert len(tpus) > 20
    assert not any(is_gpu_name(name) for name in (*tpus, "v5p:4x4x4", "ct5lp-hightpu-4t", "auto"))
