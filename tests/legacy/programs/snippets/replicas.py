"""An image classifier on replicas: flax's helpers, pmap, host and device batches."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import common_utils, train_state
from jax import lax
from jax.lib import xla_bridge
from jax.tree_util import tree_multimap


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=4, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        return nn.Dense(3)(x.reshape((x.shape[0], -1)))


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.sum(common_utils.onehot(labels, 3) * nn.log_softmax(logits), axis=-1))


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0,))
def train_step(state, batch):
    def loss_fn(params):
        return cross_entropy(state.apply_fn({"params": params}, batch["image"]), batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = lax.pmean(grads, "batch")
    metrics = lax.pmean({"loss": loss}, axis_name="batch")
    return state.apply_gradients(grads=grads), metrics


@functools.partial(jax.jit, backend="cpu")
def create_params(rng):
    return CNN().init(rng, jnp.ones((1, 4, 4, 1)))["params"]


def main():
    assert xla_bridge.get_backend().platform == "cpu"
    tx = optax.sgd(0.1, momentum=0.9)
    params = create_params(jax.random.PRNGKey(0))
    state = train_state.TrainState.create(apply_fn=CNN().apply, params=params, tx=tx)
    single = state
    state = jax_utils.replicate(state)
    n = jax.local_device_count()
    metrics = []
    for step in range(3):
        rng = np.random.RandomState(step)
        label = rng.randint(0, 3, (2 * n,))
        image = rng.normal(size=(2 * n, 4, 4, 1)) + label[:, None, None, None]
        batch = {"image": image.astype(np.float32), "label": label.astype(np.int32)}
        sharded = common_utils.shard(batch)
        assert sharded["image"].shape[:2] == (n, 2)
        sharded = jax.device_put_sharded(
            [jax.tree_map(lambda x: x[i], sharded) for i in range(n)], jax.local_devices()
        )
        state, metric = train_step(state, sharded)
        metrics.append(metric)

        def loss_fn(params):
            return cross_entropy(CNN().apply({"params": params}, batch["image"]), batch["label"])

        single = single.apply_gradients(grads=jax.grad(loss_fn)(single.params))
    metrics = common_utils.get_metrics(metrics)
    assert metrics["loss"].shape == (3,)
    one = jax_utils.unreplicate(state)
    assert int(one.step) == 3
    differences = tree_multimap(
        lambda a, b: float(jnp.max(jnp.abs(a - b))), one.params, jax.device_get(single.params)
    )
    assert max(jax.tree_leaves(differences)) < 1e-4
    replicated = jax.device_put_replicated({"w": np.ones(3)}, jax.local_devices())
    assert replicated["w"].shape == (n, 3)
    assert jax.tree_util.tree_all(
        jax.tree_map(lambda x: isinstance(x, jnp.DeviceArray), one.params)
    )


if __name__ == "__main__":
    main()
