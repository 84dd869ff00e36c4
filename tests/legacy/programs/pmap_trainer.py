"""Data-parallel training with pmap: one replica of everything on every device."""

import argparse
import functools
import json
import os
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util
from jax.interpreters import pxla

INPUTS, HIDDEN = 6, 10
PER_DEVICE = 4


class Replicated(NamedTuple):
    params: Any
    momentum: Any


def init(key: jax.random.KeyArray):
    k1, k2 = jax.random.split(key)
    params = [
        {"w": jax.random.normal(k1, (INPUTS, HIDDEN)) * 0.3, "b": jnp.zeros(HIDDEN)},
        {"w": jax.random.normal(k2, (HIDDEN, 1)) * 0.3, "b": jnp.zeros(1)},
    ]
    return Replicated(params, jax.tree_map(jnp.zeros_like, params))


def predict(params, x):
    hidden, out = params
    return (jnp.tanh(x @ hidden["w"] + hidden["b"]) @ out["w"] + out["b"])[..., 0]


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((predict(params, x) - y) ** 2)


@functools.partial(jax.pmap, axis_name="batch")
def update(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    loss, grads = lax.pmean((loss, grads), axis_name="batch")
    momentum = jax.tree_multimap(lambda m, g: 0.9 * m + g, state.momentum, grads)
    params = jax.tree_multimap(lambda p, m: p - 0.05 * m, state.params, momentum)
    return Replicated(params, momentum), loss


@jax.pmap
def evaluate(params, x):
    return predict(params, x)


def replicate(tree):
    return jax.device_put_replicated(tree, jax.local_devices())


def unreplicate(tree):
    return jax.tree_map(lambda x: x[0], tree)


def shard(pieces):
    return jax.device_put_sharded(pieces, jax.local_devices())


def read(step, place):
    rng = np.random.RandomState(100 * step + place)
    x = rng.normal(size=(PER_DEVICE, INPUTS)).astype(np.float32)
    return x, np.sin(x.sum(axis=1)).astype(np.float32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--multiprocess", action="store_true")
    args = parser.parse_args()
    if args.multiprocess:
        jax.distributed.initialize()

    place = {d: i for i, d in enumerate(jax.devices())}
    state = replicate(init(jax.random.PRNGKey(0)))
    kinds = [isinstance(x, pxla.ShardedDeviceArray) for x in tree_util.tree_leaves(state)]
    losses = []
    for step in range(args.steps):
        batch = shard([read(step, place[d]) for d in jax.local_devices()])
        state, loss = update(state, batch)
        kinds.append(isinstance(loss, pxla.ShardedDeviceArray))
        losses.append(float(loss[0]))
    spread = max(float(jnp.max(jnp.abs(x - x[:1]))) for x in jax.tree_leaves(state.params))

    path = os.path.join(args.workdir, "checkpoint.pkl")
    if jax.process_index() == 0:
        with open(path, "wb") as f:
            pickle.dump(jax.device_get(unreplicate(state)), f)
    # Everybody waits until it has been written.
    jax.pmap(lambda x: lax.psum(x, "i"), "i")(jnp.ones(jax.local_device_count()))[
        0
    ].block_until_ready()
    with open(path, "rb") as f:
        restored = replicate(pickle.load(f))

    x = batch[0]
    before, after = evaluate(state.params, x), evaluate(restored.params, x)
    first = before[0]
    report = {
        "losses": losses,
        "spread": spread,
        "outputs": [float(row.sum()) for row in before],
        "restored": [float(after[i].sum()) for i in range(len(after))],
        "all_sharded_device_arrays": all(kinds),
        "first_is_device_array": isinstance(first, jnp.DeviceArray),
        "first_is_sharded": isinstance(first, pxla.ShardedDeviceArray),
        "buffers_are_local": [b.device() for b in before.device_buffers] == jax.local_devices(),
        "slice": list(before[1:3].shape),
    }
    print("RESULT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
