"""The table of GPUs: figures agree with each other and with published ones."""

import dataclasses
import math

import pytest

from xlashard.gpu import GPU_MODELS, GpuModel
from xlashard.gpu.gpu_models import BY_NAME

by_name = pytest.mark.parametrize("model", GPU_MODELS, ids=lambda model: model.name)


@by_name
def test_every_figure_has_its_source(model: GpuModel) -> None:
    sources = dict(model.sources)
    fields = {field.name for field in dataclasses.fields(model)}
    assert set(sources) == fields - {"name", "title", "sources"}
    assert all(len(source) > 10 for source in sources.values())


@by_name
def test_figures_agree_with_each_other(model: GpuModel) -> None:
    peaks = dict(model.peak_flops)
    assert model.available_bytes == int(0.75 * model.hbm_bytes)
    # A multiply-add of each lane in each cycle, but for the data sheet's lower boost clock.
    vector = 2 * model.sms * model.fp32_lanes * model.clock_hz
    assert vector == pytest.approx(peaks["float32"], rel=0.2)
    assert peaks["tensorfloat32"] == pytest.approx(peaks["bfloat16"] / 2, rel=0.01)
    assert peaks["float16"] == peaks["bfloat16"]
    assert peaks["int8"] == pytest.approx(2 * peaks["bfloat16"], rel=0.01)
    assert peaks.get("float8", peaks["int8"]) == peaks["int8"]
    # A multiple of the tensor cores' width for each cycle of each multiprocessor.
    width = peaks["bfloat16"] / (2 * model.sms * model.clock_hz)
    assert 0.75 < width / 2 ** round(math.log2(width)) <= 1.1
    assert model.network_bandwidth < model.node_bandwidth
    assert model.max_node % model.gpus_per_host == 0


def test_figures_of_links() -> None:
    speeds = {name: model.node_bandwidth / 1e9 for name, model in BY_NAME.items()}
    assert speeds == {
        **dict.fromkeys(("a100-40gb", "a100-80gb"), 300),
        **dict.fromkeys(("h100", "h200"), 450),
        **dict.fromkeys(("b200", "gb200"), 900),
        "h100-pcie": 63,
    }
