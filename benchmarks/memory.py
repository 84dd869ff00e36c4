"""Memory of small arrays and time of the garbage collector, with up to a million of them alive.

The arrays are results of one program, held in a list. JAX's and ours live in processes of their
own, which take turns. Times are CPU times.

    python -m benchmarks.memory [--rounds N] [--json PATH] [--strict]
"""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._devices import emulated, run_apart

os.environ.update(emulated(1))

import jax
import numpy as np
import psutil

from benchmarks._measure import Line, Measurement, RatioGoal, Report, read_options
from benchmarks._sides import JAX, OURS, Side

COUNTS = (10_000, 100_000, 1_000_000)
RESULTS = 100
"""Results of a call."""

FEW_ROUNDS = 2
"""Rounds of a million arrays, of which each takes ten seconds."""

UNITS = {
    "memory of the arrays": "bytes",
    "objects of the collector": "objects",
    "making": "s",
    "gc.collect()": "s",
    "deletion": "s",
}
GOAL = RatioGoal(1.10)
# An Array refers to the object of its buffers, and the collector sees both.
GOALS = {"objects of the collector": RatioGoal(2.01)}


@contextmanager
def timed(costs: dict[str, float], row: str) -> Iterator[None]:
    """Keep the CPU time of a block."""
    started = time.process_time()
    yield
    costs[row] = time.process_time() - started


def hold(side_name: str, count: int) -> dict[str, float]:
    """Return the costs of arrays that are made, held and deleted."""
    side: Side = OURS if side_name == OURS.name else JAX
    call = side.api.jit(lambda x: [x + number for number in range(RESULTS)])
    x = side.api.device_put(np.float32(1), side.sharding(1))
    jax.block_until_ready(call(x))
    gc.collect()
    gc.disable()
    costs: dict[str, float] = {}
    objects, memory = len(gc.get_objects()), psutil.Process().memory_info().rss
    with timed(costs, "making"):
        live = [y for _ in range(count // RESULTS) for y in call(x)]
        jax.block_until_ready(live)
    # A call of an array's `block_until_ready` leaves 40 bytes of garbage in jaxlib.
    gc.collect()
    costs["memory of the arrays"] = max(psutil.Process().memory_info().rss - memory, 1)
    costs["objects of the collector"] = len(gc.get_objects()) - objects
    with timed(costs, "gc.collect()"):
        gc.collect()
    with timed(costs, "deletion"):
        live.clear()
    return costs


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("Memory of arrays and the garbage collector, beside JAX", rounds=3)
    report = Report("memory")
    lines: dict[str, list[Line]] = {row: [] for row in UNITS}
    for count in COUNTS:
        number = options.rounds if count < COUNTS[-1] else min(options.rounds, FEW_ROUNDS)
        rounds = [
            {side.name: run_apart({}, hold, side.name, count) for side in (JAX, OURS)}
            for _ in range(number)
        ]
        for row, unit in UNITS.items():
            theirs, ours = (
                Measurement(side.name, 1, tuple(costs[side.name][row] for costs in rounds), unit)
                for side in (JAX, OURS)
            )
            goal = GOALS.get(row, GOAL)
            lines[row].append(Line(row, theirs, ours, goal, (count, "arrays")))
    report.add_growth("Live arrays, 1 device", [line for row in lines.values() for line in row])
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
