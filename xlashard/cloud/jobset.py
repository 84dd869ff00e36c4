"""The manifest of a job on GKE, from the template `jobset.yaml`.

`kubectl` runs the job. GKE sets `TPU_WORKER_ID`, `TPU_WORKER_HOSTNAMES` and `MEGASCALE_*` in each
pod, and JAX reads them.
"""

import json
import string
from pathlib import Path

from xlashard.cloud.cloud_settings import CloudSettings, check_command, check_name, read_accelerator
from xlashard.cloud.session import Session
from xlashard.errors import CloudError

_TEMPLATE = Path(__file__).with_name("jobset.yaml")
# The longest name of a pod is the name of a service, too: NAME-slice-99-9999-abcde.
_LONGEST_NAME = 40


def show(session: Session) -> int:
    """Print the manifest.

    Raises:
        CloudError: A setting is missing or invalid.
    """
    print(manifest(session.settings), end="")
    return 0


def manifest(settings: CloudSettings) -> str:
    """Return the JobSet of a job as YAML: one Job for each slice, one pod for each host.

    Raises:
        CloudError: The name, the accelerator, the image or the command is missing or invalid.
    """
    name = settings.tpu.name
    check_name(name)
    if len(name) > _LONGEST_NAME:
        raise CloudError(
            f"--name={name} has {len(name)} letters; a JobSet's name has up to {_LONGEST_NAME}, as "
            f"the names of its pods are longer. Write --name={name[:_LONGEST_NAME].rstrip('-')}",
            code=2,
        )
    if not settings.gke.image:
        raise CloudError(
            "--image is missing: write the container image, such as "
            "--image=REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME",
            code=2,
        )
    # A shell that gets SIGTERM waits for its child, and then runs no further command.
    command = f"trap 'exit 143' TERM\n{check_command(settings.run.command)}"
    accelerator = read_accelerator(settings.tpu.accelerator)
    lines = _TEMPLATE.read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(
        line.replace("#spot ", "")
        for line in lines
        if "#spot " not in line or settings.tpu.capacity == "spot"
    )
    return string.Template(text).substitute(
        name=name,
        slices=settings.gke.slices,
        restarts=settings.gke.restarts,
        hosts=accelerator.hosts,
        chips=accelerator.chips_per_host,
        node_label=accelerator.node_label,
        topology=accelerator.topology,
        image=json.dumps(settings.gke.image),
        command=json.dumps(command),
        grace=round(settings.run.grace),
    )
