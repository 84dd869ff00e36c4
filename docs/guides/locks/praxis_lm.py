"""A small language model of praxis, trained for five steps on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import maps
from jax.experimental.pjit import pjit
from jax.sharding import PartitionSpec as P
from praxis import base_layer, layers, pax_fiddle

VOCABULARY, LENGTH, BATCH = 64, 16, 8

config = pax_fiddle.Config(
    layers.TransformerLm,
    name="lm",
    vocab_size=VOCABULARY,
    model_dims=32,
    stacked_transformer_tpl=pax_fiddle.Config(
        layers.StackedTransformer, num_layers=2, num_heads=4, model_dims=32, hidden_dims=64
    ),
)
config.softmax_tpl.scale_sqrt_depth = True
model = base_layer.instantiate(config)
tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH), dtype=np.int32)


def batch_of(ids):
    return dict(
        inputs=ids,
        paddings=jnp.zeros(ids.shape, jnp.float32),
        labels=base_layer.NestedMap(
            class_ids=jnp.roll(ids, -1, axis=1), class_weights=jnp.ones(ids.shape, jnp.float32)
        ),
    )


def initialize(key):
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=False)):
        return model.init(key, **batch_of(jnp.zeros((BATCH, LENGTH), jnp.int32)))


def loss_of(variables, ids, key):
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=False)):
        outputs, _ = model.apply(
            variables, **batch_of(ids), rngs={"random": key}, mutable=["aux_loss", "summaries"]
        )
    return outputs.avg_xent


def spec_of(x):
    return P(*[None] * (x.ndim - 1), "mdl") if x.ndim and x.shape[-1] % 2 == 0 else P()


optimizer = optax.adamw(1e-2)


def train(variables, state, ids, key):
    loss, gradients = jax.value_and_grad(loss_of)(variables, ids, key)
    updates, state = optimizer.update(gradients, state, variables)
    return optax.apply_updates(variables, updates), state, loss


shapes = jax.eval_shape(initialize, jax.random.PRNGKey(0))
specs = jax.tree_map(spec_of, shapes)
state_specs = jax.tree_map(spec_of, jax.eval_shape(optimizer.init, shapes))
with maps.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "mdl")):
    variables = pjit(initialize, in_axis_resources=None, out_axis_resources=specs)(
        jax.random.PRNGKey(0)
    )
    state = pjit(optimizer.init, in_axis_resources=(specs,), out_axis_resources=state_specs)(
        variables
    )
    step = pjit(
        train,
        in_axis_resources=(specs, state_specs, P("data"), None),
        out_axis_resources=(specs, state_specs, None),
    )
    for number in range(5):
        variables, state, loss = step(variables, state, tokens, jax.random.PRNGKey(number))
        print(f"step {number}: loss {loss:.3f}")
