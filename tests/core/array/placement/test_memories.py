"""Memory kinds and layouts: given to every constructor, read back, carried by programs."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tests.core.array.cases import CONSTRUCTORS, DEVICES, named, same, value
from tests.message_patterns import naming
from xlashard import (
    Array,
    SingleDeviceSharding,
    device_put,
    make_array_from_callback,
    make_array_from_process_local_data,
    pjit,
)
from xlashard.errors import ArgumentError, ShardingError

KINDS = [memory.kind for memory in DEVICES[0].addressable_memories()]
V = value(np.float32)
ROWS = named("x", "y")
COLUMNS_FIRST = Format(Layout((0, 1)), ROWS)
ROWS_FIRST = Format(Layout((1, 0)), ROWS)
FORMATTED = {
    "device_put": lambda f: device_put(V, f),
    "moved": lambda f: device_put(device_put(V, named()), f),
    "callback": lambda f: make_array_from_callback(V.shape, f, lambda index: V[index]),
    "local data": lambda f: make_array_from_process_local_data(f, V),
}


@pytest.mark.parametrize("constructor", list(CONSTRUCTORS))
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_through_every_memory_kind(kind: str, constructor: str) -> None:
    make = CONSTRUCTORS[constructor]
    for place in (ROWS, named(), SingleDeviceSharding(DEVICES[2])):
        there = place.with_memory_kind(kind)
        x = make(V, there)
        assert x.sharding == there and x.sharding.memory_kind == kind and same(x, V)
        assert all(s.data.sharding.memory_kind == kind for s in x.addressable_shards)
        back = device_put(x, named("y"))
        assert back.sharding.memory_kind == KINDS[0] and same(back, V)
        assert same(device_put(x, named("y", memory_kind=kind)), V)
        moved = device_put(x, there, donate=True)
        assert x.is_deleted() and moved.sharding == there and same(moved, V)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_operations_on_memory_kinds_equal_jax(kind: str) -> None:
    x = device_put(V, ROWS.with_memory_kind(kind))
    for use in (lambda x: x + 1, lambda x: x.sum(), lambda x: -x, lambda x: x == x, lambda x: x.T):
        ours, theirs = use(x), use(x.to_jax())
        assert type(ours) is Array and same(ours, np.asarray(theirs))
        assert ours.sharding.memory_kind == theirs.sharding.memory_kind
    assert same(pjit(lambda x: x * 2)(x), V * 2)
    out = pjit(lambda x: x * 2, out_shardings=ROWS.with_memory_kind(kind))(device_put(V, ROWS))
    assert out.sharding.memory_kind == kind and same(out, V * 2)


def test_an_unknown_memory_kind() -> None:
    with pytest.raises(ShardingError, match=naming("memory_kind='hbm2'", "cpu:0", "'device'")):
        ROWS.with_memory_kind("hbm2")


@pytest.mark.devices(8)
@pytest.mark.parametrize("way", list(FORMATTED))
@pytest.mark.parametrize("form", [COLUMNS_FIRST, ROWS_FIRST])
def test_every_layout(way: str, form: Any) -> None:
    x = FORMATTED[way](form)
    assert x.layout.major_to_minor == form.layout.major_to_minor
    assert x.format == Format(x.layout, ROWS) and same(x, V)
    assert same(device_put(x, named()), V) and same(x[:4, :4], V[:4, :4]) and same(x + x, V + V)
    assert same(pjit(lambda x: x + 1)(x), V + 1)
    assert [same(s.data, V[s.index]) for s in x.addressable_shards] == [True] * 8


def test_layouts_of_programs() -> None:
    taken = pjit(lambda x: x + 1, in_shardings=ROWS_FIRST, out_shardings=ROWS_FIRST)(V)
    assert taken.layout.major_to_minor == (1, 0) and same(taken, V + 1)
    again = pjit(lambda x: x * 2, in_shardings=ROWS_FIRST, out_shardings=COLUMNS_FIRST)
    for _ in range(2):
        out = again(taken)
        assert out.layout.major_to_minor == (0, 1) and same(out, (V + 1) * 2)


def test_an_automatic_layout_is_refused() -> None:
    with pytest.raises(ArgumentError, match=naming("x: ", "layout", "major_to_minor=(1, 0)")):
        device_put(V, Format(Layout.AUTO, ROWS))
    assert jax.devices()[0].platform != "cpu" or "pinned_host" in KINDS
