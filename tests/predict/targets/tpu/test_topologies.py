"""Topologies by name: their chips, hosts, rings and devices."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.message_patterns import naming
from tests.predict.preflight.programs import compile_stage
from xlashard import Mesh, NamedSharding, P, SingleDeviceSharding, pjit
from xlashard._jax.runtime import topologies
from xlashard.errors import TopologyError
from xlashard.predict.preflight.report.build import describe_topology
from xlashard.predict.targets.tpu.generations import BY_NAME
from xlashard.predict.targets.tpu.topologies import wraps_of
from xlashard.tpu import Topology, topology


@pytest.mark.parametrize(
    ("name", "slices", "text"),
    [
        ("v5p-128", 1, "Topology('v5p:4x4x4': 64 chips on 16 hosts)"),
        ("v5e-1", 1, "Topology('v5e:1x1': 1 chip on 1 host)"),
        ("v5e-8", 1, "Topology('v5e:2x4': 8 chips on 1 host)"),
        ("v4-32", 1, "Topology('v4:2x2x4': 16 chips on 4 hosts)"),
        ("v5p:2x1x1", 1, "Topology('v5p:2x1x1': 2 chips on 1 host)"),
        ("tpu7x-16", 1, "Topology('tpu7x:2x2x2': 8 chips on 2 hosts, 16 devices)"),
        ("v6e-16", 2, "Topology('v6e:4x4': 32 chips on 8 hosts in 2 slices)"),
        ("v5p-12288", 1, "Topology('v5p:16x16x24': 6,144 chips on 1,536 hosts)"),
    ],
)
def test_repr_and_device_count_of_topologies(name: str, slices: int, text: str) -> None:
    found = topology(name, slices)
    assert repr(found) == text
    assert found.num_devices == found.chips * found.generation.devices_per_chip
    assert found.accelerator_type.split("-")[0] in ("v5litepod", found.generation.name)


def test_topologies_with_equivalent_names_are_equal() -> None:
    one, other = topology("v5litepod-16"), topology("v5e:4x4")
    assert one == other
    assert hash(one) == hash(other)
    assert one.devices == other.devices
    assert one.mesh({"data": 16}) == other.mesh({"data": 16})
    assert one != topology("v5e:4x4", slices=2)
    assert one != topology("v5e:4x8")
    assert pickle.loads(pickle.dumps(topology("v6e-16", 2))) == topology("v6e:4x4", slices=2)
    assert str(topology("v6e-16", 2)) == "2 slices of v6e:4x4"


def test_megacore_chips_are_one_device() -> None:
    assert {d.core_on_chip for d in topology("v4-16").devices} == {0}
    assert {d.core_on_chip for d in topology("tpu7x-8").devices} == {0, 1}
    assert {d.core_on_chip for d in topology("v3-8").devices} == {0, 1}


def test_devices_are_ordered_by_slice_and_host() -> None:
    found = topology("v5e:4x4", slices=2)
    assert [d.slice_index for d in found.devices] == [0] * 16 + [1] * 16
    hosts = [(d.slice_index, d.process_index) for d in found.devices]
    assert hosts == sorted(hosts)
    assert found.hosts == 8
    assert found.coordinates.shape == (32, 4)
    assert found.coordinates.max(axis=0).tolist() == [1, 3, 3, 0]


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5p:4x4x4", (True, True, True)),
        ("v4:4x4x8", (True, True, True)),
        ("v5p:2x2x4", (False, False, False)),
        ("v4:2x4x4", (False, False, False)),
        ("v5e:16x16", (True, True)),
        ("v6e:8x16", (False, True)),
        ("v5e:8x8", (False, False)),
        ("v3:16x32", (False, True)),
        ("v2:16x16", (True, True)),
        ("tpu7x:4x4x8", (True, True, True)),
    ],
)
def test_wraparound_links_by_topology(name: str, wraps: tuple[bool, ...]) -> None:
    kind, _, shape = name.partition(":")
    assert wraps_of(BY_NAME[kind], tuple(map(int, shape.split("x")))) == wraps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5p:4x4x8", "v5p:4x4x8_twisted", "v6e:8x16", "v5e-8", "v4-16"])
def test_compiler_receives_rings_hosts_and_megacores(name: str, tmp_path) -> None:
    found = topology(name)
    one = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=SingleDeviceSharding(found.devices[0]))
    pjit(lambda x: x + 1).lower(one).compile({"xla_dump_to": str(tmp_path)})
    (dump,) = tmp_path.glob("*target_arguments.txt")
    text = dump.read_text()
    ring = re.search(r"wrap \{([^}]*)\}", text)
    closed = {} if ring is None else dict(re.findall(r"(\w): (\w+)", ring[1]))
    assert tuple(closed.get(d) == "true" for d in "xyz"[: len(found.shape)]) == found.wraps
    assert ("twist: true" in text) == found.twisted
    assert ('"megacore"' in text) == (found.generation.name == "v4")
    hosts = re.search(r" host_bounds \{([^}]*)\}", text)
    assert hosts is not None
    count = 1
    for size in re.findall(r": (\d+)", hosts[1]):
        count *= int(size)
    assert count == found.hosts


@pytest.mark.slow
def test_a_program_for_the_largest_pod_compiles() -> None:
    pod = topology("v5p:16x16x24")
    sharding = NamedSharding(pod.mesh({"data": -1}), P("data"))
    rows = jax.ShapeDtypeStruct((6144, 128), jnp.float32, sharding=sharding)
    done = compile_stage(pjit(lambda x: x.sum(0)).lower(rows))
    assert done.executable is not None
    assert [c.kind for c in done.module.collectives] == ["all-reduce"]


@pytest.mark.slow
def test_compiler_uses_wraparound_links() -> None:
    found = topology("v5p:4x4x4")
    default = {tuple(device.coords): device for device in found.devices}
    unspecified = {tuple(d.coords): d for d in topologies.compile_only_devices("v5p:4x4x4", {})}
    texts = []
    for devices in (default, unspecified):
        order = [devices[place] for place in sorted(devices)]
        mesh = Mesh(np.array(order), ("all",))
        rows = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, P("all")))
        gather = pjit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
        texts.append(gather.lower(rows).compile().as_text())
    assert "3DAllGather" in texts[0]
    assert "3DAllGather" not in texts[1]


def test_invalid_slice_counts_are_refused() -> None:
    for wrong in (0, -1, 1.5, "2", True):
        with pytest.raises(
            TopologyError, match=naming("slices", repr(wrong), "topology('v5e-16', slices=")
        ):
            topology("v5e-16", wrong)  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match=naming("TPU v3", "single slice")):
        topology("v3-32", slices=2)


def test_missing_libtpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies.cloud_tpu_init, "get_tpu_library_path", lambda: None)
    with pytest.raises(TopologyError, match=r"requires libtpu: pip install 'xlashard\[tpu\]'"):
        topology("v5e:2x16")


def test_topology_report_has_the_figures_of_the_generation() -> None:
    report = describe_topology(topology("tpu7x:4x4x4", slices=2))
    assert (report.name, report.generation, report.slices) == ("tpu7x:4x4x4", "tpu7x", 2)
    assert (report.chips, report.devices, report.hosts) == (128, 256, 32)
    assert (report.shape, report.wraps) == ((4, 4, 4), (True, True, True))
    assert report.hbm_bytes == 96 * 2**30 > report.available_bytes
    assert dict(report.peak_flops)["bfloat16"] == 2307e12 / 2
    assert report.hbm_bandwidth == 7380e9 / 2
    assert report.dcn_bandwidth == 50e9 / 8
    assert isinstance(topology("v5e-16"), Topology)
