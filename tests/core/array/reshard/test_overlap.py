"""Shards in place keep their buffers, and donated shards are freed during a reshard."""

from typing import Any

import numpy as np
import pytest

from tests.core.array.cases import DEVICES, MESH, Stripes, named, same
from xlashard import Array, Mesh, NamedSharding, P, Sharding, SingleDeviceSharding, device_put
from xlashard.core.array.reshard import p2p, plan
from xlashard.errors import PlacementError

V = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


def on(devices: Any, *spec: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("d",)), P(*spec))


def pointers(x: Array) -> dict[Any, int]:
    return {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


PAIRS: dict[str, tuple[Any, Any]] = {
    "some other devices": (on(DEVICES[4:], "d"), on([*DEVICES[4:6], *DEVICES[:2]], "d")),
    "more devices, replicated": (on(DEVICES[:4]), on(DEVICES)),
    "fewer devices, replicated": (on(DEVICES), on(DEVICES[3:5])),
    "one of many": (on(DEVICES), SingleDeviceSharding(DEVICES[2])),
    "one to many": (SingleDeviceSharding(DEVICES[2]), on(DEVICES[:4])),
    "more copies of each tile": (on(DEVICES[:2], "d"), named("x", mesh=MESH)),
    "one's own sharding": (on(DEVICES[:4], "d"), Stripes(DEVICES[2:6], (2, 3, 0, 1))),
    "another order on others": (
        on(DEVICES[:4], "d"),
        on([*DEVICES[3:5], *DEVICES[2:3], DEVICES[0]], "d"),
    ),
}


def kept(source: Sharding, target: Sharding) -> set[Any]:
    """Return the devices that hold the same piece before and after."""
    before, after = (s.devices_indices_map(V.shape) for s in (source, target))
    pairs = ((d, before.get(d), i) for d, i in after.items())
    return {d for d, old, new in pairs if old is not None and same(V[old], V[new])}


@pytest.mark.parametrize(("source", "target"), PAIRS.values(), ids=PAIRS)
class TestOverlap:
    @pytest.mark.usefixtures("way")
    def test_shards_in_place_keep_their_buffers(self, source: Sharding, target: Sharding) -> None:
        x = device_put(V, source)
        before = pointers(x)
        y = device_put(x, target)
        after = pointers(y)
        stay = kept(source, target)
        assert stay or source.device_set != target.device_set
        assert {d: after[d] for d in stay} == {d: before[d] for d in stay}
        assert same(y, V)
        assert same(x, V)

    @pytest.mark.usefixtures("way")
    def test_may_alias_false_copies_every_shard(self, source: Sharding, target: Sharding) -> None:
        x = device_put(V, source)
        y = device_put(x, target, may_alias=False)
        assert not set(pointers(x).values()) & set(pointers(y).values())
        x.delete()
        assert same(y, V)

    @pytest.mark.usefixtures("way")
    def test_source_may_be_donated(self, source: Sharding, target: Sharding) -> None:
        x = device_put(V, source)
        y = device_put(x, target, donate=True)
        assert x.is_deleted()
        assert same(y, V)

    def test_emulated_devices_copy_no_byte_of_an_existing_tile(
        self, source: Sharding, target: Sharding, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every target here holds tiles of the source, or contiguous parts of them."""
        copies: list[Any] = []
        monkeypatch.setattr(p2p, "copy_all", copies.extend)
        x = device_put(V, source)
        y = device_put(x, target)
        assert copies == []
        assert same(y, V)
        x.delete()
        assert same(y, V)


def test_block_of_scattered_parts_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy_all = p2p.copy_all
    monkeypatch.setattr(
        p2p,
        "copy_all",
        lambda copies: (copied.extend(s.nbytes for _, s in copies), copy_all(copies)),
    )
    x = device_put(V, named(("x", "y")))
    y = device_put(x, named(None, "y"))
    assert sum(copied) == V.nbytes
    assert same(y, V)


def test_donated_buffers_are_freed_one_by_one_in_one_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = device_put(V, named(("x", "y")))
    buffers = [shard.data for shard in x.addressable_shards]
    alive: list[int] = []
    copy_all = p2p.copy_all

    def counted(copies: Any) -> None:
        alive.append(sum(not b.is_deleted() for b in buffers))
        copy_all(copies)

    monkeypatch.setattr(p2p, "copy_all", counted)
    y = device_put(x, named(None, ("x", "y")), donate=True)
    assert alive == [8, 7, 6, 5, 4, 3, 2, 1]
    assert same(y, V)


def test_donated_buffers_are_freed_one_by_one_between_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "in_one_memory", lambda *shardings: False)
    x = device_put(V, on(DEVICES[:4], "d"))
    buffers = [shard.data for shard in x.addressable_shards]
    alive: list[int] = []
    taken = p2p._moved_piece

    def counted(*args: Any) -> Any:
        alive.append(sum(not b.is_deleted() for b in buffers))
        return taken(*args)

    monkeypatch.setattr(p2p, "_moved_piece", counted)
    y = device_put(x, SingleDeviceSharding(DEVICES[6]), donate=True)
    assert alive == [4, 3, 2, 1]
    assert same(y, V)


def test_refused_donation_leaves_the_source_alive() -> None:
    x = device_put(V, named("x"))
    with pytest.raises(PlacementError):
        device_put(x, named(None, None, "x"), donate=True)
    assert not x.is_deleted()
    assert same(x, V)
