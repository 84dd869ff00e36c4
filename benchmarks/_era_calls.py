"""Calls of the era's `pjit` in each of its array modes, beside `xlashard.pjit` on Arrays.

The function adds one to each of its leaves, arrays of eight numbers, so nearly all of a call is
dispatch, including the choice of the array mode. Results are the arguments of the next call.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np

import xlashard
from benchmarks._measure import Options, Report, interleave
from xlashard import Mesh, P, legacy

LEAVES = (1, 10, 100)
WORLDS = {
    "GlobalDeviceArray in and out": legacy.ArrayMode(jax_array=False, output_gda=True),
    "ShardedDeviceArray in and out": legacy.ArrayMode(jax_array=False),
    "Array in and out": legacy.ArrayMode(),
}


def add_one(leaves: list[jax.Array]) -> list[jax.Array]:
    """Add one to each leaf: the function under test."""
    return [leaf + 1 for leaf in leaves]


class Loop:
    """Call a function on its own last results."""

    def __init__(self, call: Callable[[Any], Any], state: Any) -> None:
        self.call = call
        self.state = call(state)

    def __call__(self) -> None:
        """Make one call."""
        self.state = self.call(self.state)


@contextmanager
def in_mode(mode: legacy.ArrayMode, mesh: Mesh) -> Iterator[None]:
    """Run the block in an array mode, under a mesh."""
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(legacy.jax_array(mode.jax_array))
        stack.enter_context(legacy.parallel_functions_output_gda(mode.output_gda))
        yield


def calls(report: Report, options: Options) -> None:
    """Compare repeat calls on eight devices; those of `xlashard.pjit` are the same in all modes."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    for what, mode in WORLDS.items():
        for count in LEAVES:
            host = [np.full((8,), i, np.float32) for i in range(count)]
            with in_mode(mode, mesh):
                candidates = {
                    "xlashard.pjit, Array": Loop(
                        xlashard.pjit(add_one, P("data"), P("data")), host
                    ),
                    "legacy.pjit": Loop(legacy.pjit(add_one, P("data"), P("data")), host),
                }
                # Eight threads on few cores: single rounds are noisy.
                measured = interleave(candidates, rounds=3 * options.rounds)
            report.add(
                f"{what}, {count} leaves" if count > 1 else f"{what}, 1 leaf",
                measured,
                baseline="xlashard.pjit, Array",
                goals={"legacy.pjit": 1.15},
            )
