"""Trace, lower, compile and run a new function: the first call of pjit beside jax.jit.

Each sample makes a new function of two arguments with given shardings, so that nothing of it is in
a cache. A profile hook counts the calls of xlashard's own functions during one such call, and the
files that they lie in; it does that for the step of an optimizer with 21 donated leaves, too.

    python -m benchmarks.first_call [--rounds N] [--json PATH] [--strict]
"""

import os

from benchmarks._devices import emulated

os.environ.update(emulated(8))

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

import xlashard
from benchmarks._measure import Report, interleave, read_options
from xlashard import Mesh, NamedSharding, PartitionSpec

GOALS = {"traced and lowered": 1.6, "called for the first time": 1.1}
# Calls of xlashard's own functions in a first call, and the files that they lie in.
MOST = {"of two arguments": (400, 30), "with 21 donated leaves": (1600, 40)}

_PACKAGE = str(Path(xlashard.__file__).parent) + os.sep
_numbers = itertools.count()


class Side:
    """One of the two sides: its shardings, arguments and functions."""

    def __init__(self, is_ours: bool, num_devices: int) -> None:
        mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
        rows: Any = NamedSharding(mesh, PartitionSpec("data"))
        self.jit: Any = xlashard.pjit if is_ours else jax.jit
        put: Any = xlashard.device_put if is_ours else jax.device_put
        self.rows = rows if is_ours else rows.jax_sharding()
        self.x, self.w = (put(np.ones((8, 8), np.float32), self.rows) for _ in range(2))

    def function(self) -> Any:
        """Return a new function; its constant keeps the compiled programs apart."""
        number = float(next(_numbers))

        def scale(x: jax.Array, w: jax.Array) -> jax.Array:
            return x @ w * number

        return self.jit(scale, in_shardings=(self.rows, self.rows), out_shardings=self.rows)

    def donating_step(self) -> Callable[[], object]:
        """Return a first call of an optimizer's step with 21 donated leaves."""
        number = float(next(_numbers))

        def step(params: Any, first: Any, second: Any, x: jax.Array) -> Any:
            def loss(params: Any) -> jax.Array:
                return (reduce(jax.numpy.matmul, params, x) ** 2).sum() * number

            gradients = jax.grad(loss)(params)
            first = [0.9 * m + g for m, g in zip(first, gradients, strict=True)]
            second = [0.9 * v + g * g for v, g in zip(second, gradients, strict=True)]
            return (
                [p - m / (v + 1) for p, m, v in zip(params, first, second, strict=True)],
                first,
                second,
            )

        state = [[self.w + 0 for _ in range(7)] for _ in range(3)]
        return partial(self.jit(step, donate_argnums=(0, 1, 2)), *state, self.x)

    def lower(self) -> None:
        """Trace and lower a new function."""
        self.function().lower(self.x, self.w)

    def first_call(self) -> None:
        """Call a new function for the first time."""
        jax.block_until_ready(self.function()(self.x, self.w))


def count_calls(call: Callable[[], object]) -> Counter[str]:
    """Return the number of calls of xlashard's own functions by file, while `call` runs."""
    files: Counter[str] = Counter()

    def hook(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(_PACKAGE):
            files[path.removeprefix(_PACKAGE)] += 1

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("First call of a function, beside jax.jit", rounds=21)
    jax.config.update("jax_enable_compilation_cache", False)
    report = Report("first_call")
    for num_devices in (1, 8):
        sides = {"jax.jit": Side(False, num_devices), "pjit": Side(True, num_devices)}
        devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
        for title, way in (
            ("traced and lowered", Side.lower),
            ("called for the first time", Side.first_call),
        ):
            candidates = {name: partial(way, side) for name, side in sides.items()}
            measured = interleave(candidates, rounds=options.rounds, inner=5, warmup=3)
            goals = {"pjit": GOALS[title]}
            report.add(f"a function {title}, {devices}", measured, baseline="jax.jit", goals=goals)
    side, too_many = Side(True, 8), False
    for what, make_call in (
        ("of two arguments", lambda: partial(side.function(), side.x, side.w)),
        ("with 21 donated leaves", side.donating_step),
    ):
        make_call()()
        files = count_calls(make_call())
        calls, num_files = sum(files.values()), len(files)
        most_calls, most_files = MOST[what]
        too_many |= calls > most_calls or num_files > most_files
        report.console.print(
            f"a first call {what} makes {calls} calls (goal: ≤ {most_calls}) of xlashard's own "
            f"functions in {num_files} files (goal: ≤ {most_files})"
        )
    status = report.finish(options)
    return 1 if too_many and options.strict else status


if __name__ == "__main__":
    raise SystemExit(main())
