"""Asks Google Cloud for a TPU; it is there when wait.py says so.

On demand:        create.py --name=my-tpu --accelerator=v5litepod-16 --zone=us-west4-a
Spot:             the same with --capacity=spot
Reserved:         the same with --capacity=reserved
Queued:           the same with --queued [--valid_for=6h]
Several slices:   the same with --slices=2 (always queued)

One that is there, or on its way, is left as it is.
"""

from xlashard.cloud.provisioning import create
from xlashard.cloud.script import start

if __name__ == "__main__":
    start(lambda session, _: create(session), ("tpu", "wait"), __doc__)
