"""Array constructors of pmap programs: one value per device, and rows back, beside JAX.

JAX's own `device_put_sharded` is gone; it is compared with what its migration guide writes instead:
a stack on the host and a `device_put` with the equal sharding. "rows there" is that `device_put`
alone, of an array that was stacked before.

    python -m benchmarks.makers [--rounds N] [--json PATH] [--strict]
"""

import os
import sys
from collections.abc import Callable

from benchmarks._devices import emulated

os.environ.update(emulated(8))

import jax
import numpy as np

import xlashard
from benchmarks._measure import Report, interleave, read_options
from xlashard import Array, Mesh, NamedSharding, P

DEVICES = jax.devices()[:8]
SHARDING = NamedSharding(Mesh(np.array(DEVICES), ("d",)), P("d")).jax_sharding()

type Tree = list[np.ndarray]


def trees(leaves: int, floats: int) -> list[Tree]:
    """Return one tree per device, of `leaves` leaves of `floats` floats."""
    rng = np.random.default_rng(0)
    return [[rng.random(floats, np.float32) for _ in range(leaves)] for _ in DEVICES]


def sharded(shards: list[Tree]) -> dict[str, Callable[[], object]]:
    """Return the ways to put a tree on each device."""
    stacked = [np.stack(leaves) for leaves in zip(*shards, strict=True)]

    def by_stack() -> object:
        made = [np.stack(leaves) for leaves in zip(*shards, strict=True)]
        return jax.block_until_ready(jax.device_put(made, SHARDING))

    return {
        "jax, stacked": by_stack,
        "jax, rows there": lambda: jax.block_until_ready(jax.device_put(stacked, SHARDING)),
        "xlashard": lambda: jax.block_until_ready(xlashard.device_put_sharded(shards, DEVICES)),
    }


def replicated(tree: Tree) -> dict[str, Callable[[], object]]:
    """Return the ways to put one tree on all devices."""

    def by_stack() -> object:
        made = [np.stack([leaf] * len(DEVICES)) for leaf in tree]
        return jax.block_until_ready(jax.device_put(made, SHARDING))

    return {
        "jax, stacked": by_stack,
        "xlashard": lambda: jax.block_until_ready(xlashard.device_put_replicated(tree, DEVICES)),
    }


def rows(floats: int) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """Return the ways to read one row of eight, and all rows one after the other."""
    handle = jax.device_put(np.ones((len(DEVICES), floats), np.float32), SHARDING)
    x = Array.from_jax(handle)
    one: dict[str, Callable[[], object]] = {
        "jax": lambda: jax.block_until_ready(handle[3]),
        "xlashard": lambda: jax.block_until_ready(x[3]),
    }
    # JAX iterates over its cached host value if it was read before: use another handle.
    each: dict[str, Callable[[], object]] = {
        "jax": lambda: jax.block_until_ready(list(handle.clone())),
        "xlashard": lambda: jax.block_until_ready(list(x)),
    }
    return one, each


def main() -> int:
    """Run all comparisons; the exit status is 1 with `--strict` and a missed goal."""
    options = read_options(__doc__ or "", rounds=9)
    report = Report("makers")

    def compare(title: str, candidates: dict[str, Callable[[], object]], inner: int | None) -> None:
        measured = interleave(candidates, rounds=options.rounds, inner=inner, warmup=2)
        report.add(title, measured, baseline=next(iter(candidates)), goals={"xlashard": 1.0})

    large, small = trees(1, 2**21), trees(500, 64)
    compare("device_put_sharded, 8 × 8 MB", sharded(large), 1)
    compare("device_put_replicated, 8 × 8 MB", replicated(large[0]), 1)
    compare("device_put_sharded, 500 leaves", sharded(small), 1)
    compare("device_put_replicated, 500 leaves", replicated(small[0]), 1)
    for floats in (64, 2**18):
        one, each = rows(floats)
        compare(f"x[3], rows of {4 * floats} bytes", one, None)
        compare(f"list(x), rows of {4 * floats} bytes", each, None)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
