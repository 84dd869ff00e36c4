"""`device_put`: trees of values onto shardings, with and without transfers."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tests.core.array.cases import DEVICES, HALF, MESH, SHARDINGS, named, same, value
from tests.message_patterns import naming
from xlashard import (
    Array,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    P,
    SingleDeviceSharding,
    device_put,
)
from xlashard.core.array.reshard import compiled, p2p
from xlashard.errors import ArgumentError, DeletedError, PlacementError

V = value(np.float32)


def raises(kind: type[Exception], *texts: str) -> Any:
    """Expect an error whose message has all of these texts."""
    return pytest.raises(kind, match=naming(*texts))


def pointers(x: Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the transfer strategies that ran."""
    gone: list[str] = []
    ways = {
        "reshard_by_program": compiled,
        "carry_shards": p2p,
        "reshard_by_pieces": p2p,
        "reshard_in_host_memory": p2p,
    }
    for name, module in ways.items():
        call = getattr(module, name)

        def recorded(*args: Any, _name: str = name, _call: Any = call, **kwargs: Any) -> Any:
            gone.append(_name)
            count = len(gone)
            moved = _call(*args, **kwargs)
            del gone[count:]  # the strategies that this one consists of
            return moved

        monkeypatch.setattr(module, name, recorded)
    return gone


def test_without_a_place_values_are_uncommitted_and_arrays_stay() -> None:
    x = device_put(V)
    assert x.devices() == {jax.devices()[0]} and not x.committed
    assert device_put(x) is x
    sharded = device_put(V, named("x"))
    assert device_put(sharded) is sharded
    assert device_put(sharded, named("x")).sharding == named("x")
    with jax.default_device(DEVICES[2]):
        assert device_put(V).devices() == {DEVICES[2]}


def test_numbers_keep_their_weak_types() -> None:
    for number, dtype in ((1, "int32"), (1.5, "float32"), (2j, "complex64"), (True, "bool")):
        x = device_put(number, named())
        assert x.dtype == dtype
        assert x.weak_type == (dtype != "bool")
        assert x.item() == number
    assert not device_put(np.float32(1)).weak_type
    assert device_put(np.arange(3.0)).dtype == jnp.zeros(()).dtype


def test_equivalent_shardings_move_nothing(moves: list[str]) -> None:
    x = device_put(V, named("x", "y"))
    for same_place in (
        named("x", "y"),
        named(("x",), ("y",)),
        GSPMDSharding(DEVICES, "{devices=[2,4]<=[8]}"),
        jax.sharding.NamedSharding(MESH, P("x", "y")),
        named("x", "y", memory_kind=DEVICES[0].default_memory().kind),
        NamedSharding(Mesh(MESH.devices.T, ("y", "x")), P("x", "y")),
    ):
        moved = device_put(x, same_place)
        assert pointers(moved) == pointers(x) or moved.sharding.devices != x.sharding.devices
        assert sorted(pointers(moved)) == sorted(pointers(x))
        assert same(moved, V)
    assert moves == []
    uncommitted = device_put(V)
    committed = device_put(uncommitted, jax.devices()[0])
    assert committed.committed and pointers(committed) == pointers(uncommitted)


@pytest.mark.slow
def test_reshard_on_equal_devices_runs_one_program(moves: list[str], way: str) -> None:
    x = device_put(V, named("x", "y"))
    for place in (named(None, ("x", "y")), named(), SHARDINGS["listed tiles"]):
        moves.clear()
        device_put(x, place)
        assert moves == [
            "reshard_in_host_memory" if way == "in one memory" else "reshard_by_program"
        ]


