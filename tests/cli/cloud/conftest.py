"""A cloud on this machine: TPU VMs are folders, and ssh runs commands there as local processes."""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.fork_server import python_command
from xlashard.cli.cloud.cloud_settings import load_settings
from xlashard.cli.cloud.session import Command, Runner, Session
from xlashard.pods.testing.emulated_devices import flags_for_devices

ROOT = Path(__file__).parents[3]

QUICK = {
    "tpu.name": "one",
    "tpu.accelerator": "v4-16",
    "tpu.zone": "here",
    "wait.poll": 0.05,
    "wait.ready_within": 20.0,
    "wait.ssh_tries": 3,
    "wait.ssh_wait": 0.02,
    "watch.pause": 0.05,
    "run.grace": 2.0,
    "setup.python": "",
    "setup.install": "",
}


@dataclass
class Cloud(Runner):
    """A runner that carries out the commands of gcloud on this machine.

    Attributes:
        folder: Folder of the VMs, of the project's code and of the logs.
        state: State of the TPU; empty if it does not exist.
        hosts: Number of its VMs.
        final: State that a new TPU gets when it is queried for the second time.
        unreachable: Number of the next connections to each worker that fail.
        breaks: Bytes after which the next connections to each worker that follow a job break.
        reports: Lines that sessions have reported.
        commands: Commands of gcloud, without the program.
    """

    folder: Path
    state: str = ""
    hosts: int = 2
    final: str = "READY"
    unreachable: dict[int, int] = field(default_factory=dict)
    breaks: dict[int, list[int]] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)
    commands: list[tuple[str, ...]] = field(default_factory=list)
    dry: bool = False

    def session(self, **settings: Any) -> Session:
        """Return a session for a TPU of two workers; `run__command` sets `run.command`."""
        own = {"run.logs": str(self.folder / "logs"), "setup.code": str(self.folder / "code")}
        named = {name.replace("__", "."): value for name, value in settings.items()}
        return Session(load_settings("", {**QUICK, **own, **named}), self, self.reports.append)

    def start(self, command: Command, stderr: BinaryIO | int) -> "subprocess.Popen[bytes] | None":
        """Carry out a command of gcloud; flags that gcloud does not have are refused."""
        assert command.words[:4] == ("gcloud", "compute", "tpus", "tpu-vm")
        verb, *words = command.words[4:]
        self.commands.append(command.words[4:])
        values = _parser(verb).parse_args(words)
        script = getattr(self, f"_{verb}")(values)
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.home(values.worker) if verb == "ssh" else self.folder,
            env=self._environment(values.worker) if verb == "ssh" else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )

    def _create(self, values: argparse.Namespace) -> str:
        assert values.zone and values.version and not self.state
        self.state = "CREATING"
        for worker in range(self.hosts):
            self.home(worker).mkdir(parents=True)
        return ":"

    def _list(self, values: argparse.Namespace) -> str:
        nodes = []
        if self.state:
            addresses = [{"ipAddress": f"127.0.0.{n + 1}"} for n in range(self.hosts)]
            nodes = [{"name": "z/nodes/one", "state": self.state, "networkEndpoints": addresses}]
        if self.state == "CREATING":
            self.state = self.final
        return f"echo {shlex.quote(json.dumps(nodes))}"

    def _delete(self, values: argparse.Namespace) -> str:
        assert self.state
        self.preempt()
        self.state = ""
        return f"rm -r {self.folder}/homes"

    def _ssh(self, values: argparse.Namespace) -> str:
        if failure := self._connect(values.worker):
            return failure
        if " follow " in values.command and self.breaks.get(values.worker):
            limit = self.breaks[values.worker].pop(0)
            return f"({values.command}) 2>&1 | head --bytes={limit}; exit 255"
        return values.command

    def _scp(self, values: argparse.Namespace) -> str:
        *files, target = values.name
        folder = self.home(values.worker) / target.partition(":")[2]
        return self._connect(values.worker) or shlex.join(["cp", *files, str(folder)])

    def _connect(self, worker: int) -> str:
        if self.state != "READY":
            return "echo 'ERROR: TPU is not in state READY' >&2; exit 1"
        if self.unreachable.get(worker):
            self.unreachable[worker] -= 1
            return "echo 'Connection closed by remote host' >&2; exit 255"
        return ""

    def _environment(self, worker: int) -> dict[str, str]:
        """Return the environment of a VM: JAX finds emulated devices, and the other workers."""
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        return {
            **kept,
            "PATH": f"{self.folder / 'bin'}:{kept['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home(worker)),
            "CLOUD_FOLDER": str(self.folder),
            "PROBE_ROOT": str(self.folder / "machine"),
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "XLA_FLAGS": flags_for_devices(os.environ["XLA_FLAGS"], 2),
            "XLASHARD_POD_COORDINATOR": f"127.0.0.1:{(self.folder / 'port').read_text()}",
            "XLASHARD_POD_PROCESSES": str(self.hosts),
            "XLASHARD_POD_PROCESS_ID": str(worker),
            "XLASHARD_POD_DEVICES": "2",
        }

    def home(self, worker: int) -> Path:
        """Return the home folder of a VM."""
        return self.folder / "homes" / str(worker)

    def verbs(self) -> list[str]:
        """Return the verbs of the commands."""
        return [words[0] for words in self.commands]

    def write_code(self, **files: str) -> None:
        """Write a project; `job_sh` is the file `job.sh`."""
        for name, text in files.items():
            (self.folder / "code" / name.replace("_", ".")).write_text(text)

    def preempt(self) -> None:
        """Preempt the TPU: its VMs lose their power."""
        self.state = "PREEMPTED"
        self.kill("CLOUD_FOLDER", str(self.folder))

    def processes(self, variable: str, value: str) -> list[int]:
        """Return the processes with a variable in their environment."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{variable}={value}".encode() in path.read_bytes().split(b"\0"):
                    pids.append(int(path.parent.name))
            except OSError:
                continue
        return [pid for pid in pids if pid != os.getpid()]

    def kill(self, variable: str, value: str) -> None:
        """Kill the processes with a variable in their environment."""
        for pid in self.processes(variable, value):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def running(self) -> list[int]:
        """Return the processes of the VMs."""
        return self.processes("CLOUD_FOLDER", str(self.folder))

    def log(self, worker: int) -> str:
        """Return the output of a worker in all jobs."""
        files = sorted((self.folder / "logs").glob(f"**/worker-{worker}.log"))
        return "".join(path.read_text() for path in files)


def _parser(verb: str) -> argparse.ArgumentParser:
    """Return the flags of a verb, as `gcloud compute tpus tpu-vm VERB --help` lists them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    create = ("version", "accelerator-type", "type", "topology", "network", "labels")
    flags = {"create": create, "ssh": ("command", "ssh-flag"), "list": ("format",)}
    switches = {"create": ("spot", "reserved", "internal-ips", "async")}
    positional = {"list": "*", "scp": "+"}
    parser.add_argument("name", nargs=positional.get(verb))
    parser.add_argument("--worker", type=int, default=0)
    for name in ("zone", "project", *flags.get(verb, ())):
        parser.add_argument(f"--{name}", action="append" if name == "ssh-flag" else "store")
    connects = ("internal-ip",) if verb in ("ssh", "scp") else ()
    for name in ("quiet", *switches.get(verb, ()), *connects):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    (tmp_path / "bin").mkdir()
    (tmp_path / "code").mkdir()
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "code")], check=True)
    made = Cloud(tmp_path)
    made.write_code(job_sh="echo hello from $XLASHARD_POD_PROCESS_ID\n")
    try:
        yield made
    finally:
        made.kill("CLOUD_FOLDER", str(tmp_path))


@pytest.fixture
def forked_python(cloud: Cloud) -> None:
    """Let the VMs run Python as forks of a process that has imported JAX."""
    own = ("CLOUD_FOLDER", "HOME")  # The server outlives this cloud.
    kept = {name: value for name, value in cloud._environment(0).items() if name not in own}
    command = shlex.join(python_command(kept))
    for name in ("python", "python3"):
        (cloud.folder / "bin" / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (cloud.folder / "bin" / name).chmod(0o755)
