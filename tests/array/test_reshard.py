"""Between random pairs of shardings: every shard is the right piece."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.array.cases import DEVICES, same
from xlashard import GSPMDSharding, Mesh, NamedSharding, P, SingleDeviceSharding, device_put
from xlashard.array import reshard
from xlashard.geometry import TileAssignment

SHAPE = (8, 24)
GRIDS = [(8,), (2, 4), (4, 2), (2, 2, 2), (4,), (2, 2), (2,), (6,), (2, 3)]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.sampled_from(GRIDS))
    count = int(np.prod(sizes))
    start = draw(st.integers(0, 8 - count))
    devices = DEVICES[start : start + count]
    if draw(st.booleans()):
        devices = draw(st.permutations(devices))
    names = tuple("abc"[: len(sizes)])
    return Mesh(np.array(devices).reshape(sizes), names)


@st.composite
def shardings(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["named", "named", "named", "single", "tiles"]))
    if kind == "single":
        return SingleDeviceSharding(draw(st.sampled_from(DEVICES)))
    if kind == "tiles":
        dims = draw(st.sampled_from([(2, 4), (4, 2), (8, 1), (1, 8), (2, 2, 2), (1, 4, 2)]))
        order = draw(st.permutations(range(8)))
        assignment = TileAssignment.listed(dims, order, ("replicated",) * (len(dims) - 2))
        return GSPMDSharding(DEVICES, assignment)
    mesh = draw(meshes())
    # Axes of three and six only divide the second dimension.
    wide = [name for name, size in mesh.shape.items() if size in (3, 6)]
    free = [name for name in mesh.axis_names if name not in wide]
    placed = {name: draw(st.sampled_from([0, 1, None])) for name in free}
    placed |= {name: draw(st.sampled_from([1, None])) for name in wide}
    dims = [tuple(n for n in draw(st.permutations(list(placed))) if placed[n] == d) for d in (0, 1)]
    return NamedSharding(mesh, P(*dims))


@settings(max_examples=150)
@given(source=shardings(), target=shardings(), donate=st.booleans())
def test_every_shard_is_the_right_piece(source: Any, target: Any, donate: bool) -> None:
    check(source, target, donate)


@settings(max_examples=40)
@given(source=shardings(), target=shardings(), donate=st.booleans())
def test_also_where_devices_have_memories_of_their_own(
    source: Any, target: Any, donate: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard, "in_one_memory", lambda *places: False)
        check(source, target, donate)


def check(source: Any, target: Any, donate: bool) -> None:
    v = np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE)
    x = device_put(v, source)
    y = device_put(x, target, donate=donate)
    assert y.sharding is target
    assert x.is_deleted() == donate
    indices = target.devices_indices_map(SHAPE)
    assert [s.device for s in y.addressable_shards] == list(target.devices)
    for shard in y.addressable_shards:
        assert shard.data.devices() == {shard.device}
        assert same(shard.data, v[indices[shard.device]])
    assert same(y, v)
    assert jax.block_until_ready(y) is y
