"""A job as a JobSet of Kubernetes: one Job for each slice, one pod for each of its hosts.

https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2 and
https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice. GKE itself tells the pods
which worker of which slice they are (`TPU_WORKER_ID`, `TPU_WORKER_HOSTNAMES`, `MEGASCALE_*`), and
JAX reads that.
"""

from typing import Any

from xlashard.cloud.accelerators import Accelerator, read_accelerator
from xlashard.cloud.resuming import Resumption, resumption_of, start_or_resume
from xlashard.cloud.settings import CloudSettings, check_name, read_pairs
from xlashard.errors import CloudError

_REPLICATED = "slice"
_CONTAINER = "worker"
# Of TPUs in one slice, and between slices.
_PORTS = (8471, 8080)
# The longest name of a pod is a name of a service, too: NAME-slice-99-9999-abcde.
_LONGEST_NAME = 40


def jobset(settings: CloudSettings) -> dict[str, Any]:
    """The manifest of a job, as kubectl takes it.

    Args:
        settings: `tpu`, `run` and `gke` of them.

    Raises:
        CloudError: There is no such accelerator, or image, command or name are missing.
    """
    accelerator = _checked(settings)
    gke, slices = settings.gke, settings.tpu.slices
    labels = {"kueue.x-k8s.io/queue-name": gke.queue} if gke.queue else {}
    labels |= read_pairs("labels", settings.tpu.labels)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": settings.tpu.name,
            "namespace": gke.namespace,
            "labels": labels,
            # Each slice has a node pool for itself.
            "annotations": {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
            },
        },
        "spec": {
            # A pod that fails, or whose node is taken away, starts all slices anew.
            "failurePolicy": {"maxRestarts": gke.restarts},
            "successPolicy": {"operator": "All"},
            "network": {"enableDNSHostnames": True, "subdomain": settings.tpu.name},
            "replicatedJobs": [
                {
                    "name": _REPLICATED,
                    "replicas": slices,
                    "template": {"spec": _job(settings, accelerator)},
                }
            ],
        },
    }


def _checked(settings: CloudSettings) -> Accelerator:
    name = settings.tpu.name
    check_name(name)
    if len(name) > _LONGEST_NAME:
        raise CloudError(
            f"--name={name} has {len(name)} letters; a JobSet's has up to {_LONGEST_NAME}, for the "
            f"names of pods are longer. Write --name={name[:_LONGEST_NAME].rstrip('-')}",
            code=2,
        )
    if not settings.gke.image:
        raise CloudError(
            "which container image? Write --image=REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME",
            code=2,
        )
    if not settings.run.command.strip():
        raise CloudError("which command? Write --command='xlashard train --config FILE'", code=2)
    return read_accelerator(settings.tpu.accelerator)


def _job(settings: CloudSettings, accelerator: Accelerator) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "parallelism": accelerator.hosts,
        "completions": accelerator.hosts,
        # The JobSet starts all pods anew, or none.
        "backoffLimit": 0,
        "template": {"spec": _pod(settings, accelerator)},
    }


def _pod(settings: CloudSettings, accelerator: Accelerator) -> dict[str, Any]:
    gke = settings.gke
    volumes = read_pairs("volumes", gke.volumes)
    names = {claim: f"volume-{number}" for number, claim in enumerate(volumes)}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        # Pods find each other by the names of their hosts.
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": accelerator.node_label,
            "cloud.google.com/gke-tpu-topology": gke.topology or accelerator.topology,
            **_capacity(settings),
            **read_pairs("selectors", gke.selectors),
        },
        "containers": [_container(settings, accelerator, volumes, names)],
    }
    if settings.tpu.capacity == "spot":
        tolerated = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
        pod["tolerations"] = [{**tolerated, "effect": "NoSchedule"}]
        # Long enough for the checkpoint of a job that hears SIGTERM.
        pod["terminationGracePeriodSeconds"] = round(settings.run.grace)
    if gke.pod_account:
        pod["serviceAccountName"] = gke.pod_account
    if volumes:
        pod["volumes"] = [
            {"name": names[claim], "persistentVolumeClaim": {"claimName": claim}}
            for claim in volumes
        ]
    return pod


def _capacity(settings: CloudSettings) -> dict[str, str]:
    return {"cloud.google.com/gke-spot": "true"} if settings.tpu.capacity == "spot" else {}


def _container(
    settings: CloudSettings,
    accelerator: Accelerator,
    volumes: dict[str, str],
    names: dict[str, str],
) -> dict[str, Any]:
    given = read_pairs("environment", settings.run.environment)
    environment: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in {"PYTHONUNBUFFERED": "1", **given}.items()
    ]
    attempt = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    environment.append(
        {"name": "LAUNCHER_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": attempt}}}
    )
    chips = {"google.com/tpu": str(accelerator.chips_per_host)}
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": settings.gke.image,
        "command": ["bash", "-c", _command(settings)],
        "env": environment,
        "ports": [{"containerPort": port} for port in _PORTS],
        "resources": {"requests": chips, "limits": chips},
        "securityContext": {"privileged": True},
    }
    if volumes:
        container["volumeMounts"] = [
            {"name": names[claim], "mountPath": path} for claim, path in volumes.items()
        ]
    return container


def _command(settings: CloudSettings) -> str:
    chosen = settings.watch
    said = Resumption(chosen.resume, chosen.checkpoints) if chosen.resume else None
    command = start_or_resume(settings.run.command, said or resumption_of(settings.run.command))
    # A shell that is told to end waits for what it runs, and does nothing after it.
    return f"trap 'exit 143' TERM\n{command}"
