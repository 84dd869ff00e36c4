"""The maths and texts against those of the installed JAX."""

import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.lib import xla_client as xc
from jax._src.sharding_impls import GSPMDSharding, device_replica_id_map

from tests.geometry.oracle import all_specs, assignment_of, grid_id, small_grids
from xlashard.errors import GeometryError
from xlashard.geometry import MeshGrid, Spec, TileAssignment, Tiling, validate_spec

# Nothing is compiled, so no partitioner runs.
pytestmark = pytest.mark.own_partitioner

KINDS = {
    "replicated": xc.OpSharding.Type.REPLICATED,
    "manual": xc.OpSharding.Type.MANUAL,
    "unreduced": xc.OpSharding.Type.UNREDUCED,
}


def jax_sharding(grid, spec, order):
    devices = np.array([jax.devices()[i] for i in order]).reshape(grid.axis_sizes)
    mesh = jax.sharding.Mesh(devices, grid.axis_names)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec.dims))


@pytest.mark.parametrize("grid", small_grids(most=8), ids=grid_id)
def test_text_of_every_spec_equals_jax(grid):
    for ndim in (0, 1, 3):
        for spec in all_specs(grid, ndim):
            sharding = jax_sharding(grid, spec, range(grid.size))
            theirs = sharding._to_xla_hlo_sharding(ndim)
            ours = assignment_of(grid, spec, ndim)
            assert ours.to_text() == str(theirs)
            assert str(xc.HloSharding.from_string(ours.to_text())) == ours.to_text()


@pytest.mark.parametrize("grid", small_grids(most=8, biggest=8), ids=grid_id)
def test_indices_and_replica_ids_of_any_spec_and_device_order(grid):
    rng = random.Random(grid_id(grid))
    specs = list(all_specs(grid, 3))
    for spec in rng.sample(specs, min(len(specs), 12)):
        order = rng.sample(range(8), grid.size)
        sharding = jax_sharding(grid, spec, order)
        tiling = Tiling.from_spec(grid, spec, 3)
        shape = tuple(count * rng.randint(1, 3) for count in tiling.counts)
        theirs = sharding.devices_indices_map(shape)
        assert [d.id for d in theirs] == order
        assert tiling.indices(shape) == list(theirs.values())
        assert tiling.shard_shape(shape) == sharding.shard_shape(shape)
        assert tiling.is_replicated == sharding.is_fully_replicated
        replicas = device_replica_id_map(sharding, shape)
        assert tiling.replica_ids().tolist() == list(replicas.values())
        assert Tiling.from_indices(shape, list(theirs.values())) == tiling
        for other in rng.sample(specs, min(len(specs), 6)):
            same = sharding.is_equivalent_to(jax_sharding(grid, other, order), 3)
            assert tiling.same_tiles(Tiling.from_spec(grid, other, 3)) == same


def test_empty_dimensions_have_jaxs_indices():
    grid = MeshGrid(("x", "y"), (2, 4))
    for spec in all_specs(grid, 2):
        theirs = jax_sharding(grid, spec, range(8)).devices_indices_map((0, 8))
        assert Tiling.from_spec(grid, spec, 2).indices((0, 8)) == list(theirs.values())


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_shapes_are_refused_exactly_as_by_jax(data):
    grid = data.draw(st.sampled_from(small_grids(most=8)))
    spec = data.draw(st.sampled_from(list(all_specs(grid, 2))))
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    sharding = jax_sharding(grid, spec, range(grid.size))
    try:
        # With the trailing `()` gone, as JAX counts every entry as a dimension.
        jax_sharding(grid, Spec(spec.dims), range(grid.size)).check_compatible_aval(shape)
        theirs = sharding.shard_shape(shape)
    except ValueError:
        theirs = None
    try:
        validate_spec(spec, grid, shape)
        ours = Tiling.from_spec(grid, spec, len(shape)).shard_shape(shape)
    except GeometryError:
        ours = None
    assert ours == theirs


