"""Prints a job as a JobSet of Kubernetes, for TPUs of a GKE cluster.

jobset.py --name=my-job --accelerator=v5litepod-16 --image=IMAGE --command=COMMAND | \
    kubectl apply --filename=-
"""

from xlashard.cli.cloud.session import print_manifest, start

if __name__ == "__main__":
    start(print_manifest, ("tpu", "run", "gke"), __doc__)
