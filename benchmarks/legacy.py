"""`GlobalDeviceArray`s made with the loops of 2022 and with this package.

Then, the cost of calls of the era's `pjit` with them: see `_era_calls`.

The pods of these meshes are fake: their devices are made up, and only the indices and replica ids
are computed: for all devices, and for the eight of this process, which is all that
`from_callback` needs here, while the loops go through the whole pod. "Seen before" is a call with
a shape, mesh and axes of an earlier call, against loops with a cache, as the era had one.

On emulated CPU devices, the cost of `from_callback` is copying 2,048 × 2,048 floats, once for each
device that holds them. Here the pieces are always copied, because the callback may reuse its
memory; the loops alias the callback's memory where JAX can, unless the callback returns a copy.

    python -m benchmarks.legacy [--rounds N] [--json PATH] [--strict]
"""

import functools
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks._devices import emulated

os.environ.update(emulated(8))

import jax
import numpy as np

from benchmarks._era_calls import calls
from benchmarks._gda_loops import (
    Index,
    from_callback_in_loops,
    indices_replica_ids_in_loops,
)
from benchmarks._measure import Options, Report, interleave, read_options
from xlashard import Mesh, NamedSharding, P
from xlashard.legacy import GlobalDeviceArray
from xlashard.legacy.arrays import shards
from xlashard.legacy.arrays.shards import target_of
from xlashard.legacy.shardings.partition_spec import PartitionSpec

SHAPE = (2048, 2048)
OWN = 8
PODS = (8, 64, 512, 2048)
SPECS = {"every device its own tile": P("x", "y"), "copies along y": P("x")}


@dataclass(frozen=True, eq=False)
class FakeDevice:
    """Device of a fake pod: hashed by identity, as real ones are."""

    id: int
    process_index: int
    platform: str = "tpu"


def fake_mesh(count: int) -> Mesh:
    """Return a mesh of `count` fake devices, four along `y`."""
    devices = np.array([FakeDevice(n, process_index=n // OWN) for n in range(count)], dtype=object)
    return Mesh(devices.reshape(count // 4, 4), ("x", "y"))


def index_maths(count: int, spec: P) -> dict[str, Callable[[], object]]:
    """Return the ways to compute index and replica id of every device of a pod."""
    mesh, axes = fake_mesh(count), tuple(spec)
    uncached = shards.get_shard_indices_replica_ids_uncached
    wanted = indices_replica_ids_in_loops(SHAPE, mesh, axes)
    assert shards.get_shard_indices_replica_ids(SHAPE, mesh, axes) == wanted
    # A shape that is new in every call.
    shapes = ((2048 * n, 2048) for n in itertools.count(1))
    return {
        "loops": lambda: indices_replica_ids_in_loops(next(shapes), mesh, axes),
        "xlashard": lambda: uncached(next(shapes), mesh, axes),
        f"xlashard, own {OWN}": lambda: own_indices(next(shapes), mesh, spec),
    }


def seen_before(count: int, spec: P) -> dict[str, Callable[[], object]]:
    """Return the ways to look up indices that were computed before."""
    mesh, axes = fake_mesh(count), PartitionSpec(*spec)
    loops = functools.lru_cache(maxsize=4096)(indices_replica_ids_in_loops)
    return {
        "loops": lambda: loops(SHAPE, mesh, axes),
        "xlashard": lambda: shards.get_shard_indices_replica_ids(SHAPE, mesh, axes),
        "xlashard, indices alone": lambda: shards.get_shard_indices(SHAPE, mesh, axes),
        "xlashard, shape": lambda: shards.get_shard_shape(SHAPE, mesh, axes),
    }


def own_indices(shape: tuple[int, ...], mesh: Mesh, spec: P) -> object:
    """Return the indices that `from_callback` computes before it calls back."""
    return target_of((shape, mesh, spec)).indices


def from_callback(spec: P) -> dict[str, Callable[[], object]]:
    """Return the ways to make an array on the eight local devices."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    sharding = NamedSharding(mesh, spec).jax_sharding()
    whole = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)

    def in_loops(data_callback: Callable[[Index], np.ndarray]) -> object:
        return from_callback_in_loops(SHAPE, sharding, data_callback).block_until_ready()

    def here() -> object:
        made = GlobalDeviceArray.from_callback(SHAPE, mesh, spec, whole.__getitem__)
        return made.block_until_ready()

    return {
        "loops": lambda: in_loops(lambda index: whole[index].copy()),
        "loops that share memory": lambda: in_loops(whole.__getitem__),
        "xlashard": here,
    }


def construction(report: Report, options: Options) -> None:
    """Compare constructors of `GlobalDeviceArray`s of 2,048 × 2,048."""
    goals = {"xlashard": 0.2}
    for count in PODS:
        for what, spec in SPECS.items():
            report.add(
                f"indices and replica ids, {count:,} devices, {what}",
                interleave(index_maths(count, spec), rounds=options.rounds),
                baseline="loops",
                goals=goals | ({f"xlashard, own {OWN}": 0.2} if count > 64 else {}),
            )
        report.add(
            f"seen before, {count:,} devices",
            interleave(seen_before(count, P("x", "y")), rounds=options.rounds),
            baseline="loops",
        )
    for what, spec in SPECS.items():
        report.add(
            f"from_callback on 8 devices, {what}",
            interleave(from_callback(spec), rounds=options.rounds, inner=1),
            baseline="loops",
        )


def main() -> int:
    """Run all comparisons; the exit status is 1 with `--strict` and a missed goal."""
    options = read_options(__doc__ or "", rounds=15)
    report = Report("legacy")
    construction(report, options)
    calls(report, options)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
