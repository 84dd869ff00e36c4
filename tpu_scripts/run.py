"""Installs the code on all workers of a TPU, runs a command there, and follows its output.

    run.py --name=my-tpu --zone=us-west4-a --command="xlashard train --config configs/tiny.toml"

The first worker that fails stops the others; Ctrl-C stops all of them. The job outlives the
connection: logs.py follows it again.
"""

from xlashard.cli.cloud.jobs import run
from xlashard.cli.cloud.session import start

if __name__ == "__main__":
    start(run, ("tpu", "wait", "setup", "run"), __doc__)
