"""Meshes on a torus: positions of their axes, and errors."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.experimental.topologies import get_topology_desc

from tests.message_patterns import naming
from xlashard import Mesh
from xlashard.errors import TopologyError
from xlashard.predict.preflight.mesh_mapping import resolve_mesh
from xlashard.predict.preflight.render.report_text import mesh_text
from xlashard.predict.preflight.report.build import describe_mesh
from xlashard.tpu import Topology, axis_links, topology


def along(name: str, axes: dict[str, int], slices: int = 1) -> dict[str, tuple[str, ...]]:
    """Return the dimensions that each axis lies along."""
    found = topology(name, slices)
    mesh = found.mesh(axes)
    return {
        axis: tuple(f"{p.dimension}{p.size}" for p in axis_links(found, mesh, [axis]).parts)
        for axis in mesh.axis_names
    }


def test_axes_are_assigned_to_rings() -> None:
    assert along("v5p:4x4x8", {"data": 8, "model": 16}) == {
        "data": ("z8",),
        "model": ("x4", "y4"),
    }
    assert along("v5e:16x16", {"data": 16, "model": 16}) == {"data": ("x16",), "model": ("y16",)}
    assert along("v5p:16x16x24", {"data": 16, "fsdp": 24, "model": 16}) == {
        "data": ("x16",),
        "fsdp": ("z24",),
        "model": ("y16",),
    }


def test_slices_are_major_and_cores_of_a_chip_minor() -> None:
    assert along("tpu7x:4x4x4", {"data": 4, "fsdp": 8, "model": 8}, 2) == {
        "data": ("slice2", "x2"),
        "fsdp": ("x2", "y4"),
        "model": ("z4", "core2"),
    }
    found = topology("tpu7x:4x4x4", 2)
    devices = found.mesh({"data": 4, "fsdp": 8, "model": 8}).devices
    assert [d.core_on_chip for d in devices[0, 0]] == [0, 1] * 4
    assert [d.slice_index for d in devices[:, 0, 0]] == [0, 0, 1, 1]


def test_slices_are_assigned_to_the_axes_with_the_least_traffic() -> None:
    assert along("v5e-16", {"replica": 2, "model": 16}, 2)["replica"] == ("slice2",)
    # 3 slices don't divide the first axis, and do the second.
    assert along("v5e-16", {"replica": 2, "data": 6, "model": 4}, 3)["data"][0] == "slice3"
    found = topology("v5e-16", 2)
    mesh = found.mesh({"replica": 2, "model": 16}, order=["replica", "model"])
    assert axis_links(found, mesh, ["model"]).parts[0].dimension == "slice"


def test_order_determines_the_assignment_of_axes() -> None:
    found = topology("v5e:16x8".replace("16x8", "8x16"))
    axes = {"a": 16, "b": 8}
    first, last = found.mesh(axes, order=("a", "b")), found.mesh(axes)
    assert first.axis_names == last.axis_names == ("a", "b")
    assert axis_links(found, first, ["a"]).links == 2.0
    with pytest.raises(TopologyError, match=naming("order=['a']", "order=['b', 'a']")):
        found.mesh(axes, order=["a"])
    with pytest.raises(TopologyError, match="order='ab'"):
        found.mesh(axes, order="ab")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["v5p:4x4x4", "v5e:4x8", "tpu7x:2x2x4", "v3:4x4", "v4:2x2x2"]),
    st.sampled_from([1, 2, 3]),
    st.data(),
)
def test_every_valid_mesh_has_each_device_once(name, slices, data) -> None:
    found = topology(name, 1 if name.startswith("v3") else slices)
    left, sizes = found.num_devices, []
    while left > 1:
        sizes.append(data.draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0])))
        left //= sizes[-1]
    mesh = found.mesh({f"a{i}": size for i, size in enumerate(sizes)})
    assert mesh.devices.shape == tuple(sizes)
    assert {d.id for d in mesh.devices.flat} == {d.id for d in found.devices}
    # Every axis is found again where it was laid.
    for axis in mesh.axis_names:
        assert math.prod(p.size for p in axis_links(found, mesh, [axis]).parts) == mesh.shape[axis]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("v5p:4x4x8", (8, 16)),
        ("v5p:4x4x4", (4, 4, 4)),
        ("v5e:16x16", (16, 16)),
        ("v5p:4x8x8", (8, 32)),
        ("v5p:16x16x24", (16, 24, 16)),
        ("v5e:4x8", (8, 4)),
    ],
)
def test_mesh_is_no_slower_than_create_device_mesh(name: str, sizes: tuple[int, ...]) -> None:
    found = topology(name)
    names = tuple(f"a{i}" for i in range(len(sizes)))
    ours = found.mesh(dict(zip(names, sizes, strict=True)))
    theirs = Mesh(mesh_utils.create_device_mesh(sizes, found.devices), names)
    for axis in reversed(names):
        mine, other = (axis_links(found, mesh, [axis]) for mesh in (ours, theirs))
        assert mine.bytes_per_second >= other.bytes_per_second


def test_axis_size_minus_one_is_inferred() -> None:
    found = topology("v5p-128")
    assert dict(found.mesh({"data": -1, "model": 4}).shape) == {"data": 16, "model": 4}
    assert dict(found.mesh({"data": -1}).shape) == {"data": 64}
    assert dict(found.mesh({"data": 64, "model": -1}).shape) == {"data": 64, "model": 1}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3}, ["data=3 has 3 devices", "v5e:4x4 has 16", "mesh({'data': 16})"]),
        ({"data": 8, "model": 4}, ["has 32 devices", "mesh({'data': 4, 'model': 4})"]),
        ({"a": 12, "b": 20}, ["240 devices", "divisors: 1, 2, 4, 8, 16", "mesh({'a': 16})"]),
        ({"a": -1, "b": 3}, ["3 doesn't divide the 16", "mesh({'a': -1, 'b': 2})"]),
        ({"a": -1, "b": -1}, ["'a' and 'b' are both -1"]),
        ({"a": 0}, ["'a' has the invalid size 0"]),
        ({"a": 2.0, "b": 8}, ["'a' has the invalid size 2.0"]),
        ({"a": True}, ["'a' has the invalid size True"]),
        ({}, ["axes={}", "mesh({'data': 16})"]),
        ([("a", 16)], ["axes=[('a', 16)]"]),
    ],
)
def test_invalid_axis_sizes_are_refused_with_a_valid_mesh(axes, message: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        topology("v5e-16").mesh(axes)
    for part in message:
        assert part in str(caught.value)


def test_error_of_a_wrong_mesh_counts_all_slices() -> None:
    with pytest.raises(TopologyError, match="2 slices of v5e:4x4 has 32: mesh"):
        topology("v5e-16", 2).mesh({"data": 16})


def place(device) -> tuple[int, ...]:
    return (getattr(device, "slice_index", 0), *device.coords, device.core_on_chip)


def dimensions_along(mesh: Mesh, number: int) -> tuple[tuple[str, int], ...]:
    """Return the box that each line of devices along an axis fills, device by device."""
    boxes = set()
    rows = [range(size) for size in mesh.devices.shape]
    for index in itertools.product(*(r if i != number else [0] for i, r in enumerate(rows))):
        line = [
            place(mesh.devices[(*index[:number], at, *index[number + 1 :])]) for at in rows[number]
        ]
        values = [sorted({coordinates[d] for coordinates in line}) for d in range(5)]
        is_box = set(itertools.product(*values)) == set(line)
        boxes.add(tuple(map(len, values)) if is_box else None)
    (box,) = boxes if len(boxes) == 1 else (None,)
    names = ("slice", "x", "y", "z", "core")
    sizes = zip(names, box or (), strict=False)
    return tuple((name, size) for name, size in sizes if size > 1)


def shuffled(found: Topology, sizes: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Return the devices in one of the orders that programs give them."""
    devices = np.array(found.devices, dtype=object)
    match random.integers(5):
        case 0:
            return random.permutation(devices).reshape(sizes)
        case 1 if found.slices == 1 and found.chip.devices_per_chip == 1:
            return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        case 2:
            return devices.reshape(sizes)
    grid = found.mesh({f"a{i}": size for i, size in enumerate(sizes)}).devices.copy()
    axis = random.integers(len(sizes))
    if random.integers(2):
        # Every other row the other way around, as a snake.
        rows = np.moveaxis(grid, axis, -1).reshape(-1, sizes[axis])
        rows[1::2] = rows[1::2, ::-1]
        return np.moveaxis(rows.reshape(np.moveaxis(grid, axis, -1).shape), -1, axis)
    return np.take(grid, random.permutation(sizes[axis]), axis=axis)


