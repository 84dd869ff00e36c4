"""Assembly of arrays, their shards, and questions to shardings, on 8, 64 and 512 devices.

Each number of devices has a process of its own. Times are CPU times of the calling thread.

    python -m benchmarks.assembly [--rounds N] [--json PATH] [--strict]
"""

import copy
import os
from collections.abc import Callable
from functools import partial

from benchmarks._devices import emulated, run_apart

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from benchmarks._measure import Line, Report, read_options
from benchmarks._sides import Call, Lines, Side

DEVICES = (8, 64, 512)
COLUMNS = 16
GOAL = 1.0

type Make = Callable[[Side, int], Call]


def make_host(devices: int) -> np.ndarray:
    """Return one row for each device."""
    return np.ones((devices, COLUMNS), np.float32)


def read_shards(side: Side, devices: int) -> Call:
    """Return a call that reads the list of an array's shards again."""
    x = side.api.device_put(make_host(devices), side.sharding(devices, "data"))
    return lambda: x.addressable_shards


def read_indices(side: Side, devices: int) -> Call:
    """Return a call that reads data, index and replica of each shard."""
    x = side.api.device_put(make_host(devices), side.sharding(devices, "data"))
    return lambda: [(shard.data, shard.index, shard.replica_id) for shard in x.addressable_shards]


def assemble(side: Side, devices: int) -> Call:
    """Return a call that makes an array of arrays of single devices."""
    host, rows = make_host(devices), side.sharding(devices, "data")
    pieces = [
        side.api.device_put(host[number : number + 1], device)
        for number, device in enumerate(jax.devices())
    ]
    return partial(side.api.make_array_from_single_device_arrays, host.shape, rows, pieces)


def assemble_shards(side: Side, devices: int) -> Call:
    """Return a call that makes an array of the shards of another."""
    host, rows = make_host(devices), side.sharding(devices, "data")
    x = side.api.device_put(host, rows)
    make = side.api.make_array_from_single_device_arrays
    return lambda: make(host.shape, rows, [shard.data for shard in x.addressable_shards])


def call_back(spec: tuple[str, ...], side: Side, devices: int) -> Call:
    """Return a call that makes an array from a callback."""
    host = make_host(devices)
    make, sharding = side.api.make_array_from_callback, side.sharding(devices, *spec)
    return lambda: make(host.shape, sharding, lambda index: host[index])


def put(spec: tuple[str, ...], side: Side, devices: int) -> Call:
    """Return a call that moves an array from the host to the devices."""
    return partial(side.api.device_put, make_host(devices), side.sharding(devices, *spec))


def put_local(side: Side, devices: int) -> Call:
    """Return a call that makes an array of the data of this process."""
    rows = side.sharding(devices, "data")
    return partial(side.api.make_array_from_process_local_data, rows, make_host(devices))


def copied(how: Callable[[jax.Array], object], side: Side, devices: int) -> Call:
    """Return a call that copies or iterates over a sharded array."""
    return partial(how, side.api.device_put(make_host(devices), side.sharding(devices, "data")))


ARRAYS: dict[str, Make] = {
    "x.addressable_shards, read again": read_shards,
    "data, index and replica of each shard": read_indices,
    "make_array_from_single_device_arrays": assemble,
    "shards back into an array": assemble_shards,
    "make_array_from_callback, rows": partial(call_back, ("data",)),
    "make_array_from_callback, replicated": partial(call_back, ()),
    "make_array_from_process_local_data": put_local,
    "device_put, rows": partial(put, ("data",)),
    "device_put, replicated": partial(put, ()),
    "copy.copy(x)": partial(copied, copy.copy),
    "copy.deepcopy(x)": partial(copied, copy.deepcopy),
    "x.copy()": partial(copied, lambda x: x.copy()),
}
COPIES_GOAL = 1.10
# A class of Python whose initializer only calls that of JAX's class takes 1.53 times as long as it.
MADE_GOAL = 1.55
# Both sides read a value that they keep.
KEPT_GOAL = 1.05
GOALS = {
    "NamedSharding(mesh, spec)": MADE_GOAL,
    "hash of a new sharding": MADE_GOAL,
    "is_fully_replicated": KEPT_GOAL,
    "devices_indices_map, seen before": KEPT_GOAL,
    **{row: COPIES_GOAL for row in ARRAYS if "copy" in row},
}


def make_sharding(side: Side, devices: int) -> Call:
    """Return a call that constructs a sharding."""
    mesh, spec = side.sharding(devices).mesh, jax.sharding.PartitionSpec("data", None)
    return lambda: side.named_sharding(mesh, spec)


def hash_sharding(side: Side, devices: int) -> Call:
    """Return a call that hashes a new sharding."""
    make = make_sharding(side, devices)
    return lambda: hash(make())


def compare_layouts(side: Side, devices: int) -> Call:
    """Return a call that compares the layouts of two shardings."""
    one, other = side.sharding(devices, "data"), side.sharding(devices, "data", None)
    return lambda: one.is_equivalent_to(other, 2)


def ask(question: Callable[..., object], side: Side, devices: int) -> Call:
    """Return a call that reads a property of a sharding."""
    return partial(question, side.sharding(devices, "data"), (4 * devices, COLUMNS))


SHARDINGS: dict[str, Make] = {
    "NamedSharding(mesh, spec)": make_sharding,
    "hash of a new sharding": hash_sharding,
    "is_equivalent_to": compare_layouts,
    "shard_shape": partial(ask, lambda sharding, shape: sharding.shard_shape(shape)),
    "is_fully_replicated": partial(ask, lambda sharding, shape: sharding.is_fully_replicated),
    "device_set": partial(ask, lambda sharding, shape: sharding.device_set),
    "addressable_devices": partial(ask, lambda sharding, shape: sharding.addressable_devices),
    "devices_indices_map, seen before": partial(
        ask, lambda sharding, shape: sharding.devices_indices_map(shape)
    ),
}
TABLES = {"Arrays": ARRAYS, "Shardings": SHARDINGS}


def measure(devices: int, rounds: int) -> dict[str, list[Line]]:
    """Return the lines of both tables for a number of devices."""
    tables = {}
    for title, rows in TABLES.items():
        tables[title] = lines = Lines(rounds, GOAL)
        for row, make in rows.items():
            size, goal = (devices, "devices"), GOALS.get(row)
            lines.measure(row, lambda side, make=make: make(side, devices), size=size, goal=goal)
    return {title: list(lines) for title, lines in tables.items()}


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("Assembly of arrays, and shardings, beside JAX", rounds=11)
    report = Report("assembly")
    # One round tries the benchmark, for which two sizes do.
    sizes = DEVICES[:2] if options.rounds == 1 else DEVICES
    measured = [run_apart(emulated(n), measure, n, options.rounds) for n in sizes]
    for title in TABLES:
        rows = zip(*(tables[title] for tables in measured), strict=True)
        report.add_growth(f"{title} of 8 to {sizes[-1]} devices", [x for row in rows for x in row])
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
