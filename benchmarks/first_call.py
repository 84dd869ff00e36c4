"""Trace, lower, compile and run a new function: the first call of pjit beside jax.jit.

Each sample makes a new function of two arguments with given shardings, so that nothing of it is in
a cache. First calls of jax.jit are timed in three processes as well: one that never imports
xlashard, one that does, and one that has used it. A profile hook counts the calls of xlashard's own
functions during a first call, an `explain` and a `preflight`, and the files that they lie in.

    python -m benchmarks.first_call [--rounds N] [--json PATH] [--strict]
"""

import os

from benchmarks._devices import emulated

os.environ.update(emulated(8))

import itertools
import subprocess
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
# Calls of xlashard's own functions, and the files that they lie in.
MOST = {
    "a first call of two arguments": (400, 30),
    "a first call with 21 donated leaves": (1450, 40),
    "explain of jax.jit with two arguments": (2260, 60),
    "preflight of jax.jit with two arguments, with an estimate": (4670, 100),
}

# What a process does before its first calls of jax.jit.
PREPARATIONS = {
    "without xlashard": "",
    "after the import": "import xlashard",
    "after a report": "import xlashard; xlashard.explain(new_function(), x, w)",
}
JIT_GOAL = 1.05
_JIT_PROCESS = """
import itertools, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.config.update("jax_enable_compilation_cache", False)
rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
x, w = (jax.device_put(np.ones((8, 8), np.float32), rows) for _ in range(2))
numbers = itertools.count()

def new_function():
    number = float(next(numbers))
    return jax.jit(lambda x, w: x @ w * number, in_shardings=(rows, rows), out_shardings=rows)

exec(sys.argv[1])
for _ in sys.stdin:
    jax.block_until_ready(new_function()(x, w))
    print(flush=True)
"""

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

    def report(self, report: Callable[..., object]) -> Callable[[], object]:
        """Return a report of a new loss of replicated weights and sharded rows."""
        number = float(next(_numbers))

        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return jax.numpy.tanh(x @ w).sum() * number

        whole = jax.sharding.NamedSharding(self.rows.mesh, PartitionSpec())
        w = jax.ShapeDtypeStruct((128, 64), np.float32, sharding=whole)
        x = jax.ShapeDtypeStruct((64, 128), np.float32, sharding=self.rows)
        return partial(report, self.jit(loss), w, x)

    def lower(self) -> None:
        """Trace and lower a new function."""
        self.function().lower(self.x, self.w)

    def first_call(self) -> None:
        """Call a new function for the first time."""
        jax.block_until_ready(self.function()(self.x, self.w))


class JitProcess:
    """A process that makes a first call of jax.jit whenever it is called."""

    def __init__(self, preparation: str) -> None:
        command = [sys.executable, "-c", _JIT_PROCESS, preparation]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def __call__(self) -> None:
        """Wait for one first call."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write("\n")
        if not stdout.readline():
            raise RuntimeError("the process ended: its traceback is above")

    def end(self) -> None:
        """End the process."""
        self.process.communicate()


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
    processes = {name: JitProcess(code) for name, code in PREPARATIONS.items()}
    measured = interleave(processes, rounds=options.rounds, inner=5, warmup=3)
    baseline, *others = processes
    goals = dict.fromkeys(others, JIT_GOAL)
    report.add(
        "a function of jax.jit called for the first time", measured, baseline=baseline, goals=goals
    )
    for process in processes.values():
        process.end()
    ours, theirs, too_many = Side(True, 8), Side(False, 8), False
    preflight = partial(xlashard.preflight, topology="v5e-8", estimate=True)
    makers = (
        lambda: partial(ours.function(), ours.x, ours.w),
        ours.donating_step,
        lambda: theirs.report(xlashard.explain),
        lambda: theirs.report(preflight),
    )
    for what, make_call in zip(MOST, makers, strict=True):
        make_call()()
        files = count_calls(make_call())
        calls, num_files = sum(files.values()), len(files)
        most_calls, most_files = MOST[what]
        too_many |= calls > most_calls or num_files > most_files
        report.console.print(
            f"{what} makes {calls} calls (goal: ≤ {most_calls}) of xlashard's own "
            f"functions in {num_files} files (goal: ≤ {most_files})"
        )
    status = report.finish(options)
    return 1 if too_many and options.strict else status


if __name__ == "__main__":
    raise SystemExit(main())
