"""A train state whose specs are found by rules over paths, and a step over stacked batches."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core.frozen_dict import freeze, unfreeze
from flax.training import train_state
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import PartitionSpec as P
from jax.experimental import maps
from jax.experimental.pjit import pjit, with_sharding_constraint

_unmatched = object()


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, name="fc1")(x))
        return nn.Dense(4, name="fc2")(nn.LayerNorm(name="norm")(x))


class TrainState(train_state.TrainState):
    seen: int = 0


def match(patterns, key):
    return any(
        all(re.match(q + "$", k) for q, k in zip(patterns, key[i:]))
        for i in range(len(key) - len(patterns) + 1)
    )


def set_partitions(params):
    rules = [
        (("fc1", "kernel"), P(None, "mp")),
        (("fc1", "bias"), P("mp")),
        (("fc2", "kernel"), P("mp", None)),
        (("fc2", "bias"), None),
        (("norm", "(scale|bias)"), None),
    ]
    found = {}
    for key in flatten_dict(unfreeze(params)):
        specs = [spec for patterns, spec in rules if match(patterns, key)]
        found[key] = specs[0] if specs else _unmatched
    assert _unmatched not in found.values(), "Incomplete partition spec."
    return freeze(unflatten_dict(found))


def main():
    model = MLP()
    mesh = maps.Mesh(np.asarray(jax.devices()).reshape(2, 4), ("dp", "mp"))
    tx = optax.adam(1e-2)
    abstract = jax.eval_shape(model.init, jax.random.PRNGKey(0), jnp.ones((1, 8)))["params"]
    spec = set_partitions(abstract)

    def opt_spec_of(x):
        return unfreeze(spec) if isinstance(x, (dict, type(spec))) else None

    opt_shapes = jax.eval_shape(tx.init, unfreeze(abstract))
    opt_spec = jax.tree_util.tree_map(
        opt_spec_of, opt_shapes, is_leaf=lambda x: isinstance(x, dict)
    )
    state_spec = TrainState(
        params=unfreeze(spec),
        opt_state=opt_spec,
        step=None,
        seen=None,
        apply_fn=model.apply,
        tx=tx,
    )

    def init_state(key):
        params = unfreeze(model.init(key, jnp.ones((1, 8)))["params"])
        return TrainState.create(apply_fn=model.apply, tx=tx, params=params)

    def loss_fn(params, x, y):
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    def step(state, xs, ys):
        def one(x, y):
            return jax.value_and_grad(loss_fn)(state.params, x, y)

        xs, ys = with_sharding_constraint((xs, ys), P("dp"))
        losses, grads = jax.vmap(one)(xs, ys)
        grads = jax.tree_map(partial(jnp.mean, axis=0), grads)
        state = state.apply_gradients(grads=grads, seen=state.seen + xs.shape[1])
        return with_sharding_constraint(state.params, unfreeze(spec)), state, losses.mean()

    p_init = pjit(init_state, in_axis_resources=None, out_axis_resources=state_spec)
    p_step = pjit(
        step,
        in_axis_resources=(state_spec, P("dp"), P("dp")),
        out_axis_resources=(unfreeze(spec), state_spec, None),
        donate_argnums=(0,),
    )
    xs = np.random.RandomState(0).normal(size=(2, 6, 8)).astype(np.float32)
    ys = xs[..., :4] * 2
    with maps.Mesh(mesh.devices, mesh.axis_names):
        state = p_init(jax.random.PRNGKey(0))
        losses = []
        for _ in range(4):
            params, state, loss = p_step(state, xs, ys)
            losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert int(state.step) == 4 and int(state.seen) == 24
    expected = init_state(jax.random.PRNGKey(0))
    for _ in range(4):
        grads = jax.grad(lambda p: loss_fn(p, xs.reshape(12, 8), ys.reshape(12, 4)))(
            expected.params
        )
        expected = expected.apply_gradients(grads=grads)
    jax.tree_map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4),
        jax.device_get(params),
        jax.device_get(expected.params),
    )


if __name__ == "__main__":
    main()
