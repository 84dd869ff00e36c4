"""Samples from a small transformer whose weights are spread over the devices."""

import argparse
import json
from functools import partial
from typing import Any, Dict, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import PartitionSpec, maps, mesh_utils, multihost_utils
from jax.experimental.pjit import PartitionSpec as P
from jax.experimental.pjit import pjit, with_sharding_constraint

LAYERS, VOCAB, EMBED, HEADS, LENGTH = 2, 32, 16, 4, 12
HEAD = EMBED // HEADS

Params = Dict[str, Any]
Cache = Tuple[Tuple[jnp.DeviceArray, jnp.DeviceArray], ...]


def numpy_params(seed: int) -> Params:
    """The weights as they come from a file; layer norms have no bias, which is None."""
    rng = np.random.RandomState(seed)

    def weight(*shape):
        return rng.normal(0, 1 / np.sqrt(shape[0]), shape).astype(np.float32)

    params: Params = {"wte": weight(VOCAB, EMBED), "wpe": weight(LENGTH, EMBED)}
    for i in range(LAYERS):
        params[f"layer_{i}"] = {
            "ln": {"scale": np.ones(EMBED, np.float32), "bias": None},
            "attn": {"qkv": weight(EMBED, 3, HEADS, HEAD), "o": weight(HEADS, HEAD, EMBED)},
            "mlp": {"wi": weight(EMBED, 4 * EMBED), "wo": weight(4 * EMBED, EMBED)},
        }
    return params


def param_axes() -> Params:
    layer = {
        "ln": {"scale": None, "bias": None},
        "attn": {"qkv": P(None, None, "mp", None), "o": P("mp", None, None)},
        "mlp": {"wi": PartitionSpec(None, "mp"), "wo": PartitionSpec("mp", None)},
    }
    axes: Params = {"wte": P("mp", None), "wpe": None}
    axes.update({f"layer_{i}": layer for i in range(LAYERS)})
    return axes


def constrain(x: jnp.ndarray, *axes: Optional[str]) -> jnp.ndarray:
    if maps.thread_resources.env.physical_mesh.empty:
        return x
    return with_sharding_constraint(x, P(*axes))


def norm(x: jnp.ndarray, scale: jnp.ndarray) -> jnp.ndarray:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def empty_cache(batch: int) -> Cache:
    shape = (batch, LENGTH, HEADS, HEAD)
    return tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(LAYERS))


def decode_one(params: Params, cache: Cache, token: jnp.ndarray, at: jnp.ndarray):
    """The logits after one more token, and the cache with it."""
    x = params["wte"][token] + params["wpe"][at]
    x = constrain(x, "dp", None)
    written = []
    for i, (keys, values) in enumerate(cache):
        p = params[f"layer_{i}"]
        assert p["ln"]["bias"] is None
        q, k, v = jnp.moveaxis(
            jnp.einsum("be,eshd->bshd", norm(x, p["ln"]["scale"]), p["attn"]["qkv"]), 1, 0
        )
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k[:, None], at, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v[:, None], at, axis=1)
        keys, values = (constrain(c, "dp", None, "mp", None) for c in (keys, values))
        written.append((keys, values))
        scores = jnp.einsum("bhd,blhd->bhl", q, keys) / np.sqrt(HEAD)
        scores = jnp.where(jnp.arange(LENGTH) <= at, scores, -1e9)
        mixed = jnp.einsum("bhl,blhd->bhd", jax.nn.softmax(scores), values)
        x = x + jnp.einsum("bhd,hde->be", mixed, p["attn"]["o"])
        x = x + jax.nn.gelu(x @ p["mlp"]["wi"]) @ p["mlp"]["wo"]
    return x @ params["wte"].T, tuple(written)


def sample(logits: jnp.ndarray, key: jax.random.KeyArray, temperature: float) -> jnp.ndarray:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    return jax.random.categorical(key, logits / temperature, axis=-1)


def generate(params: Params, prompt: jnp.ndarray, key: jax.random.KeyArray, temperature: float):
    """Goes on with prompts of [batch, given] to [batch, LENGTH] tokens."""
    given = prompt.shape[1]
    tokens = jnp.zeros((prompt.shape[0], LENGTH), prompt.dtype).at[:, :given].set(prompt)

    def body(at, carry):
        tokens, cache, key = carry
        logits, cache = decode_one(params, cache, tokens[:, at], at)
        key, subkey = jax.random.split(key)
        chosen = sample(logits, subkey, temperature).astype(tokens.dtype)
        following = jnp.where(at + 1 < given, tokens[:, at + 1], chosen)
        return tokens.at[:, at + 1].set(following), cache, key

    tokens, cache, _ = jax.lax.fori_loop(
        0, LENGTH - 1, body, (tokens, empty_cache(prompt.shape[0]), key)
    )
    return tokens, cache[-1][0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--multiprocess", action="store_true")
    args = parser.parse_args()
    if args.multiprocess:
        jax.distributed.initialize()

    mesh = maps.Mesh(mesh_utils.create_device_mesh((2, 4)), ("dp", "mp"))
    axes = param_axes()
    placed: Params = {}
    with maps.mesh(mesh.devices, mesh.axis_names):
        assert maps.thread_resources.env.shape["mp"] == 4
        for name, value in numpy_params(0).items():
            placed[name] = pjit(lambda x: x, None, axes[name])(value)

    generator = pjit(
        generate,
        in_axis_resources=(axes, None, None),
        out_axis_resources=(None, P("dp", None, "mp")),
        static_argnums=3,
    )
    one_token = pjit(
        decode_one,
        in_axis_resources=(axes, P("dp", None, "mp"), P("dp"), None),
        out_axis_resources=(None, P("dp", None, "mp")),
        donate_argnums=1,
    )
    prompt = (np.arange(4 * 3, dtype=np.int32).reshape(4, 3) * 5) % VOCAB
    key = jax.random.PRNGKey(int(args.temperature * 10))
    with mesh:
        sampled, keys = generator(placed, prompt, key, args.temperature)
        greedy, _ = generator(placed, prompt, key, 0)

    # Once more the greedy way, a token at a time from here.
    tokens = np.array(prompt)
    make_cache = pjit(
        partial(empty_cache, 4), in_axis_resources=None, out_axis_resources=P("dp", None, "mp")
    )
    rows = len(prompt) // jax.process_count()
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    with mesh:
        cache = make_cache()
        for at in range(LENGTH - 1):
            token = tokens[mine, at]
            if jax.config.jax_array and jax.process_count() > 1:
                token = multihost_utils.host_local_array_to_global_array(token, mesh, P("dp"))
            logits, cache = one_token(placed, cache, token, np.int32(at))
            if at + 1 >= prompt.shape[1]:
                chosen = np.asarray(logits).argmax(axis=-1).astype(np.int32)
                tokens = np.concatenate([tokens, chosen[:, None]], axis=1)

    sizes = jax.tree_map(lambda x: x.size * x.dtype.itemsize, placed)
    report = {
        "sampled": np.asarray(sampled).tolist(),
        "greedy": np.asarray(greedy).tolist(),
        "one_by_one": tokens.tolist(),
        "cache_shape": list(keys.shape),
        "weights": {k: sum(jax.tree_leaves(v)) for k, v in sizes.items()},
        "bias": placed["layer_0"]["ln"]["bias"],
        "device_arrays": all(isinstance(x, jnp.DeviceArray) for x in jax.tree_leaves(placed)),
    }
    print("RESULT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