@pytest.mark.parametrize("name", ["v5e:2x4", "v6e:4x4", "v5p:2x2x4", "tpu7x:2x2x2", "v5e:2x2*2"])
def test_axis_in_any_order_lies_along_the_box_of_its_lines(name: str) -> None:
    name, _, slices = name.partition("*")
    found = topology(name, int(slices or 1))
    random = np.random.default_rng(0)
    for _ in range(60):
        left, sizes = found.num_devices, []
        while left > 1:
            sizes.append(int(random.choice([n for n in range(2, left + 1) if left % n == 0])))
            left //= sizes[-1]
        grid = shuffled(found, tuple(sizes), random)
        mesh = Mesh(grid, tuple(f"a{i}" for i in range(len(sizes))))
        axes = describe_mesh(found, mesh)
        assert [axis.along for axis in axes] == [
            dimensions_along(mesh, number) for number in range(len(sizes))
        ]
        for axis in axes:
            assert (f"{axis.name} across several" in mesh_text(axes)) == (not axis.along)


class TestMeshesOfOthers:
    def test_mesh_of_hosts_by_chips_has_a_ring_within_hosts(self) -> None:
        found = topology("v5e:4x4")
        mesh = Mesh(np.array(found.devices).reshape(4, 4), ("hosts", "chips"))
        hosts, chips = describe_mesh(found, mesh)
        assert chips.along == hosts.along == (("x", 2), ("y", 2))
        assert (chips.ring, hosts.ring) == (True, False)

    def test_axes_of_shuffled_devices_have_no_torus_dimension(self) -> None:
        found = topology("v5e:4x4")
        order = np.random.default_rng(0).permutation(16)
        mesh = Mesh(np.array(found.devices)[order].reshape(4, 4), ("a", "b"))
        for axis in describe_mesh(found, mesh):
            assert axis.along == ()
            assert not axis.ring
        links = axis_links(found, mesh, ["a"])
        assert (links.network, links.bytes_per_second) == ("ici", 50e9)

    def test_mesh_of_a_row_of_devices_is_a_ring(self) -> None:
        found = topology("v5p:4x4x4")
        row = [d for d in found.devices if d.coords[1:] == [0, 0]]
        (axis,) = describe_mesh(found, Mesh(np.array(row), ("x",)))
        assert (axis.along, axis.ring) == ((("x", 4),), True)

    def test_axis_of_size_one_has_no_torus_dimension(self) -> None:
        found = topology("v5e:4x4")
        (one, _) = describe_mesh(found, found.mesh({"a": 1, "b": 16}))
        assert (one.size, one.along) == (1, ())

    def test_neighbours_around_the_end_of_a_ring_are_neighbours(self) -> None:
        found = topology("v5p:4x4x4")
        ends = [d for d in found.devices if d.coords[1:] == [0, 0] and d.coords[0] in (0, 3)]
        (axis,) = describe_mesh(found, Mesh(np.array(ends), ("x",)))
        assert (axis.along, axis.ring) == ((("x", 2),), True)

    @pytest.mark.parametrize("slices", [1, 2])
    def test_devices_of_another_client_are_those_at_their_coordinates(self, slices: int) -> None:
        found = topology("v5e:4x4", slices)
        theirs = get_topology_desc(
            platform="tpu", topology_name="v5e:4x4", num_slices=slices
        ).devices
        order = np.random.default_rng(1).permutation(len(theirs))
        chosen = [theirs[i] for i in order]
        ours = found.match_devices(chosen)
        assert ours is not None
        assert set(ours) == set(found.devices)
        assert list(map(place, ours)) == list(map(place, chosen))
        mesh = Mesh(np.array(chosen).reshape(-1, 4), ("a", "b"))
        resolved = resolve_mesh(found, mesh, {})
        assert resolved.devices.flat[:].tolist() == list(ours)
        assert describe_mesh(found, mesh) == describe_mesh(found, resolved)

    def test_devices_of_other_chips_are_not_matched(self) -> None:
        found = topology("v5e:4x4")
        assert found.match_devices(found.devices[:4]) == found.devices[:4]
        assert found.match_devices(jax.devices()) is None
        for other in ("v5e:2x4", "v6e:4x4"):
            assert found.match_devices(topology(other).devices) is None

    def test_mesh_of_a_different_topology_is_refused(self) -> None:
        found = topology("v5e:2x2")
        with pytest.raises(TopologyError, match=naming("v5e:2x2", "topology('v5e:2x2')")):
            describe_mesh(found, topology("v5e:4x4").mesh({"a": 16}))
        with pytest.raises(TopologyError, match="of platform cpu, "):
            axis_links(found, Mesh(np.array(jax.devices()), ("a",)), ["a"])

    def test_unknown_axis_is_refused(self) -> None:
        found = topology("v5e:2x2")
        with pytest.raises(TopologyError, match=r"no axis 'model'; it has \('data',\)"):
            axis_links(found, found.mesh({"data": 4}), ["model"])
