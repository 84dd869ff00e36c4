"""The two sides of growth tables: JAX, and xlashard in its place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import xlashard
from benchmarks._measure import Line, compare

type Call = Callable[[], object]


@dataclass(frozen=True)
class Side:
    """Functions of one side that have the same names or parameters on the other.

    Attributes:
        name: Its name in tables.
        api: Module with `jit`, `device_put` and the constructors of arrays.
        named_sharding: Its class of shardings.
        constrain: Its `with_sharding_constraint`.
    """

    name: str
    api: Any
    named_sharding: Callable[..., Any]
    constrain: Callable[..., Any]

    def sharding(self, num_devices: int, *spec: str | None) -> Any:
        """Return a sharding over the axis `data` of a mesh of the first devices."""
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("data",))
        return self.named_sharding(mesh, jax.sharding.PartitionSpec(*spec))

    def put_rows(self, num_devices: int, count: int, length: int = 8) -> list[Any]:
        """Return arrays of ones, sharded over the devices."""
        rows = self.sharding(num_devices, "data")
        return [self.api.device_put(np.ones(length, np.float32), rows) for _ in range(count)]


JAX = Side("jax", jax, jax.sharding.NamedSharding, jax.lax.with_sharding_constraint)
OURS = Side("xlashard", xlashard, xlashard.NamedSharding, xlashard.with_sharding_constraint)


class Lines(list[Line]):
    """Lines of a growth table, each measured when it is added.

    Args:
        rounds: Samples of each side.
        goal: Limit of the ratios, where a line has no other.
    """

    def __init__(self, rounds: int, goal: float = 1.10) -> None:
        super().__init__()
        self.rounds = rounds
        self.goal = goal

    def measure(
        self,
        row: str,
        make: Callable[[Side], Call],
        *,
        rounds: int | None = None,
        goal: float | None = None,
        floor: Call | None = None,
        **options: Any,
    ) -> None:
        """Measure the calls that `make` returns for JAX and for xlashard, and add the line.

        Args:
            row: The work.
            make: Returns the call of a side.
            rounds: Upper limit of the samples of each side.
            goal: Limit of the ratio.
            floor: The least work that arrays of another class than JAX's allow, measured beside
                both.
            options: Other arguments of `compare`.
        """
        work = {side.name: make(side) for side in (JAX, OURS)}
        if floor is not None:
            work["floor"] = floor
        rounds = self.rounds if rounds is None else min(rounds, self.rounds)
        self.append(compare(row, work, rounds=rounds, goal=goal or self.goal, **options))
