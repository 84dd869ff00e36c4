"""Topologies of GPUs by name: devices, meshes, links, and programs compiled for them."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.message_patterns import naming
from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard import Mesh, NamedSharding, P, device_put, explain, pjit, preflight
from xlashard._jax.runtime import topologies
from xlashard.errors import CompileOnlyError, TopologyError
from xlashard.gpu import GPU_MODELS, axis_links, topology
from xlashard.hardware import AxisLinks
from xlashard.predict.targets.gpu.topologies import target_config

pytestmark = needs_plugin


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h100-32", "GpuTopology('h100:4x8': 32 GPUs on 4 hosts)"),
        ("h100-1", "GpuTopology('h100:1x1': 1 GPU on 1 host)"),
        ("gb200-nvl72", "GpuTopology('gb200:1x72': 72 GPUs on 18 hosts in 1 node)"),
        ("128xa3-megagpu-8g", "GpuTopology('128xa3-megagpu-8g': 1,024 GPUs on 128 hosts)"),
    ],
)
def test_repr_and_device_order_of_gpu_topologies(name: str, text: str) -> None:
    found = topology(name)
    assert repr(found) == text
    assert found.num_devices == found.nodes * found.gpus_per_node == found.chips
    assert [device.id for device in found.devices] == list(range(found.num_devices))
    hosts = [device.process_index for device in found.devices]
    assert hosts == sorted(hosts)
    assert hosts.count(0) == found.num_devices // found.hosts


def test_topologies_with_equivalent_names_are_equal() -> None:
    one, other = topology("16xh100"), topology("h100-8", nodes=2)
    assert one == other
    assert one.mesh({"data": 16}) == other.mesh({"data": 16})
    assert one != topology("2xp5.48xlarge")
    assert pickle.loads(pickle.dumps(one)) == one
    assert str(one) == "h100:2x8"
    theirs = topologies.gpu_devices("other", target_config(one.chip), "2x1x8")
    assert one.match_devices(theirs[::-1]) == one.devices[::-1]
    assert topology("h100-8").match_devices(theirs[:8]) is None


@pytest.mark.slow
@pytest.mark.parametrize("model", GPU_MODELS, ids=lambda model: model.name)
def test_compiler_receives_the_figures_of_every_model(model) -> None:
    found = topology(f"{model.name}-2")
    assert {device.device_kind for device in found.devices} == {model.device_kind}
    x = jax.ShapeDtypeStruct(
        (64, 64), jnp.bfloat16, sharding=NamedSharding(found.mesh({"x": 2}), P("x"))
    )
    compiled = pjit(lambda x: (x * 2).sum()).lower(x).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 64 * 32 * 2
    assert compiled.cost_analysis() is None


class TestMeshes:
    def test_axes_with_the_most_communication_stay_within_nodes(self) -> None:
        found = topology("h100-32")
        mesh = found.mesh({"data": 4, "model": 8})
        assert links(found, mesh, "model") == ("nvlink", 450, (("gpu", 8),))
        assert links(found, mesh, "data") == ("network", 50, (("node", 4),))
        other = found.mesh({"model": 8, "data": 4}, order=["data", "model"])
        assert links(found, other, "data") == ("nvlink", 450, (("gpu", 4),))
        assert links(found, other, "model") == ("network", 100, (("node", 4), ("gpu", 2)))

    @pytest.mark.parametrize(
        ("name", "axes"),
        [
            ("h100-8", {"data": 2, "model": 2, "x": 2}),
            ("h100-32", {"data": 8, "model": 4}),
            ("2xgb200-nvl72", {"data": 16, "model": 9}),
        ],
    )
    def test_mesh_devices_are_in_id_order(self, name: str, axes: dict[str, int]) -> None:
        # XLA logs an error about any other order, and the hosts of a rack have neighbours.
        mesh = topology(name).mesh(axes)
        assert [device.id for device in mesh.devices.flat] == list(range(mesh.devices.size))

    def test_an_axis_over_all_devices_uses_every_adapter(self) -> None:
        found = topology("h100-32")
        whole = axis_links(found, found.mesh({"data": 32}), ["data"])
        assert (whole.network, whole.domains, whole.bytes_per_second) == ("network", 4, 400e9)
        slow = topology("4xa3-highgpu-8g")
        both = axis_links(slow, slow.mesh({"data": 4, "model": 8}), ["data", "model"])
        assert both.bytes_per_second == pytest.approx(8 * 12.5e9)

    def test_nvlink_rack_is_one_node(self) -> None:
        found = topology("gb200-nvl72")
        mesh = found.mesh({"data": 9, "model": 8})
        assert links(found, mesh, "data") == ("nvlink", 900, (("gpu", 9),))
        assert axis_links(found, mesh, ["data", "model"]).ring

    def test_gpus_without_nvlink_use_pcie(self) -> None:
        found = topology("h100-pcie-8")
        assert links(found, found.mesh({"x": 8}), "x") == ("pcie", 63, (("gpu", 8),))

    def test_one_device_has_no_links(self) -> None:
        found = topology("h100-8")
        one = axis_links(found, found.mesh({"one": 1, "x": 8}), ["one"])
        assert (one.size, one.links, one.bytes_per_second) == (1, 0, float("inf"))

    def test_axis_of_shuffled_devices_uses_the_network(self) -> None:
        found = topology("h100-32")
        order = np.random.default_rng(0).permutation(32)
        mesh = Mesh(np.array(found.devices)[order].reshape(4, 8), ("a", "b"))
        across = axis_links(found, mesh, ["b"])
        assert (across.network, across.parts, across.ring) == ("network", (), False)
        assert across.domains == len({device // 8 for device in order[:8]})

    def test_mesh_of_a_different_topology_is_refused(self) -> None:
        found = topology("h100-8")
        with pytest.raises(TopologyError, match=naming("h100:1x8", "topology('h100:1x8')")):
            axis_links(found, topology("h100-16").mesh({"a": 16}), ["a"])
        with pytest.raises(TopologyError, match=naming("h100:1x8 has 8", "mesh({'data': 8})")):
            found.mesh({"data": 9})


def links(found, mesh: Mesh, axis: str) -> tuple[object, ...]:
    """Return the network, the GB/s and the extents of an axis."""
    link: AxisLinks = axis_links(found, mesh, [axis])
    parts = tuple((part.dimension, part.size) for part in link.parts)
    return link.network, link.bytes_per_second / 1e9, parts


@pytest.mark.slow
def test_arrays_on_a_topology_are_refused() -> None:
    sharding = NamedSharding(topology("h100-16").mesh({"x": 16}), P("x"))
    with pytest.raises(CompileOnlyError, match=naming("h100:2x8", "ShapeDtypeStruct")):
        device_put(np.ones(16), sharding)
    with pytest.raises(CompileOnlyError, match="h100:2x8"):
        pjit(jnp.sin, in_shardings=sharding)(np.ones(16))


@pytest.mark.slow
def test_explain_names_collectives_by_axes() -> None:
    mesh = topology("h100-32").mesh({"data": 4, "fsdp": 8})
    rows, both = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P(("data", "fsdp")))
    w = jax.ShapeDtypeStruct((512, 512), "bfloat16", sharding=rows)
    x = jax.ShapeDtypeStruct((512, 512), "bfloat16", sharding=both)

    def loss(w, x):
        return (x @ w).astype("float32").sum()

    ours = explain(pjit(jax.grad(loss), out_shardings=w.sharding), w, x)
    theirs = explain(jax.jit(jax.grad(loss), out_shardings=w.sharding), w, x)
    for report in (ours, theirs):
        assert {c.along for c in report.collectives} == {"data", "fsdp"}
        assert {m.kind for m in ours.collectives} >= {"all-reduce"}


def test_missing_plugin_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(topologies, "_version", lambda package: None)
    text = naming("JAX's CUDA plugin", "pip install 'xlashard[gpu-target]'")
    with pytest.raises(TopologyError, match=text):
        topologies.gpu_devices("h100:1x8", "", "1x1x8")


@pytest.mark.slow
def test_one_gpu_needs_no_mesh() -> None:
    report = preflight(
        jax.jit(lambda x: jnp.arctan2(jax.lax.erf_inv(x), jnp.tan(x @ x))),
        jax.ShapeDtypeStruct((64, 64), "float32"),
        topology="h100-1",
    )
    assert (report.outcome, report.time.bound) == ("fits", "launch")
    assert [(axis.name, axis.size) for axis in report.mesh] == [("device", 1)]


def test_plugin_of_a_mismatched_version_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(topologies, "_version", lambda package: "0.9.0")
    with pytest.raises(TopologyError, match=naming("0.9.0 is installed", "jax-cuda13-plugin==")):
        topologies.gpu_devices("h100:1x8", "", "1x1x8")
