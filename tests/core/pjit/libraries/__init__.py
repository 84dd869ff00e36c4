"""Training programs as users of JAX and its libraries write them.

Each takes the names of its import lines, so that it runs with JAX's names and with those of this
package.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import xlashard


@dataclass(frozen=True)
class Imports:
    """Names such as `jit` and `NamedSharding`, of one package or of the other."""

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
    """Outcome of a program.

    Attributes:
        losses: The loss of each step.
        state: The trained state after the last step.
        specs: Expected specs of some arrays: pairs of an array and its spec.
    """

    losses: list[float]
    state: Any
    specs: list[tuple[Any, Any]]


def batches(count: int, *, features: int = 8, rows: int = 16) -> Iterator[tuple[Any, Any]]:
    """Yield inputs `[rows, features]` and targets `[rows, 4]`."""
    random = np.random.default_rng(0)
    for _ in range(count):
        x = random.normal(size=(rows, features)).astype(np.float32)
        yield x, np.sin(x[:, :4] + x[:, 4:8])
