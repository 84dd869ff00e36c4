"""Calls of a compiled function: pjit and the bound step beside jax.jit, as work grows.

The functions compute next to nothing on arrays of eight numbers, so nearly all of a call is
dispatch. Results are fed back as the next call's arguments, as a training loop does it, unless the
row has another way. Times are CPU times of the calling thread; those of several threads are of the
process.

    python -m benchmarks.dispatch [--rounds N] [--json PATH] [--strict]
"""

import os

from benchmarks._devices import Loop, add_one, emulated

os.environ.update(emulated(8))

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from benchmarks._floors import call_checked, repeat_wrapped
from benchmarks._measure import Report, read_options
from benchmarks._sides import JAX, OURS, Call, Lines, Side

LEAVES = (1, 10, 100, 500)
KEPT = {1: (1, 10, 100, 1000, 10_000), 8: (1, 10, 100, 1000)}
THREADS = (1, 2, 4, 8)
TASKS = (1, 10, 50)
CALLS = 100
GOALS = {1: 1.10, 8: 1.03}
BOUND_GOALS = {1: 0.90, 8: 0.97}
HOST = np.ones(8, np.float32)

# Function, the options of jit, and a call with an array [8].
FORMS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[Any, Any], Any]]] = {
    "keyword arguments": (lambda x, y: x + y, {}, lambda f, x: f(x=x, y=x)),
    "an array and a Python number": (lambda x, y: x + y, {}, lambda f, x: f(x, 2.0)),
    "an array and a NumPy array": (lambda x, y: x + y, {}, lambda f, x: f(x, HOST)),
    "a static argument": (
        lambda x, mode: x + 1,
        {"static_argnames": "mode"},
        lambda f, x: f(x, mode="train"),
    ),
    "an unused argument": (lambda x, y: x + 1, {}, lambda f, x: f(x, x)),
    "8 unused results": (lambda x: [x + i for i in range(8)], {}, lambda f, x: f(x) and None),
}


def repeat_call(side: Side, num_devices: int, leaves: int, **options: Any) -> Call:
    """Return a call that adds one to each leaf of its last results."""
    return Loop(side.api.jit(add_one, **options), side.put_rows(num_devices, leaves))


def bound_step(side: Side, num_devices: int, leaves: int) -> Call:
    """Return the same call by `jax.jit` and by a bound step."""
    if side is JAX:
        return repeat_call(side, num_devices, leaves)
    state = side.put_rows(num_devices, leaves)
    return side.api.jit(add_one).lower(state).compile().bind(state)


def keep_unused(side: Side, num_devices: int, leaves: int) -> Call:
    """Return a call of many leaves, which the program takes and ignores."""
    function = side.api.jit(lambda leaves: leaves[0] + leaves[-1], keep_unused=True)
    return functools.partial(function, side.put_rows(num_devices, leaves))


def call_form(side: Side, num_devices: int, form: str) -> Call:
    """Return a call in one of the forms."""
    function, options, call = FORMS[form]
    [x] = side.put_rows(num_devices, 1)
    return functools.partial(call, side.api.jit(function, **options), x)


def jit_again(side: Side, num_devices: int) -> Call:
    """Return a call that makes a jitted function of the same function each time."""
    [x] = side.put_rows(num_devices, 1)

    def double(x: jax.Array) -> jax.Array:
        return x * 2

    return lambda: side.api.jit(double)(x)


def jit_alone(side: Side, num_devices: int) -> Call:
    """Return a call that makes a jitted function and no call."""
    return functools.partial(side.api.jit, add_one)


def jit_lambda(side: Side, num_devices: int) -> Call:
    """Return a call that makes a jitted function of a new function each time."""
    [x] = side.put_rows(num_devices, 1)
    return lambda: side.api.jit(lambda x: x * 2 + 1)(x)


def transform(how: Callable[[Any], Any], side: Side, num_devices: int) -> Call:
    """Return a call of a transformed jitted function."""
    [x] = side.put_rows(num_devices, 1)
    return functools.partial(how(side.api.jit), x)


def sum_squares(x: jax.Array) -> jax.Array:
    """Return the sum of squares."""
    return (x * x).sum()


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad of a jitted function": lambda jit: jax.grad(jit(sum_squares)),
    "vmap of a jitted function": lambda jit: jax.vmap(jit(lambda x: x * 2)),
    "jit of grad of a jitted function": lambda jit: jit(jax.grad(jit(sum_squares))),
}


