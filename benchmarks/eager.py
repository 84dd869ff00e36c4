"""Cost of the second call of an operation on an Array, beside the same operation on a jax.Array.

The arrays are small, so nearly all of an operation is Python, dispatch and (on eight emulated
devices) waking the devices. Each call waits for its result. Times are CPU times of the calling
thread: a few microseconds are not measurable in wall time on a shared machine.

    python -m benchmarks.eager [--rounds N] [--json PATH] [--strict]
"""

import copy
import functools
import os

from benchmarks._devices import emulated

os.environ.update(emulated(8))

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xlashard
import xlashard.numpy as xnp
from benchmarks._floors import read_wrapped
from benchmarks._measure import Report, read_options
from benchmarks._sides import OURS, Call, Lines, Side
from xlashard import Array, Mesh, NamedSharding, PartitionSpec

ROWS = (8, 64, 512)
INDEX = np.array([5, 2, 7])

# Each operation takes the module and an array [8, 16] of it.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "x + x": lambda m, x: x + x,
    "x * 3": lambda m, x: x * 3,
    "x > 1": lambda m, x: x > 1,
    "-x": lambda m, x: -x,
    "x @ x.T": lambda m, x: x @ x.T,
    "x.T": lambda m, x: x.T,
    "x.sum()": lambda m, x: x.sum(),
    "x.mean(axis=0)": lambda m, x: x.mean(axis=0),
    "x.reshape(16, 8)": lambda m, x: x.reshape(16, 8),
    "x.transpose()": lambda m, x: x.transpose(),
    "x.astype(int32)": lambda m, x: x.astype(jnp.int32),
    "x[3]": lambda m, x: x[3],
    "x[2:5]": lambda m, x: x[2:5],
    "x[index]": lambda m, x: x[INDEX],
    "x.at[2].set(1)": lambda m, x: x.at[2].set(1.0),
    "x.at[index].add(1)": lambda m, x: x.at[INDEX].add(1.0),
    "exp(x)": lambda m, x: m.exp(x),
    "add(x, x)": lambda m, x: m.add(x, x),
    "where(x > 1, x, 0)": lambda m, x: m.where(x > 1, x, 0),
    "concatenate([x, x])": lambda m, x: m.concatenate([x, x]),
    "stack([x, x])": lambda m, x: m.stack([x, x]),
    "matmul(x, x.T)": lambda m, x: m.matmul(x, x.T),
    "sum(x, axis=1)": lambda m, x: m.sum(x, axis=1),
    "einsum": lambda m, x: m.einsum("ij,kj->ik", x, x),
    "linalg.norm(x)": lambda m, x: m.linalg.norm(x),
    "fft.fft(x)": lambda m, x: m.fft.fft(x),
    "zeros_like(x)": lambda m, x: m.zeros_like(x),
    "each row": lambda m, x: list(x)[-1],
    "copy.copy(x)": lambda m, x: copy.copy(x),
    "copy.deepcopy(x)": lambda m, x: copy.deepcopy(x),
    "x.copy()": lambda m, x: x.copy(),
}

# Functions of JAX, which return its arrays from arrays of both.
FUNCTIONS: dict[str, Callable[[Any], jax.Array]] = {
    "jax.numpy.asarray(x)": lambda x: jnp.asarray(x).block_until_ready(),
    "jax.numpy.array(x)": lambda x: jnp.array(x).block_until_ready(),
    "jax.numpy.sum(x)": lambda x: jnp.sum(x).block_until_ready(),
}

# What the host reads of a scalar.
SCALARS: dict[str, Callable[[Any], Any]] = {
    "float(x)": float,
    "int(x)": int,
    "bool(x)": bool,
    "x.item()": lambda x: x.item(),
    "np.asarray(x)": np.asarray,
    "f'{x:.3f}'": lambda x: f"{x:.3f}",
    "float(x + 1)": lambda x: float(x + 1),
}

