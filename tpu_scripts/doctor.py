"""Checks that a TPU works and is free, and prints advice.

    doctor.py --name=my-tpu --zone=us-west4-a --accelerator=v5litepod-16    all workers
    doctor.py                                                               this machine alone

It checks the chips, the processes that hold them, versions, memory, the connection to the
coordinator, and that all workers see all chips. It exits with 1 if something is wrong.
"""

from xlashard.cli.cloud.doctor import check
from xlashard.cli.cloud.session import start

if __name__ == "__main__":
    start(check, ("tpu", "wait", "doctor"), __doc__)
