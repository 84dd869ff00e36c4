"""Creates a TPU, sets it up and runs a command there; again, when the TPU is taken away.

    watch.py --name=my-tpu --accelerator=v5litepod-16 --zone=us-west4-a --capacity=spot \
        --command="xlashard train --config configs/tiny.toml --runs /mnt/runs"

A run of `xlashard train` goes on from its last checkpoint, which must lie where a new TPU sees it:
in a mounted bucket or on a file server. For another program say --resume=COMMAND and
--checkpoints=PATTERN. The TPU is deleted in the end, unless --keep.
"""

from xlashard.cloud.script import start
from xlashard.cloud.watching import watch

if __name__ == "__main__":
    start(lambda session, _: watch(session), ("tpu", "wait", "setup", "run", "watch"), __doc__)
