"""Programs and layouts of the tests of automatic layouts."""

from functools import cache

import jax
import jax.numpy as jnp
import optax

from xlashard import AutoPlan, P, auto_shard, pjit
from xlashard.auto.problem import ProgramLayout
from xlashard.auto.search import Search

OPTIMIZER = optax.adam(1e-3)
WIDTH, HIDDEN, ROWS = 32, 64, 64


def make_params(width=WIDTH, hidden=HIDDEN, layers=2):
    keys = iter(jax.random.split(jax.random.key(0), 2 * layers))
    return [
        {
            "up": jax.random.normal(next(keys), (width, hidden)) / 8,
            "down": jax.random.normal(next(keys), (hidden, width)) / 8,
        }
        for _ in range(layers)
    ]


def make_state(*sizes):
    params = make_params(*sizes)
    return {"params": params, "opt": OPTIMIZER.init(params)}


def make_batch(rows=ROWS, width=WIDTH):
    return {
        name: jax.random.normal(jax.random.key(n), (rows, width)) for n, name in enumerate("xy")
    }


def loss(params, batch):
    x = batch["x"]
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - batch["y"]) ** 2)


def step(state, batch):
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


def double(w, x):
    return w * 2 + x


DOUBLED = jax.ShapeDtypeStruct((64, 32), "float32")


def shapes(*sizes, rows=ROWS):
    width = sizes[0] if sizes else WIDTH
    return jax.eval_shape(lambda: (make_state(*sizes), make_batch(rows, width)))


@cache
def mlp_plan() -> AutoPlan:
    """A plan of the training step on 8 devices."""
    return auto_shard(pjit(step, donate_argnums=0), *shapes(), mesh={"data": 4, "model": 2})


@cache
def small_plan() -> AutoPlan:
    """A plan that takes half a second."""
    return auto_shard(double, DOUBLED, DOUBLED, mesh={"data": 8})


WHOLE = P()


def hand_layout(program, name, state=WHOLE, batch=WHOLE):
    """A layout with one spec for the matrices of the state and one for the batch."""

    def spec(value):
        if value.path.startswith("batch"):
            return batch
        return state if len(value.aval.shape) > 1 else WHOLE

    return ProgramLayout(
        name,
        tuple(map(spec, program.arguments)),
        tuple(map(spec, program.results)),
        (),
        1.0,
        1.0,
    )


def find_layouts(problem, seconds=60.0):
    """The layouts of a problem that a search finds, the fastest by prediction first."""
    return tuple(sorted(Search(problem, seconds).run(), key=lambda layout: layout.seconds))
