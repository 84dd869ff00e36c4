"""Cost of the second call of an operation on an Array, beside the same operation on a jax.Array.

The arrays are small, so nearly all of an operation is Python, dispatch and (on eight emulated
devices) waking the devices. Each call waits for its result. On one CPU device all of it happens
in the calling thread, whose CPU time is counted there: a few microseconds are not measurable in
wall time on a shared machine.

    python -m benchmarks.eager [--rounds N] [--json PATH] [--strict]
"""

import os
import time

from benchmarks._devices import emulated

os.environ.update(emulated(8))

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xlashard
import xlashard.numpy as xnp
from benchmarks._measure import Report, interleave, read_options
from xlashard import Array, Mesh, NamedSharding, PartitionSpec

GOAL = 1.1
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
}


def candidates(operation: Callable[[Any, Any], Any], x: Array) -> dict[str, Callable[[], object]]:
    """Return the same operation on the same buffers, by JAX and by xlashard."""
    theirs = x.to_jax()

    def jax_numpy() -> None:
        operation(jnp, theirs).block_until_ready()

    def ours() -> None:
        operation(xnp, x)._handle.block_until_ready()

    return {"jax.numpy": jax_numpy, "xlashard": ours}


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("Operations on small arrays, beside jax.numpy", rounds=41)
    report = Report("eager")
    for num_devices in (1, 8):
        mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
        host = np.arange(128, dtype=np.float32).reshape(8, 16)
        x = xlashard.device_put(host, NamedSharding(mesh, PartitionSpec("data")))
        clock = time.thread_time if num_devices == 1 else time.perf_counter
        for name, operation in OPERATIONS.items():
            measured = interleave(candidates(operation, x), rounds=options.rounds, clock=clock)
            devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
            report.add(
                f"{name}, {devices}", measured, baseline="jax.numpy", goals={"xlashard": GOAL}
            )
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
