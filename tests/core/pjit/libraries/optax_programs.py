"""Programs with optax, and training loops of JAX alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.core.pjit.libraries import Imports, Trained, batches

SPECS = {"up": P(None, "model"), "down": P("model"), "bias": P()}


def init_params() -> dict[str, jax.Array]:
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (8, 16)) / 3,
        "down": jax.random.normal(down, (16, 4)) / 4,
        "bias": jnp.zeros(4),
    }


def predict(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]


def loss_of(params, x, y):
    return ((predict(params, x) - y) ** 2).mean()


def _trained_by(optimizer: Any, imports: Imports, mesh: Any, steps: int) -> Trained:
    """Run a loop over steps that donate parameters and optimiser state."""

    def named(spec):
        return imports.NamedSharding(mesh, spec)

    def train_step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = imports.device_put(init_params(), jax.tree.map(named, SPECS))
    opt_state = imports.jit(optimizer.init)(params)
    step = imports.jit(train_step, donate_argnums=(0, 1))
    losses = []
    for batch in batches(steps):
        params, opt_state, loss = step(
            params, opt_state, *imports.device_put(batch, named(P("data")))
        )
        losses.append(float(loss))
    return Trained(losses, (params, opt_state), [])


def schedule_and_multi_steps(imports: Imports, mesh: Any) -> Trained:
    """A chain with a schedule, with updates at every second step."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 8)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    return _trained_by(optax.MultiSteps(chain, every_k_schedule=2), imports, mesh, 5)


def masked_adafactor(imports: Imports, mesh: Any) -> Trained:
    """Factored second moments; weight decay on matrices alone."""
    matrices = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    optimizer = optax.chain(
        optax.masked(optax.add_decayed_weights(0.01), matrices),
        optax.adafactor(0.05, min_dim_size_to_factor=4),
    )
    return _trained_by(optimizer, imports, mesh, 3)


def hyperparameters_in_the_state(imports: Imports, mesh: Any) -> Trained:
    optimizer = optax.inject_hyperparams(optax.lion)(learning_rate=0.01)
    return _trained_by(optimizer, imports, mesh, 3)


def labelled_optimisers(imports: Imports, mesh: Any) -> Trained:
    """One optimiser for matrices, another one for the rest."""

    def label(params):
        return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)

    optimizer = optax.multi_transform({"matrix": optax.adam(0.02), "vector": optax.sgd(0.1)}, label)
    return _trained_by(optimizer, imports, mesh, 3)


def states_placed_like_parameters(imports: Imports, mesh: Any) -> Trained:
    """Specs of the optimiser's state, derived from those of the parameters."""
    optimizer = optax.adam(1e-2)
    shapes = jax.eval_shape(lambda: optimizer.init(init_params()))
    state_specs = optax.tree_utils.tree_map_params(
        optimizer, lambda _, spec: spec, shapes, SPECS, transform_non_params=lambda _: P()
    )

    def init():
        params = init_params()
        return params, optimizer.init(params)

    def train_step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    shardings = jax.tree.map(lambda spec: imports.NamedSharding(mesh, spec), (SPECS, state_specs))
    params, opt_state = imports.jit(init, out_shardings=shardings)()
    batch = imports.NamedSharding(mesh, P("data"))
    step = imports.jit(
        train_step,
        in_shardings=(*shardings, batch, batch),
        out_shardings=(*shardings, None),
        donate_argnums=(0, 1),
    )
    losses = []
    for x, y in batches(3):
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(float(loss))
    specs = [(params["up"], SPECS["up"]), (opt_state[0].nu["down"], SPECS["down"])]
    return Trained(losses, params, specs)


