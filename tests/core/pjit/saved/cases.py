"""Compiled programs with every feature that a file can store, and arguments to call them on."""

import collections
import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType

from tests.core.pjit.helpers import f32, make_mesh
from xlashard import GSPMDSharding, Mesh, NamedSharding, P, device_put, pjit


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["activation", "width"]
)
@dataclasses.dataclass
class Layer:
    """Node with static data: a function of a module, and a number."""

    w: jax.Array
    b: jax.Array
    activation: object = jax.nn.relu
    width: int = 8


Pair = collections.namedtuple("Pair", ["first", "second"])


def mesh():
    """Return a mesh of four by two devices."""
    return make_mesh((4, 2), ("x", "y"))


def named(*spec):
    """Return a sharding on that mesh."""
    return NamedSharding(mesh(), P(*spec))


def training():
    """Adam on a layer, its state donated, keywords and the partitioner's own choices."""
    tx = optax.adam(1e-2)

    def update(layer, state, x, *, scale):
        def loss(layer):
            return (layer.activation(x @ layer.w + layer.b) ** 2).sum() * scale

        value, grads = jax.value_and_grad(loss)(layer)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(layer, updates), state, {"loss": value}

    layer = Layer(f32(4, 8), f32(8))
    place = Layer(named(None, "y"), named("y"))
    f = pjit(update, in_shardings=(place, None, named("x")), donate_argnums=(0, 1))
    args = (layer, tx.init(layer), f32(16, 4))
    return f.lower(*args, scale=0.5).compile(), args, {"scale": 0.5}


def closed_over():
    """A large constant on a mesh, keys of one device, and LAPACK."""
    table = device_put(np.linspace(0, 1, 160 * 160, dtype=np.float32).reshape(160, 160), named("x"))
    keys = jax.device_put(jax.random.split(jax.random.key(7), 8), jax.devices()[0])

    def f(x, unused):
        noise = jax.vmap(jax.random.normal)(keys)
        return x @ table, jnp.linalg.cholesky(jnp.eye(3) * 4), noise

    args = (device_put(f32(8, 160), named(None, "x")), f32(3))
    return pjit(f).lower(*args).compile(), args, {}


def keys():
    """Keys in and out, and structures of Python's own."""

    def f(pair, bag, nothing):
        key, sub = jax.random.split(pair.first)
        out = collections.OrderedDict(z=key, a=[sub, bag["n"] * 2])
        return out, (), None, collections.defaultdict(list, k=pair.second + 1)

    args = (Pair(jax.random.key(3), np.int8(4)), {"n": f32(2).astype(jnp.bfloat16)}, None)
    return pjit(f).lower(*args).compile(), args, {}


def tiles():
    """Tiles in an order that no mesh has, and a layout."""
    dealt = GSPMDSharding(jax.devices(), "{devices=[4,2]0,2,4,6,1,3,5,7}")
    columns = Format(Layout((1, 0)), named("x"))
    f = pjit(
        lambda a, b: (a.T, b + 1), in_shardings=(dealt, columns), out_shardings=(None, columns)
    )
    args = (f32(8, 4), f32(8, 4))
    return f.lower(*args).compile(), args, {}


def one_device():
    """On a device other than the first."""
    args = (device_put(f32(4), jax.devices()[3]), 2.0)
    return pjit(lambda x, s: x * s).lower(*args).compile(), args, {}


def explicit():
    """A mesh whose axes are part of types."""
    grid = np.array(jax.devices()[:4]).reshape(2, 2)
    there = Mesh(grid, ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    args = (device_put(f32(4, 4), NamedSharding(there, P("a", "b"))),)
    return pjit(lambda x: x + 1).lower(*args).compile(), args, {}


CASES = {f.__name__: f for f in (training, closed_over, keys, tiles, one_device, explicit)}


def facts(compiled, args, kwargs):
    """Return a program's properties and results, as plain values."""
    results = compiled(*args, **kwargs)
    again = compiled(*args, **kwargs)
    values = [np.asarray(data(leaf)).tolist() for leaf in jax.tree.leaves(results)]
    assert values == [np.asarray(data(leaf)).tolist() for leaf in jax.tree.leaves(again)]
    memory = compiled.memory_analysis()
    found = {
        "values": values,
        "placed": [str(leaf.sharding) for leaf in jax.tree.leaves(results)],
        "committed": [bool(leaf.committed) for leaf in jax.tree.leaves(results)],
        "types": [str(a) for a in jax.tree.leaves((compiled.in_avals, compiled.out_avals))],
        "formats": [
            str(f) for f in jax.tree.leaves((compiled.input_formats, compiled.output_formats))
        ],
        "shardings": [str(compiled.input_shardings), str(compiled.output_shardings)],
        "trees": [str(compiled.in_tree), str(compiled.out_tree)],
        "out_info": str(compiled.out_info),
        "args_info": str(compiled.args_info),
        "donated": list(compiled.donate_argnums),
        "name": compiled.fun_name,
        "alias bytes": memory.alias_size_in_bytes,
        "argument bytes": memory.argument_size_in_bytes,
        "text": compiled.as_text().partition("\n")[0],
        "flops": compiled.cost_analysis().get("flops"),
    }
    # Functions in static parts are shown with their addresses.
    return json.loads(re.sub("0x[0-9a-f]+", "0x", json.dumps(found)))


def data(leaf):
    """Return the integers of keys; anything else as it is, small floats widened."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return np.asarray(leaf).astype(np.float32) if leaf.dtype == jnp.bfloat16 else leaf
