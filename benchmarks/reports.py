"""Cost of `explain` and of an estimate by `preflight` beside the compilation of the program.

The programs are gradients of losses of 10 to 1,000 unrolled layers. `explain` reports a program
that is compiled for eight CPU devices; `preflight` lowers its program for a TPU topology and has it
compiled, without code generation, by a worker process. CPU times are of the process that reports,
against those of the compilation: of plain JAX on the CPU, of the worker for the topology. Memory is
what the peak of a process rises above its memory before.

    python -m benchmarks.reports [--rounds N] [--json PATH] [--strict]
"""

import functools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks._devices import emulated, run_apart

os.environ.update(emulated(8))

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import xlashard
from benchmarks._measure import Line, Measurement, RatioGoal, Report, read_options
from benchmarks._sides import JAX

LAYERS = (10, 100, 1000)
WIDTH = 64
GOAL = RatioGoal(1 / 3)
LINEAR = 1.0
LEAST_MEMORY = 2**20
"""Bytes below which a difference of memory is noise."""

TOPOLOGY = "v5e-8"
UNITS = {"s": "seconds", "bytes": "memory"}
TITLES = {"s": "CPU time of reports", "bytes": "Memory of reports, beyond that before"}


@dataclass(frozen=True)
class Cost:
    """CPU seconds, and bytes by which the peak of memory exceeds the memory before."""

    seconds: float
    memory: float


def lower(layers: int) -> Any:
    """Return a new lowered gradient of a loss of unrolled layers."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        hidden = functools.reduce(lambda x, w: x + jnp.tanh(x @ w), weights, x)
        return (hidden * hidden).mean()

    whole, rows = JAX.sharding(8), JAX.sharding(8, "data")
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32, sharding=whole)
    x = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32, sharding=rows)
    return jax.jit(jax.grad(loss)).lower([weight] * layers, x)


class Peaks(threading.Thread):
    """Peaks of the memory of this process and its workers, read 20 times in a second.

    Attributes:
        peaks: Peak of each process, in bytes.
        ended: Event after which it stops.
        seconds: CPU time of the reading.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[psutil.Process, int] = {}
        self.ended = threading.Event()
        self.seconds = 0.0

    def run(self) -> None:
        """Read the memory until the work has ended."""
        own = psutil.Process()
        while not self.ended.wait(0.05):
            for process in (own, *own.children(recursive=True)):
                with suppress(psutil.Error):
                    memory = process.memory_info().rss
                    self.peaks[process] = max(memory, self.peaks.get(process, 0))
        self.seconds = time.thread_time()


def measure_cost(call: Callable[[], object]) -> tuple[Cost, Cost]:
    """Return what a call costs in this process, and in the workers that it uses."""
    own = psutil.Process()
    before = {child: read_child(child) for child in own.children(recursive=True)}
    memory, peaks = own.memory_info().rss, Peaks()
    peaks.start()
    started = time.process_time()
    call()
    seconds = time.process_time() - started
    peaks.ended.set()
    peaks.join()
    seconds -= peaks.seconds
    workers = Cost(0, LEAST_MEMORY)
    for child in own.children(recursive=True):
        known = before.get(child, Cost(0, 0))
        risen = peaks.peaks.get(child, 0) - known.memory
        workers = Cost(
            workers.seconds + read_child(child).seconds - known.seconds,
            max(workers.memory, risen),
        )
    return Cost(seconds, max(peaks.peaks.get(own, 0) - memory, LEAST_MEMORY)), workers


def read_child(process: psutil.Process) -> Cost:
    """Return the CPU time and the memory of a process so far."""
    return Cost(sum(process.cpu_times()[:2]), process.memory_info().rss)


def measure(layers: int) -> dict[str, tuple[Cost, Cost]]:
    """Return the costs of the compilation and of the report, by row."""
    jax.config.update("jax_enable_compilation_cache", False)
    small = lower(2)
    xlashard.explain(small.compile())
    xlashard.preflight(small, topology=TOPOLOGY, estimate=True)
    lowered = lower(layers)
    compiled: list[Any] = []
    compilation, _ = measure_cost(lambda: compiled.append(lowered.compile()))
    explained, _ = measure_cost(lambda: xlashard.explain(compiled[0]))
    estimated, worker = measure_cost(
        lambda: xlashard.preflight(lowered, topology=TOPOLOGY, estimate=True)
    )
    return {"explain": (compilation, explained), "preflight, an estimate": (worker, estimated)}


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("Reports beside the compilation of their programs", rounds=2)
    report = Report("reports")
    lines: dict[str, list[Line]] = {unit: [] for unit in TITLES}
    for layers in LAYERS:
        rounds = options.rounds if layers < LAYERS[-1] else 1
        samples = [run_apart({}, measure, layers) for _ in range(rounds)]
        for row in samples[0]:
            for unit, attribute in UNITS.items():
                sides = zip(*(sample[row] for sample in samples), strict=True)
                theirs, ours = (
                    Measurement(name, 1, tuple(getattr(cost, attribute) for cost in costs), unit)
                    for name, costs in zip(("compilation", "report"), sides, strict=True)
                )
                lines[unit].append(Line(row, theirs, ours, GOAL, (layers, "layers"), LINEAR))
    for unit, title in TITLES.items():
        report.add_growth(title, sorted(lines[unit], key=lambda line: line.row))
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
