"""Bandwidth along mesh axes, against figures worked out by hand."""

import pytest

from xlashard.tpu import axis_links, topology


def speed(name: str, axes: dict[str, int], along: list[str], slices: int = 1) -> float:
    found = topology(name, slices)
    return axis_links(found, found.mesh(axes), along).bytes_per_second / 1e9


def test_ring_bandwidth_uses_both_directions() -> None:
    assert speed("v5p:4x4x8", {"data": 8, "model": 16}, ["data"]) == 2 * 100
    assert speed("v5p:4x4x8", {"data": 8, "model": 16}, ["model"]) == 4 * 100
    assert speed("v5p:4x4x8", {"data": 8, "model": 16}, ["data", "model"]) == 6 * 100
    assert speed("v5e:16x16", {"data": 16, "model": 16}, ["model"]) == 2 * 50


def test_open_axis_is_limited_to_one_link_per_dimension() -> None:
    assert speed("v5e:8x16", {"data": 16, "model": 8}, ["model"]) == 50
    assert speed("v5e:4x4", {"data": 16}, ["data"]) == 2 * 50
    assert speed("v5p:2x2x4", {"data": 4, "model": 4}, ["model"]) == 2 * 100


def test_interleaved_groups_share_links() -> None:
    # Pairs, and devices two steps apart along the same line: two groups on each of its links.
    axes = {"data": 4, "fsdp": 2, "model": 2}
    assert speed("v5e:4x4", axes, ["model"]) == 50
    assert speed("v5e:4x4", axes, ["fsdp"]) == 50 / 2
    assert speed("v5e:4x4", axes, ["data"]) == 50
    # Half a ring, and every other position of it: two rings that share its links.
    axes = {"data": 16, "fsdp": 8, "model": 2}
    assert speed("v5e:16x16", axes, ["fsdp"]) == 2 * 50 / 2


def test_devices_of_a_chip_share_its_links() -> None:
    axes = {"data": 64, "model": 2}
    assert speed("tpu7x:4x4x4", axes, ["model"]) == 600
    # Each device of a chip has a separate group, and half of the links.
    assert speed("tpu7x:4x4x4", axes, ["data"]) == 6 * 100 / 2
    assert speed("tpu7x:4x4x4", axes, ["data", "model"]) == 600


def test_axes_across_slices_use_dcn() -> None:
    found = topology("v5e:4x4", 2)
    mesh = found.mesh({"replica": 2, "data": 4, "model": 4})
    links = axis_links(found, mesh, ["replica"])
    assert (links.network, links.links) == ("dcn", 0)
    assert links.bytes_per_second == found.generation.device_dcn_bandwidth == 12.5e9 / 4
    # The four devices of each slice receive the data of the other slice.
    both = axis_links(found, mesh, ["replica", "model"])
    assert both.network == "dcn"
    assert both.bytes_per_second == pytest.approx(4 * 12.5e9 / 4)
    assert axis_links(found, mesh, ["model"]).network == "ici"
    assert axis_links(found, mesh, ["data", "model"]).size == 16


def test_axis_with_gaps_is_not_a_ring() -> None:
    found = topology("v5p:4x4x8")
    mesh = found.mesh({"data": 2, "fsdp": 4, "model": 16})
    assert axis_links(found, mesh, ["model"]).ring
    assert axis_links(found, mesh, ["data", "fsdp", "model"]).ring
    assert not axis_links(found, mesh, ["data"]).ring, "the ring has gaps"


def test_slices_and_single_devices_are_not_rings() -> None:
    found = topology("tpu7x:4x4x4", 2)
    mesh = found.mesh({"replica": 2, "one": 1, "data": 64, "model": 2})
    rings = {axis: axis_links(found, mesh, [axis]).ring for axis in mesh.axis_names}
    assert rings == {"replica": False, "one": False, "data": True, "model": True}
    assert axis_links(found, mesh, ["one"]).bytes_per_second == float("inf")
