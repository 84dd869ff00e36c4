"""The suite over every class of sharding, and what each class has of its own."""

from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.suite import ShardingSuite
from xlashard import (
    GSPMDSharding,
    Mesh,
    NamedSharding,
    OpShardingSharding,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
)
from xlashard.errors import (
    DivisibilityError,
    DuplicateAxisError,
    RankError,
    ShardingError,
    ShardingTextError,
    TilingError,
    UnknownAxisError,
)
from xlashard.geometry import MeshGrid, Spec, TileAssignment, Tiling
from xlashard.sharding import from_hlo, from_jax

ALL = slice(None)


def mesh(*, reverse: bool = False) -> Mesh:
    devices = np.array(jax.devices())
    return Mesh((devices[::-1] if reverse else devices).reshape(4, 2), ("data", "model"))


class TestNamed(ShardingSuite):
    shape: ClassVar = (8, 6)
    cuts: ClassVar = {
        2 * i + j: (slice(2 * i, 2 * i + 2), slice(3 * j, 3 * j + 3))
        for i in range(4)
        for j in range(2)
    }
    uneven: ClassVar = (6, 6)
    low_rank: ClassVar = (8,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        return NamedSharding(mesh(), P("data", "model"))


class TestNamedByTwoAxes(ShardingSuite):
    shape: ClassVar = (3, 16)
    cuts: ClassVar = {
        2 * i + j: (ALL, slice(2 * (4 * j + i), 2 * (4 * j + i) + 2))
        for i in range(4)
        for j in range(2)
    }
    uneven: ClassVar = (3, 12)
    low_rank: ClassVar = (16,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        return NamedSharding(mesh(), P(None, ("model", "data")))


class TestNamedOnAPermutedMesh(TestNamed):
    @pytest.fixture
    def sharding(self) -> Sharding:
        return NamedSharding(mesh(reverse=True), P("data", "model"))


class TestNamedOnAMeshWithIdleAxes(ShardingSuite):
    """Axes of size 1, and one that cuts nothing."""

    shape: ClassVar = (4, 3, 2)
    cuts: ClassVar = {i: (slice(i // 2, i // 2 + 1), ALL, ALL) for i in range(8)}
    uneven: ClassVar = (6, 3, 2)
    low_rank: ClassVar = (4, 3)

    @pytest.fixture
    def sharding(self) -> Sharding:
        grid = np.array(jax.devices()).reshape(1, 4, 1, 2)
        on = Mesh(grid, ("one", "data", "unit", "idle"))
        return NamedSharding(on, P(("one", "data"), None, "unit"))


class TestNamedOnOneDevice(ShardingSuite):
    shape: ClassVar = (3, 5)
    cuts: ClassVar = {0: (ALL, ALL)}
    low_rank: ClassVar = (3,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        on = Mesh(np.array(jax.devices()[5:6]).reshape(1, 1), ("data", "model"))
        return NamedSharding(on, P("data", "model"))


class TestNamedOnSomeOfTheDevices(ShardingSuite):
    shape: ClassVar = (6,)
    cuts: ClassVar = {i: (slice(2 * i, 2 * i + 2),) for i in range(3)}
    uneven: ClassVar = (7,)
    low_rank: ClassVar = ()

    @pytest.fixture
    def sharding(self) -> Sharding:
        return NamedSharding(Mesh(np.array(jax.devices())[[6, 1, 3]], ("data",)), P("data"))


class TestNamedReplicated(ShardingSuite):
    shape: ClassVar = (3, 5)
    cuts: ClassVar = {i: (ALL, ALL) for i in range(8)}

    @pytest.fixture
    def sharding(self) -> Sharding:
        return NamedSharding(mesh(), P())


class TestNamedInAnotherMemory(TestNamed):
    @pytest.fixture
    def sharding(self) -> Sharding:
        kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
        return NamedSharding(mesh(), P("data", "model"), memory_kind=kinds[-1])


class TestSingleDevice(ShardingSuite):
    shape: ClassVar = (3, 5)
    cuts: ClassVar = {0: (ALL, ALL)}

    @pytest.fixture
    def sharding(self) -> Sharding:
        return SingleDeviceSharding(jax.devices()[3])


class TestTilesByIota(ShardingSuite):
    shape: ClassVar = (4, 8)
    cuts: ClassVar = {i: (ALL, slice(2 * (i % 4), 2 * (i % 4) + 2)) for i in range(8)}
    uneven: ClassVar = (4, 6)
    low_rank: ClassVar = (8,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        text = "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
        return GSPMDSharding(jax.devices(), text)


class TestTilesAcrossDimensions(ShardingSuite):
    """Two by three tiles, dealt out column by column."""

    shape: ClassVar = (4, 6)
    cuts: ClassVar = {
        3 * row + column: (
            slice(2 * (tile // 3), 2 * (tile // 3) + 2),
            slice(2 * (tile % 3), 2 * (tile % 3) + 2),
        )
        for row in range(2)
        for column in range(3)
        for tile in [2 * column + row]
    }
    uneven: ClassVar = (4, 8)
    low_rank: ClassVar = (6,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        return GSPMDSharding(jax.devices()[:6], "{devices=[2,3]<=[2,3]T(1,0)}")


class TestTilesOnOneDevice(ShardingSuite):
    shape: ClassVar = (3, 5)
    cuts: ClassVar = {0: (ALL, ALL)}

    @pytest.fixture
    def sharding(self) -> Sharding:
        return GSPMDSharding(jax.devices()[2:3], "{maximal device=0}")


class TestTilesByList(ShardingSuite):
    shape: ClassVar = (2, 4)
    cuts: ClassVar = {
        device: (slice(tile // 2, tile // 2 + 1), slice(2 * (tile % 2), 2 * (tile % 2) + 2))
        for tile, device in enumerate((2, 0, 3, 1))
    }
    uneven: ClassVar = (3, 4)
    low_rank: ClassVar = (4,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        return OpShardingSharding(jax.devices()[:4], "{devices=[2,2]2,0,3,1}")


class TestTilesReplicated(TestNamedReplicated):
    @pytest.fixture
    def sharding(self) -> Sharding:
        return GSPMDSharding.get_replicated(jax.devices())


class Halves(Sharding):
    """A sharding as a user writes one: devices, and a map from them to slices."""

    @property
    def devices(self) -> tuple[Any, ...]:
        return tuple(jax.devices()[:2])

    def devices_indices_map(self, global_shape: tuple[int, ...]) -> dict[Any, tuple[slice, ...]]:
        half = global_shape[0] // 2
        rest = (ALL,) * (len(global_shape) - 1)
        first, second = self.devices
        return {second: (slice(0, half), *rest), first: (slice(half, global_shape[0]), *rest)}


class Columns(XLACompatibleSharding):
    """A sharding as a user writes one whose tiles depend on the rank alone."""

    @property
    def devices(self) -> tuple[Any, ...]:
        return tuple(jax.devices()[:4])

    @property
    def is_fully_replicated(self) -> bool:
        return False

    @property
    def memory_kind(self) -> str:
        return jax.devices()[0].default_memory().kind

    def with_memory_kind(self, kind: str) -> Any:
        return from_jax(self.twin((4,))).with_memory_kind(kind)

    def rank_tiling(self, ndim: int) -> Tiling:
        grid = MeshGrid(("columns",), (4,))
        return Tiling.from_spec(grid, Spec(((),) * (ndim - 1) + (("columns",),)), ndim)


class TestAUsersOwnByRank(ShardingSuite):
    shape: ClassVar = (3, 8)
    cuts: ClassVar = {i: (ALL, slice(2 * i, 2 * i + 2)) for i in range(4)}
    uneven: ClassVar = (3, 6)
    low_rank: ClassVar = ()
    pickles: ClassVar = False

    @pytest.fixture
    def sharding(self) -> Sharding:
        return Columns()

    def test_memories(self, sharding: Sharding) -> None:
        assert sharding.memory_kind == jax.devices()[0].default_memory().kind

    def test_too_low_a_rank_is_refused_with_the_numbers(self, sharding: Sharding) -> None:
        with pytest.raises(RankError, match="at least 1 dimension, the array has 0"):
            sharding.shard_shape(())


class TestAUsersOwn(ShardingSuite):
    shape: ClassVar = (6, 5)
    cuts: ClassVar = {0: (slice(3, 6), ALL), 1: (slice(0, 3), ALL)}
    pickles: ClassVar = False

    @pytest.fixture
    def sharding(self) -> Sharding:
        return Halves()

    def test_uneven_shapes_are_refused_with_the_numbers(self, sharding: Sharding) -> None:
        with pytest.raises(TilingError, match="7"):
            sharding.shard_shape((7, 5))

    def test_too_low_a_rank_is_refused_with_the_numbers(self, sharding: Sharding) -> None:
        with pytest.raises(IndexError):  # its own code
            sharding.shard_shape(())


def test_classes_are_those_of_the_interface() -> None:
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
    ("spec", "error", "said"),
    [
        (P("modle"), UnknownAxisError, "model"),
        (P("data", "data"), DuplicateAxisError, "dimensions 0 and 1"),
        (("data", "model"), ShardingError, r"PartitionSpec\('data', 'model'\)"),
        ("data", ShardingError, r"PartitionSpec\('data'\)"),
    ],
)
def test_wrong_specs_say_what_would_do(spec: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        NamedSharding(mesh(), spec)


def test_a_named_sharding_needs_a_mesh() -> None:
    with pytest.raises(ShardingError, match="Mesh\\(devices, axis_names\\)"):
        NamedSharding(jax.devices(), P("data"))  # type: ignore[arg-type]


def test_what_does_not_divide_is_said_with_axes_and_sizes() -> None:
    with pytest.raises(DivisibilityError, match="'data'=4.*size 4 or 8") as caught:
        NamedSharding(mesh(), P("data")).shard_shape((6, 2))
    assert (caught.value.dim, caught.value.size, caught.value.tiles) == (0, 6, 4)


def test_a_rank_too_low_is_said() -> None:
    with pytest.raises(RankError, match="2 dimensions, the array has 1"):
        NamedSharding(mesh(), P("data", "model")).shard_shape((8,))


def test_an_abstract_mesh_has_no_devices() -> None:
    abstract = NamedSharding(mesh().abstract_mesh, P("data"))
    assert abstract.shard_shape((8, 2)) == (2, 2)
    with pytest.raises(ShardingError, match="AbstractMesh"):
        _ = abstract.devices


@pytest.mark.parametrize(
    ("tiles", "error", "said"),
    [
        ("{devices=[2,2]<=[4]}", ShardingError, "4 devices, but 8 were given"),
        ("{devices=[8]<=[9]}", TilingError, "hold 9 devices"),
        ("{rubbish}", ShardingTextError, "rubbish"),
        (7, ShardingError, "int"),
    ],
)
def test_wrong_tiles_are_refused(tiles: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        GSPMDSharding(jax.devices(), tiles)


def test_tiles_may_come_as_protos_texts_or_assignments() -> None:
    text = "{devices=[4,2]<=[8]}"
    one = GSPMDSharding(jax.devices(), text)
    proto = one.twin()._to_xla_hlo_sharding(2).to_proto()
    for given in (proto, one.twin()._to_xla_hlo_sharding(2), TileAssignment.parse_text(text)):
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
    assert short == short.twin()
    assert hash(short) == hash(short.twin())


def test_shardings_of_jax_come_back_as_ours() -> None:
    theirs = jax.sharding.NamedSharding(mesh(), P("data"))
    ours = from_jax(theirs)
    assert type(ours) is NamedSharding
    assert ours == theirs
    assert from_jax(theirs) is ours
    single = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    assert from_jax(single) == SingleDeviceSharding(jax.devices()[2])


def test_reported_tiles_get_the_names_of_a_mesh_where_it_has_them() -> None:
    devices = tuple(jax.devices())
    named = from_hlo("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", devices, mesh())
    assert named == NamedSharding(mesh(), P("data"))
    unnamed = from_hlo("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", devices, None)
    assert type(unnamed) is GSPMDSharding
    strange = from_hlo("{devices=[8]0,2,1,3,4,5,6,7}", devices, mesh())
    assert type(strange) is GSPMDSharding
    assert from_hlo("{replicated}", devices[:1], None) == SingleDeviceSharding(devices[0])


def test_a_users_map_that_leaves_devices_out_is_refused() -> None:
    class Lacking(Halves):
        def devices_indices_map(self, global_shape: tuple[int, ...]) -> dict[Any, Any]:
            return {self.devices[0]: (ALL,) * len(global_shape)}

    with pytest.raises(ShardingError, match="no entry for"):
        Lacking().shard_shape((4,))


def test_unconstrained_dimensions_count_as_whole() -> None:
    sharding = NamedSharding(mesh(), P(P.UNCONSTRAINED, "model"))
    assert sharding.shard_shape((8, 6)) == (8, 3)
