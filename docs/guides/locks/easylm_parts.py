"""The packages below EasyLM, used as it uses them: five steps of a small GPT-J on eight devices."""

import re

import jax
import mlxu
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.experimental import maps
from jax.experimental.pjit import pjit, with_sharding_constraint
from jax.sharding import PartitionSpec as P
from transformers import GPTJConfig
from transformers.models.gptj.modeling_flax_gptj import FlaxGPTJForCausalLMModule

RULES = (
    ("wte/embedding", P("mp", "dp")),
    ("attn/(q_proj|k_proj|v_proj)/kernel", P("dp", "mp")),
    ("attn/out_proj/kernel", P("mp", "dp")),
    ("mlp/fc_in/kernel", P("dp", "mp")),
    ("mlp/fc_out/kernel", P("mp", "dp")),
    ("lm_head/kernel", P("dp", "mp")),
    (".*", P()),
)
flags = mlxu.config_dict(vocabulary=64, length=16, batch=8, rate=1e-2)
config = GPTJConfig(
    vocab_size=flags.vocabulary, n_positions=32, n_embd=32, n_layer=2, n_head=4, rotary_dim=4
)
module = FlaxGPTJForCausalLMModule(config)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(flags.rate))


def match_rules(path, leaf):
    """Return the spec of the first rule that matches the path of a parameter."""
    name = "/".join(str(getattr(key, "key", key)) for key in path)
    return next(spec for pattern, spec in RULES if re.search(pattern, name))


def initialize(key):
    shape = (flags.batch, flags.length)
    ones = np.ones(shape, np.int32)
    params = module.init(key, ones, ones, np.broadcast_to(np.arange(flags.length), shape))
    return TrainState.create(params=params["params"], tx=optimizer, apply_fn=None)


def loss_of(params, tokens):
    tokens = with_sharding_constraint(tokens, P("dp"))
    positions = np.broadcast_to(np.arange(flags.length), tokens.shape)
    logits = module.apply({"params": params}, tokens, np.ones_like(positions), positions).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def train(state, tokens):
    loss, gradients = jax.value_and_grad(loss_of)(state.params, tokens)
    return state.apply_gradients(grads=gradients), loss


tokens = np.random.default_rng(0).integers(0, flags.vocabulary, (flags.batch, flags.length))
shapes = jax.eval_shape(initialize, jax.random.PRNGKey(0))
state_specs = jax.tree_map(lambda leaf: P(), shapes)
specs = jax.tree_util.tree_map_with_path(match_rules, shapes.params)
state_specs = state_specs.replace(params=specs)
with maps.Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "mp")):
    assert not maps.thread_resources.env.physical_mesh.empty
    state = pjit(initialize, in_axis_resources=None, out_axis_resources=state_specs)(
        jax.random.PRNGKey(0)
    )
    step = pjit(
        train,
        in_axis_resources=(state_specs, P("dp")),
        out_axis_resources=(state_specs, None),
        donate_argnums=(0,),
    )
    for number in range(5):
        state, loss = step(state, tokens.astype(np.int32))
        print(f"step {number}: loss {loss:.3f}")
