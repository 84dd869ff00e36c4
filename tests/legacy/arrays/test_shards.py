"""Index and replica id of each device of a mesh, by the functions of `global_device_array`."""

import dataclasses
from collections.abc import Mapping

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given

from benchmarks._gda_loops import indices_in_loops, indices_replica_ids_in_loops
from tests.legacy.removed import global_device_array as era
from tests.legacy.removed import maps
from tests.message_patterns import naming
from xlashard import Mesh
from xlashard.errors import (
    ArgumentError,
    DivisibilityError,
    DuplicateAxisError,
    RankError,
    SpecEntryError,
    UnknownAxisError,
)
from xlashard.legacy.arrays.shards import (
    Shard,
    get_shard_indices,
    get_shard_indices_replica_ids,
    get_shard_shape,
)
from xlashard.legacy.shardings.partition_spec import PartitionSpec as P

AXES = ("x", "y", "z")


@dataclasses.dataclass(eq=False)
class FakeDevice:
    id: int
    process_index: int = 0
    platform: str = "tpu"


@dataclasses.dataclass
class Unhashable(FakeDevice):
    """Device that compares by value, and so has no hash, as tests of the era wrote them."""


def fake_mesh(*sizes, kind=FakeDevice, mesh=Mesh):
    devices = np.array([kind(n) for n in range(int(np.prod(sizes)))], dtype=object)
    return mesh(devices.reshape(sizes), AXES[: len(sizes)])


def bounds(index, shape):
    return [cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True)]


def test_unsharded_dimension_is_indexed_by_a_full_slice(mesh):
    by_device = get_shard_indices((8, 2), mesh, P("x"))
    assert list(by_device) == list(mesh.devices.flat)
    assert by_device[mesh.devices[0, 0]] == (slice(0, 2, None), slice(None))
    assert repr(by_device[mesh.devices[3, 1]]) == "(slice(6, 8, None), slice(None, None, None))"
    both = get_shard_indices((8, 2), mesh, P("x", "y"))
    assert both[mesh.devices[1, 1]] == (slice(2, 4), slice(1, 2))
    assert set(get_shard_indices((8, 2), mesh, P()).values()) == {(slice(None), slice(None))}
    assert set(get_shard_indices((), mesh, P()).values()) == {()}


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    names = draw(st.permutations(AXES[: len(sizes)]))
    used = names[: draw(st.integers(0, len(names)))]
    ndim = draw(st.integers(1, 3))
    dims = [[] for _ in range(ndim)]
    for name in used:
        dims[draw(st.integers(0, ndim - 1))].append(name)
    entries = [draw(st.sampled_from([None, ()])) if not d else tuple(d) for d in dims]
    entries = [e[0] if e and len(e) == 1 and draw(st.booleans()) else e for e in entries]
    counts = [int(np.prod([sizes[AXES.index(n)] for n in d], dtype=int)) for d in dims]
    shape = tuple(count * draw(st.integers(1, 3)) for count in counts)
    return sizes, tuple(entries), shape


@pytest.mark.slow
@given(cases())
def test_shard_indices_equal_loops_over_the_mesh(case):
    sizes, entries, shape = case
    mesh = fake_mesh(*sizes)
    plain = tuple(entry or None for entry in entries)
    expected = indices_in_loops(shape, mesh, plain)
    by_device = get_shard_indices(shape, mesh, P(*entries))
    assert [bounds(i, shape) for i in by_device.values()] == [bounds(i, shape) for i in expected]
    both = get_shard_indices_replica_ids(shape, mesh, entries)
    assert both == {d: (by_device[d], both[d][1]) for d in mesh.devices.flat}
    looped = indices_replica_ids_in_loops(shape, mesh, plain)
    assert [copy for _, copy in both.values()] == [copy for _, copy in looped.values()]
    part = get_shard_shape(shape, mesh, list(entries))
    for index in by_device.values():
        assert tuple(np.empty(shape, bool)[index].shape) == part


def test_every_form_of_a_spec_is_equivalent(mesh):
    kinds = [P("x"), ("x",), ["x"], ("x", None), (("x",),), jax.sharding.PartitionSpec("x")]
    for kind in kinds:
        assert get_shard_shape((8, 2), mesh, kind) == (2, 2)
        assert get_shard_indices((8, 2), mesh, kind) == get_shard_indices((8, 2), mesh, P("x"))
    assert get_shard_shape([8, 2], mesh, None) == (8, 2)


