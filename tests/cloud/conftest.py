"""A cloud of local processes: the stand-ins first on the PATH, and nothing left afterwards."""

import io
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from xlashard.cloud.commands import DryRunner, SystemRunner
from xlashard.cloud.retrying import SystemClock
from xlashard.cloud.session import Session
from xlashard.cloud.settings import load_settings
from xlashard.testing.launch.pod_environment import flags_for_devices

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# Quick, for machines that are folders.
QUICK = {
    "wait.poll": 0.05,
    "wait.ready_within": 20.0,
    "wait.ssh_within": 5.0,
    "wait.ssh_wait": 0.02,
    "watch.pause": 0.05,
    "run.grace": 5.0,
    "run.others": 0.5,
    "setup.python": "",
    "setup.install": "",
}


@dataclass
class Cloud:
    """The cloud of one test.

    Attributes:
        folder: All that the stand-ins know.
        said: What a session has told.
    """

    folder: Path
    said: list[str] = field(default_factory=list)

    def session(self, **settings: Any) -> Session:
        """A session for a TPU of two workers; `run__command` stands for `run.command`."""
        return Session(self._settings(settings), SystemRunner(), SystemClock(), self.said.append)

    def dry(self, **settings: Any) -> tuple[Session, io.StringIO]:
        """One that only shows its commands, and where it shows them."""
        out = io.StringIO()
        clock = SystemClock()
        return Session(self._settings(settings), DryRunner(out), clock, self.said.append), out

    def _settings(self, settings: dict[str, Any]) -> Any:
        own = {
            "tpu.name": "one",
            "tpu.accelerator": "v4-16",
            "tpu.zone": "here",
            "run.logs": str(self.folder / "logs"),
            "setup.code": str(self.folder / "code"),
        }
        named = {name.replace("__", "."): value for name, value in settings.items()}
        return load_settings("", {**QUICK, **own, **named})

    def faults(self, **faults: Any) -> None:
        """Lets things go wrong."""
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def calls(self) -> list[list[str]]:
        """What the stand-ins were asked."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def verbs(self) -> list[str]:
        """The same, without flags."""
        return [" ".join(w for w in words if not w.startswith("-")) for words in self.calls()]

    def write_code(self, **files: str) -> None:
        """Writes a project; `job_sh` is the file `job.sh`."""
        (self.folder / "code").mkdir(exist_ok=True)
        for name, text in files.items():
            (self.folder / "code" / name.replace("_", ".")).write_text(text)

    def preempt(self, name: str = "one") -> None:
        """Takes a TPU away: its VMs have no power any more."""
        path = self.folder / "tpus" / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "state": "PREEMPTED"}))
        for home in (self.folder / "homes").glob(f"{name}--*"):
            end(f"HOME={home}")

    def running(self) -> list[int]:
        """The processes of its machines."""
        return processes_with(f"STANDIN_CLOUD={self.folder}")

    def log(self, label: str) -> str:
        """What a worker wrote in all jobs."""
        files = sorted((self.folder / "logs").glob(f"**/worker-{label}.log"))
        return "".join(path.read_text() for path in files)


def processes_with(variable: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def end(variable: str) -> None:
    for pid in processes_with(variable):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    python = tmp_path / "bin"
    python.mkdir()
    # The VM's own Python is the one of the tests, with what is installed there.
    for name in ("python", "python3"):
        (python / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (python / name).chmod(0o755)
    path = f"{HERE / 'standins'}:{python}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS_OF_VMS", flags_for_devices(os.environ["XLA_FLAGS"], 2))
    made = Cloud(tmp_path)
    made.write_code(job_sh="echo hello from $XLASHARD_POD_PROCESS_ID\n")
    monkeypatch.setenv("STANDIN_CLOUD", str(tmp_path))
    try:
        yield made
    finally:
        monkeypatch.delenv("STANDIN_CLOUD")
        end(f"STANDIN_CLOUD={tmp_path}")
