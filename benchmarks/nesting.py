"""Trace, lower and compile 64 nested calls: pjit beside jax.jit.

Each level is a layer of a small network that calls the level inside it, with the shardings of its
arguments and of its result given. Every sample makes all functions anew.

    python -m benchmarks.nesting [--rounds N] [--json PATH] [--strict]
"""

import os

from benchmarks._devices import emulated

os.environ.update(emulated(128))

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xlashard
from benchmarks._measure import Report, interleave, read_options
from xlashard import Mesh, NamedSharding, PartitionSpec

DEPTH = 64
DEVICES = (8, 128)
WIDTH = 16


def layer(inner: Callable[..., Any], x: jax.Array, w: jax.Array) -> jax.Array:
    """Normalised layer with a gate and a residual, around another level."""
    x = inner(x, w)
    scaled = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    gate, value = jnp.split(scaled @ w, 2, axis=-1)
    return x + jax.nn.sigmoid(gate) * jnp.tanh(value)


class Side:
    """One of the two sides: its functions, shardings and arguments."""

    def __init__(self, is_ours: bool, num_devices: int) -> None:
        devices = np.array(jax.devices()[:num_devices]).reshape(-1, 2)
        mesh = Mesh(devices, ("data", "model"))
        rows = NamedSharding(mesh, PartitionSpec("data", None))
        whole = NamedSharding(mesh, PartitionSpec(None, None))
        self.jit = xlashard.pjit if is_ours else jax.jit
        put = xlashard.device_put if is_ours else jax.device_put
        self.rows, self.whole = (
            (rows, whole) if is_ours else (rows.jax_sharding(), whole.jax_sharding())
        )
        self.x = put(np.ones((num_devices, WIDTH), np.float32), self.rows)
        self.w = put(np.ones((WIDTH, 2 * WIDTH), np.float32), self.whole)

    def function(self) -> Any:
        """Return the outermost of new functions."""
        call: Callable[..., Any] = lambda x, w: x  # noqa: E731
        for _ in range(DEPTH):
            call = self.jit(
                functools.partial(layer, call),
                in_shardings=(self.rows, self.whole),
                out_shardings=self.rows,
            )
        return call

    def trace(self) -> None:
        """Trace new functions."""
        self.function().trace(self.x, self.w)

    def lower(self) -> None:
        """Trace and lower new functions."""
        self.function().lower(self.x, self.w)

    def first_call(self) -> None:
        """Call new functions for the first time."""
        jax.block_until_ready(self.function()(self.x, self.w))


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("Nested calls, beside jax.jit", rounds=11)
    jax.config.update("jax_enable_compilation_cache", False)
    report = Report("nesting")
    for num_devices in DEVICES:
        sides = {"jax.jit": Side(False, num_devices), "pjit": Side(True, num_devices)}
        for title, way, rounds in (
            ("traced", Side.trace, options.rounds),
            ("traced and lowered", Side.lower, options.rounds),
            ("called for the first time", Side.first_call, max(options.rounds // 3, 1)),
        ):
            candidates = {name: functools.partial(way, side) for name, side in sides.items()}
            measured = interleave(
                candidates, rounds=rounds, inner=1, warmup=1, clock=time.process_time
            )
            table = f"{DEPTH} nested calls {title}, {num_devices} devices"
            report.add(table, measured, baseline="jax.jit", goals={"pjit": 1.2})
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