def test_returned_mappings_are_cached_and_immutable(mesh):
    for ask in (get_shard_indices, get_shard_indices_replica_ids):
        first = ask((8, 2), mesh, P("x"))
        assert first is ask((8, 2), mesh, P("x")) and isinstance(first, Mapping)
        with pytest.raises(TypeError, match="item assignment"):
            first[mesh.devices[0, 0]] = None
        own = dict(first)
        own.clear()
        assert len(first) == 8 and list(first.items()) == [(d, first[d]) for d in first]
        assert {**first} == first == first.copy() and mesh.devices[0, 0] in first
    uncached = era._get_shard_indices_replica_ids_uncached((8, 2), mesh, P("x"))
    assert uncached == get_shard_indices_replica_ids((8, 2), mesh, P("x"))


def test_shard_indices_of_a_mesh_of_fake_devices():
    pod = fake_mesh(64, 32)
    by_device = get_shard_indices_replica_ids((2048, 2048), pod, P(("y", "x")))
    assert len(by_device) == 2048
    assert by_device[pod.devices[63, 31]] == ((slice(2047, 2048), slice(None)), 0)
    assert get_shard_indices_replica_ids((2048, 2048), pod, P(None, "y"))[pod.devices[63, 31]] == (
        (slice(None), slice(1984, 2048)),
        63,
    )


@pytest.mark.parametrize("mesh_type", [maps.Mesh, None])
def test_fake_devices_without_a_hash_are_accepted(mesh_type):
    if mesh_type is None:  # any object with devices and axis names
        mesh_type = dataclasses.make_dataclass("Bare", ["devices", "axis_names"], eq=False)
    mesh = fake_mesh(4, 2, kind=Unhashable, mesh=mesh_type)
    assert get_shard_shape((8, 2), mesh, P("x")) == (2, 2)
    by_device = get_shard_indices((8, 2), mesh, P("x"))
    assert by_device[mesh.devices[1, 0]] == (slice(2, 4), slice(None)) and len(by_device) == 8
    both = get_shard_indices_replica_ids((8, 2), mesh, P("x"))
    assert [both[d][1] for d in both] == [0, 1] * 4
    with pytest.raises(KeyError):
        by_device[Unhashable(77)]


def test_indices_of_an_abstract_mesh_are_keyed_by_position():
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
    assert get_shard_indices((8,), mesh, P("y"))[5] == (slice(4, 8),)
    assert get_shard_indices_replica_ids((8,), mesh, P("y"))[5] == ((slice(4, 8),), 2)


def test_invalid_shapes_and_specs_are_refused(mesh):
    for ask in (get_shard_indices, get_shard_indices_replica_ids, get_shard_shape):
        with pytest.raises(DivisibilityError, match=r"size 6.*4 tiles \('x'=4\)"):
            ask((6, 2), mesh, P("x"))
        with pytest.raises(UnknownAxisError, match="'w'"):
            ask((8, 2), mesh, P("w"))
        with pytest.raises(DuplicateAxisError, match="once"):
            ask((8, 2), mesh, P("x", "x"))
        with pytest.raises(RankError, match=naming("2 dimensions", "P('x')")):
            ask((8,), mesh, P("x", "y"))
        with pytest.raises(SpecEntryError, match=r"\('x',\)"):
            ask((8, 2), mesh, "x")
        with pytest.raises(
            ArgumentError, match=naming("mesh_axes", "PartitionSpec", "=3", "P('x')")
        ):
            ask((8, 2), mesh, 3)
        with pytest.raises(ArgumentError, match=naming("global_mesh", "Mesh", "list")):
            ask((8, 2), jax.devices(), P("x"))


def test_shards_compare_by_device_index_and_replica():
    device = jax.devices()[0]
    shard = Shard(device, (slice(0, 2),), 0)
    assert shard.data is None and shard == Shard(device, (slice(0, 2),), 0, np.ones(2))
    assert shard != Shard(device, (slice(0, 2),), 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.replica_id = 1  # pyright: ignore
    assert dataclasses.replace(shard, data=1).data == 1
    assert [f.name for f in dataclasses.fields(Shard)] == ["device", "index", "replica_id", "data"]


def test_type_aliases_of_global_device_array():
    assert isinstance(jax.devices()[0], era.Device) and era.MeshAxes is P
    assert isinstance(np.ones(3), era.ArrayLike) and isinstance(jax.numpy.ones(3), era.ArrayLike)
    assert era.Shape == tuple[int, ...] and era.Index == tuple[slice, ...]
