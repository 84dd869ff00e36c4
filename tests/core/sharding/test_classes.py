"""The suite over every class of sharding, and the properties of each class."""

import copy
import pickle
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.core.sharding.suite import ShardingSuite
from tests.message_patterns import naming
from xlashard import (
    GSPMDSharding,
    Mesh,
    NamedSharding,
    OpShardingSharding,
    Shard,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    device_put,
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
    pjit,
    with_sharding_constraint,
)
from xlashard._jax.runtime.shardings import JaxGSPMDSharding
from xlashard.core.sharding import from_jax
from xlashard.errors import (
    RankError,
    ShardingError,
    TilingError,
)
from xlashard.geometry import MeshGrid, Spec, Tiling

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
    """Axes of size 1, and an axis that shards nothing."""

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
    """Two by three tiles, assigned column by column."""

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


def test_tuple_shardings_are_hashable_values() -> None:
    devices = jax.devices()
    text = "{{replicated}, {devices=[8]<=[8]}}"
    pair = GSPMDSharding(devices, text)
    others = [
        GSPMDSharding(devices, text),
        GSPMDSharding(devices, pair._hlo_sharding),
        pickle.loads(pickle.dumps(pair)),
        JaxGSPMDSharding(tuple(devices), pair._hlo_sharding),
    ]
    for other in others:
        assert pair == other
        assert other == pair
    # JAX's own ends the process when it computes its hash.
    assert {hash(other) for other in others[:3]} == {hash(pair)}
    for other in (
        GSPMDSharding(devices[::-1], text),
        GSPMDSharding(devices, "{{replicated}, {replicated}}"),
        GSPMDSharding(devices, "{replicated}"),
        GSPMDSharding(devices, "{devices=[8]<=[8]}"),
        pair.with_memory_kind("pinned_host"),
    ):
        assert pair != other
        assert other != pair
        assert not pair.is_equivalent_to(other, 1)
    first, second = pair.tile_assignment.elements
    assert GSPMDSharding(devices, first).is_fully_replicated
    assert GSPMDSharding(devices, second).shard_shape((16,)) == (2,)
    assert not pair.is_fully_replicated
    with pytest.raises(TilingError, match="tuple of 2 "):
        pair.shard_shape((16,))
    with pytest.raises(ShardingError, match=r"\{devices=\[4\]<=\[4\]\} .* 4 devices.* 8"):
        GSPMDSharding(devices, "{{replicated}, {devices=[4]<=[4]}}")


class Halves(Sharding):
    """User-defined sharding: devices, and a map from them to slices."""

    @property
    def devices(self) -> tuple[Any, ...]:
        return tuple(jax.devices()[:2])

    def devices_indices_map(self, global_shape: tuple[int, ...]) -> dict[Any, tuple[slice, ...]]:
        half = global_shape[0] // 2
        rest = (ALL,) * (len(global_shape) - 1)
        first, second = self.devices
        return {second: (slice(0, half), *rest), first: (slice(half, global_shape[0]), *rest)}


class Columns(XLACompatibleSharding):
    """User-defined sharding whose tiles depend on the rank alone."""

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
        return from_jax(self.jax_sharding((4,))).with_memory_kind(kind)

    def rank_tiling(self, ndim: int) -> Tiling:
        grid = MeshGrid(("columns",), (4,))
        return Tiling.from_spec(grid, Spec(((),) * (ndim - 1) + (("columns",),)), ndim)


@pytest.mark.parametrize("count", [1, 8])
def test_tiles_for_another_number_of_devices_are_refused(count: int) -> None:
    class Miscounted(Columns):
        devices = tuple(jax.devices()[:count])

    class OneShape(Sharding):
        devices = tuple(jax.devices()[:count])

        def tiling(self, shape: Any) -> Tiling:
            return Columns().tiling(shape)

    x = np.ones((2, 8), np.float32)
    uses: list[Any] = [
        lambda own: own.devices_indices_map(x.shape),
        lambda own: Shard(jax.devices()[0], own, x.shape).index,
        lambda own: device_put(x, own),
        lambda own: device_put(device_put(x), own),
        lambda own: make_array_from_callback(x.shape, own, lambda index: x[index]),
        lambda own: make_array_from_process_local_data(own, x),
        lambda own: make_array_from_single_device_arrays(x.shape, own, [x] * count),
        lambda own: pjit(lambda x: x, in_shardings=own).lower(x),
        lambda own: pjit(lambda x: x, out_shardings=own).lower(x),
        lambda own: with_sharding_constraint(x, own),
        lambda own: jax.jit(lambda x: with_sharding_constraint(x, own)).lower(x),
    ]
    for use in uses:
        for own in (Miscounted(), OneShape()):
            with pytest.raises(ValueError, match=naming("tiling", "4 devices", str(count))):
                use(own)


def test_devices_without_an_order_count_by_their_numbers() -> None:
    class Unordered(Sharding):
        device_set = property(lambda _: set(jax.devices()[3::-1]))

        def devices_indices_map(self, global_shape: Any) -> Any:
            return Columns().devices_indices_map(global_shape)

    own, like = Unordered(), Columns()
    assert own.devices == like.devices and own.num_devices == 4
    assert own.tiling((2, 8)) == like.tiling((2, 8))


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

    def test_sharding_can_be_copied_after_use(self, sharding: Sharding) -> None:
        used = sharding.devices_indices_map((3, 8))
        assert copy.deepcopy(sharding).devices_indices_map((3, 8)) == used

    def test_too_low_a_rank_is_refused_with_the_numbers(self, sharding: Sharding) -> None:
        with pytest.raises(RankError, match=r"1 dimension.* 0.*P\(\)"):
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