# Operations on many arrays, and their numbers.
COUNTS = {1: (10, 100, 1000), 8: (10, 100)}
MANY: dict[str, Callable[[list[Any]], Any]] = {
    "jax.numpy.stack": lambda arrays: jnp.stack(arrays).block_until_ready(),
    "jax.numpy.concatenate": lambda arrays: jnp.concatenate(arrays).block_until_ready(),
    "jax.tree.map": lambda arrays: jax.tree.map(lambda leaf: leaf, arrays),
    "jax.tree.map of shapes": lambda arrays: jax.tree.map(lambda leaf: leaf.shape, arrays),
    "jax.block_until_ready": jax.block_until_ready,
}


def copy_to_jax(x: Array) -> jax.Array:
    """Return an array of JAX with the same value and sharding.

    It has buffers of its own: an Array whose buffers JAX's code has is checked at each use.
    """
    return x.copy().to_jax()


def operate(operation: Callable[[Any, Any], Any], x: Array, side: Side) -> Call:
    """Return an operation on an array of JAX or of xlashard that waits for the result."""
    if side is OURS:
        return lambda: operation(xnp, x)._handle.block_until_ready()
    theirs = copy_to_jax(x)
    return lambda: operation(jnp, theirs).block_until_ready()


def read(how: Callable[[Any], Any], x: Array, side: Side) -> Call:
    """Return a call of one array of JAX or of xlashard."""
    return functools.partial(how, x if side is OURS else copy_to_jax(x))


def read_many(how: Callable[[list[Any]], Any], x: Array, count: int, side: Side) -> Call:
    """Return a call of a list of different arrays."""
    arrays = [x + number for number in range(count)]
    return functools.partial(how, arrays if side is OURS else list(map(copy_to_jax, arrays)))


def iterate(rows: int, whole: NamedSharding, side: Side) -> Call:
    """Return a call that lists the rows of an array."""
    x = xlashard.device_put(np.ones((rows, 16), np.float32), whole)
    handle: Any = x.to_jax()
    # JAX iterates over its cached host value if it was read before: use another handle.
    return (lambda: list(x)) if side is OURS else (lambda: list(handle.clone()))


def measure(lines: Lines, num_devices: int) -> None:
    """Measure all operations on a number of devices."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    host = np.arange(128, dtype=np.float32).reshape(8, 16)
    rows, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("data",), ()))
    x, scalar = xlashard.device_put(host, rows), xlashard.device_put(np.float32(3), whole)
    for name, operation in OPERATIONS.items():
        lines.measure(name, functools.partial(operate, operation, x))
    for name, function in FUNCTIONS.items():
        lines.measure(name, functools.partial(read, function, x))
    for name, how in SCALARS.items():
        floor = read_wrapped(how, copy_to_jax(scalar)) if how is np.asarray else None
        lines.measure(f"{name}, a scalar", functools.partial(read, how, scalar), floor=floor)
    exposed = x.copy()
    exposed.to_jax()
    lines.measure("x + x after to_jax()", functools.partial(operate, OPERATIONS["x + x"], exposed))
    for name, how in MANY.items():
        for count in COUNTS[num_devices]:
            make, floor = functools.partial(read_many, how, x, count), None
            if name in ("jax.tree.map of shapes", "jax.block_until_ready"):
                floor = read_wrapped(how, [copy_to_jax(x + number) for number in range(count)])
            lines.measure(f"{name} of arrays", make, size=(count, "arrays"), floor=floor)
    for count in ROWS:
        make = functools.partial(iterate, count, whole)
        lines.measure("list(x)", make, size=(count, "rows"))


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("Operations on small arrays, beside jax.numpy", rounds=15)
    report = Report("eager")
    for num_devices in (1, 8):
        lines = Lines(options.rounds)
        measure(lines, num_devices)
        devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
        report.add_growth(f"Operations on {devices}", lines)
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
