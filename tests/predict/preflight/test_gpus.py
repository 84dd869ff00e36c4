"""Reports of GPUs: their terms, their drawing, and the memory that the runtime leaves."""

import html
from dataclasses import replace

import jax
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

from tests.predict.preflight.examples import FITTING
from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard import preflight
from xlashard.errors import ArgumentError
from xlashard.hlo import read
from xlashard.predict.preflight.memory_breakdown import available_bytes, runtime_memory
from xlashard.predict.preflight.report.preflight_model import AxisReport
from xlashard.predict.targets.gpu.gpu_models import BY_NAME
from xlashard.preflights import PreflightReport, compare

H100 = replace(
    FITTING.topology,
    name="h100:4x8",
    generation="h100",
    shape=(4, 8),
    wraps=(False, False),
    links="nvlink",
)
MESH = (
    AxisReport("data", 4, (("node", 4),), ring=False, strides=(1,)),
    AxisReport("model", 8, (("gpu", 8),), ring=True, strides=(1,)),
)
GPU: PreflightReport = replace(
    FITTING,
    topology=H100,
    mesh=MESH,
    time=replace(FITTING.time, bound="ici", shares=(("ici", 1.0), ("matrix", 0.5))),
    versions=replace(FITTING.versions, libtpu="", cuda_plugin="0.12.0.1"),
)
MODULE = """HloModule m, num_partitions=8

ENTRY %main (p: f32[2,4]) -> f32[16,4] {
  %p = f32[2,4]{1,0} parameter(0)
  ROOT %g = f32[16,4]{1,0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
}"""


def test_gpu_report_uses_gpu_terms() -> None:
    text = str(GPU)
    for part in (
        *("h100:4x8 (32 GPUs)", "bound by NVLink", "waiting for NVLink", "tensor cores"),
        *("data along the nodes, model along the GPUs of a node", "CUDA plugin 0.12.0.1"),
    ):
        assert part in text
    assert not any(word in text for word in ("ICI", "DCN", "libtpu", "slice", "torus", "a link"))
    assert PreflightReport.from_json(GPU.to_json()) == GPU


@pytest.mark.slow
def test_gpu_page_draws_nodes() -> None:
    page = GPU.to_html()
    assert "4 nodes of 8 GPUs, joined by NVLink within a node" in page
    assert page.count('data-slice="0"') == 32
    assert 'data-at="7,3,0" data-mesh="3,7"' in page
    assert "Mesh on the nodes" in page and "Mesh on the torus" not in page
    text = html.unescape(page)
    assert "of the share of the memory that JAX's allocator takes" in text
    assert "at the peak; JAX's allocator leaves 10.2 MiB." in " ".join(text.split())
    for words in ("compiler lets a program", "the runtime reserves"):
        assert words not in text and words in html.unescape(FITTING.to_html())


@needs_plugin
@pytest.mark.slow
def test_rules_of_partitioning_of_this_process_apply() -> None:
    double = custom_partitioning(lambda x: x * 2)
    double.def_partition(
        partition=lambda mesh, args, result: (
            *(mesh, lambda x: x * 2, result.sharding),
            tuple([arg.sharding for arg in args]),
        ),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i j -> i j",
    )
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((16, 8), "float32", sharding=rows)
    # The rules are functions of Python, which the worker process lacks.
    report = preflight(jax.jit(double), x, topology="h100-8", values="custom_partitioning")
    assert report.values[0].spec == report.inputs[0].spec
    assert report.outcome == "fits" and report.traffic == ()


def test_comparison_of_a_tpu_and_a_gpu_report() -> None:
    changes = compare(FITTING, GPU)
    facts = {change.name: (change.old, change.new) for change in changes.facts}
    assert facts["topology"] == ("v5p:4x4x2 (32 chips)", "h100:4x8 (32 GPUs)")
    assert "mesh on the torus or nodes" in facts
    assert "time: links within a slice or NVLink" in {change.name for change in changes.amounts}


def test_available_bytes_follow_the_allocator_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    chip = BY_NAME["h100"]
    for text, share in (("", 0.75), ("0.9", 0.9)):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", text)
        assert available_bytes(chip) == int(share * chip.hbm_bytes)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(ArgumentError, match=r"'most' is invalid.*0\.9"):
        available_bytes(chip)


def test_runtime_memory_includes_cuda_context_and_nccl_buffers() -> None:
    kept = runtime_memory(read(MODULE))
    assert [each.name for each in kept] == ["CUDA context", "NCCL buffers"]
    assert kept[1].device_bytes == 24 * (4 * 2**20 + 512 * 2**10 + 4_915_200)
    assert all(each.source.startswith("https://") for each in kept)
    alone = read(MODULE.replace("all-gather(%p), replica_groups=[1,8]<=[8], ", "copy(%p), "))
    assert [each.name for each in runtime_memory(alone)] == ["CUDA context"]
