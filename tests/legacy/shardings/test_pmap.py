"""The suite over `PmapSharding`, and its own properties."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.sharding.suite import ShardingSuite, bare_tiles
from xlashard import (
    Array,
    Chunked,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    NoSharding,
    P,
    PmapSharding,
    Replicated,
    ShardedAxis,
    Sharding,
    ShardingSpec,
    SingleDeviceSharding,
    Unstacked,
    device_put,
    pjit,
    with_sharding_constraint,
)
from xlashard.core.sharding import from_jax
from xlashard.errors import DivisibilityError, PlacementError, RankError, ShardingError

pytestmark = pytest.mark.partitioner

ALL = slice(None)
DEVICES = jax.devices()
ROWS = ShardingSpec((Chunked((8,)), NoSharding()), (ShardedAxis(0),))


class TestDefault(ShardingSuite):
    shape: ClassVar = (8, 3)
    cuts: ClassVar = {i: (slice(i, i + 1), ALL) for i in range(8)}
    uneven: ClassVar = (9, 3)
    low_rank: ClassVar = (8,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        return PmapSharding.default((8, 3))


class TestDefaultOfAnotherDimension(ShardingSuite):
    shape: ClassVar = (2, 4)
    cuts: ClassVar = {i: (ALL, slice(i, i + 1)) for i in range(4)}
    uneven: ClassVar = (2, 6)
    low_rank: ClassVar = (4,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        return PmapSharding.default((2, 4), sharded_dim=-1, devices=DEVICES[7:3:-1])


class TestUnstacked(TestDefault):
    """The dimension has as many elements as there are devices, so it can't be empty."""

    uneven: ClassVar = (16, 3)

    @pytest.fixture
    def sharding(self) -> Sharding:
        return PmapSharding.default((8, 3), unstacked=True)

    def test_zero_sized_arrays(self, sharding: Sharding) -> None:
        assert sharding.shard_shape((8, 0)) == (1, 0)
        assert np.asarray(device_put(np.zeros((8, 0)), sharding)).shape == (8, 0)
        with pytest.raises(DivisibilityError, match=r"\(0, 3\).*Unstacked\(8\)"):
            sharding.shard_shape((0, 3))


class TestCopies(ShardingSuite):
    """`sharded_dim=None`; the spec is still for one rank."""

    shape: ClassVar = (3, 5)
    cuts: ClassVar = {i: (ALL, ALL) for i in range(8)}
    low_rank: ClassVar = (5,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        return PmapSharding.default((3, 5), sharded_dim=None)


class TestGridOfThreeAxes(ShardingSuite):
    """Two axes over one dimension, minor first, with a replicated axis between them."""

    shape: ClassVar = (8, 3)
    cuts: ClassVar = {
        4 * minor + 2 * copy + major: (slice(2 * n, 2 * n + 2), ALL)
        for minor in range(2)
        for copy in range(2)
        for major in range(2)
        for n in [2 * major + minor]
    }
    uneven: ClassVar = (6, 3)
    low_rank: ClassVar = (8,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        grid = np.array(DEVICES).reshape(2, 2, 2)
        axes = (ShardedAxis(1), Replicated(2), ShardedAxis(0))
        return PmapSharding(grid, ShardingSpec((Chunked((2, 2)), NoSharding()), axes))


class TestInAnotherMemory(TestDefault):
    @pytest.fixture
    def sharding(self) -> Sharding:
        kinds = [memory.kind for memory in DEVICES[0].addressable_memories()]
        return PmapSharding(DEVICES, ROWS, memory_kind=kinds[-1])


def test_default_takes_as_many_devices_as_the_dimension_is_long() -> None:
    few = PmapSharding.default((3, 5))
    assert few.devices == tuple(DEVICES[:3])
    assert few.sharding_spec == ShardingSpec((Chunked((3,)), NoSharding()), (ShardedAxis(0),))
    last = PmapSharding.default((5, 2), sharded_dim=1, unstacked=True)
    assert last.sharding_spec == ShardingSpec((NoSharding(), Unstacked(2)), (ShardedAxis(0),))
    given = PmapSharding.default((6, 5), devices=np.array(DEVICES[4:6]))
    assert given.devices == tuple(DEVICES[4:6])
    assert given.shard_shape((6, 5)) == (3, 5)
    copies = PmapSharding.default((), sharded_dim=None, devices=DEVICES[:2])
    assert copies.sharding_spec == ShardingSpec((), (Replicated(2),))


def test_pmap_sharding_never_equals_other_classes() -> None:
    rows = PmapSharding(DEVICES, ROWS)
    same = [
        NamedSharding(Mesh(np.array(DEVICES), ("d",)), P("d")),
        rows.jax_sharding(),
        bare_tiles(rows, 2),
        PmapSharding.default((8, 3), unstacked=True),
    ]
    for other in same:
        assert rows != other
        assert other != rows
        assert rows.is_equivalent_to(other, 2)
        assert other.is_equivalent_to(rows, 2)
    assert rows != PmapSharding(DEVICES[::-1], ROWS)
    assert isinstance(bare_tiles(rows, 2), GSPMDSharding)
    assert isinstance(from_jax(rows.jax_sharding()), NamedSharding)


def test_repr_of_pmap_sharding_lists_device_ids() -> None:
    text = repr(PmapSharding.default((2, 3), devices=DEVICES[:2]))
    assert text == (
        "PmapSharding(ShardingSpec((Chunked((2,)), NoSharding()), (ShardedAxis(0),)), "
        "devices=[0, 1])"
    )
    kinds = [memory.kind for memory in DEVICES[0].addressable_memories()]
    assert f"memory_kind={kinds[-1]!r}" in repr(PmapSharding(DEVICES, ROWS, memory_kind=kinds[-1]))


@pytest.mark.slow
def test_computation_follows_data() -> None:
    x = device_put(np.arange(24, dtype=np.float32).reshape(8, 3), PmapSharding(DEVICES, ROWS))
    assert type(x.sharding) is PmapSharding
    mesh = Mesh(np.array(DEVICES), ("d",))
    for out in (x + 1, pjit(lambda v: v + 1)(x), jnp.add(x, 1), jax.jit(lambda v: v + 1)(x)):
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("d")), 2)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(x) + 1)
    # And with arrays that are named on a mesh of the same devices.
    named = device_put(np.ones((8, 3), np.float32), NamedSharding(mesh, P("d")))
    for out in (x + named, pjit(jnp.add)(x, named), jax.jit(jnp.add)(named, x)):
        assert out.devices() == set(DEVICES)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(x) + 1)


