"""Programs in flax (nnx and linen) and equinox, as their documentation writes them."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.ecosystem.programs import jit, program
from tests.ecosystem.programs.plain import devices_mesh


def tokens_on(mesh, *spec):
    tokens = np.arange(8 * 16, dtype=np.int32).reshape(8, 16) % 50
    return jax.device_put(tokens, NamedSharding(mesh, P(*spec)))


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.mlp = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.dropout(jax.nn.gelu(self.mlp(x)))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(50, 32, rngs=rngs)
        self.blocks = nnx.List([Block(32, rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


@program
def nnx_transformer():
    mesh = devices_mesh(data=4, model=2)
    model = Transformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, tokens):
        def loss(model):
            logits = model(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return train_step, model, optimizer, tokens_on(mesh, "data")


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.SelfAttention(num_heads=4)(nn.LayerNorm()(x))
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return x + nn.Dense(32)(nn.gelu(nn.Dense(64, kernel_init=kernel)(x)))


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(50, 32)
        x = embed(tokens)
        for _ in range(2):
            x = LinenBlock()(x)
        return embed.attend(x)


@program
def linen_transformer():
    mesh = devices_mesh(data=4, model=2)
    model = LinenTransformer()
    tokens = tokens_on(mesh, "data")

    def make(key):
        params = model.init(key, tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    abstract = jax.eval_shape(make, jax.random.key(0))
    shardings = nn.get_sharding(abstract, mesh)
    state = jax.jit(make, out_shardings=shardings)(jax.random.key(0))

    def train_step(state, tokens):
        def loss(params):
            logits = state.apply_fn({"params": params}, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    options = {"donate_argnums": 0, "out_shardings": (shardings, NamedSharding(mesh, P()))}
    return jit, train_step, options, state, tokens


@program
def equinox_transformer():
    mesh = devices_mesh(data=8)

    class Network(eqx.Module):
        embed: eqx.nn.Embedding
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(50, 32, key=keys[0])
            self.attention = eqx.nn.MultiheadAttention(4, 32, key=keys[1])
            self.mlp = eqx.nn.MLP(32, 50, 64, depth=1, key=keys[2])

        def __call__(self, tokens):
            x = jax.vmap(self.embed)(tokens)
            x = x + self.attention(x, x, x)
            return jax.vmap(self.mlp)(x)

    model = Network(jax.random.key(0))
    optimizer = optax.adam(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all-except-first")
    def step(tokens, model, state):
        @eqx.filter_value_and_grad
        def loss(model):
            logits = jax.vmap(model)(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        value, grads = loss(model)
        updates, new_state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), new_state, value

    return step, tokens_on(mesh, "data"), model, state


@program
def vision_transformer():
    mesh = devices_mesh(data=4, model=2)

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = nn.Conv(32, (4, 4), (4, 4))(images)
            x = x.reshape(x.shape[0], -1, 32)
            x = x + self.param("position", nn.initializers.normal(), (1, x.shape[1], 32))
            return nn.Dense(10)(LinenBlock()(x).mean(1))

    model = ViT()
    images = np.ones((8, 16, 16, 3), np.float32)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), images))
    images = jax.device_put(images, NamedSharding(mesh, P("data")))

    def apply(params, images):
        return jnp.argmax(model.apply(params, images), axis=-1)

    return jit, apply, {}, params, images
