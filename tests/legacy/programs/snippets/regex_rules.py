"""Places weights by rules over their names, and shards and gathers them with made functions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.pjit import pjit
from jax.experimental.pjit import with_sharding_constraint as _with_sharding_constraint
from jax.interpreters import pxla
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS


class JaxRNG:
    """Splits a key whenever one is asked for."""

    def __init__(self, seed):
        self.rng = jax.random.PRNGKey(seed)

    def __call__(self, keys=None):
        if keys is None:
            self.rng, split = jax.random.split(self.rng)
            return split
        split = jax.random.split(self.rng, num=len(keys) + 1)
        self.rng = split[0]
        return dict(zip(keys, split[1:]))


def names_in_spec(specs):
    names = set()
    if isinstance(specs, dict):
        specs = specs.values()
    for item in specs:
        if item is None:
            continue
        if isinstance(item, str):
            names.add(item)
        else:
            names.update(names_in_spec(item))
    return names


def names_in_current_mesh(*names):
    return set(names) <= set(pxla.thread_resources.env.physical_mesh.axis_names)


def with_sharding_constraint(x, spec):
    if names_in_current_mesh(*names_in_spec(spec)):
        x = _with_sharding_constraint(x, spec)
    return x


def named_leaves(tree, prefix=""):
    if not isinstance(tree, dict):
        return {prefix: tree}
    found = {}
    for key, value in tree.items():
        found.update(named_leaves(value, f"{prefix}/{key}" if prefix else key))
    return found


def match_rules(rules, tree):
    def spec_of(name, leaf):
        if len(leaf.shape) == 0 or np.prod(leaf.shape) == 1:
            return PS()
        for rule, spec in rules:
            if re.search(rule, name) is not None:
                return spec
        raise ValueError(f"no rule for {name}")

    flat = named_leaves(tree)
    structure = jax.tree_structure(tree)
    return jax.tree_unflatten(structure, [spec_of(n, flat[n]) for n in sorted(flat)])


def shard_and_gather_fns(specs, dtype):
    def cast(x):
        return x.astype(dtype) if x.dtype in (jnp.float32, jnp.bfloat16) else x

    def make_shard(spec):
        fn = pjit(cast, in_axis_resources=None, out_axis_resources=spec)
        return lambda x: fn(x)

    def make_gather(spec):
        fn = pjit(lambda x: x, in_axis_resources=spec, out_axis_resources=None)
        return lambda x: jax.device_get(fn(x))

    is_spec = lambda x: isinstance(x, PS)
    return (
        jax.tree_map(make_shard, specs, is_leaf=is_spec),
        jax.tree_map(make_gather, specs, is_leaf=is_spec),
    )


def main():
    mesh = Mesh(mesh_utils.create_device_mesh((2, 2, 2)), ("dp", "fsdp", "mp"))
    rng = JaxRNG(3)
    keys = rng(("wq", "wo", "kernel"))
    params = {
        "attention": {
            "wq": {"kernel": jax.random.normal(keys["wq"], (8, 16))},
            "wo": {"kernel": jax.random.normal(keys["wo"], (16, 8))},
        },
        "norm": {"kernel": jnp.ones(8)},
        "step": jnp.zeros((), jnp.int32),
    }
    specs = match_rules(
        [
            ("attention/wq/kernel", PS("fsdp", "mp")),
            ("attention/wo/kernel", PS("mp", "fsdp")),
            ("norm", PS(None)),
            (".*", PS(None)),
        ],
        params,
    )
    assert names_in_spec(specs["attention"]["wq"]["kernel"]) == {"fsdp", "mp"}
    assert not names_in_current_mesh("dp")
    with mesh:
        assert names_in_current_mesh("dp", "mp")
        shard_fns, gather_fns = shard_and_gather_fns(specs, jnp.float32)
        sharded = jax.tree_map(lambda fn, x: fn(x), shard_fns, params)

        def forward(p, x):
            x = with_sharding_constraint(x, PS(("dp", "fsdp"), None))
            x = x * p["norm"]["kernel"]
            x = x @ p["attention"]["wq"]["kernel"] @ p["attention"]["wo"]["kernel"]
            return with_sharding_constraint(x, PS(("dp", "fsdp"), None))

        fn = pjit(forward, in_axis_resources=(specs, PS()), out_axis_resources=PS(("dp", "fsdp")))
        out = fn(sharded, np.ones((4, 8), np.float32))
        gathered = jax.tree_map(lambda fn, x: fn(x), gather_fns, sharded)
    assert isinstance(gathered["norm"]["kernel"], np.ndarray)
    jax.tree_map(np.testing.assert_array_equal, gathered, jax.device_get(params))
    np.testing.assert_allclose(out, forward(params, np.ones((4, 8))), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main()
