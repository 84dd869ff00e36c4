"""Reading values: each shard once, with all copies started before the first is awaited."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import xlashard
from tests.core.array.cases import DEVICES, SHARDINGS, named, same, value
from xlashard import device_get, device_put
from xlashard.core.array.placement import read
from xlashard.errors import DeletedError


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Devices whose copies were started and awaited, in order."""
    seen: list[tuple[str, int]] = []

    def spy(name: str, what: str) -> None:
        call = getattr(read, name)

        def recorded(handle: Any) -> Any:
            (device, *_) = handle.sharding._device_assignment
            seen.append((what, DEVICES.index(device)))
            return call(handle)

        monkeypatch.setattr(read, name, recorded)

    spy("start_host_copy", "start")
    spy("host_view", "wait")
    return seen


@pytest.mark.devices(8)
def test_all_copies_start_before_the_first_is_awaited(events: list[tuple[str, int]]) -> None:
    np.asarray(device_put(value(np.float32), named("x", "y")))
    assert [what for what, _ in events] == ["start"] * 8 + ["wait"] * 8


@pytest.mark.devices(8)
def test_each_distinct_piece_is_copied_once(events: list[tuple[str, int]]) -> None:
    np.asarray(device_put(value(np.float32), named("y")))
    assert [number for what, number in events if what == "wait"] == [0, 1, 2, 3]


def test_replicated_value_is_read_from_one_device(events: list[tuple[str, int]]) -> None:
    device_put(value(np.float32), named()).tolist()
    assert events == [("wait", 0)]


@pytest.mark.devices(8)
def test_second_read_uses_the_cached_value(events: list[tuple[str, int]]) -> None:
    x = device_put(value(np.float32), named("x", "y"))
    first = np.asarray(x)
    del events[:]
    assert np.asarray(x) is first or np.shares_memory(np.asarray(x), first)
    assert float(x.tolist()[0][1]) == 1.0
    x.copy_to_host_async()
    assert events == []


@pytest.mark.parametrize("convert", [float, int, bool, np.asarray, lambda x: x.item()])
def test_a_scalar_is_read_from_its_device_once(
    events: list[tuple[str, int]], convert: Callable[[Any], Any]
) -> None:
    x = device_put(np.float32(2), named())
    assert float(x) == 2
    assert events == [("wait", 0)]
    del events[:]
    assert convert(x) == convert(np.float32(2))
    assert events == []
    assert not np.asarray(x).flags.writeable
    x.delete()
    with pytest.raises(DeletedError):
        convert(x)


@pytest.mark.devices(8)
def test_an_early_start_copies_the_distinct_pieces(events: list[tuple[str, int]]) -> None:
    x = device_put(value(np.float32), named("y"))
    x.copy_to_host_async()
    assert events == [("start", n) for n in range(4)]
    assert same(x, value(np.float32))
    y = device_put(value(np.float32), named())
    del events[:]
    y.copy_to_host_async()
    assert events == [("start", 0)]


@pytest.mark.devices(8)
def test_device_get_of_a_tree_starts_all_copies_before_waiting(
    events: list[tuple[str, int]],
) -> None:
    v = value(np.float32)
    tree = {"a": device_put(v, named("x")), "b": [device_put(v, named("y")), 3], "c": "text"}
    got = device_get(tree)
    started = [n for n, (what, _) in enumerate(events) if what == "start"]
    awaited = [n for n, (what, _) in enumerate(events) if what == "wait"]
    assert min(awaited) >= 2 + 4
    assert started[0] == 0
    assert same(got["a"], v) and same(got["b"][0], v)
    assert not got["a"].flags.writeable
    assert got["b"][1] == 3 and got["c"] == "text"


@pytest.mark.slow
def test_getting_takes_arrays_of_jax_too() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    got = device_get({"jax": jax.numpy.arange(3), "number": np.float32(2)})
    assert type(got["jax"]) is np.ndarray and got["jax"].tolist() == [0, 1, 2]
    assert got["number"] == 2
    assert xlashard.device_get(np.arange(2)).tolist() == [0, 1]
    assert jax.random.key_data(keys).shape == (2, 2)


@pytest.mark.parametrize("kind", list(SHARDINGS))
def test_reading_keeps_no_buffer_from_being_donated(kind: str) -> None:
    v = value(np.float32)
    x = device_put(v, SHARDINGS[kind])
    np.asarray(x)
    moved = device_put(x, named("y"), donate=True)
    assert x.is_deleted()
    assert same(moved, v)


def test_a_window_on_donated_memory_does_not_change() -> None:
    x = device_put(np.zeros(1 << 16, np.float32), DEVICES[0])
    window = np.asarray(x)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x).block_until_ready()
    assert not window.any()