def test_values_without_dimensions_move_too(way: str) -> None:
    for start, end in ((DEVICES[0], named()), (DEVICES[2], DEVICES[3]), (named(), DEVICES[1])):
        x = device_put(device_put(np.int32(7), start), end)
        assert same(x, np.asarray(np.int32(7)))
        assert all(same(shard.data, np.asarray(np.int32(7))) for shard in x.addressable_shards)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_other_devices(moves: list[str], way: str) -> None:
    emulated = way == "in one memory"
    first = NamedSharding(Mesh(DEVICES[:4], ("z",)), P("z"))
    x = device_put(V, NamedSharding(HALF, P("z")))
    for place, ways in (
        (first, ["carry_shards"]),
        (NamedSharding(first.mesh, P(None, "z")), ["carry_shards", "reshard_by_program"]),
        (named("x", "y"), ["reshard_by_pieces"]),
        (DEVICES[0], ["reshard_by_pieces"]),
    ):
        moves.clear()
        assert same(device_put(x, place), V)
        assert moves == (["reshard_in_host_memory"] if emulated else ways)
    assert same(device_put(device_put(V, DEVICES[6]), named("x")), V)


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_memories() -> None:
    x = device_put(V, named("x", "y"))
    there = device_put(x, named("x", "y", memory_kind="pinned_host"))
    assert there.sharding.memory_kind == "pinned_host"
    assert there.to_jax().sharding.memory_kind == "pinned_host"
    assert same(there, V)
    other = device_put(there, named("y", memory_kind="pinned_host"))
    assert other.sharding.memory_kind == "pinned_host" and same(other, V)
    back = device_put(other, named(None, "y"))
    assert same(back + 1, V + 1)
    assert same(device_put(there, NamedSharding(HALF, P(None, "z"))), V)


@pytest.mark.slow
def test_a_memory_space_keeps_devices_and_commits_as_in_jax() -> None:
    host = SingleDeviceSharding(DEVICES[0], memory_kind="pinned_host")
    key = jax.random.key(0)
    values = [V, 2.5, jnp.ones(3), device_put(V), key, device_put(V, DEVICES[2])]
    values += [device_put(V, named("x", "y")), device_put(V, named("x", memory_kind="pinned_host"))]
    for x in values:
        for target in (jax.memory.Space.Host, jax.memory.Space.Device, host):
            theirs = x.to_jax() if isinstance(x, Array) else x
            ours, wanted = device_put(x, target), jax.device_put(theirs, target)
            assert ours.sharding == wanted.sharding, (x, target)
            assert ours.committed == wanted.committed, (x, target)
    with raises(ArgumentError, "a memory space", "MemorySpace"):
        device_put(V, jax.memory.Space.Any)


def test_layouts() -> None:
    columns = Format(Layout((1, 0)), named("x"))
    for source in (V, device_put(V), device_put(V, named("y")), device_put(V, named("x"))):
        x = device_put(source, columns)
        assert x.layout.major_to_minor == (1, 0)
        assert x.sharding == named("x")
        assert same(x, V)
    assert same(device_put(x, named(None, "x")), V)
    plain = device_put(x, Format(Layout((0, 1)), named("x")))
    assert plain.layout.major_to_minor == (0, 1)
    assert device_put(V, Format(None, named("x"))).sharding == named("x")
    assert not device_put(V, Format(None, None)).committed
    with raises(PlacementError, "default memory", "'pinned_host'"):
        device_put(V, Format(Layout((1, 0)), named("x", memory_kind="pinned_host")))


