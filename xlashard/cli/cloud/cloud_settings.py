"""Settings of a TPU and of a job on it, by a TOML file and flags; types of TPU slices.

On GKE `kubectl` runs the job, from the manifest by the template `jobset.yaml`. GKE sets
`TPU_WORKER_ID`, `TPU_WORKER_HOSTNAMES` and `MEGASCALE_*` in each pod, and JAX reads them.
"""

import json
import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xlashard.errors import CloudError, TopologyError
from xlashard.predict.targets.tpu.topology_names import (
    accelerator_type,
    default_shape,
    parse_topology_name,
    shape_name,
)
from xlashard.support.documents import read_toml
from xlashard.train.config.schema import Bounds, read, section, setting

_POSITIVE = Bounds(at_least=1)
_SECONDS = Bounds(above=0)
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class TpuSettings:
    """Name, size, zone and price of the TPU."""

    name: str = setting("", "name of the TPU, or of the JobSet")
    accelerator: str = setting("", "type, such as v5litepod-16, v5p-64 or v6e-256")
    zone: str = setting("", "zone, such as us-west4-a; empty: gcloud's default")
    project: str = setting("", "project of Google Cloud; empty: gcloud's default")
    capacity: Literal["on-demand", "spot", "reserved"] = setting(
        "on-demand", "spot costs less and may be preempted; reserved uses a reservation"
    )
    runtime: str = setting("", "VM image; empty: that of the TPU's generation")
    internal_ips: bool = setting(False, "use no external addresses, neither for VMs nor for ssh")
    create_flags: tuple[str, ...] = setting(
        (), "more flags of gcloud compute tpus tpu-vm create, such as --network=NAME"
    )


@dataclass(frozen=True)
class WaitSettings:
    """Time limits, and intervals between attempts."""

    poll: float = setting(15.0, "seconds between two queries of the TPU's state", _SECONDS)
    ready_within: float = setting(7200.0, "seconds in which the TPU must become ready", _SECONDS)
    ssh_tries: int = setting(8, "attempts of an ssh or scp that fails", _POSITIVE)
    ssh_wait: float = setting(2.0, "seconds before the second attempt; then doubled", _SECONDS)


@dataclass(frozen=True)
class SetupSettings:
    """Code and packages of the workers."""

    code: str = setting(".", "folder that is copied to ~/job: files that git tracks or would add")
    python: str = setting("3.12", "Python of the job's environment, installed by uv; empty: none")
    install: str = setting(
        "python -m pip install --quiet --editable '.[tpu,train]'",
        "shell command that installs the code, run in ~/job",
    )


@dataclass(frozen=True)
class JobSettings:
    """The job: one command on each worker."""

    command: str = setting("", "shell command, run in ~/job")
    logs: str = setting("logs", "local folder for a log of each worker")
    grace: float = setting(30.0, "seconds between SIGTERM and SIGKILL", _SECONDS)


@dataclass(frozen=True)
class WatchSettings:
    """Restarts after a preemption."""

    tries: int = setting(20, "limit of starts of the job, and of failures to get a TPU", _POSITIVE)
    pause: float = setting(10.0, "seconds before the TPU is created again; then doubled", _SECONDS)
    keep: bool = setting(False, "keep the TPU when the job has ended")


@dataclass(frozen=True)
class GkeSettings:
    """A JobSet on a GKE cluster with TPU node pools."""

    image: str = setting("", "container image with the program")
    slices: int = setting(1, "number of slices, joined by the network", _POSITIVE)
    restarts: int = setting(20, "limit of restarts of the JobSet", Bounds(at_least=0))


@dataclass(frozen=True)
class DoctorSettings:
    """Checks of the doctor."""

    port: int = setting(8482, "port of worker 0 that the other workers connect to", _POSITIVE)
    chips_within: float = setting(180.0, "seconds for the program that counts chips", _SECONDS)


@dataclass(frozen=True)
class CloudSettings:
    """Settings of all scripts."""

    tpu: TpuSettings = section(TpuSettings, "the TPU")
    wait: WaitSettings = section(WaitSettings, "time limits")
    setup: SetupSettings = section(SetupSettings, "code and packages of the workers")
    run: JobSettings = section(JobSettings, "the job")
    watch: WatchSettings = section(WatchSettings, "restarts after a preemption")
    gke: GkeSettings = section(GkeSettings, "the job on GKE")
    doctor: DoctorSettings = section(DoctorSettings, "checks of the doctor")


def load_settings(path: str, flags: Mapping[str, Any]) -> CloudSettings:
    """Read settings from a file and from flags.

    Args:
        path: A TOML file; empty for none.
        flags: Values by the setting's path, such as ``tpu.zone``; they override the file.

    Raises:
        SettingsError: A setting is unknown or has an invalid value.
        CloudError: The file can't be read.
    """
    try:
        table = read_toml(path) if path else {}
    except OSError as error:
        raise CloudError(f"--config {path} can't be read: {error.strerror}", code=2) from None
    except ValueError as error:
        raise CloudError(f"--config {path} is not a TOML file: {error}", code=2) from None
    for key, value in flags.items():
        group, _, name = key.partition(".")
        table.setdefault(group, {})[name] = value
    return read(CloudSettings, table)


