"""Calls of the era's `pjit` in each of its array modes, beside `xlashard.pjit` on Arrays.

The function adds one to each of its leaves, arrays of eight numbers, so nearly all of a call is
dispatch, including the choice of the array mode. Results are the arguments of the next call.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import jax
import numpy as np

import xlashard
from benchmarks._devices import Loop, add_one
from benchmarks._measure import Options, Report, interleave
from xlashard import Mesh, P, legacy

LEAVES = (1, 10, 100)
WORLDS = {
    "GlobalDeviceArray in and out": legacy.ArrayMode(jax_array=False, output_gda=True),
    "ShardedDeviceArray in and out": legacy.ArrayMode(jax_array=False),
    "Array in and out": legacy.ArrayMode(),
}


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
                ours = xlashard.pjit(add_one, P("data"), P("data"))
                eras = legacy.pjit(add_one, P("data"), P("data"))
                candidates = {
                    "xlashard.pjit, Array": Loop(ours, ours(host)),
                    "legacy.pjit": Loop(eras, eras(host)),
                }
                # Eight threads on few cores: single rounds are noisy.
                measured = interleave(candidates, rounds=3 * options.rounds)
            report.add(
                f"{what}, {count} leaves" if count > 1 else f"{what}, 1 leaf",
                measured,
                baseline="xlashard.pjit, Array",
                goals={"legacy.pjit": 1.15},
            )
