"""The table of generations, against the devices of libtpu."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax._src import tpu_info

from xlashard import SingleDeviceSharding, pjit
from xlashard.errors import ProgramTooLargeError
from xlashard.predict.costs.rates import VECTOR_LANES, core_clock
from xlashard.tpu import GENERATIONS, Generation, Topology, topology

by_name = pytest.mark.parametrize("generation", GENERATIONS, ids=lambda g: g.name)
GIB = 2**30


def hosts_of_four(generation: Generation) -> Topology:
    """Return some hosts of a large slice."""
    return topology(f"{generation.name}:{'4x4x4'[: 2 * generation.dimensions - 1]}")


@by_name
def test_every_figure_has_a_source(generation: Generation) -> None:
    sources = dict(generation.sources)
    fields = {field.name for field in dataclasses.fields(generation)}
    assert set(sources) == fields - {"name", "title", "sources"}
    assert all(len(source) > 10 for source in sources.values())


@by_name
def test_vmem_bandwidth_is_three_registers_per_cycle(generation: Generation) -> None:
    """An operation of the vector unit reads two registers and writes one."""
    clock = core_clock(generation)
    assert clock is not None
    cycles = clock * generation.cores_per_chip
    registers = generation.vmem_bandwidth / cycles / (VECTOR_LANES * 4)
    assert registers == pytest.approx(2.9, rel=0.012)
    derived = dict(generation.sources)["vmem_bandwidth"].startswith("no public figure")
    assert derived == (generation.name not in ("v5e", "tpu7x"))


@by_name
def test_device_and_host_counts_match_libtpu(generation: Generation) -> None:
    devices = hosts_of_four(generation).devices
    chips = {tuple(device.coords) for device in devices}
    hosts = {device.process_index for device in devices}
    assert {device.device_kind for device in devices} == {generation.device_kind}
    assert len(devices) == generation.devices_per_chip * len(chips)
    assert len(chips) == generation.chips_per_host * len(hosts)
    assert len(devices) == generation.devices_per_host * len(hosts)
    for host in hosts:
        own = [device.coords for device in devices if device.process_index == host]
        spans = [max(c) - min(c) + 1 for c in zip(*own, strict=True)]
        assert tuple(spans) == generation.host_bounds


@by_name
def test_cores_per_chip_and_megacore_match_jax_and_libtpu(generation: Generation) -> None:
    device = hosts_of_four(generation).devices[0]
    version = tpu_info.chip_version_from_device_kind(device.device_kind)
    assert isinstance(version, tpu_info.ChipVersion)
    assert version.num_physical_tensor_cores_per_chip == generation.cores_per_chip
    assert version.supports_megacore == (generation.cores_per_device > 1)
    assert device.num_cores * generation.devices_per_chip == generation.cores_per_chip


@by_name
def test_available_bytes_match_the_limit_of_the_compiler(generation: Generation) -> None:
    device = SingleDeviceSharding(hosts_of_four(generation).devices[0])

    def compiled(argument_bytes: int) -> object:
        rows = jax.ShapeDtypeStruct((argument_bytes // 4096, 1024), jnp.float32, sharding=device)
        return pjit(lambda x: x[0, 0]).lower(rows).compile()

    # The program without its argument takes less than this.
    compiled(generation.available_bytes - 2**20)
    with pytest.raises(ProgramTooLargeError, match=f"{generation.available_bytes / GIB:.2f}"):
        compiled(generation.available_bytes)
    kept_back = generation.device_hbm_bytes - generation.available_bytes
    assert 0 < kept_back < 0.07 * generation.device_hbm_bytes


@by_name
def test_peak_rates_are_close_to_jax_figures(generation: Generation) -> None:
    """JAX's table, made for Pallas, has some measured figures in place of published ones."""
    version = tpu_info.chip_version_from_device_kind(generation.device_kind)
    assert isinstance(version, tpu_info.ChipVersion)
    cores = generation.cores_per_chip // generation.devices_per_chip
    theirs = tpu_info.get_tpu_info_for_chip(version, cores)
    per_core = generation.cores_per_chip
    flops = dict(generation.peak_flops)
    assert theirs.bf16_ops_per_second * per_core == pytest.approx(flops["bfloat16"], rel=0.15)
    assert theirs.mem_bw_bytes_per_second * per_core == pytest.approx(
        generation.hbm_bandwidth, rel=0.15 if generation.name != "v4" else 0.01
    )
    if theirs.int8_ops_per_second and "int8" in flops:
        assert theirs.int8_ops_per_second * per_core == pytest.approx(flops["int8"], rel=0.01)
    assert theirs.hbm_capacity_bytes * per_core == pytest.approx(generation.hbm_bytes, rel=0.08)


@by_name
def test_figures_are_consistent(generation: Generation) -> None:
    assert math.prod(generation.pod_shape) == generation.pod_chips
    assert len(generation.pod_shape) == generation.dimensions
    assert generation.ici_links == 2 * generation.dimensions
    assert all(size % generation.ring_size == 0 for size in generation.pod_shape)
    assert (generation.core_bandwidth > 0) == (generation.devices_per_chip > 1)
    assert generation.device_hbm_bytes * generation.devices_per_chip == generation.hbm_bytes
    halves = dict(generation.device_peak_flops)
    for dtype, flops in generation.peak_flops:
        assert halves[dtype] * generation.devices_per_chip == flops
