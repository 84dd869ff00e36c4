"""Reshards between random pairs of shardings: every replica is right, and matches the plan.

`RESHARD_EXAMPLES=3000 pytest tests/core/array/reshard/test_reshard_property.py` tries more of them.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.array.cases import DEVICES, Stripes, same
from xlashard import (
    GSPMDSharding,
    Mesh,
    NamedSharding,
    P,
    SingleDeviceSharding,
    device_put,
    reshard_plan,
)
from xlashard.core.array.reshard import compiled, plan
from xlashard.geometry import TileAssignment
from xlashard.legacy.shardings.pmap import PmapSharding
from xlashard.legacy.shardings.sharding_spec import Chunked, Replicated, ShardedAxis, ShardingSpec
from xlashard.legacy.shardings.sharding_spec import NoSharding as Whole

pytestmark = pytest.mark.devices(8)

EXAMPLES = int(os.environ.get("RESHARD_EXAMPLES", "150"))

# A few shapes bound the number of programs. Three and six divide some dimensions only.
SHAPES = [(8, 24), (8, 24), (8, 24), (24,), (2, 4, 12), (0, 24), (8, 0), ()]
GRIDS = [(8,), (2, 4), (4, 2), (2, 2, 2), (4,), (2, 2), (2,), (6,), (2, 3), (1,), (2, 1)]
DTYPES = [np.int32, np.int32, np.complex64, np.bool_, jnp.bfloat16, jnp.int4]


def some_devices(draw: st.DrawFn, count: int) -> Any:
    start = draw(st.integers(0, 8 - count))
    devices = DEVICES[start : start + count]
    return draw(st.permutations(devices)) if draw(st.booleans()) else devices


def named(draw: st.DrawFn, shape: Sequence[int]) -> Any:
    sizes = draw(st.sampled_from(GRIDS))
    names = "abc"[: len(sizes)]
    devices = np.array(some_devices(draw, math.prod(sizes))).reshape(sizes)
    dims: list[list[str]] = [[] for _ in shape]
    for name in draw(st.permutations(names)):
        size = sizes[names.index(name)]
        left = [n // math.prod(sizes[names.index(a)] for a in d) for n, d in zip(shape, dims)]  # noqa: B905
        free = [i for i, n in enumerate(left) if n % size == 0]
        dim = draw(st.sampled_from([None, *free, *free]))
        if dim is not None:
            dims[dim].append(name)
    kinds = (NamedSharding, jax.sharding.NamedSharding)
    return draw(st.sampled_from(kinds))(Mesh(devices, tuple(names)), P(*map(tuple, dims)))


def tiles(draw: st.DrawFn, shape: Sequence[int]) -> Any:
    """Draw tiles and replicas of them, as listed devices or as an iota."""
    count = draw(st.sampled_from([2, 4, 8]))
    dims, left = [], count
    for n in shape:
        dims.append(draw(st.sampled_from([k for k in (1, 2, 4, 8) if left % k == 0 == n % k])))
        left //= dims[-1]
    sizes = (*dims, left)
    if not shape or left == count:
        return GSPMDSharding.get_replicated(some_devices(draw, count))
    if draw(st.booleans()):
        order = draw(st.permutations(range(count)))
        assignment = TileAssignment.listed(sizes, order, ("replicated",))
    else:
        turned = draw(st.permutations(range(len(sizes))))
        assignment = TileAssignment.iota(
            sizes, tuple(sizes[d] for d in np.argsort(turned)), tuple(turned), ("replicated",)
        )
    return GSPMDSharding(some_devices(draw, count), assignment)


def pmap(draw: st.DrawFn, shape: Sequence[int]) -> Any:
    """Draw a dimension in as many slices as devices, with or without replicas."""
    cuts = [(d, k) for d, n in enumerate(shape) for k in (2, 4, 8) if n % k == 0]
    dim, count = draw(st.sampled_from([*cuts, (None, 4)]))
    copies = draw(st.sampled_from([1, 2])) if dim is None or count < 8 else 1
    sharding = tuple(Chunked((count,)) if d == dim else Whole() for d in range(len(shape)))
    axes: list[Any] = [ShardedAxis(0)] if dim is not None else [Replicated(count)]
    if copies > 1:
        axes.insert(draw(st.integers(0, 1)), Replicated(copies))
    return PmapSharding(some_devices(draw, count * copies), ShardingSpec(sharding, tuple(axes)))


def own(draw: st.DrawFn, shape: Sequence[int]) -> Any:
    if not shape or shape[0] % 4:
        return SingleDeviceSharding(draw(st.sampled_from(DEVICES)))
    return Stripes(some_devices(draw, 4), draw(st.permutations(range(4))))


def single(draw: st.DrawFn, shape: Sequence[int]) -> Any:
    return SingleDeviceSharding(draw(st.sampled_from(DEVICES)))


def draw_case(draw: st.DrawFn) -> tuple[np.ndarray, Any, Any]:
    shape = draw(st.sampled_from(SHAPES))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    numbers = np.arange(math.prod(shape)) % (2 if dtype == np.bool_ else 8)
    v = (
        numbers.astype(dtype).reshape(shape)
        if dtype != np.int32
        else np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    )
    kinds = [named, named, named, tiles, tiles, pmap, own, single]
    source, target = (draw(st.sampled_from(kinds))(draw, shape) for _ in "st")
    return v, source, target


cases = st.composite(draw_case)


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(case=cases(), donate=st.booleans())
def test_every_replica_is_the_right_piece(case: Any, donate: bool) -> None:
    check(*case, donate)


@pytest.mark.slow
@settings(max_examples=max(40, EXAMPLES // 4))
@given(case=cases(), donate=st.booleans(), slabs=st.booleans())
def test_every_replica_is_right_between_separate_memories(
    case: Any, donate: bool, slabs: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "in_one_memory", lambda *shardings: False)
        if slabs:
            patch.setattr(compiled, "_NEGLIGIBLE_BYTES", 0)
        check(*case, donate)


@pytest.mark.slow
@settings(max_examples=2 * EXAMPLES)
@given(case=cases())
def test_plan_counts_exactly_the_missing_elements(case: Any) -> None:
    v, source, target = case
    report = reshard_plan(jax.ShapeDtypeStruct(v.shape, v.dtype), target, source=source)
    held, wanted = (masks(v.shape, sharding) for sharding in (source, target))
    nowhere = np.zeros(v.shape, bool)
    missing = Counter({d: (m & ~held.get(d, nowhere)).sum() for d, m in wanted.items()})
    size = v.dtype.itemsize
    assert report.bytes_moved == missing.total() * size
    assert report.bytes_kept == sum(m.sum() for m in wanted.values()) * size - report.bytes_moved
    taken: Counter[int] = Counter()
    for pair in report.pairs:
        assert pair.source != pair.destination
        taken[pair.destination] += pair.nbytes
    assert taken == Counter({d.id: n * size for d, n in missing.items() if n})
    for sharding, nbytes in (
        (source, report.source_shard_bytes),
        (target, report.target_shard_bytes),
    ):
        assert {m.sum() * size for m in masks(v.shape, sharding).values()} == {nbytes}


def masks(shape: Sequence[int], sharding: Any) -> dict[Any, np.ndarray]:
    """Return the elements that each device holds, from the slices alone."""
    found = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found[device] = np.zeros(shape, bool)
        found[device][index] = True
    return found


def check(v: np.ndarray, source: Any, target: Any, donate: bool) -> None:
    x = device_put(v, source)
    y = device_put(x, target, donate=donate)
    # JAX's functions inspect the sharding, and can't read a user-defined class.
    assert y.sharding == target or isinstance(target, Stripes)
    assert x.is_deleted() == donate
    indices = target.devices_indices_map(v.shape)
    shards = {shard.device: shard.data for shard in y.addressable_shards}
    assert shards.keys() == indices.keys()
    for device, data in shards.items():
        assert data.devices() == {device}
        assert same(data, v[indices[device]])
    assert same(y, v)
    assert donate or same(x, v)
