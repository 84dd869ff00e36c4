"""Times of collectives on a torus, against the closed formulas of rings and lines."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlashard.core.sharding import Mesh
from xlashard.geometry.groups import ReplicaGroups, SourceTargetPairs
from xlashard.hlo.collective_kinds import GROUPED_KINDS
from xlashard.hlo.collectives import Collective
from xlashard.hlo.shapes import Shape
from xlashard.predict.costs.network_model import NetworkModel
from xlashard.predict.costs.rates import rates_of
from xlashard.tpu import topology

MB = 10**6


def collective(kind, groups, nbytes):
    """Return a collective with `nbytes` of operands and of results."""
    array = Shape("u8", (nbytes,))
    return Collective(kind, "c", "main", (array,), (array,), groups)


def groups_along(mesh, axes):
    """Return the groups of devices that differ in these axes alone."""
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    last = [mesh.axis_names.index(axis) for axis in axes]
    first = [i for i in range(places.ndim) if i not in last]
    count = math.prod(mesh.shape[axis] for axis in axes)
    return ReplicaGroups.of_list(places.transpose(*first, *last).reshape(-1, count).tolist())


def seconds(pod, mesh, kind, axes, nbytes=8 * MB):
    cost = NetworkModel(pod, mesh).of(collective(kind, groups_along(mesh, axes), nbytes))
    return cost.seconds


def test_ring_sends_in_both_directions_and_line_in_one():
    ring = topology("v5p:4x4x4")  # whole cubes close to rings
    mesh = ring.mesh({"data": 16, "model": 4})
    link = ring.generation.ici_bandwidth
    assert seconds(ring, mesh, "all-gather", ["model"]) == pytest.approx(
        8 * MB * 3 / 4 / (2 * link)
    )
    line = topology("v5e:4x4")
    mesh = line.mesh({"data": 4, "model": 4})
    link = line.generation.ici_bandwidth
    assert seconds(line, mesh, "all-gather", ["model"]) == pytest.approx(8 * MB * 3 / 4 / link)


def test_slowest_group_determines_the_time():
    pod = topology("v5p:4x4x4")
    mesh = pod.mesh({"data": 16, "model": 4})
    devices = mesh.devices.copy()
    devices[-2:, 0] = devices[-2:, 0][::-1]
    torn = Mesh(devices, mesh.axis_names)
    link = pod.generation.ici_bandwidth
    whole, slow = (seconds(pod, each, "all-gather", ["model"]) for each in (mesh, torn))
    assert (whole, slow) == pytest.approx((8 * MB * 3 / 4 / (2 * link), 8 * MB * 3 / 4 / link))


def test_all_reduce_time_is_scatter_plus_gather():
    pod = topology("v5p:4x4x4")
    mesh = pod.mesh({"data": 16, "model": 4})
    parts = [seconds(pod, mesh, kind, ["data"]) for kind in ("reduce-scatter", "all-gather")]
    assert seconds(pod, mesh, "all-reduce", ["data"]) == pytest.approx(sum(parts))


def test_axes_over_more_dimensions_have_more_links():
    pod = topology("v5p:4x4x4")
    mesh = pod.mesh({"data": 16, "model": 4})
    link = pod.generation.ici_bandwidth
    one = NetworkModel(pod, mesh).of(
        collective("all-gather", groups_along(mesh, ["model"]), 8 * MB)
    )
    two = NetworkModel(pod, mesh).of(collective("all-gather", groups_along(mesh, ["data"]), 8 * MB))
    assert (len(one.dimensions), len(two.dimensions)) == (1, 2)
    assert not set(one.dimensions) & set(two.dimensions)
    assert two.seconds == pytest.approx(8 * MB * 15 / 16 / (4 * link))


@pytest.mark.parametrize(("name", "directions"), [("v5p:4x4x4", 2), ("v5p:2x2x8", 1)])
def test_all_to_all_time_is_bound_by_the_bisection(name, directions):
    pod = topology(name)
    size = max(pod.shape)
    mesh = pod.mesh({"rest": pod.num_devices // size, "across": size})
    link = pod.generation.ici_bandwidth
    took = seconds(pod, mesh, "all-to-all", ["across"])
    # Half of the devices of a line send half of their data over its middle.
    assert took == pytest.approx(size / 2 * (8 * MB / 2) / (directions * link))


def test_interleaved_groups_share_links():
    pod = topology("v5e:2x8")
    devices = np.array(pod.devices, dtype=object)
    order = sorted(range(16), key=lambda i: (pod.devices[i].coords[0], pod.devices[i].coords[1]))
    grid = devices[order].reshape(2, 4, 2)  # along the long side: 4 devices, 2 chips apart
    mesh = Mesh(grid, ("x", "far", "near"))
    near, far = (
        NetworkModel(pod, mesh).of(collective("all-gather", groups_along(mesh, [axis]), 8 * MB))
        for axis in ("near", "far")
    )
    link = pod.generation.ici_bandwidth
    assert near.seconds == pytest.approx(8 * MB / 2 / link)
    assert far.seconds == pytest.approx(8 * MB * 3 / 4 / (link / 2))


def test_devices_of_a_chip_share_its_links():
    pod = topology("tpu7x:2x2x2")
    mesh = pod.mesh({"data": 8, "core": 2})
    generation = pod.generation
    network = NetworkModel(pod, mesh)
    core = network.of(collective("all-gather", groups_along(mesh, ["core"]), 8 * MB))
    assert core.dimensions == ("core",)
    assert core.seconds == pytest.approx(4 * MB / generation.core_bandwidth)
    data = network.of(collective("all-gather", groups_along(mesh, ["data"]), 8 * MB))
    # Three links per chip, shared by its two devices.
    assert data.seconds == pytest.approx(8 * MB * 7 / 8 / (3 * generation.ici_bandwidth / 2))


def test_devices_of_a_slice_share_the_traffic_between_slices():
    pod = topology("v5e:2x2", slices=2)
    mesh = pod.mesh({"data": 8})
    cost = NetworkModel(pod, mesh).of(
        collective("all-reduce", groups_along(mesh, ["data"]), 8 * MB)
    )
    assert cost.dcn_bytes == pytest.approx(2 * 8 * MB / 2 / 4)
    assert cost.dcn_seconds == pytest.approx(2 * MB / pod.generation.device_dcn_bandwidth)
    assert cost.sent_bytes == pytest.approx(2 * 8 * MB * 3 / 4)


@pytest.mark.parametrize("kind", GROUPED_KINDS)
def test_a_slice_sends_the_bytes_of_reports(kind):
    pod = topology("v5p:4x4x4")
    mesh = pod.mesh({"data": 16, "model": 4})
    sent = collective(kind, groups_along(mesh, ["data"]), 8 * MB)
    assert NetworkModel(pod, mesh).of(sent).sent_bytes == sent.sent_bytes > 0


def test_the_whole_value_of_a_broadcast_passes():
    pod = topology("v5e:2x2", slices=4)
    mesh = pod.mesh({"data": 4, "model": 4})
    network, chip = NetworkModel(pod, mesh), pod.generation
    inside = network.of(collective("collective-broadcast", groups_along(mesh, ["model"]), 8 * MB))
    gather = network.of(collective("all-gather", groups_along(mesh, ["model"]), 8 * MB))
    assert inside.sent_bytes == gather.sent_bytes == 8 * MB * 3 / 4
    assert inside.seconds == pytest.approx(gather.seconds * 4 / 3)
    assert inside.dcn_bytes == inside.dcn_seconds == 0
    everywhere = groups_along(mesh, ["data", "model"])
    cost = network.of(collective("collective-broadcast", everywhere, 8 * MB))
    assert (cost.sent_bytes, cost.seconds) == (inside.sent_bytes, inside.seconds)
    # The devices of a slice share what it sends; the last slice sends nothing on.
    assert cost.dcn_bytes == 8 * MB / 4 * 3 / 4
    assert cost.dcn_seconds == pytest.approx(2 * MB / chip.device_dcn_bandwidth)


def test_groups_of_one_device_take_no_time():
    pod = topology("v5e:2x2")
    mesh = pod.mesh({"data": 4, "one": 1})
    cost = NetworkModel(pod, mesh).of(collective("all-gather", groups_along(mesh, ["one"]), MB))
    assert (cost.seconds, cost.sent_bytes, cost.dimensions) == (0, 0, ())


def test_busiest_link_bounds_the_time_of_a_permutation():
    pod = topology("v5e:4x4")
    mesh = Mesh(np.array(sorted(pod.devices, key=lambda d: d.coords), dtype=object), ("all",))
    link = pod.generation.ici_bandwidth
    step = SourceTargetPairs(tuple((4 * x + y, 4 * x + y + 1) for x in range(4) for y in range(3)))
    assert (
        NetworkModel(pod, mesh).of(collective("collective-permute", step, MB)).seconds == MB / link
    )
    # Around a line, the last transfer goes all the way back, and no other goes that way.
    round_ = SourceTargetPairs(
        tuple((4 * x + y, 4 * x + (y + 1) % 4) for x in range(4) for y in range(4))
    )
    assert (
        NetworkModel(pod, mesh).of(collective("collective-permute", round_, MB)).seconds
        == MB / link
    )
    # Every device sends across the line: two transfers meet on the link in the middle.
    across = SourceTargetPairs(
        tuple((4 * x + y, 4 * x + (y + 2) % 4) for x in range(4) for y in range(4))
    )
    cost = NetworkModel(pod, mesh).of(collective("collective-permute", across, MB))
    assert cost.seconds == 2 * MB / link
    assert cost.sent_bytes == MB


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(16)))
def test_permutation_time_is_at_least_that_of_its_hops(order):
    pod = topology("v5e:4x4")
    mesh = Mesh(np.array(pod.devices, dtype=object), ("all",))
    pairs = SourceTargetPairs(tuple(enumerate(order)))
    cost = NetworkModel(pod, mesh).of(collective("collective-permute", pairs, MB))
    places = [device.coords for device in pod.devices]
    hops = sum(
        sum(abs(a - b) for a, b in zip(places[source], places[target], strict=True))
        for source, target in pairs.pairs
    )
    links = 2 * (3 * 4 + 3 * 4)
    assert cost.seconds >= hops / links * MB / pod.generation.ici_bandwidth * 0.999
    assert cost.sent_bytes == pytest.approx(MB * sum(a != b for a, b in pairs.pairs) / 16)


def test_opposite_shifts_of_a_ring_use_opposite_link_directions():
    pod = topology("v5p:4x4x4")
    mesh = pod.mesh({"rest": 16, "model": 4})
    rows = np.arange(64).reshape(16, 4)
    shifts = [
        tuple(zip(rows.ravel().tolist(), np.roll(rows, by, 1).ravel().tolist(), strict=True))
        for by in (1, -1)
    ]
    forth, back = (
        NetworkModel(pod, mesh).of(collective("collective-permute", SourceTargetPairs(pairs), MB))
        for pairs in shifts
    )
    assert forth.dimensions == back.dimensions
    assert len(forth.links) == len(back.links) == 1
    assert not set(forth.links) & set(back.links)
    ring = NetworkModel(pod, mesh).of(collective("all-gather", groups_along(mesh, ["model"]), MB))
    assert set(ring.links) == {*forth.links, *back.links}


def test_two_dimensional_reductions_use_links_less_than_gathers():
    pod = topology("v6e-256")
    mesh = pod.mesh({"fsdp": 256})
    rates = rates_of(pod.generation)
    groups = groups_along(mesh, ["fsdp"])
    model = NetworkModel(pod, mesh)
    gather, scatter, both = (
        model.of(collective(kind, groups, 606_076_928))
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
    )
    latency = rates.collective_seconds + 16 * rates.hop_seconds
    assert gather.expected_seconds == pytest.approx(gather.seconds / rates.link_share + latency)
    assert scatter.expected_seconds == pytest.approx(
        scatter.seconds / rates.torus_reduction_share + latency
    )
    # The published all-reduce of this size took 5.12 ms.
    assert both.expected_seconds == pytest.approx(5.12e-3, rel=0.02)
