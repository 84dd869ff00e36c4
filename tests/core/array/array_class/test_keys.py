"""Key arrays: JAX's own, placed by this package."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tests.core.array.cases import DEVICES, HALF, SHARDINGS, named
from tests.message_patterns import naming
from xlashard import (
    NamedSharding,
    P,
    SingleDeviceSharding,
    device_get,
    device_put,
    key_shards,
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
    pjit,
)
from xlashard.errors import ArgumentError, DeletedError, PlacementError

KEYS = jax.random.split(jax.random.key(7), 8)
NUMBERS = np.asarray(jax.random.key_data(KEYS))
ONE_DIMENSIONAL = {
    "rows": named(("x", "y")),
    "partly replicated": named("y"),
    "replicated": named(),
    "single": SingleDeviceSharding(DEVICES[:4][-1]),
    "half": NamedSharding(HALF, P("z")),
    "jax's own": jax.sharding.NamedSharding(SHARDINGS["rows"].mesh, P("x")),
    **{kind: SHARDINGS[kind] for kind in ("own",) if kind in SHARDINGS},
}


def check(keys: Any, sharding: Any) -> None:
    assert jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    assert keys.shape == (8,) and keys.dtype == KEYS.dtype
    assert np.array_equal(jax.random.key_data(keys), NUMBERS)
    assert set(keys.devices()) == set(sharding.device_set)
    indices = sharding.devices_indices_map((8,))
    for shard in key_shards(keys):
        assert np.array_equal(jax.random.key_data(shard.data), NUMBERS[indices[shard.device]])
        assert np.array_equal(NUMBERS[shard.index], NUMBERS[indices[shard.device]])


@pytest.mark.parametrize("kind", list(ONE_DIMENSIONAL))
def test_key_arrays_accept_every_sharding(kind: str) -> None:
    sharding = ONE_DIMENSIONAL[kind]
    check(device_put(KEYS, sharding), sharding)
    check(device_put(device_put(KEYS, named("x")), sharding), sharding)
    check(make_array_from_callback((8,), sharding, lambda i: KEYS[i]), sharding)
    pieces = [
        device_put(KEYS[index], device)
        for device, index in sharding.devices_indices_map((8,)).items()
    ]
    check(make_array_from_single_device_arrays((8,), sharding, pieces), sharding)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_key_arrays_are_split_and_read_by_shard() -> None:
    keys = device_put(KEYS, named("x"))
    wanted = jax.vmap(jax.random.normal)(KEYS)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.random.normal))(keys), wanted)
    assert jax.random.split(keys[0], 2).shape == (2,)
    shard = key_shards(keys)[1]
    assert shard.replica_id == 1 and shard.index == (slice(0, 4),)
    assert "Shard(device=" in repr(shard)
    assert device_put({"k": KEYS, "n": 1})["k"] is KEYS
    assert device_get(keys).dtype == KEYS.dtype


# One device has no other copy of the keys, which other tests read.
@pytest.mark.devices(8)
def test_donation() -> None:
    keys = device_put(KEYS, named("x"))
    moved = device_put(keys, named("y"), donate=True)
    assert keys.is_deleted()
    check(moved, named("y"))


@pytest.mark.slow
def test_errors() -> None:
    with pytest.raises(PlacementError, match=r"x\['k'\].*2 tiles"):
        device_put({"k": KEYS[:3]}, named("x"))
    with pytest.raises(ArgumentError, match=naming("x: ", "key array", "layout")):
        device_put(KEYS, Format(Layout((0, 1)), named("x")))
    with pytest.raises(PlacementError, match=naming("shape (8,)", "shape (4,)")):
        make_array_from_callback((8,), named("x"), lambda index: KEYS)
    other = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    with pytest.raises(PlacementError, match="key<rbg>.* key<fry>"):
        make_array_from_callback(
            (8,), named("x"), lambda index: other if index[0].start else KEYS[:4]
        )
    with pytest.raises(PlacementError, match="float32.* key<fry>"):
        make_array_from_callback(
            (8,), named("x"), lambda index: np.zeros(4) if index[0].start else KEYS[:4]
        )


@pytest.mark.parametrize("kind", list(ONE_DIMENSIONAL))
def test_key_arrays_from_process_local_data(kind: str) -> None:
    sharding = ONE_DIMENSIONAL[kind]
    check(make_array_from_process_local_data(sharding, {"k": KEYS})["k"], sharding)
    check(make_array_from_process_local_data(sharding, KEYS, (8,)), sharding)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_operations_on_sharded_key_arrays() -> None:
    rows = named(("x", "y"))
    keys = device_put(KEYS, rows)
    assert keys.sharding == rows and bool((keys == KEYS).all())
    assert repr(keys).startswith("Array((8,), dtype=key<fry>)")
    assert keys.reshape(2, 4).shape == (2, 4) and len(list(keys)) == 8
    for other in (copy.copy(keys), copy.deepcopy(keys)):
        check(other, rows)
    assert np.array_equal(jax.random.key_data(pickle.loads(pickle.dumps(keys))), NUMBERS)
    check(jax.random.wrap_key_data(device_put(NUMBERS, named(("x", "y"), None))), rows)
    noise = pjit(
        lambda keys: jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys),
        in_shardings=rows,
        out_shardings=named(("x", "y")),
    )
    expected = jax.vmap(lambda key: jax.random.normal(key, (4,)))(KEYS)
    np.testing.assert_array_equal(noise(keys), expected)
    halves = pjit(lambda keys: jax.vmap(lambda key: jax.random.split(key))(keys))(keys)
    assert halves.shape == (8, 2) and halves.dtype == KEYS.dtype
    keys.delete()
    with pytest.raises(DeletedError, match="has been deleted"):
        device_put(keys, named())


def test_a_key_array_with_a_layout_leaves_a_donated_array_alive() -> None:
    x = device_put(np.ones(8, np.float32))
    place = Format(Layout(major_to_minor=(0,)), named())
    with pytest.raises(ArgumentError, match=naming("x['k']", "layout")):
        device_put({"a": x, "k": KEYS}, {"a": DEVICES[1], "k": place}, donate=True)
    assert not x.is_deleted()
