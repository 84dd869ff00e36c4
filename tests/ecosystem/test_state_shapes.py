"""`eval_shape` with shardings for states of optax, flax and equinox, and their restoration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from xlashard import Mesh, P, device_put, eval_shape

pytestmark = pytest.mark.devices(8)

KEY = jax.random.key(0)
X = jnp.ones((1, 8))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def specs(tree: Any, ending: str) -> set[tuple[Any, ...]]:
    """Return the specs of the arrays whose paths contain a text, and have two dimensions."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        tuple(leaf.sharding.spec)
        for path, leaf in flat
        if ending in jax.tree_util.keystr(path) and leaf.ndim == 2
    }


def make_params(key: Any) -> Any:
    # Adafactor factors what has 128 rows and columns.
    return {"kernel": jax.random.normal(key, (128, 256)), "bias": jnp.zeros(256)}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "lion": lambda: optax.lion(1e-3, mu_dtype=jnp.bfloat16),
    "muon": lambda: optax.contrib.muon(1e-3),
    "masked": lambda: optax.masked(optax.adam(1e-3), {"kernel": True, "bias": False}),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "accumulated": lambda: optax.MultiSteps(optax.adam(1e-3), 4),
    "averaged": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_optimizers_follow_their_parameters(mesh: Mesh, name: str) -> None:
    optimizer = OPTIMIZERS[name]()

    def init(key: Any) -> Any:
        params = make_params(key)
        return params, optimizer.init(params)

    rules = [(r"^result\[0\].*kernel", P("data", "model")), (r"^result\[0\].*bias", P("model"))]
    with jax.set_mesh(mesh):
        state = eval_shape(init, KEY, shardings=rules)
    assert specs(state[1], "kernel") == {("data", "model")}
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(init, KEY))
    factors = [leaf for leaf in jax.tree.leaves(state[1]) if leaf.shape in {(128,), (256, 1)}]
    assert all(leaf.sharding.is_fully_replicated for leaf in factors)
    # As a program of its own, which gets the parameters.
    params = state[0]
    alone = eval_shape(optimizer.init, params, shardings=[])
    assert specs(alone, "kernel") == {("data", "model")}


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(8)(linen.LayerNorm()(linen.Dense(16)(x)))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)


def test_states_of_flax_and_equinox_have_shardings(mesh: Mesh) -> None:
    model, optimizer = Linen(), optax.adamw(1e-3)

    def linen_state(key: Any) -> Any:
        params = model.init(key, X)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def nnx_state(key: Any) -> Any:
        _, state = nnx.split(Net(nnx.Rngs(key)))
        return state, optimizer.init(state)

    def equinox_state(key: Any) -> Any:
        arrays = eqx.filter(eqx.nn.MLP(8, 4, 16, 1, key=key), eqx.is_array)
        return arrays, optimizer.init(arrays)

    with jax.set_mesh(mesh):
        found = eval_shape(linen_state, KEY, shardings=[("params.*kernel", P("data"))])
        assert isinstance(found, TrainState)
        assert specs(found.params, "kernel") == specs(found.opt_state, "kernel") == {("data",)}
        found = eval_shape(nnx_state, KEY, shardings=[(r"^result\[0\].*kernel", P("data"))])
        assert specs(found[0], "kernel") == specs(found[1], "kernel") == {("data",)}
        rules = [(r"^result\[0\].*weight", P(None, "model"))]
        found = eval_shape(equinox_state, KEY, shardings=rules)
        assert specs(found[0], "weight") == specs(found[1], "weight") == {(None, "model")}
        # Parts that are not arrays are combined afterwards, as always in equinox.
        static = eqx.filter_eval_shape(eqx.nn.MLP, 8, 4, 16, 1, key=KEY)
        assert eqx.combine(found[0], static).layers[0].weight == found[0].layers[0].weight


def test_orbax_restores_to_the_result(mesh: Mesh, tmp_path: Path) -> None:
    optimizer = optax.adamw(1e-3)

    def init(key: Any) -> Any:
        params = make_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    state = init(KEY)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        with jax.set_mesh(mesh):
            abstract = eval_shape(init, KEY, shardings=[("params.*kernel", P("data", "model"))])
        restored = checkpointer.restore(tmp_path / "state", abstract)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        by_manager = manager.restore(1, args=ocp.args.StandardRestore(item=abstract))
    for tree in (restored, by_manager):
        placed = jax.tree.map(lambda x: x.sharding, tree)
        assert placed == jax.tree.map(lambda x: x.sharding, abstract)
        wanted = device_put(state, placed)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), tree, wanted))
