"""Deletes a TPU. One that does not exist is no error.

delete.py --name=my-tpu --zone=us-west4-a
"""

from xlashard.cli.cloud.session import start
from xlashard.cli.cloud.tpu import delete

if __name__ == "__main__":
    start(delete, ("tpu", "wait"), __doc__)
