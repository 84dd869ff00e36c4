"""Training programs as somebody writes them who knows JAX and its libraries, and nothing else.

Each takes what would stand in its import lines, so that it runs with the names of JAX and with
those of this package.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import xlashard


@dataclass(frozen=True)
class Imports:
    """`jit`, `NamedSharding` and so on, of one package or of the other."""

    jit: Callable[..., Any]
    NamedSharding: Any
    with_sharding_constraint: Callable[..., Any]
    device_put: Callable[..., Any]


JAX = Imports(jax.jit, jax.sharding.NamedSharding, jax.lax.with_sharding_constraint, jax.device_put)
ALL_OF_XLASHARD = Imports(
    xlashard.jit,
    xlashard.NamedSharding,
    xlashard.with_sharding_constraint,
    xlashard.device_put,
)
JIT_OF_XLASHARD = Imports(
    xlashard.jit, jax.sharding.NamedSharding, jax.lax.with_sharding_constraint, jax.device_put
)


@dataclass(frozen=True)
class Trained:
    """What a program came to.

    Attributes:
        losses: The loss of each step.
        state: What it has trained, as it is after the last.
        specs: Where some of that is to lie: pairs of an array and its spec.
    """

    losses: list[float]
    state: Any
    specs: list[tuple[Any, Any]]


def batches(count: int, *, features: int = 8, rows: int = 16) -> Iterator[tuple[Any, Any]]:
    """Inputs `[rows, features]` and targets `[rows, 4]`."""
    random = np.random.default_rng(0)
    for _ in range(count):
        x = random.normal(size=(rows, features)).astype(np.float32)
        yield x, np.sin(x[:, :4] + x[:, 4:8])
