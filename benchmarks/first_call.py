"""Trace, lower, compile and run new functions: pjit beside jax.jit, as work grows.

Each sample makes a new function, so that nothing of it is in a cache. Times of tracing and lowering
are CPU times of the calling thread, those of first calls are of the process, with the compiler's.

First calls of jax.jit are timed in three processes as well: one that never imports xlashard, one
that does, and one that has used it. A profile hook counts the calls of xlashard's own functions
during a first call, an `explain` and a `preflight`, and the files that they lie in.

    python -m benchmarks.first_call [--rounds N] [--json PATH] [--strict]
"""

import os

from benchmarks._devices import emulated

os.environ.update(emulated(8))

import itertools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xlashard
from benchmarks._measure import Report, interleave, read_options
from benchmarks._sides import JAX, OURS, Call, Lines, Side

DEVICES = 8
WIDTH = 16
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
_numbers = itertools.count(1)

type New = tuple[Any, tuple[Any, ...]]
"""A new function and its arguments."""

type Make = Callable[[Side, int], Callable[[], New]]
"""Returns what makes the functions of a side, of a size."""


def next_number() -> float:
    """Return a constant that keeps the compiled programs of new functions apart."""
    return float(next(_numbers))


def scale_leaves(side: Side, leaves: int) -> Callable[[], New]:
    """Make functions with as many results as arguments."""
    [x] = side.put_rows(DEVICES, 1)

    def make() -> New:
        number = next_number()
        return side.api.jit(lambda leaves: [leaves[0] * number, *leaves[1:]]), ([x] * leaves,)

    return make


def shard_leaves(side: Side, leaves: int) -> Callable[[], New]:
    """Make functions whose arguments and results have a tree of shardings, and are donated."""
    [x], rows = side.put_rows(DEVICES, 1), side.sharding(DEVICES, "data")
    shardings = [rows] * leaves

    def make() -> New:
        number = next_number()
        function = side.api.jit(
            lambda leaves: [leaf * number for leaf in leaves],
            in_shardings=(shardings,),
            out_shardings=shardings,
            donate_argnums=0,
        )
        return function, ([x] * leaves,)

    return make


def put_layers(side: Side, layers: int) -> tuple[Any, list[Any]]:
    """Return a batch and the weights of layers."""
    [w] = [side.api.device_put(np.ones((8, 8), np.float32), side.sharding(DEVICES))]
    x = side.api.device_put(np.ones((8, 8), np.float32), side.sharding(DEVICES, "data"))
    return x, [w] * layers


def stack_layers(is_nested: bool, is_grad: bool, side: Side, layers: int) -> Callable[[], New]:
    """Make losses of layers.

    Args:
        is_nested: Whether a layer is a jitted function by itself.
        is_grad: Whether the function is the loss's gradient.
        side: JAX or xlashard.
        layers: Number of layers.
    """
    x, weights = put_layers(side, layers)

    def make() -> New:
        number = next_number()

        def apply(x: jax.Array, w: jax.Array) -> jax.Array:
            y = jnp.tanh(x @ w) * number
            return x + y / (1 + jnp.abs(y).mean(-1, keepdims=True))

        layer = side.api.jit(apply) if is_nested else apply

        def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
            return reduce(layer, weights, x).sum()

        return side.api.jit(jax.grad(loss) if is_grad else loss), (weights, x)

    return make


def call_known(side: Side, calls: int) -> Callable[[], New]:
    """Make functions that call one known jitted function many times."""
    [x] = side.put_rows(DEVICES, 1)
    inner = side.api.jit(lambda x: x * 2)
    inner(x)

    def make() -> New:
        number = next_number()

        def outer(x: jax.Array) -> jax.Array:
            for _ in range(calls):
                x = inner(x)
            return x * number

        return side.api.jit(outer), (x,)

    return make