class TestTrees:
    tree: ClassVar = {"w": V, "b": [np.arange(8), 2.0], "none": None}

    def test_one_sharding_applies_to_all_leaves(self) -> None:
        out = device_put(self.tree, named())
        assert out["none"] is None
        assert all(leaf.sharding == named() for leaf in jax.tree.leaves(out))

    def test_a_prefix(self) -> None:
        places = {"w": named("x"), "b": [DEVICES[1], None], "none": None}
        out = device_put(self.tree, places)
        assert out["w"].sharding == named("x")
        assert out["b"][0].devices() == {DEVICES[1]}
        assert not out["b"][1].committed
        out = device_put((V, {"a": V}), (named("x"), named("y")))
        assert out[1]["a"].sharding == named("y")

    def test_a_spec_means_the_mesh_in_force(self) -> None:
        with jax.set_mesh(MESH):
            out = device_put({"a": V, "b": [V]}, {"a": P("x"), "b": P()})
            with raises(PlacementError, "x: ", "'z'"):
                device_put(V, P("z"))
        assert out["a"].sharding == named("x")
        assert out["b"][0].sharding == named()

    @pytest.mark.parametrize("donate", [True, {"a": True, "b": False}, {"a": False, "b": True}])
    @pytest.mark.parametrize("there", [("x",), ("y", "x"), ()])
    def test_tied_leaves_are_donated_once(self, donate: Any, there: tuple[str, ...]) -> None:
        tied = device_put(V, named("x"))
        out = device_put({"a": tied, "b": tied}, named(*there), donate=donate)
        assert tied.is_deleted()
        assert same(out["a"], V) and same(out["b"], V)
        out["a"].delete()
        assert same(out["b"] + 0, V)

    @pytest.mark.devices(8)
    def test_errors_name_the_path_of_the_leaf(self) -> None:
        with raises(PlacementError, "x['b'][0]: dimension 0", "3", "2 tiles ('x'=2)"):
            device_put({"b": [np.zeros(3)]}, named("x"))
        with raises(ArgumentError, "x['b'][1]", "str"):
            device_put({"b": [1, "text"]})
        with raises(ArgumentError, "x['b']", "masked array", "x.filled(0)"):
            device_put({"b": np.ma.masked_array(V)})
        with raises(ArgumentError, "x['b']", "dtype >f4", "x.astype('float32')"):
            device_put({"b": V.astype(">f4")})
        with raises(ArgumentError, "x[0]", "device, a sharding, a Format, a memory space or None"):
            device_put([V], ["cpu"])
        with raises(ArgumentError, "x: ", "NamedSharding(mesh, "):
            device_put(V, P("x"))
        gone = device_put(V, named("x"))
        gone.delete()
        with raises(DeletedError, "x['a'][1]", "float32[8,16]"):
            device_put({"a": (1, gone)}, named())

    def test_a_prefix_that_does_not_fit(self) -> None:
        with raises(ArgumentError, "device['b']", "x['b']", "a list of 1", "a list of 2"):
            device_put(self.tree, {"w": None, "b": [None], "none": None})
        with raises(ArgumentError, "device ", "['w']", "['b', 'none', 'w']"):
            device_put(self.tree, {"w": None})
        with raises(ArgumentError, "device", "a tuple of 2", "a list of 2"):
            device_put([1, 2], (None, None))

    def test_flags_may_be_prefixes(self) -> None:
        x, y = device_put(V, named("x")), device_put(V, named("x"))
        device_put({"x": x, "y": y}, named("y"), donate={"x": True, "y": False})
        assert x.is_deleted() and not y.is_deleted()
        with raises(ArgumentError, "donate", " x "):
            device_put({"x": y}, donate={"z": True})
        for flags in ({"donate": 1}, {"donate": None}, {"may_alias": "yes"}):
            with raises(ArgumentError, "x['x']", "donate"):
                device_put({"x": y}, **flags)

    def test_an_empty_tree(self) -> None:
        assert device_put({}, named("x")) == {}
        assert device_put([], donate=True) == []