def loop_inside_by_scan(imports: Imports, mesh: Any) -> Trained:
    """All steps in one program: a donated carry, and auxiliary values of the loss."""
    optimizer = optax.adam(1e-2)
    whole, data = (imports.NamedSharding(mesh, spec) for spec in (P(), P(None, "data")))

    def loss_with_norm(params, x, y):
        out = predict(params, x)
        return ((out - y) ** 2).mean(), {"norm": jnp.linalg.norm(out)}

    def one_step(carry, batch):
        params, opt_state = carry
        gradient = jax.value_and_grad(loss_with_norm, has_aux=True)
        (loss, aux), grads = gradient(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), (loss, aux)

    @functools.partial(
        imports.jit, in_shardings=(whole, data), out_shardings=(whole, whole), donate_argnums=0
    )
    def train(carry, xs):
        return lax.scan(one_step, carry, xs)

    params = init_params()
    stacked = jax.tree.map(lambda *each: np.stack(each), *batches(4))
    carry, (losses, aux) = train((params, optimizer.init(params)), stacked)
    assert aux["norm"].shape == (4,)
    return Trained([float(loss) for loss in losses], carry, [(carry[0]["up"], P())])


def accumulation_in_mixed_precision(imports: Imports, mesh: Any) -> Trained:
    """Gradients of bfloat16, accumulated in float32 over pieces of a batch, by scan."""
    shardings = jax.tree.map(lambda spec: imports.NamedSharding(mesh, spec), SPECS)

    def piece_loss(params, x, y):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        out = predict(low, x.astype(jnp.bfloat16)).astype(jnp.float32)
        return 128.0 * ((out - y) ** 2).mean()

    @functools.partial(imports.jit, out_shardings=(shardings, None), donate_argnums=0)
    def train_step(params, x, y):
        pieces = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), (x, y))
        data = imports.NamedSharding(mesh, P(None, "data"))
        pieces = jax.tree.map(lambda a: imports.with_sharding_constraint(a, data), pieces)

        def accumulate(total, piece):
            loss, grads = jax.value_and_grad(piece_loss)(params, *piece)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = lax.scan(accumulate, zero, pieces)
        scale = 1 / (4 * 128.0)
        return jax.tree.map(lambda p, g: p - 0.1 * scale * g, params, grads), loss * scale

    params, losses = imports.device_put(init_params(), shardings), []
    for x, y in batches(3):
        params, loss = train_step(params, x, y)
        losses.append(float(loss))
    return Trained(losses, params, [(params[name], SPECS[name]) for name in SPECS])


def dropout_by_keys(imports: Imports, mesh: Any) -> Trained:
    """A key in the state, split at each step; a static argument that disables dropout."""
    data = imports.NamedSharding(mesh, P("data"))

    @functools.partial(imports.jit, static_argnames="train", donate_argnames="state")
    def step(state, x, y, *, train):
        key, now = jax.random.split(state["key"])

        def loss_of(params):
            h = jnp.tanh(x @ params["up"])
            if train:
                h = jnp.where(jax.random.bernoulli(now, 0.75, h.shape), h / 0.75, 0)
            return ((h @ params["down"] + params["bias"] - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"key": key, "params": params}, loss

    state = {"key": jax.random.key(0), "params": init_params()}
    state = imports.device_put(state, imports.NamedSharding(mesh, P()))
    losses = []
    for i, batch in enumerate(batches(4)):
        x, y = imports.device_put(batch, data)
        state, loss = step(state, x, y, train=i < 3)
        losses.append(float(loss))
    return Trained(losses, state["params"], [])


def data_parallel_by_shard_map(imports: Imports, mesh: Any) -> Trained:
    """Gradients averaged explicitly, in a `shard_map` inside of the program."""

    def local(params, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        return lax.pmean(loss, "data"), lax.pmean(grads, "data")

    everywhere = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=False,
    )

    @imports.jit
    def step(params, x, y):
        loss, grads = everywhere(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = imports.device_put(init_params(), imports.NamedSharding(mesh, P()))
    losses = []
    for batch in batches(3):
        params, loss = step(
            params, *imports.device_put(batch, imports.NamedSharding(mesh, P("data")))
        )
        losses.append(float(loss))
    return Trained(losses, params, [])


PROGRAMS = {
    f.__name__: f
    for f in (
        schedule_and_multi_steps,
        masked_adafactor,
        hyperparameters_in_the_state,
        labelled_optimisers,
        states_placed_like_parameters,
        loop_inside_by_scan,
        accumulation_in_mixed_precision,
        dropout_by_keys,
        data_parallel_by_shard_map,
    )
}
