"""The tables of docs/gpu/topologies.md."""

import re
from pathlib import Path

from tests.goldens import check_golden
from tests.predict.targets.tpu.test_page import between
from xlashard.gpu import GPU_MODELS, MACHINE_TYPES, GpuModel, MachineType

PAGE = Path(__file__).resolve().parents[4] / "docs" / "gpu" / "topologies.md"
GIB = 2**30

MODEL_HEAD = [
    *("name", "GPUs of a node", "GPUs of a machine", "memory, GiB", "HBM, GB/s"),
    *("bf16 TFLOP/s", "int8", "fp8", "fp4", "within a node, GB/s", "to other nodes, GB/s"),
]
MACHINE_HEAD = ["name", "GPUs", "to other machines, GB/s"]


def model_row(model: GpuModel) -> list[str]:
    peaks = {**dict.fromkeys(("bfloat16", "int8", "float8", "float4"), 0.0)}
    peaks |= {dtype: peak for dtype, peak in model.peak_flops if dtype in peaks}
    return [
        f"`{model.name}`",
        str(model.max_node),
        str(model.gpus_per_host),
        f"{model.hbm_bytes / GIB:.1f}",
        f"{model.hbm_bandwidth / 1e9:,.0f}",
        *(f"{peak / 1e12:,.0f}" if peak else "" for peak in peaks.values()),
        f"{model.node_bandwidth / 1e9:g}",
        f"{model.network_bandwidth / 1e9:g}",
    ]


def machine_row(machine: MachineType) -> list[str]:
    gpus = f"{machine.gpus} x `{machine.model.name}`"
    return [f"`{machine.name}`", gpus, f"{machine.network_bandwidth / 1e9:g}"]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_documented_gpu_tables_are_up_to_date(update_goldens: bool) -> None:
    text = PAGE.read_text(encoding="utf-8")
    made = between(text, "models", table(MODEL_HEAD, [model_row(m) for m in GPU_MODELS]))
    machines = [machine_row(m) for m in MACHINE_TYPES]
    check_golden(
        PAGE, between(made, "machines", table(MACHINE_HEAD, machines)), update=update_goldens
    )


def test_page_documents_the_extra() -> None:
    project = (PAGE.parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    named = set(re.findall(r"xlashard\[([\w-]+)\]", PAGE.read_text(encoding="utf-8")))
    assert named == {"gpu-target"}
    assert "\ngpu-target = [" in project
