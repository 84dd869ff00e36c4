"""Call overhead of a compiled function: pjit and the bound step beside jax.jit.

The function adds one to each of its leaves, arrays of eight numbers, so nearly all of a call is
dispatch. Results are fed back as the next call's arguments, as a training loop does it.

    python -m benchmarks.dispatch [--rounds N] [--json PATH] [--strict]
"""

import os

from benchmarks._devices import Loop, add_one, emulated

os.environ.update(emulated(8))

from collections.abc import Callable

import jax
import numpy as np

import xlashard
from benchmarks._measure import Report, interleave, read_options
from xlashard import Mesh, NamedSharding, PartitionSpec

LEAVES = (1, 10, 100, 500)
GOALS = {
    1: {"pjit": 1.10, "bound step": 0.90},
    8: {"pjit": 1.00, "bound step": 0.97},
}


def candidates(num_devices: int, num_leaves: int) -> dict[str, Callable[[], object]]:
    """Return three ways to run the function, on the same devices and shardings."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    host = [np.full((8,), i, np.float32) for i in range(num_leaves)]
    theirs = jax.device_put(host, sharding.jax_sharding())
    ours = xlashard.device_put(host, sharding)
    function = xlashard.pjit(add_one)
    return {
        "jax.jit": Loop(jax.jit(add_one), theirs),
        "pjit": Loop(function, ours),
        "bound step": function.lower(ours).compile().bind(ours),
    }


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("Dispatch of a compiled function, beside jax.jit", rounds=41)
    report = Report("dispatch")
    # On one GPU, the rows of several devices are left out.
    counts = [count for count in GOALS if count <= len(jax.devices())]
    for num_devices, goals in ((count, GOALS[count]) for count in counts):
        for num_leaves in LEAVES:
            measured = interleave(candidates(num_devices, num_leaves), rounds=options.rounds)
            devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
            leaves = "1 leaf" if num_leaves == 1 else f"{num_leaves} leaves"
            report.add(f"{devices}, {leaves}", measured, baseline="jax.jit", goals=goals)
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
