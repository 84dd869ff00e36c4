"""Counts the chips that all workers see together; the doctor runs it on every worker.

It is run by path, in the environment of jobs, with jax and xlashard.
"""

import json
import sys

import jax

from xlashard import multihost


def count(timeout: float) -> dict[str, object]:
    """Return what this process sees, and the sum of a 1 from every device."""
    place = multihost.initialize(timeout=timeout)
    local = jax.local_device_count()
    ones = jax.pmap(lambda x: jax.lax.psum(x, "all"), axis_name="all")
    total = float(ones(jax.numpy.ones((local,)))[0])
    return {
        "process": place.process,
        "processes": place.count,
        "devices": jax.device_count(),
        "local": local,
        "summed": total,
        "kind": jax.devices()[0].device_kind,
    }


if __name__ == "__main__":
    print("chips: " + json.dumps(count(float(sys.argv[1]))), flush=True)
