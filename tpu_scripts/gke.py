"""Runs a command on TPUs of a GKE cluster, as a JobSet.

    gke.py manifest --name=my-job --accelerator=v5litepod-16 --image=IMAGE --command=COMMAND
    gke.py run      the same: makes the JobSet, follows it to its end, deletes it
    gke.py apply    makes it and returns
    gke.py follow   shows and keeps what its pods write, until it is over
    gke.py delete   deletes it with its pods

Everything can stand in a file: gke.py run --config=job.toml
"""

from xlashard.cloud.gke import do
from xlashard.cloud.script import start

if __name__ == "__main__":
    start(do, ("tpu", "wait", "run", "watch", "gke"), __doc__)
