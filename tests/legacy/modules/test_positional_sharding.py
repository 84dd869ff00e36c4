"""`PositionalSharding`: grids of devices, in functions of JAX and of xlashard."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xlashard
from tests.message_patterns import naming
from xlashard import legacy
from xlashard.errors import ShardingError
from xlashard.legacy.modules.sharding import PositionalSharding

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def sharding() -> PositionalSharding:
    return PositionalSharding(jax.devices())


def ids(sharding: PositionalSharding) -> dict[tuple[int, ...], set[int]]:
    """Return the ids of the devices at each position of a grid, by its effect on an array."""
    shape = tuple(sharding.shape)
    holders: dict[tuple[int, ...], set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        place = tuple(i.indices(n)[0] for i, n in zip(index, shape, strict=True))
        holders.setdefault(place, set()).add(device.id)
    return holders


def sets(grid: np.ndarray) -> dict[tuple[int, ...], set[int]]:
    return {place: set(grid[place]) for place in np.ndindex(*grid.shape)}


class OfSets:
    """Slow oracle: an object array of sets of ids."""

    def __init__(self, grid: np.ndarray) -> None:
        self.grid = grid

    def replicate(self, axis: int, keepdims: bool) -> np.ndarray:
        parts = np.moveaxis(self.grid, axis, 0)
        out = np.empty(parts.shape[1:], dtype=object)
        for place in np.ndindex(*out.shape):
            out[place] = set().union(*(parts[(number, *place)] for number in range(len(parts))))
        return np.expand_dims(out, axis) if keepdims else out


STEPS = st.lists(
    st.tuples(st.sampled_from(["reshape", "transpose", "replicate", "index"]), st.integers(0, 99)),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
@pytest.mark.devices(8)
def test_rearranged_grids_equal_numpy_arrays_of_device_sets(steps):
    made = PositionalSharding(jax.devices())
    grid = np.empty(8, dtype=object)
    grid[:] = [{device.id} for device in jax.devices()]
    for kind, number in steps:
        if kind == "reshape":
            halves = [n for n in range(1, grid.size + 1) if grid.size % n == 0]
            shape = (halves[number % len(halves)], -1)
            made, grid = made.reshape(*shape), grid.reshape(shape)
        elif kind == "transpose":
            made, grid = made.T, grid.T
        elif kind == "replicate" and grid.ndim:
            axis, keepdims = number % grid.ndim, bool(number % 2)
            made = made.replicate(axis, keepdims=keepdims)
            grid = OfSets(grid).replicate(axis, keepdims)
        elif grid.ndim:
            at = slice(number % grid.shape[0], None)
            made, grid = made[at], grid[at]
    assert made.shape == grid.shape and made.ndim == grid.ndim
    assert ids(made) == sets(grid)
    assert made.device_set == {d for d in jax.devices() if any(d.id in s for s in grid.flat)}
    assert made == pickle.loads(pickle.dumps(made)) == copy.copy(made)


def grids(sharding: PositionalSharding) -> list[PositionalSharding]:
    grid = sharding.reshape(4, 2)
    return [
        *(grid, grid.T, grid.replicate(0), grid.replicate(1), grid.replicate()),
        *(sharding.reshape(8, 1), sharding.reshape((1, -1))),
        sharding.reshape(2, 2, 2).replicate(1, keepdims=False),
        sharding.reshape(2, 2, 2).transpose(2, 0, 1).reshape(4, 2),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(9))
def test_jax_and_xlashard_accept_positional_shardings(sharding, number, partitioner):
    made = grids(sharding)[number]
    for put in (jax.device_put, xlashard.device_put):
        x = put(X, made)
        assert x.sharding == made and type(x.sharding) is PositionalSharding
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, X[shard.index])
        assert x.sharding.shard_shape(X.shape) == tuple(
            size // parts for size, parts in zip(X.shape, made.shape, strict=True)
        )

    def body(x):
        return jax.lax.with_sharding_constraint(x * 2, made) + 1

    for jit in (jax.jit, xlashard.pjit, legacy.pjit):
        out = jit(body, in_shardings=made, out_shardings=made)(X)
        assert out.sharding.is_equivalent_to(made, 2)
        np.testing.assert_array_equal(out, X * 2 + 1)


@pytest.mark.devices(8)
def test_repr_shows_the_device_ids_of_each_tile(sharding):
    grid = sharding.reshape(4, 2)
    assert "PositionalSharding([[{CPU 0} {CPU 1}]\n" + " " * 20 + "[{CPU 2} {CPU 3}]" in repr(grid)
    assert "[[{CPU 0 2 4 6} {CPU 1 3 5 7}]]" in repr(grid.replicate(0))
    assert "({CPU 5}" in repr(grid[2, 1]) and grid[..., 0].shape == (4,)


@pytest.mark.devices(8)
def test_equality_hash_and_memory_kind(sharding):
    grid = sharding.reshape(4, 2)
    again = PositionalSharding(np.array(jax.devices()).reshape(4, 2))
    assert grid == again and hash(grid) == hash(again) and grid != grid.T.reshape(4, 2)
    assert grid != sharding and sharding != PositionalSharding(jax.devices()[::-1])
    pinned = grid.with_memory_kind("pinned_host")
    assert pinned != grid and pinned.memory_kind == "pinned_host" and pinned.shape == (4, 2)
    assert grid.replicate().is_fully_replicated and not grid.is_fully_replicated
    assert jax.device_put(1.0, sharding.replicate()).is_fully_replicated


@pytest.mark.devices(8)
def test_mismatched_shapes_are_refused(sharding):
    with pytest.raises(ShardingError, match=naming("(8,)", "(3, 2)", "8 entries", "reshape(-1)")):
        sharding.reshape(3, 2)
    with pytest.raises(ValueError, match="axis 2"):
        sharding.reshape(4, 2).replicate(2)
    with pytest.raises(ValueError, match="1 dimension"):
        jax.device_put(X, sharding)
    with pytest.raises(ValueError, match=naming("dimension 0", "(6, 8)", "4 tiles")):
        jax.device_put(X[:6], sharding.reshape(4, 2))


@pytest.mark.slow
def test_positional_sharding_is_importable_by_its_legacy_names(mesh):
    with legacy.installed():
        from jax.experimental.sharding import PositionalSharding as earlier
        from jax.sharding import PositionalSharding as imported

        assert imported is PositionalSharding is earlier
        assert jax._src.sharding_impls.PositionalSharding is imported
        y = jax.device_put(jnp.ones((8, 4)), imported(jax.devices()).reshape(8, 1))
        assert jax.jit(jnp.sin)(y).sharding.is_equivalent_to(y.sharding, 2)
        named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
        named.is_compatible_aval((6, 2))
        jax.sharding.SingleDeviceSharding(jax.devices()[0]).is_compatible_aval(())
        with pytest.raises(ValueError, match="2 dimensions"):
            named.is_compatible_aval((8,))
    assert not hasattr(jax.sharding, "PositionalSharding")
