"""Random calls of the constructors, most of them bad: all errors are this package's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout

from tests.core.array.cases import DEVICES, SHARDINGS, named
from xlashard import (
    Array,
    P,
    device_put,
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
)
from xlashard.errors import XlashardError

KEYS = jax.random.split(jax.random.key(0), 4)
LIVE = device_put(np.arange(8.0), named("x"))
DEAD = device_put(np.arange(8.0), named("x"))
DEAD.delete()
# A user-defined sharding may raise its own errors.
GOOD = [sharding for kind, sharding in SHARDINGS.items() if not kind.startswith("own")]

junk = st.sampled_from(
    [
        None,
        "text",
        3,
        -1,
        2.5,
        True,
        object(),
        len,
        b"bytes",
        {},
        [],
        (),
        {"a": 1},
        Ellipsis,
        P("x"),
    ]
)
values = st.one_of(
    junk,
    st.sampled_from(
        [
            np.arange(8),
            np.arange(8.0).reshape(4, 2),
            np.zeros((0, 4)),
            np.array("text"),
            np.array([None]),
            np.array([(1, 2)], "i4,i4"),
            np.datetime64("2000"),
            LIVE,
            DEAD,
            Array(),
            LIVE.to_jax(),
            KEYS,
            jnp.zeros(8, jnp.bfloat16),
            [[1, 2], [3]],
        ]
    ),
)
placements = st.one_of(
    junk,
    st.sampled_from([*GOOD, *DEVICES[:2]]),
    st.sampled_from([Format(Layout((1, 0)), named("x")), Format(Layout.AUTO, named("x"))]),
)
sizes = st.integers(-1, 9)
shapes = st.one_of(st.lists(sizes, max_size=3).map(tuple), st.lists(sizes, max_size=2), junk)
dtypes = st.one_of(st.none(), st.sampled_from(["float32", "int4", np.int8, object, "colour", 3]))
flags = st.one_of(st.booleans(), st.none(), junk)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        leaves, st.lists(leaves, max_size=2), st.dictionaries(st.sampled_from("ab"), leaves)
    )


def only_ours(call: Callable[[], Any]) -> None:
    try:
        jax.block_until_ready(call())
    except Exception as error:
        if not isinstance(error, XlashardError):
            raise
        assert len(str(error)) > 20, error


no_slowness = settings(
    max_examples=600, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.mark.slow
@no_slowness
@given(x=trees(values), place=trees(placements), donate=trees(flags), alias=trees(flags))
def test_device_put(x: Any, place: Any, donate: Any, alias: Any) -> None:
    # Arrays that other examples use must not be donated.
    donate = False if donate is True or not isinstance(donate, bool | int | str) else donate
    only_ours(lambda: device_put(x, place, donate=donate, may_alias=alias))


@pytest.mark.slow
@no_slowness
@given(shape=shapes, place=placements, piece=values, dtype=dtypes)
def test_from_callback(shape: Any, place: Any, piece: Any, dtype: Any) -> None:
    only_ours(lambda: make_array_from_callback(shape, place, lambda index: piece, dtype))


@pytest.mark.slow
@no_slowness
@given(
    shape=shapes,
    place=placements,
    arrays=st.one_of(values, st.lists(values, max_size=3)),
    dtype=dtypes,
)
def test_from_single_device_arrays(shape: Any, place: Any, arrays: Any, dtype: Any) -> None:
    only_ours(lambda: make_array_from_single_device_arrays(shape, place, arrays, dtype=dtype))


@pytest.mark.slow
@no_slowness
@given(place=trees(placements), data=trees(values), shape=trees(st.one_of(shapes, st.none())))
def test_from_process_local_data(place: Any, data: Any, shape: Any) -> None:
    only_ours(lambda: make_array_from_process_local_data(place, data, shape))