def run_threads(side: Side, num_devices: int, threads: int) -> Call:
    """Return 100 calls in each of several threads."""
    [x] = side.put_rows(num_devices, 1)
    function = side.api.jit(lambda x: x + 1)
    function(x)

    def work() -> None:
        for _ in range(CALLS):
            jax.block_until_ready(function(x))

    def run() -> None:
        running = [threading.Thread(target=work) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    return run


def run_tasks(side: Side, num_devices: int, tasks: int) -> Call:
    """Return 20 calls in each of several tasks of asyncio."""
    [x] = side.put_rows(num_devices, 1)
    function = side.api.jit(lambda x: x + 1)

    async def work() -> None:
        for _ in range(20):
            function(x)
            await asyncio.sleep(0)

    async def run() -> None:
        await asyncio.gather(*(work() for _ in range(tasks)))

    return lambda: asyncio.run(run())


def train(side: Side, num_devices: int, leaves: int) -> Call:
    """Return a step of AdamW whose parameters and moments have about as many leaves."""
    optimizer = optax.adamw(1e-3)
    whole = side.sharding(num_devices)
    host = {f"layer{number}": np.ones(8, np.float32) for number in range(leaves // 3)}
    params = side.api.device_put(host, whole)
    state = (params, side.api.device_put(optimizer.init(host), whole))
    [batch] = side.put_rows(num_devices, 1)

    def step(state: Any, batch: jax.Array) -> Any:
        params, moments = state
        gradients = jax.tree.map(lambda leaf: leaf * 1e-3, params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), batch.sum()

    function = side.api.jit(step, donate_argnums=0)

    def call() -> None:
        nonlocal state
        state, _ = function(state, batch)

    return call


def add_first(leaves: list[Any]) -> Any:
    """Add one to the first leaf."""
    return leaves[0] + 1


def call_across(jit_side: Side, num_devices: int, leaves: int, side: Side) -> Call:
    """Return a call of `jax.jit` on JAX's arrays, or of one library on arrays of the other.

    Args:
        jit_side: Library of the compiled function in the call across the two.
        num_devices: Number of devices.
        leaves: Number of arrays.
        side: JAX for the call of `jax.jit`, xlashard for the call across.
    """
    other = OURS if jit_side is JAX else JAX
    jit, owner = (jit_side, other) if side is OURS else (JAX, JAX)
    function = jit.api.jit(add_first, keep_unused=True)
    return functools.partial(function, owner.put_rows(num_devices, leaves))


def measure_repeat_calls(lines: Lines, num_devices: int) -> None:
    """Measure calls of known functions."""

    def add(row: str, make: Callable[..., Call], *args: Any, **options: Any) -> None:
        lines.measure(row, lambda side: make(side, num_devices, *args), **options)

    for leaves in LEAVES:
        size, floor = (leaves, "leaves"), repeat_wrapped(num_devices, leaves)
        add("repeat call, state fed back", repeat_call, leaves, size=size, floor=floor)
    goal = BOUND_GOALS[num_devices]
    for leaves in LEAVES:
        add("the same by a bound step", bound_step, leaves, size=(leaves, "leaves"), goal=goal)
    donated = functools.partial(repeat_call, donate_argnums=0)
    for leaves in (1, 10, 100):
        size, floor = (leaves, "leaves"), repeat_wrapped(num_devices, leaves, donate_argnums=0)
        add("repeat call, donated", donated, leaves, size=size, floor=floor)
    for leaves in KEPT[num_devices]:
        if leaves > 1000 and lines.rounds == 1:
            continue  # One round tries the benchmark: compiling this takes a third of its time.
        rounds = 5 if leaves > 1000 else None
        size = (leaves, "leaves")
        add("unused leaves, kept", keep_unused, leaves, size=size, rounds=rounds)
    for form in FORMS:
        add(form, call_form, form)
    add("optax, donated", train, 500, size=(500, "leaves"))


def measure_ways(lines: Lines, num_devices: int) -> None:
    """Measure new functions, transformed ones, threads, tasks, and arrays of the other library."""

    def add(row: str, make: Callable[..., Call], *args: Any, **options: Any) -> None:
        lines.measure(row, lambda side: make(side, num_devices, *args), **options)

    add("jit(f)(x) of one f in each call", jit_again)
    add("jit(f) alone", jit_alone)
    add("jit(f)(x) of a new f in each call", jit_lambda, rounds=11, inner=1)
    for name, how in TRANSFORMS.items():
        lines.measure(name, functools.partial(transform, how, num_devices=num_devices))
    process: dict[str, Any] = {"clock": time.process_time, "inner": 1, "rounds": 9}
    for threads in THREADS:
        size = (threads, "threads")
        add(f"{CALLS} calls in each thread", run_threads, threads, size=size, **process)
    for tasks in TASKS:
        size = (tasks, "tasks")
        add("20 calls in each task of asyncio", run_tasks, tasks, size=size, rounds=9)
    for title, side in (
        ("jax.jit of xlashard's arrays", JAX),
        ("xlashard.jit of JAX's arrays", OURS),
    ):
        for leaves in (1, 100, 1000):
            make = functools.partial(call_across, side, num_devices, leaves)
            is_checked = side is OURS and num_devices > 1
            floor = call_checked(add_first, num_devices, leaves) if is_checked else None
            lines.measure(title, make, size=(leaves, "leaves"), floor=floor)


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("Calls of compiled functions, beside jax.jit", rounds=21)
    jax.config.update("jax_enable_compilation_cache", False)
    report = Report("dispatch")
    for num_devices, goal in GOALS.items():
        if num_devices > len(jax.devices()):
            continue  # on one GPU
        devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
        for title, measure, limit in (
            ("Repeat calls", measure_repeat_calls, goal),
            ("Other calls", measure_ways, 1.10),
        ):
            lines = Lines(options.rounds, limit)
            measure(lines, num_devices)
            report.add_growth(f"{title}, {devices}", lines)
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
