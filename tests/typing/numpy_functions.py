"""`xlashard.numpy` returns Arrays, and takes the arguments of `jax.numpy`."""

from typing import assert_type

import jax
import numpy as np

import xlashard
import xlashard.numpy as xnp
from xlashard import Array


def softmax(x: Array) -> Array:
    e = xnp.exp(x - xnp.max(x, axis=-1, keepdims=True))
    return xnp.true_divide(e, xnp.sum(e, axis=-1, keepdims=True))


def functions(x: Array) -> None:
    assert_type(xnp.sum(x, axis=0), Array)
    assert_type(xnp.maximum(x, 0), Array)
    assert_type(xnp.add.reduce(x, axis=1), Array)
    assert_type(xnp.concatenate([x, np.ones((8, 4))]), Array)
    assert_type(xnp.einsum("ij,kj->ik", x, x), Array)
    assert_type(xnp.where(x > 3, x, 0), Array)
    assert_type(xnp.where(x > 3), tuple[Array, ...])
    assert_type(xnp.linspace(0, 1, 5), Array)
    assert_type(xnp.linspace(0, 1, retstep=True), tuple[Array, Array])
    assert_type(xnp.atleast_2d(x), Array)
    assert_type(xnp.zeros((3,), dtype=xnp.int32), Array)
    assert_type(xnp.asarray([1, 2]), Array)
    assert_type(xnp.clip(x, 0, 1), Array)
    rows, columns = xnp.divmod(x, 2)
    any_array: jax.Array = rows + columns
    print(any_array.shape, xnp.pi, xnp.finfo(x.dtype).eps)


def refused(x: Array) -> None:
    xnp.sum(x, axs=0)  # pyright: ignore[reportCallIssue]
    xnp.exp("x")  # pyright: ignore[reportArgumentType]
    xnp.maximum(x)  # pyright: ignore[reportCallIssue]
    xnp.summ(x)  # pyright: ignore[reportAttributeAccessIssue]


def run() -> None:
    """Run everything except for type errors."""
    x = xlashard.device_put(np.ones((8, 4), np.float32))
    functions(x)
    assert softmax(x).shape == x.shape