def check_name(name: str) -> None:
    """Check that Google Cloud accepts the name of a TPU.

    Raises:
        CloudError: The name is empty or invalid.
    """
    if not name:
        raise CloudError("--name is missing: write the TPU's name, such as --name=my-tpu", code=2)
    if not _NAME.fullmatch(name):
        near = re.sub(r"[^-a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
        if not near[:1].isalpha():
            near = f"tpu-{near}".strip("-")
        raise CloudError(
            f"--name={name!r} is invalid: a TPU's name has up to 63 small letters, digits and "
            f"hyphens, begins with a letter and does not end with a hyphen. Write --name={near}",
            code=2,
        )


def check_command(command: str) -> str:
    """Return the command of a job.

    Raises:
        CloudError: The command is empty.
    """
    if not command.strip():
        raise CloudError(
            "--command is missing. Write, for example:\n"
            "  --command='xlashard train --config configs/tiny.toml'",
            code=2,
        )
    return command


_IMAGES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
    "tpu7x": "v2-alpha-tpu7-ubuntu2404",
}
"""VM image of each generation, by libtpu's name: https://cloud.google.com/tpu/docs/runtimes"""

_NODE_LABELS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""Label of GKE nodes: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus"""


@dataclass(frozen=True)
class Accelerator:
    """A type of TPU slice.

    Attributes:
        name: Accelerator type in gcloud: `v5litepod-16`.
        generation: Name of the generation in libtpu: `v5e`.
        topology: Chips along each dimension: `4x4`.
        chips: Chips of a slice.
        hosts: VMs (nodes in GKE) of a slice.
        devices_per_chip: JAX devices of each chip.
        is_default: Whether gcloud chooses this topology for the accelerator type.
    """

    name: str
    generation: str
    topology: str
    chips: int
    hosts: int
    devices_per_chip: int
    is_default: bool

    @property
    def chips_per_host(self) -> int:
        """Chips of each VM."""
        return self.chips // self.hosts

    @property
    def image(self) -> str:
        """VM image for this generation."""
        return _IMAGES[self.generation]

    @property
    def node_label(self) -> str:
        """Label of the nodes in GKE.

        Raises:
            CloudError: GKE has no nodes of this generation.
        """
        if self.generation not in _NODE_LABELS:
            raise CloudError(
                f"--accelerator={self.name}: GKE has no TPU {self.generation}; expected one of "
                f"{', '.join(_NODE_LABELS)}",
                code=2,
            )
        return _NODE_LABELS[self.generation]

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of gcloud that select this type."""
        if self.is_default:
            return (f"--accelerator-type={self.name}",)
        return (f"--type={self.name.rpartition('-')[0]}", f"--topology={self.topology}")


def read_accelerator(name: str) -> Accelerator:
    """Return the type that a name of gcloud or of libtpu stands for.

    Args:
        name: `v5litepod-16`, `v5e-16` or `v5e:4x4`.

    Raises:
        CloudError: The name is empty or unknown.

    Example:
        >>> read_accelerator("v5e-16")
        Accelerator(name='v5litepod-16', generation='v5e', topology='4x4', chips=16, hosts=4,
        devices_per_chip=1, is_default=True)
    """
    if not name:
        raise CloudError(
            "--accelerator is missing: write the TPU's type, such as --accelerator=v5litepod-16",
            code=2,
        )
    try:
        topology = parse_topology_name(name)
    except TopologyError as error:
        raise CloudError(f"--accelerator={name}: {error}", code=2) from None
    generation, shape = topology.generation, topology.shape
    chips = math.prod(shape)
    on_one_host = chips <= generation.chips_per_host or shape in generation.single_host_shapes
    return Accelerator(
        accelerator_type(topology),
        generation.name,
        shape_name(shape),
        chips,
        1 if on_one_host else chips // generation.chips_per_host,
        generation.devices_per_chip,
        shape == default_shape(generation, chips),
    )


_TEMPLATE = Path(__file__).with_name("jobset.yaml")
# The longest name of a pod is the name of a service, too: NAME-slice-99-9999-abcde.
_LONGEST = 40


def manifest(settings: CloudSettings) -> str:
    """Return the JobSet of a job as YAML: one Job for each slice, one pod for each host.

    Raises:
        CloudError: The name, the accelerator, the image or the command is missing or invalid.
    """
    name = settings.tpu.name
    check_name(name)
    if len(name) > _LONGEST:
        raise CloudError(
            f"--name={name} has {len(name)} letters; a JobSet's name has up to {_LONGEST}, as "
            f"the names of its pods are longer. Write --name={name[:_LONGEST].rstrip('-')}",
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
