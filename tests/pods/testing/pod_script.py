"""Script without xlashard: `python pod_script.py [fail]`."""

import sys

import jax

jax.distributed.initialize()
print("process", jax.process_index(), "of", jax.process_count(), "has", jax.local_device_count())
if sys.argv[1:] == ["fail"]:
    sys.stdout.flush()
    raise SystemExit(f"process {jax.process_index()} gives up")
