"""Script with the programs of real code bases in small: what reports must get right of each.

`PROGRAMS` has the functions and the arguments of a call, which a test compiles on its own.
`library` is a module of installed packages that jits for the user.
"""

import functools
import sys

import jax
import library
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
NAMES = tuple("abcdefghijkl")
wide_mesh = jax.make_mesh((2, 1, 2, *(1,) * 8, 2), NAMES, axis_types=(AxisType.Auto,) * 12)


def put(x, *spec, on=mesh):
    return jax.device_put(x, NamedSharding(on, P(*spec)))


@jax.jit
def noisy_step(state, x):
    noise = jax.vmap(lambda key: jax.random.normal(key, (16,)))(state["keys"])
    gradient = jax.grad(lambda w: (((x + noise) @ w) ** 2).mean())(state["w"])
    return {"keys": state["keys"], "w": state["w"] - gradient}


@jax.jit
def count(reference, x):
    reference[...] = reference[...] * 0.5 + x.mean()


@functools.partial(jax.jit, donate_argnums=1)
def decode(params, cache, token, position):
    cache = cache.at[:, position].set(params["embed"][token])
    logits = (cache.sum(1) / (position + 1)) @ params["embed"].T
    return cache, logits.argmax(-1).astype(np.int32)


table = put(np.arange(64, dtype=np.float32).reshape(16, 4) % 7, "d")


@jax.jit
def look_up(x):
    return (x @ table).sum()


@jax.jit
def many_axes(x, w):
    w = jax.lax.with_sharding_constraint(w, NamedSharding(wide_mesh, P("a", ("c", "l"))))
    return (x @ w).sum(0)


def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2.0


double = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), np.float32))
scaled = jax.jit(
    jax.shard_map(double, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
)


@library.compiled
def step(w, x):
    return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


x = put(np.arange(128, dtype=np.float32).reshape(8, 16) / 128, "d")
state = {"keys": put(jax.random.split(jax.random.key(0), 8), "d"), "w": put(np.ones((16, 4)))}
params = {"embed": put(np.sin(np.arange(256, dtype=np.float32)).reshape(32, 8), "d")}
cache, token = put(np.zeros((8, 12, 8), np.float32), "d"), put(np.arange(8, dtype=np.int32), "d")
wide = put(np.ones((8, 8), np.float32), "a", on=wide_mesh)
PROGRAMS = {
    "noisy_step": (noisy_step, (state, x)),
    "count": (count, (jax.new_ref(put(np.ones((8, 16), np.float32), "d")), x)),
    "decode": (decode, (params, cache, token, 0)),
    "look_up": (look_up, (x,)),
    "many_axes": (many_axes, (wide, wide)),
    "step": (step, (put(np.ones((16, 4), np.float32)), x)),
}

if __name__ == "__main__":
    for name, (function, arguments) in PROGRAMS.items():
        if name != "decode":
            function(*arguments)
    tokens = [3]
    while tokens[-1] != 31 and len(tokens) < 12:
        cache, token = decode(params, cache, token, len(tokens) - 1)
        tokens.append(int(token[0]))
    print("tokens", *tokens)
    print("counted", float(PROGRAMS["count"][1][0][...].sum()))
    print("ratio", 1 / tokens[-1])
    if "kernels" in sys.argv:
        print("scaled", scaled(put(np.ones((64, 128), np.float32), "d")).shape)
