"""Programs with equinox."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from tests.core.pjit.libraries import Imports, Trained, batches


class Attention(eqx.Module):
    """Attention layer with dropout, over `[length, features]`."""

    norm: eqx.nn.LayerNorm
    attend: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(8)
        self.attend = eqx.nn.MultiheadAttention(2, 8, dropout_p=0.1, key=first)
        self.mlp = eqx.nn.MLP(8, 8, 16, 1, key=second)

    def __call__(self, x, key):
        h = jax.vmap(self.norm)(x)
        x = x + self.attend(h, h, h, key=key)
        return x + jax.vmap(self.mlp)(x)


def _along(tree: Any, size: int, imports: Imports, mesh: Any) -> Any:
    """Return shardings along `model` for leaves with a first dimension of that size."""
    return jax.tree.map(
        lambda x: imports.NamedSharding(
            mesh, P("model") if x.ndim > 1 and x.shape[0] == size else P()
        ),
        tree,
    )


def partition_and_combine(imports: Imports, mesh: Any) -> Trained:
    """Partition a module into arrays and the rest, and pass the arrays through jit."""
    optimizer = optax.adam(1e-2)
    model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    opt_state = optimizer.init(params)
    batch = imports.NamedSharding(mesh, P("data"))
    shardings = [_along(tree, 16, imports, mesh) for tree in (params, opt_state)]

    @functools.partial(
        imports.jit,
        in_shardings=(*shardings, batch, batch),
        out_shardings=(*shardings, None),
        donate_argnums=(0, 1),
    )
    def train_step(params, opt_state, x, y):
        def loss_of(params):
            return ((jax.vmap(eqx.combine(params, static))(x) - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, loss

    # The model's own arrays are kept; copies on the mesh are donated.
    params, opt_state = map(imports.device_put, (params, opt_state), shardings)
    losses = []
    for x, y in batches(3):
        params, opt_state, loss = train_step(params, opt_state, x, y)
        losses.append(float(loss))
    return Trained(losses, params, [(params.layers[1].weight, P("model"))])


def stacked_layers(imports: Imports, mesh: Any) -> Trained:
    """Layers made by `filter_vmap`, run by scan under checkpoint, with a key for each."""
    layers = eqx.filter_vmap(Attention)(jax.random.split(jax.random.key(0), 3))
    params, static = eqx.partition(layers, eqx.is_array)
    data, whole = (imports.NamedSharding(mesh, spec) for spec in (P("data"), P()))

    def run(params, x, key):
        @jax.checkpoint
        def layer(x, each):
            one, key = each
            keys = jax.random.split(key, x.shape[0])
            x = jax.vmap(eqx.combine(one, static))(x, keys)
            return imports.with_sharding_constraint(x, data), None

        keys = jax.random.split(key, 3)
        return jax.lax.scan(layer, x, (params, keys))[0]

    @imports.jit
    def train_step(params, x, key):
        target = jnp.roll(x, 1, axis=1)
        trained, rest = eqx.partition(params, eqx.is_inexact_array)

        def loss_of(trained):
            return ((run(eqx.combine(trained, rest), x, key) - target) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(trained)
        return jax.tree.map(lambda p, g: p - 0.05 * g, trained, grads), loss

    params, losses = imports.device_put(params, whole), []
    for i, (x, _) in enumerate(batches(3, features=8)):
        x = imports.device_put(x.reshape(4, 4, 8), data)
        params, loss = train_step(params, x, jax.random.key(i))
        losses.append(float(loss))
    return Trained(losses, params, [])


def filtered_gradient(imports: Imports, mesh: Any) -> Trained:
    """`filter_grad` inside, `eqx.filter` for the optimiser's arguments; one layer frozen."""
    model = eqx.nn.Sequential(
        [
            eqx.nn.Linear(8, 16, key=jax.random.key(0)),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(16, 4, key=jax.random.key(1)),
        ]
    )
    chosen = jax.tree.map(lambda _: False, model)
    last = (lambda m: m.layers[2].weight, lambda m: m.layers[2].bias)
    for where in last:
        chosen = eqx.tree_at(where, chosen, True)
    trained, frozen = eqx.partition(model, chosen)
    frozen_arrays, rest = eqx.partition(frozen, eqx.is_array)
    optimizer = optax.sgd(0.1)
    opt_state = optimizer.init(eqx.filter(trained, eqx.is_inexact_array))
    data = imports.NamedSharding(mesh, P("data"))

    @imports.jit
    def train_step(trained, frozen_arrays, opt_state, x, y):
        @eqx.filter_value_and_grad
        def loss_of(trained):
            model = eqx.combine(trained, frozen_arrays, rest)
            return ((jax.vmap(model)(x) - y) ** 2).mean()

        loss, grads = loss_of(trained)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(trained, updates), opt_state, loss

    losses = []
    for batch in batches(3):
        x, y = imports.device_put(batch, data)
        trained, opt_state, loss = train_step(trained, frozen_arrays, opt_state, x, y)
        losses.append(float(loss))
    return Trained(losses, trained, [])


PROGRAMS = {f.__name__: f for f in (partition_and_combine, stacked_layers, filtered_gradient)}