@pytest.mark.usefixtures("way")
class TestDonation:
    @pytest.mark.parametrize(
        "place",
        [
            named("x"),
            named("y"),
            named(),
            DEVICES[0],
            NamedSharding(HALF, P("z")),
            NamedSharding(Mesh(MESH.devices.T, ("y", "x")), P("x")),
            named("x", memory_kind="pinned_host"),
            None,
        ],
        ids=str,
    )
    @pytest.mark.parametrize("start", ["rows", "both", "half the devices", "single"])
    def test_donated_source_is_deleted(self, start: str, place: Any) -> None:
        x = device_put(V, SHARDINGS[start])
        moved = device_put(x, place, donate=True)
        assert x.is_deleted()
        assert same(moved, V)
        assert moved.committed
        with raises(DeletedError, "float32[8,16]", "donated", "device_put(..., donate=True)"):
            x + 1
        with raises(DeletedError, "donated", "device_put"):
            np.asarray(x)

    def test_donation_on_an_equal_sharding_moves_no_byte(self) -> None:
        x = device_put(V, named("x", "y"))
        before = pointers(x)
        moved = device_put(x, named("x", "y"), donate=True)
        assert pointers(moved) == before

    def test_donated_uncommitted_array_stays_uncommitted(self) -> None:
        x = device_put(V)
        moved = device_put(x, donate=True)
        assert x.is_deleted() and not moved.committed and same(moved, V)

    def test_host_values_are_not_affected(self) -> None:
        v = V.copy()
        assert same(device_put(v, named("x"), donate=True), v)

    def test_donate_and_may_alias_exclude_each_other(self) -> None:
        with raises(ArgumentError, "x: donate=True", "may_alias=True"):
            device_put(device_put(V), DEVICES[0], donate=True, may_alias=True)


@pytest.mark.usefixtures("way")
class TestAliases:
    @pytest.mark.parametrize("kind", ["rows", "both", "partly replicated", "replicated", "single"])
    def test_host_memory_is_free_afterwards(self, kind: str) -> None:
        v = np.ascontiguousarray(np.tile(V, (64, 1)))
        wanted = v.copy()
        x = device_put(v, SHARDINGS[kind])
        v[...] = -1
        assert same(x, wanted)

    def test_may_alias_shares_aligned_host_memory(self) -> None:
        block = np.zeros(1 << 16, np.float32)
        start = -block.ctypes.data % 64 // 4
        v = block[start : start + 4096]
        x = device_put(v, DEVICES[0], may_alias=True)
        if DEVICES[0].platform == "cpu":
            assert x.unsafe_buffer_pointer() == v.ctypes.data
        assert same(x, v)

    @pytest.mark.parametrize("place", [None, named("x", "y"), named("y"), DEVICES[0]], ids=str)
    def test_may_alias_false_always_copies(self, place: Any) -> None:
        x = device_put(V, named("x", "y"))
        y = device_put(x, place, may_alias=False)
        assert not set(pointers(x)) & set(pointers(y))
        x.delete()
        assert same(y, V)

    def test_a_fresh_uncommitted_copy(self) -> None:
        x = device_put(V)
        y = device_put(x, may_alias=False)
        assert pointers(x) != pointers(y) and not y.committed

    @pytest.mark.devices(8)
    def test_may_alias_false_copies_shards_in_place_too(self) -> None:
        x = device_put(V, NamedSharding(HALF, P("z")))
        overlapping = NamedSharding(Mesh(DEVICES[2:6], ("z",)), P("z"))
        y = device_put(x, overlapping, may_alias=False)
        x.delete()
        assert same(y, V)


def test_views_that_share_memory() -> None:
    broadcast = np.broadcast_to(np.float32(3), (8, 16))
    backwards, crossed = V[::-1], np.asfortranarray(V)
    for v in (broadcast, backwards, crossed, V[:, ::2]):
        for kind in ("rows", "both", "columns", "partly replicated", "replicated", "own"):
            assert same(device_put(v, SHARDINGS[kind]), np.ascontiguousarray(v))


def test_traced_values_stay_traced() -> None:
    @jax.jit
    def inside(t: Any) -> Any:
        moved = device_put({"t": t, "v": V}, named("x"))
        assert isinstance(moved["t"], jax.core.Tracer)
        return moved["t"] + moved["v"]

    assert same(inside(V), V + V)
    np.testing.assert_allclose(jax.grad(lambda t: device_put(t, named("x")).sum())(V), 1)


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_zero_sizes_move() -> None:
    empty = np.zeros((0, 16), np.float32)
    for one in ("rows", "single", "replicated", "half the devices", "own"):
        for other in ("columns", "single", "half the devices", "listed tiles", "pinned"):
            x = device_put(device_put(empty, SHARDINGS[one]), SHARDINGS[other])
            assert same(x, empty)
            assert x.sharding == SHARDINGS[other]
