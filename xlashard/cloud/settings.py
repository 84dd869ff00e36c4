"""What a person says of a TPU and of a job on it: a TOML file, and flags that win over it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from xlashard.documents import read_toml
from xlashard.errors import CloudError
from xlashard.train.schema import Bounds, read, section, setting

_POSITIVE = Bounds(at_least=1)
_SECONDS = Bounds(above=0)
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class TpuSettings:
    """Which TPU: its name, size, place and price."""

    name: str = setting("", "of the TPU; also of the queued resource and of the JobSet")
    accelerator: str = setting("", "its type, such as v5litepod-16, v5p-64 or v6e-256")
    zone: str = setting("", "such as us-west4-a; empty: gcloud's own default")
    project: str = setting("", "of Google Cloud; empty: gcloud's own default")
    slices: int = setting(1, "how many slices of that type, joined by the network", _POSITIVE)
    capacity: Literal["on-demand", "spot", "reserved"] = setting(
        "on-demand", "spot costs less and may be taken away; reserved is of a reservation"
    )
    queued: bool = setting(False, "ask by a queued resource; with several slices always")
    valid_for: str = setting("", "give up a queued request after, such as 6h; empty: never")
    reservation_project: str = setting("", "whose reservation it is, if of another project")
    runtime: str = setting("", "the VM's image; empty: the one of the TPU's generation")
    network: str = setting("", "the VPC network; empty: default")
    subnetwork: str = setting("", "the subnetwork; empty: that of the zone's region")
    internal_ips: bool = setting(False, "no external addresses; ssh goes by internal ones")
    service_account: str = setting("", "that the VMs act as; empty: Compute Engine's default")
    labels: tuple[str, ...] = setting((), "key=value, for bills and searches")
    tags: tuple[str, ...] = setting((), "network tags, for firewall rules")
    metadata: tuple[str, ...] = setting((), "key=value, which programs on the VMs can read")


@dataclass(frozen=True)
class WaitSettings:
    """How long to wait for a TPU, and how often to look."""

    poll: float = setting(15.0, "seconds between two looks at its state", _SECONDS)
    ready_within: float = setting(7200.0, "seconds in which it must be ready", _SECONDS)
    ssh_within: float = setting(300.0, "seconds in which all its workers must answer", _SECONDS)
    ssh_tries: int = setting(5, "tries of an ssh or scp that fails", _POSITIVE)
    ssh_wait: float = setting(2.0, "seconds before its second try; each further is twice", _SECONDS)


@dataclass(frozen=True)
class SetupSettings:
    """What the workers get before a job can run there."""

    code: str = setting(".", "the folder that is copied to them: what git tracks or would add")
    folder: str = setting("job", "where it goes, below the home folder of each worker")
    python: str = setting("3.12", "at least this Python; empty: the one that is there, no venv")
    install: str = setting(
        "python -m pip install --quiet --editable '.[tpu,train]'",
        "shell command that installs it, run in that folder",
    )


@dataclass(frozen=True)
class RunSettings:
    """The job: one command, which each worker runs."""

    command: str = setting("", "a shell command, run in the folder of the code")
    environment: tuple[str, ...] = setting((), "NAME=value, for the command")
    logs: str = setting("logs", "folder here for a file of each worker's output")
    grace: float = setting(30.0, "seconds to end in after SIGTERM, before SIGKILL", _SECONDS)
    others: float = setting(
        5.0, "seconds that the others run on when one has failed", Bounds(at_least=0)
    )
    attach: bool = setting(False, "start nothing: follow what was started last")
    take: bool = setting(False, "end other processes of this user that hold the TPU")


@dataclass(frozen=True)
class WatchSettings:
    """What happens when a TPU is taken away."""

    tries: int = setting(20, "how often the job may be started in all", _POSITIVE)
    pause: float = setting(10.0, "seconds before a TPU is made again; twice each time", _SECONDS)
    resume: str = setting("", "command that goes on; empty: made from an xlashard train command")
    checkpoints: str = setting("", "pattern of paths; if one exists there, the job goes on")
    keep: bool = setting(False, "leave the TPU running when the job is over")


@dataclass(frozen=True)
class GkeSettings:
    """A job as a JobSet of Kubernetes, on a cluster with TPU node pools."""

    image: str = setting("", "container image with the program")
    namespace: str = setting("default", "of the cluster")
    context: str = setting("", "of kubectl's configuration; empty: the current one")
    topology: str = setting("", "such as 4x4; empty: that of the accelerator's name")
    restarts: int = setting(20, "how often the JobSet may start anew", Bounds(at_least=0))
    pod_account: str = setting("", "Kubernetes service account of the pods")
    queue: str = setting("", "Kueue's local queue")
    selectors: tuple[str, ...] = setting((), "key=value, more labels that nodes must have")
    volumes: tuple[str, ...] = setting((), "claim=/path, persistent volume claims to mount")


@dataclass(frozen=True)
class DoctorSettings:
    """How the doctor looks."""

    port: int = setting(8482, "on which worker 0 is to be reached", Bounds(at_least=1))
    chips_within: float = setting(180.0, "seconds for the program that counts chips", _SECONDS)


@dataclass(frozen=True)
class CloudSettings:
    """All of it; each script reads what concerns it."""

    tpu: TpuSettings = section(TpuSettings, "which TPU")
    wait: WaitSettings = section(WaitSettings, "how long to wait for it")
    setup: SetupSettings = section(SetupSettings, "what its workers get")
    run: RunSettings = section(RunSettings, "the job")
    watch: WatchSettings = section(WatchSettings, "what happens when it is taken away")
    gke: GkeSettings = section(GkeSettings, "the job on Kubernetes")
    doctor: DoctorSettings = section(DoctorSettings, "how the doctor looks")


def load_settings(path: str, flags: Mapping[str, Any]) -> CloudSettings:
    """Reads settings from a file and from flags.

    Args:
        path: A TOML file; empty for none.
        flags: By the setting's path, such as ``tpu.zone``; they win over the file.

    Raises:
        SettingsError: A setting that there is not, or that can't be what it is.
        CloudError: The file can't be read.
    """
    table: dict[str, Any] = _read(path) if path else {}
    for key, value in flags.items():
        group, _, name = key.partition(".")
        table.setdefault(group, {})[name] = value
    return read(CloudSettings, table)


def _read(path: str) -> dict[str, Any]:
    try:
        return read_toml(path)
    except OSError as error:
        raise CloudError(f"--config {path} can't be read: {error.strerror}", code=2) from None
    except ValueError as error:
        raise CloudError(f"--config {path} is no TOML file: {error}", code=2) from None


def check_name(name: str) -> None:
    """Checks that a TPU can have a name.

    Raises:
        CloudError: It has none, or one that Google Cloud refuses.
    """
    if not name:
        raise CloudError("which TPU? Write --name=my-tpu", code=2)
    if not _NAME.fullmatch(name):
        near = re.sub(r"[^-a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
        if not near[:1].isalpha():
            near = f"tpu-{near}".strip("-")
        raise CloudError(
            f"--name={name!r}: a TPU's name has up to 63 small letters, digits and hyphens, begins "
            f"with a letter and ends with no hyphen. Write --name={near}",
            code=2,
        )


def read_pairs(flag: str, pairs: tuple[str, ...]) -> dict[str, str]:
    """`key=value` words as a table.

    Raises:
        CloudError: One of them has no `=`.

    Example:
        >>> read_pairs("labels", ("team=llm", "run=7"))
        {'team': 'llm', 'run': '7'}
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise CloudError(f"--{flag}={pair}: write --{flag}=KEY=VALUE", code=2)
        found[key] = value
    return found
