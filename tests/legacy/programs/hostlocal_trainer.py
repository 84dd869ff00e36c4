"""Trains a classifier where every host feeds, and reads, only its own part of each batch."""

import argparse
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.config import config
from jax.experimental import multihost_utils
from jax.experimental.maps import Mesh
from jax.experimental.pjit import PartitionSpec as P
from jax.experimental.pjit import pjit, with_sharding_constraint
from jax.interpreters import pxla

INPUTS, HIDDEN, CLASSES, BATCH = 12, 16, 5, 24


def make_mesh():
    return Mesh(np.asarray(jax.devices()).reshape(jax.device_count() // 2, 2), ("data", "model"))


def in_mesh(fn):
    """Calls a function under a mesh of its own, as long as there is none in force."""

    @functools.wraps(fn)
    def wrapped(*args):
        if not pxla.thread_resources.env.physical_mesh.empty:
            return fn(*args)
        m = make_mesh()
        with Mesh(m.devices, m.axis_names):
            return fn(*args)

    return wrapped


def init_params(seed):
    rng = np.random.RandomState(seed)
    return {
        "hidden": {
            "kernel": rng.normal(0, 0.3, (INPUTS, HIDDEN)).astype(np.float32),
            "bias": np.zeros((HIDDEN,), np.float32),
        },
        "out": {
            "kernel": rng.normal(0, 0.3, (HIDDEN, CLASSES)).astype(np.float32),
            "bias": np.zeros((CLASSES,), np.float32),
        },
    }


PARAM_AXES = {
    "hidden": {"kernel": P(None, "model"), "bias": P("model")},
    "out": {"kernel": P("model", None), "bias": None},
}


def apply(params, x):
    h = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    h = with_sharding_constraint(h, P("data", "model"))
    return h @ params["out"]["kernel"] + params["out"]["bias"]


def loss_fn(params, x, y):
    log_probs = jax.nn.log_softmax(apply(params, x))
    return -jnp.mean(jnp.sum(log_probs * jax.nn.one_hot(y, CLASSES), axis=-1))


def train_step(params, momentum, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    momentum = tree_util.tree_map(lambda m, g: 0.9 * m + g, momentum, grads)
    params = tree_util.tree_map(lambda p, m: p - 0.1 * m, params, momentum)
    return params, momentum, loss


def global_batch(step):
    rng = np.random.RandomState(1000 + step)
    x = rng.normal(size=(BATCH, INPUTS)).astype(np.float32)
    return x, (np.abs(x).argmax(axis=1) % CLASSES).astype(np.int32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--multiprocess", action="store_true")
    args = parser.parse_args()
    if args.multiprocess:
        jax.distributed.initialize()

    num_hosts, host = jax.process_count(), jax.process_index()
    local_batch = BATCH // num_hosts
    mesh = make_mesh()
    transition = config.jax_array and num_hosts > 1

    step = in_mesh(
        pjit(
            train_step,
            (PARAM_AXES, PARAM_AXES, P("data"), P("data")),
            (PARAM_AXES, PARAM_AXES, None),
            donate_argnums=(0, 1),
        )
    )
    predict = in_mesh(
        pjit(apply, in_axis_resources=[PARAM_AXES, P("data")], out_axis_resources=P("data"))
    )

    params = init_params(0)
    momentum = jax.tree_map(np.zeros_like, params)
    if transition:
        params, momentum = multihost_utils.host_local_array_to_global_array(
            (params, momentum), mesh, (PARAM_AXES, PARAM_AXES)
        )
    losses, shapes = [], []
    for number in range(args.steps):
        x, y = (v[host * local_batch : (host + 1) * local_batch] for v in global_batch(number))
        if transition:
            x, y = multihost_utils.host_local_array_to_global_array((x, y), mesh, P("data"))
        params, momentum, loss = step(params, momentum, x, y)
        losses.append(float(loss))
        shapes.append([list(x.shape), list(params["hidden"]["kernel"].shape)])

    out = predict(params, x)
    if transition:
        out = multihost_utils.global_array_to_host_local_array(out, mesh, P("data"))
    local = np.asarray(out)
    correct = int(
        (
            local.argmax(axis=1)
            == np.asarray(global_batch(args.steps - 1)[1])[
                host * local_batch : (host + 1) * local_batch
            ]
        ).sum()
    )
    multihost_utils.sync_global_devices("evaluated")
    total = multihost_utils.process_allgather(np.asarray(correct))
    agreed = multihost_utils.broadcast_one_to_all(np.float32(losses[-1]))
    multihost_utils.assert_equal(np.float32(losses), "hosts saw different losses")
    report = {
        "losses": losses,
        "local_out": local.sum(axis=1).tolist(),
        "local_shape": list(local.shape),
        "fed": shapes[0],
        "correct": int(np.sum(total)),
        "agreed": float(agreed),
        "sharded_device_array": isinstance(out, pxla.ShardedDeviceArray),
        "device_array": isinstance(out, jnp.DeviceArray),
    }
    print("RESULT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
