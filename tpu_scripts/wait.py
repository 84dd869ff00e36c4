"""Waits until a TPU is ready and all its workers answer.

wait.py --name=my-tpu --zone=us-west4-a [--ready_within=7200]
"""

from xlashard.cloud.provisioning import wait
from xlashard.cloud.script import start

if __name__ == "__main__":
    start(lambda session, _: wait(session), ("tpu", "wait"), __doc__)