@st.composite
def any_tiles(draw):
    """Draw tile dims with sub-groups, and an iota, for arrays of rank 1 and up."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    perm = tuple(draw(st.permutations(range(len(sizes)))))
    dims, left = [], int(np.prod(sizes))
    for _ in range(draw(st.integers(0, 4))):
        dims.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= dims[-1]
    dims.append(left)
    kinds = draw(st.lists(st.sampled_from(list(KINDS)), max_size=len(dims) - 1))
    return tuple(dims), sizes, perm, tuple(kinds)


def hlo_proto(dims, kinds):
    proto = xc.OpSharding()
    proto.type = xc.OpSharding.Type.OTHER
    proto.tile_assignment_dimensions = list(dims)
    proto.last_tile_dims = [KINDS[kind] for kind in kinds]
    return proto


@pytest.mark.slow
@settings(max_examples=400)
@given(any_tiles())
def test_text_of_iotas_with_subgroups_equals_xla(tiles):
    dims, sizes, perm, kinds = tiles
    tile = xc.HloSharding.iota_tile(dims, sizes, perm, [KINDS[kind] for kind in kinds])
    # XLA names a lone sub-group by its kind alone only when it parses its own text.
    written, read = str(tile), str(xc.HloSharding.from_string(str(tile)))
    ours = TileAssignment.iota(dims, sizes, perm, kinds)
    assert ours.to_text() == (written if "devices" in read else read)
    assert TileAssignment.parse_text(written) == ours


@pytest.mark.slow
@settings(max_examples=400)
@given(any_tiles(), st.data())
def test_text_of_lists_with_subgroups_equals_xla(tiles, data):
    dims, _, _, kinds = tiles
    devices = data.draw(st.permutations(range(int(np.prod(dims)))))
    proto = hlo_proto(dims, kinds)
    proto.tile_assignment_devices = devices
    theirs = xc.HloSharding.from_string(str(xc.HloSharding.from_proto(proto)))
    ours = TileAssignment.listed(dims, devices, kinds)
    if len(devices) == 1:  # XLA calls every such list replicated, a manual one too
        assert str(theirs) == "{replicated}"
        return
    assert ours.to_text() == str(theirs)
    assert TileAssignment.parse_text(str(theirs)) == ours


def test_text_of_tuples_and_special_kinds_equals_xla():
    grid = MeshGrid(("x", "y"), (2, 4))
    elements = [
        assignment_of(grid, Spec((("y",),)), 2),
        TileAssignment.maximal(3),
        TileAssignment.replicated(),
        TileAssignment.manual(),
        TileAssignment.unreduced(),
        TileAssignment.unknown(),
    ]
    whole = TileAssignment.tuple_of(elements)
    assert str(xc.HloSharding.from_string(str(whole))) == str(whole)
    proto = xc.HloSharding.from_string(str(whole)).to_proto()
    theirs = [str(xc.HloSharding.from_proto(p)) for p in proto.tuple_shardings]
    assert theirs == [str(element) for element in elements]


@pytest.mark.devices(8)
@pytest.mark.slow
@settings(max_examples=100)
@given(st.data())
def test_permuted_lists_have_jaxs_indices_and_replica_ids(data):
    dims = data.draw(st.sampled_from([(2, 4, 1), (2, 2, 2), (1, 2, 4), (8, 1, 1), (1, 4, 2)]))
    devices = data.draw(st.permutations(range(8)))
    proto = hlo_proto(dims, ["replicated"])
    proto.tile_assignment_devices = devices
    sharding = GSPMDSharding(jax.devices(), proto)
    shape = (dims[0] * 3, dims[1])
    tiling = Tiling.from_tile_assignment(TileAssignment.listed(dims, devices, ["replicated"]), 2)
    assert tiling.indices(shape) == list(sharding.devices_indices_map(shape).values())
    assert tiling.replica_ids().tolist() == list(device_replica_id_map(sharding, shape).values())
