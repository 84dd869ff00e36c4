"""Moving arrays between host and devices and between shardings, beside JAX.

`python -m benchmarks.transfer [--mb N]` moves a float32 array of N MB (64 by default) on eight
emulated devices.
"""

import argparse
import os
import sys
from collections.abc import Callable

_COUNT = "--xla_force_host_platform_device_count"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()

import jax  # noqa: E402
import numpy as np  # noqa: E402

import xlashard  # noqa: E402
from benchmarks._measure import Report, interleave, read_options  # noqa: E402
from xlashard import Array, Mesh, NamedSharding, P  # noqa: E402

COLUMNS = 1024


def as_matrix(megabytes: int) -> np.ndarray:
    """A float32 matrix of that size with 1,024 columns."""
    rows = max(8, megabytes * 2**20 // 4 // COLUMNS // 8 * 8)
    return np.random.default_rng(0).random((rows, COLUMNS), np.float32)


def main() -> int:
    """Runs all comparisons; the exit status is 1 with `--strict` and a missed goal."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--mb", type=int, default=64)
    size, rest = own.parse_known_args()
    options = read_options(__doc__ or "", rounds=9, argv=rest)

    value = as_matrix(size.mb)
    mesh = Mesh(np.array(jax.devices()), ("d",))
    rows, columns, everywhere = (NamedSharding(mesh, P(*s)) for s in (("d",), (None, "d"), ()))
    report = Report("transfer")

    def compare(title: str, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
        measured = interleave(
            {"jax": theirs, "xlashard": ours}, rounds=options.rounds, inner=1, warmup=2
        )
        report.add(f"{title}, {size.mb} MB", measured, baseline="jax", goals={"xlashard": 1.0})

    for title, sharding in (("rows", rows), ("columns", columns), ("replicated", everywhere)):
        twin = sharding.twin()
        compare(
            f"host → {title}",
            lambda s=sharding: xlashard.device_put(value, s).block_until_ready(),
            lambda s=twin: jax.device_put(value, s).block_until_ready(),
        )
    # JAX's way through the host would reuse a value that was read before, so none is kept.
    source = jax.block_until_ready(jax.jit(lambda x: x * 1)(jax.device_put(value, rows.twin())))
    for title, sharding in (("rows → columns", columns), ("rows → replicated", everywhere)):
        compare(
            title,
            lambda s=sharding: xlashard.device_put(fresh(source), s).block_until_ready(),
            lambda s=sharding: jax.device_put(bare(source), s.twin()).block_until_ready(),
        )
    for title, sharding in (("rows", rows), ("columns", columns), ("replicated", everywhere)):
        handle = jax.block_until_ready(jax.device_put(value, sharding.twin()))
        compare(
            f"{title} → host",
            lambda h=handle: np.asarray(fresh(h)),
            lambda h=handle: np.asarray(bare(h)),
        )
    return report.finish(options)


def bare(handle: jax.Array) -> jax.Array:
    """Another handle over the same buffers, that remembers no value."""
    return handle.clone()


def fresh(handle: jax.Array) -> Array:
    """An Array over the same buffers, that remembers no value."""
    return Array.from_jax(bare(handle))


if __name__ == "__main__":
    sys.exit(main())
