"""Indices and replica ids for a shape never seen before, beside JAX.

Two questions, each on a mesh of 8,960 and of 65,536 devices: what a process needs for the four
devices of its own, and the two maps (device to index, device to replica id) of all devices. The
mesh and the spec are known beforehand, the shape is new in every call, so no cache knows it.

    python -m benchmarks.geometry [--rounds N] [--json PATH] [--strict]
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src.sharding_impls import device_replica_id_map

from benchmarks._measure import Report, TimeGoal, interleave, read_options
from xlashard.geometry import MeshGrid, Tiling, parse_spec

PER_PROCESS = 4
"""Devices that one process owns, as on a TPU host."""

MESHES = (MeshGrid(("x", "y", "z"), (16, 20, 28)), MeshGrid(("x", "y", "z"), (32, 32, 64)))

SPECS = {
    "every device its own tile": (("x", "y"), "z"),
    "copies along y": ("x", "z"),
    "everything everywhere": (),
}


class FakeClient:
    """Stand-in for a device's client, which has a process index."""

    platform = "tpu"

    def process_index(self) -> int:
        """Return the index of this process."""
        return 0


class FakeDevice:
    """Device of a fake pod: hashed by identity, as real ones are."""

    platform = "tpu"
    device_kind = "fake"

    def __init__(self, number: int, client: FakeClient) -> None:
        self.id = number
        self.process_index = number // PER_PROCESS
        self.client = client


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("Indices and replica ids of new shapes, beside JAX", rounds=15)
    report = Report("geometry")
    for grid, (what, entries) in itertools.product(MESHES, SPECS.items()):
        case = f"{grid.size:,} devices, {what}"
        own, everything = _candidates(grid, entries)
        report.add(
            f"own {PER_PROCESS} of {case}",
            interleave(own, rounds=options.rounds, warmup=1),
            baseline="jax",
            goals={"xlashard": TimeGoal(50e-6)},
        )
        report.add(
            f"all of {case}",
            interleave(everything, rounds=options.rounds, warmup=1),
            baseline="jax",
            goals={"xlashard": 0.2},
        )
        # JAX keeps every map that it made, hundreds of megabytes at these sizes.
        jax.clear_caches()
    return report.finish(options)


type Candidates = Mapping[str, Callable[[], object]]


def _candidates(grid: MeshGrid, entries: tuple[Any, ...]) -> tuple[Candidates, Candidates]:
    """Return both candidates of both questions, after a check that their results agree."""
    client = FakeClient()
    devices = [FakeDevice(i, client) for i in range(grid.size)]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(grid.axis_sizes), grid.axis_names)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))
    tiling = Tiling.from_spec(grid, parse_spec(entries), ndim=3)
    positions = list(range(PER_PROCESS))
    shapes = _shapes(tiling.counts)

    def jax_all() -> object:
        shape = next(shapes)
        return sharding.devices_indices_map(shape), device_replica_id_map(sharding, shape)

    def jax_own() -> object:
        shape = next(shapes)
        indices = sharding.addressable_devices_indices_map(shape)
        return indices, {d: device_replica_id_map(sharding, shape)[d] for d in indices}

    def our_all() -> object:
        indices = dict(zip(devices, tiling.indices(next(shapes)), strict=True))
        return indices, dict(zip(devices, tiling.replica_ids().tolist(), strict=True))

    def our_own() -> object:
        owned = devices[:PER_PROCESS]
        indices = dict(zip(owned, tiling.indices(next(shapes), positions), strict=True))
        return indices, dict(zip(owned, tiling.replica_ids(positions).tolist(), strict=True))

    _check_same(sharding, tiling, devices, next(shapes))
    return {"jax": jax_own, "xlashard": our_own}, {"jax": jax_all, "xlashard": our_all}


def _shapes(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield shapes that divide into the tiles, each different from all before it."""
    return (tuple(count * n for count in counts) for n in itertools.count(1))


def _check_same(
    sharding: jax.sharding.Sharding,
    tiling: Tiling,
    devices: list[FakeDevice],
    shape: tuple[int, ...],
) -> None:
    indices = dict(zip(devices, tiling.indices(shape), strict=True))
    replicas = dict(zip(devices, tiling.replica_ids().tolist(), strict=True))
    if indices != sharding.devices_indices_map(shape):
        raise AssertionError(f"indices differ from JAX's for {math.prod(tiling.counts)} tiles")
    if replicas != device_replica_id_map(sharding, shape):
        raise AssertionError("replica ids differ from JAX's")


if __name__ == "__main__":
    raise SystemExit(main())
