"""Environments of programs for GPUs: those of a topology beside those of real devices."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import pytest

from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard.core.program.environment import DeviceFacts, Environment, differences
from xlashard.gpu import topology


@dataclass(frozen=True)
class Client:
    """Client of real GPUs, as far as an environment reads it."""

    platform_version: str
    platform: str = "gpu"


@dataclass(frozen=True)
class Gpu:
    """Device of such a client."""

    device_kind: str
    compute_capability: str = "9.0"
    id: int = 0
    coords: tuple[int, ...] | None = None
    slice_index: int | None = None
    process_index: int = 0
    platform: str = "gpu"
    client: Client = field(default_factory=lambda: Client("PJRT C API\ncuda 13000"))


def differences_on(name: str, *gpus: Any) -> list[str]:
    """Return why a program compiled for a topology can't run on devices."""
    return differences(
        Environment.of(topology(name).devices[: len(gpus)]), Environment.of(list(gpus))
    )


FITTING = {
    "the same name": ("h100-1", Gpu("NVIDIA H100 80GB HBM3")),
    "the driver's shorter name": ("h200-1", Gpu("NVIDIA H200")),
    "with a place among others": ("h100-1", Gpu("NVIDIA H100 80GB HBM3", coords=(0, 0, 3))),
    "a later minor version": (
        "b200-1",
        Gpu("NVIDIA B200", "10.0", client=Client("PJRT C API\ncuda 13010")),
    ),
    "an older one": ("a100-40gb-1", Gpu("NVIDIA A100-SXM4-40GB", "8.0")),
}


@needs_plugin
@pytest.mark.parametrize(("name", "gpu"), FITTING.values(), ids=FITTING)
def test_program_compiled_without_a_gpu_fits_a_real_one(name: str, gpu: Gpu) -> None:
    assert differences_on(name, gpu) == []


OTHER = {
    "another model": ("h100-1", Gpu("NVIDIA H200"), r"NVIDIA H100 80GB HBM3, .*NVIDIA H200"),
    "a name that continues another": ("h200-1", Gpu("NVIDIA H20"), "NVIDIA H200 .*a NVIDIA H20$"),
    "another variant": ("h100-1", Gpu("NVIDIA H100 PCIe"), "H100 PCIe"),
    "a part of one": ("h100-1", Gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb"), "MIG"),
    "another capability": (
        "h100-1",
        Gpu("NVIDIA H100 80GB HBM3", "9.1"),
        r"compute capability 9\.0, this has 9\.1",
    ),
    "an older CUDA": (
        "h100-1",
        Gpu("NVIDIA H100 80GB HBM3", client=Client("PJRT C API\ncuda 12080")),
        "runtime cuda 13, this is cuda 12",
    ),
}


@needs_plugin
@pytest.mark.parametrize(("name", "gpu", "reason"), OTHER.values(), ids=OTHER)
def test_gpu_that_does_not_fit_is_refused_with_the_reason(name: str, gpu: Gpu, reason: str) -> None:
    (text,) = differences_on(name, gpu)
    assert re.search(reason, text)


@needs_plugin
def test_versions_of_the_plugin_are_compared() -> None:
    made = Environment.of(topology("h100-1").devices)
    assert made.plugin.startswith("jax-cuda13-plugin ")
    (text,) = differences(made, replace(made, plugin="jax-cuda12-plugin 0.12.0"))
    assert made.plugin in text and "jax-cuda12-plugin 0.12.0" in text


def test_names_of_other_devices_are_compared_whole() -> None:
    facts = DeviceFacts(0, 0, "TPU v5", (0, 0, 0), 0)
    here = replace(Environment.of(jax.devices()[:1]), devices=(facts,))
    there = replace(here, devices=(replace(facts, kind="TPU v5 lite"),))
    assert len(differences(here, there)) == 1
