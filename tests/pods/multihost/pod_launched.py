"""Run in each process of a job on a stand-in of Slurm, GKE or TPU VMs, whose place it finds."""

import os
import sys
from pathlib import Path

import jax

# JAX sets it on machines without chips of TPUs, and GKE on those with them.
if "GCE_METADATA_IP" in os.environ:
    del os.environ["TPU_SKIP_MDS_QUERY"]
# Each host has a copy of the program's files.
sys.path.insert(0, str(Path.cwd()))
import network  # noqa: F401  # pyright: ignore[reportMissingImports]

from xlashard import multihost

POD = multihost.initialize()
assert (POD.process, POD.count) == (jax.process_index(), jax.process_count())
attempt = os.environ.get("LAUNCHER_ATTEMPT", "1")
print(f"process {POD.process} of {POD.count}, {POD.found_by}, attempt {attempt}", flush=True)
multihost.barrier("all have printed")
