"""Settings of a TPU and of a job on it: a TOML file, and flags that override it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from xlashard.documents import read_toml
from xlashard.errors import CloudError
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
        raise CloudError(f"--config {path} is not a TOML file: {error}", code=2) from None


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