def nest(side: Side, depth: int) -> Callable[[], New]:
    """Make functions of which each calls the next, with given shardings."""
    rows, whole = side.sharding(DEVICES, "data", None), side.sharding(DEVICES, None, None)
    x = side.api.device_put(np.ones((DEVICES, WIDTH), np.float32), rows)
    w = side.api.device_put(np.ones((WIDTH, 2 * WIDTH), np.float32), whole)

    def layer(inner: Callable[..., Any], x: jax.Array, w: jax.Array) -> jax.Array:
        x = inner(x, w)
        scaled = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        gate, value = jnp.split(scaled @ w, 2, axis=-1)
        return x + jax.nn.sigmoid(gate) * jnp.tanh(value)

    def make() -> New:
        call: Callable[..., Any] = lambda x, w: x  # noqa: E731
        for _ in range(depth):
            call = side.api.jit(
                partial(layer, call), in_shardings=(rows, whole), out_shardings=rows
            )
        return call, (x, w)

    return make


def constrain(side: Side, constraints: int) -> Callable[[], New]:
    """Make functions of many constraints."""
    [x], rows = side.put_rows(DEVICES, 1), side.sharding(DEVICES, "data")

    def make() -> New:
        number = next_number()

        def function(x: jax.Array) -> jax.Array:
            for _ in range(constraints):
                x = side.constrain(x * number, rows)
            return x

        return side.api.jit(function), (x,)

    return make


def miss(side: Side, leaves: int) -> Call:
    """Return a call of one function in which one of many leaves has another shape each time."""
    arrays, sharding = side.put_rows(DEVICES, leaves), side.sharding(DEVICES, "data")
    function = side.api.jit(lambda leaves: leaves[0] * 2)
    shapes = itertools.count(1)

    def call() -> None:
        arrays[0] = side.api.device_put(np.zeros((8, next(shapes)), np.float32), sharding)
        jax.block_until_ready(function(arrays))

    return call


def trace(make: Callable[[], New]) -> Call:
    """Return a call that traces a new function."""

    def call() -> None:
        function, arguments = make()
        function.trace(*arguments)

    return call


def lower(make: Callable[[], New]) -> Call:
    """Return a call that traces and lowers a new function."""

    def call() -> None:
        function, arguments = make()
        function.lower(*arguments)

    return call


def first_call(make: Callable[[], New]) -> Call:
    """Return a call that calls a new function for the first time."""

    def call() -> None:
        function, arguments = make()
        jax.block_until_ready(function(*arguments))

    return call


# Work: what makes the functions, the noun of its sizes, and the sizes of each way.
WORK: dict[str, tuple[Make, str, dict[Any, tuple[int, ...]]]] = {
    "as many results as leaves": (
        scale_leaves,
        "leaves",
        {
            trace: (1, 100, 1000, 10_000),
            lower: (1, 10, 100, 1000, 10_000),
            first_call: (1, 10, 100),
        },
    ),
    "donated leaves with shardings": (shard_leaves, "leaves", {lower: (1, 10, 100, 1000)}),
    "layers": (
        partial(stack_layers, False, False),
        "layers",
        {lower: (1, 10, 100), first_call: (1, 10)},
    ),
    "jitted layers": (partial(stack_layers, True, False), "layers", {lower: (1, 10, 100)}),
    "grad of jitted layers": (partial(stack_layers, True, True), "layers", {lower: (1, 10, 30)}),
    "calls of a known inner function": (call_known, "calls", {trace: (1, 10, 100, 1000)}),
    "functions one inside the next": (
        nest,
        "functions",
        {trace: (4, 16, 64), lower: (4, 16, 64), first_call: (4, 16)},
    ),
    "with_sharding_constraint": (constrain, "constraints", {lower: (1, 10, 100)}),
}
WAYS = {trace: "traced", lower: "traced and lowered", first_call: "called for the first time"}
MISSES = (1, 100, 1000, 10_000)


def measure_growth(report: Report, rounds: int) -> None:
    """Add a growth table of each way."""
    for way, title in WAYS.items():
        calls = {
            (row, size, noun): partial(make_way, way, make, size)
            for row, (make, noun, ways) in WORK.items()
            for size in ways.get(way, ())
        }
        clock = time.thread_time
        if way is first_call:
            row, clock = "a new shape among known leaves", time.process_time
            calls |= {(row, size, "leaves"): partial(miss, leaves=size) for size in MISSES}
        lines = Lines(rounds)
        for (row, size, noun), call in calls.items():
            lines.measure(row, call, size=(size, noun), inner=1, warmup=1, clock=clock)
        report.add_growth(f"New functions {title}, {DEVICES} devices", lines)


