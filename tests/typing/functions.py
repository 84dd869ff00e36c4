"""`pjit` keeps the type of the function that it is given."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import xlashard
from xlashard import Array, Compiled, Lowered, P, Traced

NUMBERS = np.ones((8, 4), np.float32)


@xlashard.jit
def double(x: ArrayLike) -> jax.Array:
    return jnp.asarray(x) * 2


@xlashard.pjit(static_argnames="times", donate_argnums=0)
def repeated(x: Array, *, times: int) -> Array:
    return x * times


def loss(weights: dict[str, Array], batch: Array) -> tuple[Array, dict[str, Array]]:
    return (batch @ weights["w"]).sum(), {"largest": batch.max()}


compiled_loss = xlashard.pjit(loss, in_shardings=(P(), P()), out_shardings=None)


class Model:
    """Class with a compiled method; the instance is a static argument."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @xlashard.jit(static_argnums=0)
    def scale(self, x: Array) -> Array:
        return x * self.factor


def calls(x: Array, weights: dict[str, Array]) -> None:
    assert_type(double(x), jax.Array)
    assert_type(double(NUMBERS), jax.Array)
    assert_type(repeated(x + 0, times=3), Array)
    assert_type(compiled_loss(weights, x), tuple[Array, dict[str, Array]])
    assert_type(compiled_loss(weights=weights, batch=x)[1]["largest"], Array)
    assert_type(Model(3.0).scale(x), Array)


def stages(x: Array) -> None:
    assert_type(double.lower(x), Lowered)
    assert_type(double.lower(jax.ShapeDtypeStruct((8, 4), np.float32)), Lowered)
    assert_type(double.lower(x).compile(), Compiled)
    assert_type(double.trace(x), Traced)
    assert_type(double.lower(x).as_text(), str)
    print(double.eval_shape(x).shape)
    double.clear_cache()
    compiled: Any = double.lower(x).compile()(x)
    jax.grad(lambda w: double(w).sum())(x)
    jax.vmap(double)(compiled)


def refused(x: Array) -> None:
    double()  # pyright: ignore[reportCallIssue]
    double(x, x)  # pyright: ignore[reportCallIssue]
    repeated(x, times="3")  # pyright: ignore[reportArgumentType]
    repeated(x, time=3)  # pyright: ignore[reportCallIssue]
    compiled_loss(x, x)  # pyright: ignore[reportArgumentType]
    Model(3.0).scale(x, x)  # pyright: ignore[reportCallIssue]
    double.lowered(x)  # pyright: ignore[reportAttributeAccessIssue]
    xlashard.pjit(loss, out_sharding=None)  # pyright: ignore[reportCallIssue]
    xlashard.jit(donate_argnum=0)  # pyright: ignore[reportCallIssue]
    xlashard.pjit(loss, donation="loud")  # pyright: ignore[reportArgumentType]


def constrained(x: jax.Array) -> jax.Array:
    y = xlashard.with_sharding_constraint(x, P())
    assert_type(y, jax.Array)
    return y


def run() -> None:
    """Run everything except for type errors."""
    x = xlashard.device_put(NUMBERS)
    mesh = xlashard.Mesh(np.array(jax.devices()), ("data",))
    with jax.set_mesh(mesh):
        calls(x, {"w": xlashard.device_put(np.ones((4, 2), np.float32))})
        assert constrained(x).shape == x.shape
    stages(x)
