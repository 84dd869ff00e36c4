"""Programs with flax.linen."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from tests.core.pjit.libraries import Imports, Trained, batches

RULES = (("batch", "data"), ("embed", None), ("mlp", "model"), ("layers", None))


class Partitioned(nn.Module):
    """Kernels with mesh axes, and dropout."""

    @nn.compact
    def __call__(self, x, *, train: bool):
        dealt = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.gelu(nn.Dense(16, kernel_init=dealt)(x))
        x = nn.Dropout(0.25, deterministic=not train)(nn.LayerNorm()(x))
        back = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))
        return nn.Dense(4, kernel_init=back)(x)


class LogicalLayer(nn.Module):
    """Layer with logical axis names, for `nn.scan` over many."""

    @nn.compact
    def __call__(self, x, _):
        up = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        down = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
        h = nn.relu(nn.Dense(16, use_bias=False, kernel_init=up)(x))
        h = nn.with_logical_constraint(h, ("batch", "mlp"))
        return x + nn.Dense(x.shape[-1], use_bias=False, kernel_init=down)(h), None


class LogicalStack(nn.Module):
    """Three layers, scanned and rematerialised."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(LogicalLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return nn.Dense(4)(layers()(x, None)[0])


def train_state(imports: Imports, mesh: Any) -> Trained:
    """`TrainState`, shardings from `nn.with_partitioning`, dropout keys folded by step."""
    model, optimizer = Partitioned(), optax.adamw(1e-2)

    def init(key):
        variables = model.init(key, jnp.zeros((1, 8)), train=False)
        return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer)

    def named(spec):
        return imports.NamedSharding(mesh, spec)

    def train_step(state, key, x, y):
        def loss_of(params):
            rngs = {"dropout": jax.random.fold_in(key, state.step)}
            out = state.apply_fn({"params": params}, x, train=True, rngs=rngs)
            return ((out - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
    shardings = jax.tree.map(named, specs)
    state = imports.jit(init, out_shardings=shardings)(jax.random.key(0))
    step = imports.jit(
        train_step,
        in_shardings=(shardings, named(P()), named(P("data")), named(P("data"))),
        out_shardings=(shardings, named(P())),
        donate_argnums=0,
    )
    losses = []
    for x, y in batches(3):
        state, loss = step(state, jax.random.key(1), x, y)
        losses.append(float(loss))
    kernel = state.params["Dense_0"]["kernel"].value
    momentum = state.opt_state[0].mu["Dense_1"]["kernel"].value
    trained = state.step, state.params, state.opt_state
    return Trained(losses, trained, [(kernel, P(None, "model")), (momentum, P("model"))])


def logical_axes(imports: Imports, mesh: Any) -> Trained:
    """Logical axis names mapped to the mesh by rules, layers by `nn.scan` and `nn.remat`."""
    model, optimizer = LogicalStack(), optax.sgd(0.05, momentum=0.9)
    x, _ = next(batches(1))
    batch = imports.NamedSharding(mesh, P("data"))

    def init(key):
        params = model.init(key, x)["params"]
        return params, optimizer.init(params)

    def train_step(params, opt_state, x, y):
        def loss_of(params):
            return ((model.apply({"params": params}, x) - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    with mesh, nn.logical_axis_rules(RULES):
        specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
        shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
        params, opt_state = imports.jit(init, out_shardings=shardings)(jax.random.key(0))
        step = imports.jit(
            train_step,
            in_shardings=(*shardings, batch, batch),
            out_shardings=(*shardings, None),
            donate_argnums=(0, 1),
        )
        for x, y in batches(3):
            params, opt_state, loss = step(params, opt_state, x, y)
            losses.append(float(loss))
    (name,) = (name for name in params if "Dense" not in name)
    kernel = params[name]["Dense_0"]["kernel"].value
    return Trained(losses, params, [(kernel, P(None, None, "model"))])


def batch_statistics(imports: Imports, mesh: Any) -> Trained:
    """A mutable collection: batch norm over a sharded batch."""
    model = nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False), nn.Dense(4)])
    cut = imports.NamedSharding(mesh, P("data"))
    whole = imports.NamedSharding(mesh, P())
    variables = model.init(jax.random.key(0), jnp.zeros((2, 8)))

    @imports.jit
    def train_step(variables, x, y):
        def loss_of(params):
            out, changed = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return ((out - y) ** 2).mean(), changed

        (loss, changed), grads = jax.value_and_grad(loss_of, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        return {"params": params, **changed}, loss

    variables, losses = imports.device_put(variables, whole), []
    for x, y in batches(3):
        variables, loss = train_step(variables, *imports.device_put((x, y), cut))
        losses.append(float(loss))
    return Trained(losses, variables, [(variables["batch_stats"]["layers_1"]["mean"], P())])


PROGRAMS = {f.__name__: f for f in (train_state, logical_axes, batch_statistics)}
