"""Runs a command on all workers of a TPU, and shows and keeps what they write.

    run.py --name=my-tpu --zone=us-west4-a --command="xlashard train --config configs/tiny.toml"

It runs in the folder that setup.py made. What an earlier run has left on the workers is ended
before. The first worker that fails ends the others; Ctrl-C ends all of them. A connection that
breaks is made again, and nothing is lost; --attach follows a job that this machine has left.
"""

from xlashard.cloud.running import run
from xlashard.cloud.script import start

if __name__ == "__main__":
    start(lambda session, _: run(session), ("tpu", "wait", "setup", "run"), __doc__)
