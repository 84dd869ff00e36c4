"""Creates a TPU, and waits until it is ready. A TPU that exists is left as it is.

On demand:  create.py --name=my-tpu --accelerator=v5litepod-16 --zone=us-west4-a
Spot:       the same with --capacity=spot
Reserved:   the same with --capacity=reserved
"""

from xlashard.cli.cloud.session import start
from xlashard.cli.cloud.tpu import create

if __name__ == "__main__":
    start(create, ("tpu", "wait"), __doc__)
