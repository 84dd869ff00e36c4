"""Properties of each class of sharding, and conversions between classes."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.core.sharding.test_classes import ALL, Halves, mesh
from xlashard import (
    GSPMDSharding,
    NamedSharding,
    OpShardingSharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    device_put,
    make_array_from_callback,
    pjit,
    with_sharding_constraint,
)
from xlashard.core.sharding import from_hlo, from_jax
from xlashard.errors import (
    DivisibilityError,
    DuplicateAxisError,
    RankError,
    ShardingError,
    ShardingTextError,
    TilingError,
    UnknownAxisError,
)
from xlashard.geometry import TileAssignment


def test_classes_are_jax_and_xla_compatible_shardings() -> None:
    shardings = (
        NamedSharding(mesh(), P("data")),
        SingleDeviceSharding(jax.devices()[0]),
        GSPMDSharding.get_replicated(jax.devices()),
    )
    for sharding in shardings:
        assert isinstance(sharding, XLACompatibleSharding)
        assert isinstance(sharding, jax.sharding.Sharding)
        assert from_jax(sharding) is sharding
    assert OpShardingSharding is GSPMDSharding


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (P("modle"), UnknownAxisError, "model"),
        (P("data", "data"), DuplicateAxisError, "dimensions 0 and 1"),
        (("data", "model"), ShardingError, r"P\('data', 'model'\)"),
        ("data", ShardingError, r"P\('data'\)"),
    ],
)
def test_error_of_a_wrong_spec_suggests_a_valid_one(
    spec: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        NamedSharding(mesh(), spec)


def test_a_named_sharding_needs_a_mesh() -> None:
    with pytest.raises(ShardingError, match="Mesh\\(devices, axis_names\\)"):
        NamedSharding(jax.devices(), P("data"))  # type: ignore[arg-type]


def test_divisibility_error_names_axes_and_sizes() -> None:
    with pytest.raises(DivisibilityError, match="'data'=4.*size 4 or 8") as caught:
        NamedSharding(mesh(), P("data")).shard_shape((6, 2))
    assert (caught.value.dim, caught.value.size, caught.value.tiles) == (0, 6, 4)


def test_error_of_a_rank_too_low() -> None:
    with pytest.raises(RankError, match=r"2 dimensions.* 1.*P\('data'\)"):
        NamedSharding(mesh(), P("data", "model")).shard_shape((8,))


def test_an_abstract_mesh_has_no_devices() -> None:
    abstract = NamedSharding(mesh().abstract_mesh, P("data"))
    assert abstract.shard_shape((8, 2)) == (2, 2)
    with pytest.raises(ShardingError, match="AbstractMesh"):
        _ = abstract.devices


@pytest.mark.parametrize("of", [NamedSharding, jax.NamedSharding])
def test_an_empty_mesh_has_no_devices(of: Any) -> None:
    nowhere = of(jax.sharding.Mesh(np.empty((), dtype=object), ()), P())
    uses = (
        lambda: device_put(np.ones(3), nowhere),
        lambda: make_array_from_callback((3,), nowhere, lambda index: np.ones(3)[index]),
        lambda: pjit(lambda x: x, in_shardings=nowhere)(np.ones(3)),
        lambda: pjit(lambda x: x, out_shardings=nowhere)(np.ones(3)),
        lambda: with_sharding_constraint(np.ones(3), nowhere),
    )
    for use in uses:
        with pytest.raises(ShardingError, match=r"Mesh\(\).*Mesh\(jax.devices"):
            use()
    assert not nowhere.is_equivalent_to(NamedSharding(mesh(), P()), 1)


@pytest.mark.parametrize(
    ("tiles", "error", "message"),
    [
        ("{devices=[2,2]<=[4]}", ShardingError, "4 devices.* 8:"),
        ("{devices=[8]<=[9]}", TilingError, "hold 9 devices"),
        ("{rubbish}", ShardingTextError, "rubbish"),
        (7, ShardingError, "int"),
    ],
)
@pytest.mark.devices(8)
def test_wrong_tiles_are_refused(tiles: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GSPMDSharding(jax.devices(), tiles)


def test_tiles_may_come_as_protos_texts_or_assignments() -> None:
    text = "{devices=[4,2]<=[8]}"
    one = GSPMDSharding(jax.devices(), text)
    proto = one.jax_sharding()._to_xla_hlo_sharding(2).to_proto()
    for given in (
        proto,
        one.jax_sharding()._to_xla_hlo_sharding(2),
        TileAssignment.parse_text(text),
    ):
        assert GSPMDSharding(jax.devices(), given) == one
    assert one.tile_assignment.to_text() == text


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_equivalence_is_by_tiles_devices_and_memory(ndim: int) -> None:
    named = NamedSharding(mesh(), P("data"))
    text = "{devices=[4" + ",1" * (ndim - 1) + ",2]<=[8] last_tile_dim_replicate}"
    tiles = GSPMDSharding(jax.devices(), text)
    theirs = jax.sharding.NamedSharding(mesh(), P("data", *[None] * (ndim - 1)))
    for a in (named, tiles):
        for b in (named, tiles, theirs):
            assert a.is_equivalent_to(b, ndim)
    other_order = NamedSharding(mesh(reverse=True), P("data"))
    assert not named.is_equivalent_to(other_order, ndim)
    assert not named.is_equivalent_to(NamedSharding(mesh(), P()), ndim)
    assert not named.is_equivalent_to(SingleDeviceSharding(jax.devices()[0]), ndim)
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    if len(kinds) > 1:
        assert not named.is_equivalent_to(named.with_memory_kind(kinds[-1]), ndim)


def test_replicated_meshes_in_any_order_are_equivalent() -> None:
    one, other = NamedSharding(mesh(), P()), NamedSharding(mesh(reverse=True), P())
    assert one.is_equivalent_to(other, 2)


def test_specs_written_differently_hash_and_compare_as_jaxs_do() -> None:
    short, long = NamedSharding(mesh(), P("data")), NamedSharding(mesh(), P("data", None))
    assert short.is_equivalent_to(long, 2)
    assert short.normal_spec == long.normal_spec
    assert short == short.jax_sharding()
    assert hash(short) == hash(short.jax_sharding())


def test_from_jax_returns_classes_of_this_package() -> None:
    theirs = jax.sharding.NamedSharding(mesh(), P("data"))
    ours = from_jax(theirs)
    assert type(ours) is NamedSharding
    assert ours == theirs
    assert from_jax(theirs) is ours
    single = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    assert from_jax(single) == SingleDeviceSharding(jax.devices()[2])


def test_hlo_shardings_get_mesh_axis_names_if_they_fit() -> None:
    devices = tuple(jax.devices())
    named = from_hlo("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", devices, mesh())
    assert named == NamedSharding(mesh(), P("data"))
    unnamed = from_hlo("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", devices, None)
    assert type(unnamed) is GSPMDSharding
    strange = from_hlo("{devices=[8]0,2,1,3,4,5,6,7}", devices, mesh())
    assert type(strange) is GSPMDSharding
    assert from_hlo("{replicated}", devices[:1], None) == SingleDeviceSharding(devices[0])


@pytest.mark.devices(8)
def test_a_users_map_that_leaves_devices_out_is_refused() -> None:
    class Lacking(Halves):
        def devices_indices_map(self, global_shape: tuple[int, ...]) -> dict[Any, Any]:
            return {self.devices[0]: (ALL,) * len(global_shape)}

    with pytest.raises(
        ShardingError, match=r"Lacking\.devices_indices_map\(\(4,\)\).* cpu:1.* 2 devices"
    ):
        Lacking().shard_shape((4,))


def test_unconstrained_dimensions_count_as_unsharded() -> None:
    sharding = NamedSharding(mesh(), P(P.UNCONSTRAINED, "model"))
    assert sharding.shard_shape((8, 6)) == (8, 3)


@pytest.mark.devices(8)
def test_abstract_shardings_are_equivalent_by_their_tiles() -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    abstract = mesh.abstract_mesh
    mine, theirs = NamedSharding(abstract, P("x", None)), jax.NamedSharding(abstract, P("x"))
    assert mine.is_equivalent_to(theirs, 2) and theirs.is_equivalent_to(mine, 2)
    assert not mine.is_equivalent_to(NamedSharding(abstract, P("y")), 2)
    assert not mine.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert not NamedSharding(mesh, P("x")).is_equivalent_to(mine, 2)


def test_a_spec_is_needed_and_has_no_more_entries_than_the_array() -> None:
    for wrong in ((mesh(),), (mesh(), None)):
        with pytest.raises((TypeError, ShardingError)):
            NamedSharding(*wrong)  # type: ignore[arg-type]
    long = NamedSharding(mesh(), P("data", None, None))
    assert long.shard_shape((8, 4)) == (2, 4)
    x = np.ones((8, 4))
    uses = (
        lambda: long.is_compatible_aval((8, 4)),
        lambda: device_put(x, long),
        lambda: pjit(lambda x: x, in_shardings=long)(x),
        lambda: pjit(lambda x: x, out_shardings=long)(x),
        lambda: with_sharding_constraint(x, long),
        lambda: pjit(lambda x: with_sharding_constraint(x, long))(x),
    )
    for use in uses:
        with pytest.raises(ValueError, match=r"3 entries.* 2 dim.*P\('data'\)"):
            use()
    assert make_array_from_callback((8, 4), long, lambda index: x[index]).sharding == long
