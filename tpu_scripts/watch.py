"""Creates a TPU and runs a command there; again, when the TPU is preempted.

    watch.py --name=my-tpu --accelerator=v5litepod-16 --zone=us-west4-a --capacity=spot \
        --command="xlashard train --config configs/tiny.toml --runs /mnt/runs --auto-resume"

The checkpoints must be in a folder that outlives the VMs: a mounted bucket or a file server. The
TPU is deleted in the end, unless --keep.
"""

from xlashard.cli.cloud.jobs import watch
from xlashard.cli.cloud.session import start

if __name__ == "__main__":
    start(watch, ("tpu", "wait", "setup", "run", "watch"), __doc__)
