"""Small programs on topologies, for preflight tests.

Programs that are too large for the chips cost least: the compiler gives up before it makes code.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

import xlashard
from xlashard import NamedSharding, P, pjit
from xlashard.analysis.programs.program import Compilation
from xlashard.analysis.programs.program_reader import read_stage
from xlashard.predict.preflight.compilation import compile_for_report
from xlashard.tpu import Topology, topology

MIB = 2**20


def compile_stage(stage: Any, *args: Any, **kwargs: Any) -> Compilation:
    """Compile a lowered stage for a report."""
    return compile_for_report(read_stage(stage), *args, **kwargs)


def on(name: str, **axes: int) -> tuple[Topology, Any]:
    """Return a topology and a mesh on it."""
    place = topology(name)
    return place, place.mesh(axes)


@cache
def training_step(width: int, depth: int, rows: int) -> tuple[Compilation, Topology]:
    """Return a step of layers that are scanned over and computed again, with donated parameters."""
    place, mesh = on("v5e:2x2", data=2, model=2)

    def struct(shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def layer(x: Any, params: Any) -> Any:
        hidden = jax.nn.relu(x @ params["up"].astype(x.dtype))
        y = x + hidden @ params["down"].astype(x.dtype)
        return xlashard.with_sharding_constraint(y, NamedSharding(mesh, P("data"))), None

    def loss(params: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def step(params: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {
        "up": struct((depth, width, 2 * width), jnp.float32, None, "data", "model"),
        "down": struct((depth, 2 * width, width), jnp.float32, None, "model", "data"),
    }
    layouts = jax.tree.map(lambda p: p.sharding, params)
    train = pjit(step, donate_argnums=0, out_shardings=(layouts, None))
    lowered = train.lower(params, struct((rows, width), jnp.bfloat16, "data"))
    return compile_stage(lowered), place


@cache
def first_of(name: str, nbytes: int) -> tuple[Compilation, Topology]:
    """Return a program that reads one number of a fully replicated argument."""
    place, mesh = on(name, all=4)
    x = jax.ShapeDtypeStruct((nbytes // 4,), jnp.float32, sharding=NamedSharding(mesh, P()))
    return compile_stage(pjit(lambda x: x[0] + 1).lower(x)), place
