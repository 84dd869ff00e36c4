"""The table of GPUs: figures are consistent and match published figures."""

import dataclasses
import functools
import math
import mmap
import re
from importlib import metadata
from pathlib import Path

import pytest

from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard.gpu import GPU_MODELS, GpuModel
from xlashard.predict.targets.gpu.gpu_models import BY_NAME

by_name = pytest.mark.parametrize("model", GPU_MODELS, ids=lambda model: model.name)


@by_name
def test_every_figure_has_a_source(model: GpuModel) -> None:
    sources = dict(model.sources)
    fields = {field.name for field in dataclasses.fields(model)}
    assert set(sources) == fields - {"name", "title", "sources"}
    assert all(len(source) > 10 for source in sources.values())


@by_name
def test_figures_are_consistent(model: GpuModel) -> None:
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


_UNITS = {10: "float16", 11: "tensorfloat32", 12: "float64", 16: "bfloat16", 20: "float8"}
"""Dtypes by the number of XLA's primitive type in the description of a matrix unit."""
_RATE = re.compile(
    rb"key: (\d+)\s+value \{\s+clock_rate_ghz: ([\d.]+)"
    rb"\s+units_per_core: (\d+)\s+ops_per_clock: (\d+)"
)


@functools.cache
def descriptions() -> dict[str, bytes]:
    """Return descriptions of GPUs in JAX's CUDA plugin, as text protos, by device kind."""
    folder = Path(str(metadata.distribution("jax-cuda13-pjrt").locate_file("jax_plugins")))
    (plugin,) = folder.rglob("xla_cuda_plugin.so")
    found, first, last = {}, b"gpu_device_info {", b'device_description_str: "'
    with plugin.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
        start = code.find(first)
        while start >= 0:
            end = code.find(last, start)
            kind = code[end + len(last) : code.find(b'"', end + len(last))].decode()
            found[kind] = code[start:end]
            start = code.find(first, end)
    return found


@needs_plugin
@by_name
def test_figures_equal_descriptions_of_the_cuda_plugin(model: GpuModel) -> None:
    text = descriptions().get(model.device_kind)
    if text is None:
        pytest.skip(f"this plugin does not describe {model.device_kind}")

    def number(name: str) -> float:
        found = re.search(rf"\b{name}: ([\d.]+)".encode(), text)
        return float(found[1]) if found else 0.0

    assert number("core_count") == model.sms
    assert number("fpus_per_core") == model.fp32_lanes
    # The largest of the clock of the device and those of its units.
    clocks = [float(ghz) for ghz in re.findall(rb"clock_rate_ghz: ([\d.]+)", text)]
    assert max(clocks) == pytest.approx(model.clock_hz / 1e9)
    assert number("l2_cache_size") == model.l2_bytes
    assert number("device_memory_size") == model.hbm_bytes
    assert number("memory_bandwidth") == pytest.approx(model.hbm_bandwidth, rel=1e-3)
    assert number("shared_memory_per_core") == model.shared_memory
    assert (number("major"), number("minor")) == model.compute_capability
    assert number("active_links") in (0, model.nvlink_links)
    matrix = text[text.index(b"matrix_unit_description") :]
    rates = {
        int(key): 2 * float(ghz) * 1e9 * int(n) * int(ops)
        for key, ghz, n, ops in _RATE.findall(matrix)
    }
    peaks = dict(model.peak_flops)
    compared = {_UNITS[key]: model.sms * rate for key, rate in rates.items() if key in _UNITS}
    assert {"float16", "bfloat16", "tensorfloat32", "float64"} <= compared.keys()
    for dtype, rate in compared.items():
        # The data sheet of GB200 has the tensor cores at 2.0 GHz, the plugin at 1.9.
        assert peaks[dtype] == pytest.approx(rate, rel=0.05 if model.name == "gb200" else 0.015)


def test_node_bandwidths_match_data_sheets() -> None:
    speeds = {name: model.node_bandwidth / 1e9 for name, model in BY_NAME.items()}
    assert speeds == {
        **dict.fromkeys(("a100-40gb", "a100-80gb"), 300),
        **dict.fromkeys(("h100", "h200"), 450),
        **dict.fromkeys(("b200", "gb200"), 900),
        "h100-pcie": 63,
    }
