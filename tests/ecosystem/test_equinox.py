"""equinox: modules whose leaves are Arrays, its filters, and its files."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

from tests.core.array.cases import named, same
from xlashard import Array, device_put, pjit

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def model() -> Any:
    made = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    arrays, rest = eqx.partition(made, eqx.is_array)
    return eqx.combine(device_put(arrays, named()), rest)


@pytest.mark.slow
def test_equinox_functions_accept_modules_of_arrays(model: Any) -> None:
    assert all(type(x) is Array for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    assert eqx.is_array(model.layers[0].weight) and eqx.is_inexact_array(model.layers[0].weight)
    x = device_put(X, named("x"))
    wanted = jax.vmap(model)(X)
    np.testing.assert_allclose(eqx.filter_jit(lambda m, x: jax.vmap(m)(x))(model, x), wanted, 1e-5)
    loss, grads = eqx.filter_value_and_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
    better = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    assert (jax.vmap(better)(x) ** 2).mean() < loss
    arrays, rest = eqx.partition(model, eqx.is_array)
    out = pjit(lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x))(arrays, x)
    assert type(out) is Array
    np.testing.assert_allclose(out, wanted, rtol=1e-5)
    changed = eqx.tree_at(lambda m: m.layers[0].bias, model, device_put(np.ones(16, np.float32)))
    assert type(changed.layers[0].bias) is Array
    assert eqx.tree_equal(model, model) and not eqx.tree_equal(model, better)
    assert eqx.filter_shard(x, named("y")).sharding.is_equivalent_to(named("y"), 2)


@pytest.mark.slow
def test_equinox_files_round_trip(model: Any, tmp_path: Path) -> None:
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    empty = jax.tree.map(lambda x: x * 0 if eqx.is_array(x) else x, model)

    def in_place(file: Any, like: Any) -> Any:
        """Read a leaf and put it on the sharding of the existing leaf; equinox checks its type."""
        read = eqx.default_deserialise_filter_spec(file, like)
        return device_put(read, like.sharding) if isinstance(like, Array) else read

    read = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", empty, in_place)
    ours, theirs = (jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (read, model))
    assert all(same(a, np.asarray(b)) for a, b in zip(ours, theirs, strict=True))
    shapes = eqx.filter_eval_shape(eqx.nn.MLP, 8, 4, 16, 1, key=jax.random.key(0))
    read = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", shapes)
    assert same(read.layers[0].weight, np.asarray(model.layers[0].weight))
