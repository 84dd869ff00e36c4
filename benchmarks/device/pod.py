"""Join the hosts of a slice, and print what they agree on.

    python -m benchmarks.device.pod [--count]

Each host starts it. `--count` prints the numbers of hosts and devices without joining.
"""

import json
import sys
import time
from typing import Any

import jax
import numpy as np

from xlashard import multihost


def join() -> dict[str, Any]:
    """Return the times of a barrier and of a sum over all devices, after comparing the hosts."""
    began = time.perf_counter()
    multihost.initialize()
    joined = time.perf_counter() - began
    devices = jax.devices()
    sharding = jax.NamedSharding(jax.sharding.Mesh(np.array(devices), ("all",)), jax.P("all"))
    ones = jax.make_array_from_callback(
        (len(devices),), sharding, lambda index: np.ones(len(devices), np.float32)[index]
    )
    total = float(jax.jit(lambda x: x.sum())(ones))
    began = time.perf_counter()
    multihost.barrier("measured")
    waited = time.perf_counter() - began
    multihost.assert_equal(np.float32(total))
    hosts = multihost.process_allgather(np.int32(jax.process_index())).tolist()
    result = {"hosts": hosts, "devices": len(devices), "sum": total}
    return {**result, "seconds_to_join": joined, "seconds_of_barrier": waited}


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["--count"]:
        found = {"hosts": jax.process_count(), "devices": jax.device_count()}
    else:
        found = join()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
