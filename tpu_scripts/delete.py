"""Deletes a TPU, with all its slices and the queued resource that it was asked for by.

    delete.py --name=my-tpu --zone=us-west4-a [--slices=2] [--queued]

One that is not there is no error.
"""

from xlashard.cloud.provisioning import delete
from xlashard.cloud.script import start

if __name__ == "__main__":
    start(lambda session, _: delete(session), ("tpu", "wait"), __doc__)
