"""Each chip is drawn at the mesh position of its device."""

from dataclasses import replace

import pytest

from tests.predict.preflight.examples import HUGE, SMALL, TWO_SLICES, V5P
from tests.without_jax import HAS_JAX
from xlashard.predict.preflight.render.torus_drawing import (
    MOST_CHIPS,
    DevicePositions,
    colour,
    device_positions,
)
from xlashard.predict.preflight.report.preflight_model import AxisReport
from xlashard.tpu import topology

if HAS_JAX:
    from xlashard.predict.preflight.report.build import describe_mesh, describe_topology


@pytest.mark.needs_jax
@pytest.mark.parametrize(
    ("name", "slices", "axes"),
    [
        ("v5p:4x4x4", 1, {"data": 2, "fsdp": 8, "tensor": 4}),
        ("v5p:4x4x8", 1, {"data": 16, "model": 8}),
        ("v6e:8x8", 1, {"a": 4, "b": 4, "c": 2, "d": 2}),
        ("tpu7x:2x2x2", 1, {"data": 4, "model": 4}),
        ("v5e:4x4", 2, {"slice": 2, "fsdp": 8, "tensor": 2}),
        ("v5e:4x4", 2, {"data": 4, "model": 8}),
    ],
)
def test_drawn_positions_equal_mesh_positions_of_devices(
    name: str, slices: int, axes: dict[str, int]
) -> None:
    pod = topology(name, slices)
    mesh = pod.mesh(axes)
    layout = device_positions(describe_topology(pod), describe_mesh(pod, mesh))
    assert [axis.name for axis in layout.axes] == list(axes)
    for index in range(mesh.size):
        device = mesh.devices.flat[index]
        left, place = index, {}
        for axis in reversed(axes):
            left, place[axis] = divmod(left, axes[axis])
        slice_ = device.slice_index if slices > 1 else 0
        core = device.core_on_chip if layout.cores > 1 else 0
        at = tuple(device.coords)
        found = {axis.name: layout.position(axis, at, core, slice_) for axis in layout.axes}
        assert found == place


@pytest.mark.needs_jax
@pytest.mark.parametrize("name", ["v5e:4x4", "v5e:2x4", "v5p:4x4x4", "v6e:8x8", "v4:2x2x4"])
def test_drawn_hosts_match_libtpu(name: str) -> None:
    pod = topology(name)
    host = device_positions(describe_topology(pod), ()).host
    assert host is not None
    chips = {(tuple(d.coords), d.process_index) for d in pod.devices}
    by_host: dict[int, set[tuple[int, ...]]] = {}
    for at, number in chips:
        by_host.setdefault(number, set()).add((at[0] // host[0], at[1] // host[1], at[2]))
    assert all(len(places) == 1 for places in by_host.values())
    assert len({next(iter(places)) for places in by_host.values()}) == len(by_host)


def test_axis_without_a_torus_dimension_is_not_drawn() -> None:
    assert [a.name for a in device_positions(SMALL.topology, SMALL.mesh).axes] == ["y"]


def test_axis_sharing_a_dimension_is_drawn_only_with_known_strides() -> None:
    shared = AxisReport("a", 2, (("x", 2),), ring=False)
    assert device_positions(V5P, (shared,)).axes == ()
    (known,) = device_positions(V5P, (replace(shared, strides=(2,)),)).axes
    assert [DevicePositions(V5P, (known,)).position(known, (x, 0, 0), 0, 0) for x in range(4)] == [
        0,
        0,
        1,
        1,
    ]


def drawn(layout: DevicePositions) -> list[list[tuple[int, int] | None]]:
    return [[p and (p.slice, p.z) for p in row] for row in layout.planes()]


def test_all_planes_of_few_slices_are_drawn() -> None:
    layout = device_positions(TWO_SLICES.topology, TWO_SLICES.mesh)
    assert drawn(layout) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_only_first_and_last_of_too_many_planes_are_drawn() -> None:
    assert drawn(device_positions(HUGE.topology, HUGE.mesh)) == [[(0, 0), (0, 1), None, (0, 27)]]


def test_only_first_and_last_of_too_many_slices_are_drawn() -> None:
    many = replace(SMALL.topology, slices=256, chips=4096, devices=4096, hosts=1024)
    rows = drawn(device_positions(many, ()))
    assert rows[0] == [(0, 0)]
    assert rows[-1] == [(255, 0)]
    assert rows[-2] == []
    assert sum(map(bool, rows)) * 16 == MOST_CHIPS


def test_positions_have_distinct_colours() -> None:
    for size in (2, 8, 16, 28):
        assert len({colour(place, size) for place in range(size)}) == size
