"""Copies and pickles of pjit-ed functions."""

import contextlib
import copy
import pickle

import cloudpickle
import jax
import numpy as np
import pytest

from tests.core.pjit.helpers import f32
from xlashard import NamedSharding, P, SingleDeviceSharding, device_put, legacy, pjit


@pytest.mark.slow
def test_copy_is_callable_and_deepcopy_is_the_same_function(mesh):
    place = NamedSharding(mesh, P())
    for options in ({}, {"out_shardings": place}, {"donate_argnums": 0}):
        f = pjit(lambda x: x * 2, **options)
        assert copy.deepcopy({"f": f})["f"] is f
        np.testing.assert_array_equal(copy.copy(f)(f32(8)), f32(8) * 2)


@pytest.mark.parametrize("kind", ["plain", "static", "donated", "sharded", "device", "legacy"])
def test_pickle_contains_the_function_and_its_options(mesh, kind):
    place = SingleDeviceSharding(jax.devices()[2])
    f = {
        "plain": pjit(lambda x, k=3: x * k),
        "static": pjit(lambda x, k=3: x * k, static_argnames="k"),
        "donated": pjit(lambda x, k=3: x * k, donate_argnums=0),
        "sharded": pjit(lambda x: x * 3, in_shardings=NamedSharding(mesh, P("x"))),
        "device": pjit(lambda x: x * 3, device=place.devices[0]),
        "legacy": legacy.pjit(lambda x: x * 3, None, None, donate_argnums=0),
    }[kind]
    whole = device_put(f32(8), NamedSharding(mesh, P("x")))
    shard = whole.addressable_shards[0].data  # recorded while it lives, but not in the pickle
    again = cloudpickle.loads(cloudpickle.dumps({"f": f}))["f"]
    assert again is not f
    assert not shard.is_deleted()
    with mesh if kind == "legacy" else contextlib.nullcontext():
        for function in (f, again):
            x = device_put(f32(8), NamedSharding(mesh, P("x")) if kind == "sharded" else None)
            tripled = function(x)
            np.testing.assert_array_equal(tripled, f32(8) * 3)
            assert tripled.sharding == f(f32(8)).sharding
            assert x.is_deleted() == (kind in ("donated", "legacy"))
    assert again.lower(f32(8)).as_text() == f.lower(f32(8)).as_text()


def test_module_level_function_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(_named_double)) is _named_double
    assert b"callable_of" not in pickle.dumps(_named_double)


@pjit
def _named_double(x):
    return x * 2