def test_uneven_shapes_are_for_constraints_only() -> None:
    v = np.arange(27, dtype=np.float32).reshape(9, 3)
    chunks = PmapSharding(DEVICES, ROWS)
    out = pjit(lambda x: with_sharding_constraint(x * 2, chunks) + 1)(v)
    np.testing.assert_array_equal(out, v * 2 + 1)
    with pytest.raises(PlacementError, match=r"\(9, 3\) has size 9.* 8 tiles"):
        device_put(v, chunks)


def test_from_jax_keeps_a_pmap_sharding() -> None:
    rows = PmapSharding.default((8, 3), unstacked=True)
    x = Array.from_jax(jax.device_put(np.ones((8, 3)), rows))
    assert x.sharding is rows
    assert type(x.to_jax().sharding) is jax.sharding.NamedSharding


def test_arrays_reshard_from_pmap_sharding_and_back() -> None:
    value = np.arange(64, dtype=np.int32).reshape(8, 8)
    rows = PmapSharding.default((8, 8))
    mesh = Mesh(np.array(DEVICES).reshape(2, 4), ("x", "y"))
    for other in (
        NamedSharding(mesh, P("y", "x")),
        NamedSharding(mesh, P()),
        SingleDeviceSharding(DEVICES[5]),
        PmapSharding.default((8, 8), sharded_dim=1, devices=DEVICES[4:]),
        PmapSharding.default((8, 8), unstacked=True),
    ):
        there = device_put(device_put(value, rows), other)
        assert there.sharding == other
        back = device_put(there, rows)
        assert back.sharding == rows
        np.testing.assert_array_equal(np.asarray(back), value)


def test_errors_of_refused_arguments() -> None:
    with pytest.raises(ShardingError, match=r"\(8,\).* 8 devices.* 3"):
        PmapSharding(DEVICES[:3], ROWS)
    with pytest.raises(ShardingError, match=r"sharding_spec .*ShardingSpec, not P"):
        PmapSharding(DEVICES, P("x"))  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match=r"size 16.* this process has 8"):
        PmapSharding.default((16, 2))
    with pytest.raises(ShardingError, match=r"sharded_dim=2 .*\(8, 3\).* 0 to 1"):
        PmapSharding.default((8, 3), sharded_dim=2)
    with pytest.raises(DivisibilityError, match=r"\(9, 3\) has size 9.* 2 tiles"):
        PmapSharding.default((9, 3), devices=DEVICES[:2])
    with pytest.raises(RankError, match=r"3 dimensions, .* is for 2"):
        device_put(np.ones((8, 3)), PmapSharding(DEVICES, ROWS)).sharding.shard_shape((8, 3, 1))