def make_way(way: Callable[..., Call], make: Make, size: int, side: Side) -> Call:
    """Return the call of a side that traces, lowers or calls new functions of a size."""
    return way(make(side, size))


def make_call(side: Side) -> Call:
    """Return a first call of a function of two arguments with given shardings."""
    rows = side.sharding(DEVICES, "data")
    x = side.api.device_put(np.ones((8, 8), np.float32), rows)
    number = next_number()
    function = side.api.jit(
        lambda x, w: x @ w * number, in_shardings=(rows, rows), out_shardings=rows
    )
    return partial(function, x, x)


def make_step(side: Side) -> Call:
    """Return a first call of an optimizer's step with 21 donated leaves."""
    number = next_number()
    rows = side.sharding(DEVICES, "data")
    x = side.api.device_put(np.ones((8, 8), np.float32), rows)

    def step(params: Any, first: Any, second: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return (reduce(jnp.matmul, params, x) ** 2).sum() * number

        gradients = jax.grad(loss)(params)
        first = [0.9 * m + g for m, g in zip(first, gradients, strict=True)]
        second = [0.9 * v + g * g for v, g in zip(second, gradients, strict=True)]
        return (
            [p - m / (v + 1) for p, m, v in zip(params, first, second, strict=True)],
            first,
            second,
        )

    state = [[x + 0 for _ in range(7)] for _ in range(3)]
    return partial(side.api.jit(step, donate_argnums=(0, 1, 2)), *state, x)


def make_report(report: Callable[..., object]) -> Call:
    """Return a report of a new loss of jax.jit, of replicated weights and sharded rows."""
    number = next_number()

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w).sum() * number

    w = jax.ShapeDtypeStruct((128, 64), np.float32, sharding=JAX.sharding(DEVICES))
    x = jax.ShapeDtypeStruct((64, 128), np.float32, sharding=JAX.sharding(DEVICES, "data"))
    return partial(report, jax.jit(loss), w, x)


class JitProcess:
    """A process that makes a first call of jax.jit whenever it is called."""

    def __init__(self, preparation: str) -> None:
        command = [sys.executable, "-c", _JIT_PROCESS, preparation]
        pipe = subprocess.PIPE
        # Ctrl-C reaches this process alone; the other one ends with its pipe.
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, bufsize=1, process_group=0
        )

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


def measure_processes(report: Report, rounds: int) -> None:
    """Add a table of first calls of jax.jit in processes that know xlashard or not."""
    processes = {name: JitProcess(code) for name, code in PREPARATIONS.items()}
    measured = interleave(processes, rounds=rounds, inner=5, warmup=3)
    baseline, *others = processes
    goals = dict.fromkeys(others, JIT_GOAL)
    title = "a function of jax.jit called for the first time"
    report.add(title, measured, baseline=baseline, goals=goals)
    for process in processes.values():
        process.end()


def count_all_calls(report: Report) -> bool:
    """Print the counts of calls, and return whether all are within their limits."""
    preflight = partial(xlashard.preflight, topology="v5e-8", estimate=True)
    makers = (
        partial(make_call, OURS),
        partial(make_step, OURS),
        partial(make_report, xlashard.explain),
        partial(make_report, preflight),
    )
    are_few = True
    for what, make in zip(MOST, makers, strict=True):
        make()()
        files = count_calls(make())
        calls, num_files = sum(files.values()), len(files)
        most_calls, most_files = MOST[what]
        are_few &= calls <= most_calls and num_files <= most_files
        report.console.print(
            f"{what} makes {calls} calls (goal: ≤ {most_calls}) of xlashard's own "
            f"functions in {num_files} files (goal: ≤ {most_files})"
        )
    return are_few


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("First call of a function, beside jax.jit", rounds=9)
    jax.config.update("jax_enable_compilation_cache", False)
    report = Report("first_call")
    measure_growth(report, options.rounds)
    measure_processes(report, options.rounds)
    are_few = count_all_calls(report)
    status = report.finish(options)
    return status if are_few or not options.strict else 1


if __name__ == "__main__":
    raise SystemExit(main())
