"""The packages below T5X, used as it uses them: five steps on eight devices, saved and restored."""

import asyncio
import tempfile

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import seqio
import tensorflow as tf
import tensorstore as ts
from clu import metrics
from flax import linen as nn
from flax import struct
from flax.linen import partitioning
from flax.training import train_state
from jax.experimental import maps
from jax.experimental.gda_serialization import serialization
from jax.experimental.pjit import pjit
from jax.sharding import PartitionSpec as P

LENGTH, BATCH = 16, 8
RULES = (("batch", "data"), ("embed", None), ("mlp", "model"), ("vocab", "model"))
vocabulary = seqio.ByteVocabulary()

seqio.TaskRegistry.add(
    "copy",
    source=seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(
            {"inputs": ["to be or not"] * BATCH, "targets": ["to be or not"] * BATCH}
        ),
        splits=["train"],
    ),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={
        "inputs": seqio.Feature(vocabulary),
        "targets": seqio.Feature(vocabulary),
    },
)
dataset = seqio.get_dataset(
    "copy",
    {"inputs": LENGTH, "targets": LENGTH},
    dataset_split="train",
    feature_converter=seqio.EncDecFeatureConverter(pack=False),
)
batch = next(dataset.batch(BATCH).as_numpy_iterator())


@gin.configurable
class Model(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, tokens):
        size = (vocabulary.vocab_size + 127) // 128 * 128
        table = partitioning.param_with_axes(
            "table", nn.initializers.normal(1.0), (size, self.width), axes=("vocab", "embed")
        )
        kernel = partitioning.param_with_axes(
            "kernel", nn.initializers.normal(0.1), (self.width, 32), axes=("embed", "mlp")
        )
        hidden = partitioning.with_sharding_constraint(
            nn.relu(table[tokens] @ kernel), ("batch", None, "mlp")
        )
        return hidden @ kernel.T @ table.T


@struct.dataclass
class Metrics(metrics.Collection):
    loss: metrics.Average.from_output("loss")


def loss_of(params, tokens, targets):
    logits = model.apply({"params": params}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(state, tokens, targets):
    loss, gradients = jax.value_and_grad(loss_of)(state.params, tokens, targets)
    return state.apply_gradients(grads=gradients), Metrics.single_from_model_output(loss=loss)


def initialize(key):
    variables = model.init(key, jnp.zeros((BATCH, LENGTH), jnp.int32))
    return train_state.TrainState.create(
        apply_fn=None, params=variables["params"], tx=optax.adafactor(0.1)
    )


gin.parse_config("Model.width = 16")
model = Model()
mesh = maps.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
with mesh, partitioning.axis_rules(RULES):
    variables = jax.eval_shape(model.init, jax.random.PRNGKey(0), batch["encoder_input_tokens"])
    axes = partitioning.get_axis_names(variables["params_axes"])
    specs = jax.tree_map(
        lambda names: partitioning.logical_to_mesh_axes(tuple(names)),
        axes,
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    shapes = jax.eval_shape(initialize, jax.random.PRNGKey(0))
    state_specs = jax.tree_map(lambda leaf: None, shapes).replace(params=specs)
    state = pjit(initialize, in_axis_resources=None, out_axis_resources=state_specs)(
        jax.random.PRNGKey(0)
    )
    step = pjit(
        train,
        in_axis_resources=(state_specs, P("data"), P("data")),
        out_axis_resources=(state_specs, None),
        donate_argnums=0,
    )
    for number in range(5):
        state, seen = step(state, batch["encoder_input_tokens"], batch["decoder_target_tokens"])
        print(f"step {number}: loss {seen.compute()['loss']:.3f}")

folder = tempfile.mkdtemp()
spec = serialization.get_tensorstore_spec(f"{folder}/target.table")
asyncio.run(serialization.async_serialize(state.params["table"], spec))
read = {**spec, "metadata": {"compressor": {"id": "gzip"}}}
stored = ts.open(read, open=True).result().read().result()
print("restored", np.array_equal(stored, state.params["table"]))
