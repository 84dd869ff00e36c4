"""The commands of gcloud that make, look at, reach and delete TPU VMs."""

from dataclasses import dataclass

from xlashard.cloud.accelerators import Accelerator
from xlashard.cloud.commands import Command
from xlashard.cloud.settings import TpuSettings, read_pairs

_TPUS = ("gcloud", "compute", "tpus")
_VM = (*_TPUS, "tpu-vm")
_QUEUED = (*_TPUS, "queued-resources")
# A connection of which nothing is heard for a minute is dead.
_ALIVE = ("--ssh-flag=-o ServerAliveInterval=15", "--ssh-flag=-o ServerAliveCountMax=4")


@dataclass(frozen=True)
class Gcloud:
    """Writes commands for one TPU, of one or several slices.

    Attributes:
        tpu: Which.
    """

    tpu: TpuSettings

    @property
    def queued(self) -> bool:
        """Whether it is asked for by a queued resource."""
        tpu = self.tpu
        return tpu.queued or tpu.slices > 1 or bool(tpu.valid_for or tpu.reservation_project)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of its slices."""
        tpu = self.tpu
        if tpu.slices == 1:
            return (tpu.name,)
        return tuple(f"{tpu.name}-{number}" for number in range(tpu.slices))

    def create(self, accelerator: Accelerator) -> Command:
        """Asks for it; returns before it is there."""
        words = self._queued(accelerator) if self.queued else self._vm(accelerator)
        return Command((*words, "--async", "--quiet"), f"ask for the TPU {self.tpu.name}")

    def _vm(self, accelerator: Accelerator) -> tuple[str, ...]:
        version = f"--version={self.tpu.runtime or accelerator.runtime}"
        return (
            *(*_VM, "create", self.tpu.name, *self._place),
            *accelerator.flags,
            version,
            *self._capacity,
            *self._about_vms,
        )

    def _queued(self, accelerator: Accelerator) -> tuple[str, ...]:
        tpu = self.tpu
        one = (f"--node-id={tpu.name}",)
        several = (f"--node-count={tpu.slices}", f"--node-prefix={tpu.name}")
        return (
            *(*_QUEUED, "create", tpu.name, *self._place),
            *(one if tpu.slices == 1 else several),
            *accelerator.flags,
            f"--runtime-version={tpu.runtime or accelerator.runtime}",
            *self._capacity,
            *_given("--reservation-host-project", tpu.reservation_project),
            *_given("--valid-until-duration", tpu.valid_for),
            *self._about_vms,
        )

    def list_nodes(self) -> Command:
        """All TPU VMs of the zone, as JSON."""
        words = (*_VM, "list", *self._place, "--format=json")
        return Command(words, f"look at the TPU {self.tpu.name}")

    def list_queued(self) -> Command:
        """All queued resources of the zone, as JSON."""
        words = (*_QUEUED, "list", *self._place, "--format=json")
        return Command(words, f"look at the queued resource {self.tpu.name}")

    def delete_node(self, node: str) -> Command:
        """Deletes one slice, and returns when it is gone."""
        return Command((*_VM, "delete", node, *self._place, "--quiet"), f"delete the TPU {node}")

    def delete_queued(self) -> Command:
        """Deletes the queued resource with its slices, and returns when they are gone."""
        words = (*_QUEUED, "delete", self.tpu.name, *self._place, "--force", "--quiet")
        return Command(words, f"delete the queued resource {self.tpu.name}")

    def ssh(self, node: str, worker: int, script: str, why: str) -> Command:
        """Runs a shell command on one worker.

        Args:
            node: The slice.
            worker: Its worker.
            script: What the shell there gets.
            why: What it is for.
        """
        words = (*self._ssh(node, worker), *_ALIVE, f"--command={script}")
        return Command(words, why)

    def shell(self, node: str, worker: int) -> Command:
        """A shell on one worker, for a person."""
        return Command(self._ssh(node, worker), f"open a shell on worker {worker} of {node}")

    def _ssh(self, node: str, worker: int) -> tuple[str, ...]:
        return (*_VM, "ssh", node, *self._place, *self._way, f"--worker={worker}", "--quiet")

    def copy(self, node: str, worker: int, files: tuple[str, ...], folder: str) -> Command:
        """Copies files to one worker.

        Args:
            node: The slice.
            worker: Its worker.
            files: Of this machine.
            folder: There, from the home folder on; it exists.
        """
        words = (
            *(*_VM, "scp", *files, f"{node}:{folder}/", *self._place, *self._way),
            *(f"--worker={worker}", "--quiet"),
        )
        return Command(words, f"copy files to worker {worker} of {node}")

    @property
    def _place(self) -> tuple[str, ...]:
        return (*_given("--zone", self.tpu.zone), *_given("--project", self.tpu.project))

    @property
    def _way(self) -> tuple[str, ...]:
        return ("--internal-ip",) if self.tpu.internal_ips else ()

    @property
    def _capacity(self) -> tuple[str, ...]:
        return {"on-demand": (), "spot": ("--spot",), "reserved": ("--reserved",)}[
            self.tpu.capacity
        ]

    @property
    def _about_vms(self) -> tuple[str, ...]:
        tpu = self.tpu
        read_pairs("labels", tpu.labels)
        read_pairs("metadata", tpu.metadata)
        return (
            *_given("--network", tpu.network),
            *_given("--subnetwork", tpu.subnetwork),
            *(("--internal-ips",) if tpu.internal_ips else ()),
            *_given("--service-account", tpu.service_account),
            *_given("--labels", ",".join(tpu.labels)),
            *_given("--tags", ",".join(tpu.tags)),
            *_given("--metadata", ",".join(tpu.metadata)),
        )


def _given(flag: str, value: str) -> tuple[str, ...]:
    return (f"{flag}={value}",) if value else ()
