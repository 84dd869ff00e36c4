"""One call of a script: its settings, its commands of gcloud, and the object that runs them."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO

from xlashard.cloud.cloud_settings import (
    Accelerator,
    CloudSettings,
    TpuSettings,
    check_name,
    read_accelerator,
)
from xlashard.errors import CloudError

_VM = ("gcloud", "compute", "tpus", "tpu-vm")


# Detect a dead connection after a minute of silence.
_KEEPALIVE = ("--ssh-flag=-o ServerAliveInterval=15", "--ssh-flag=-o ServerAliveCountMax=4")


# Length of the output of a failed command in an error.
_LAST_LINES = 15


@dataclass(frozen=True)
class Command:
    """A command of this machine.

    Attributes:
        words: Program and arguments; no shell takes part.
        purpose: Continuation of the sentence "could not ...".
    """

    words: tuple[str, ...]
    purpose: str

    @property
    def text(self) -> str:
        """Text to type into a shell."""
        return shlex.join(self.words)


@dataclass(frozen=True)
class Finished:
    """Exit code and output of a command."""

    command: Command
    code: int
    stdout: str = ""
    stderr: str = ""

    @property
    def last_error(self) -> str:
        """Last line of the standard error."""
        return (self.stderr.strip().splitlines() or ["no message"])[-1]

    def check(self) -> str:
        """Return the standard output.

        Raises:
            CloudError: The command failed.
        """
        if self.code == 0:
            return self.stdout
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()[-_LAST_LINES:]
        output = "".join(f"\n  {line}" for line in lines) or " none"
        # no-catalogue: needs a cloud, for which tests/cloud has a stand-in
        raise CloudError(
            f"could not {self.command.purpose} (exit code {self.code}). Output:{output}\n"
            f"Command:\n  {self.command.text}",
            code=1,
        )


class Runner:
    """Runs commands on this machine, or only prints them.

    Args:
        dry: Print each command after a comment with its purpose, and run none.
    """

    def __init__(self, dry: bool = False) -> None:
        self.dry = dry

    def run(self, command: Command) -> Finished:
        """Run a command to its end; a dry run prints it and reports success."""
        process = self.start(command, subprocess.PIPE)
        if process is None:
            return Finished(command, 0)
        try:
            output = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
        texts = (text.decode("utf-8", errors="replace") for text in output)
        return Finished(command, process.returncode, *texts)

    def start(self, command: Command, stderr: BinaryIO | int) -> "subprocess.Popen[bytes] | None":
        """Start a command in its own session, out of reach of Ctrl-C; None in a dry run.

        Args:
            command: The command; its standard output is a pipe.
            stderr: Destination of its standard error.

        Raises:
            CloudError: The program is not installed.
        """
        if self.dry:
            print(f"# {command.purpose}\n{command.text}", file=sys.stdout, flush=True)
            return None
        try:
            return subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        except FileNotFoundError:
            # no-catalogue: needs a cloud, for which tests/cloud has a stand-in
            raise CloudError(
                f"could not {command.purpose}: {command.words[0]!r} is not on the PATH. Install "
                "the Google Cloud SDK (https://cloud.google.com/sdk/docs/install), or print the "
                "commands with --dry_run",
                code=1,
            ) from None


@dataclass(frozen=True)
class Gcloud:
    """Commands for one TPU.

    Attributes:
        tpu: Settings of the TPU.
    """

    tpu: TpuSettings

    def create(self, accelerator: Accelerator) -> Command:
        """Request the TPU, without waiting for it."""
        tpu = self.tpu
        words = (
            *("create", tpu.name, *accelerator.flags),
            f"--version={tpu.runtime or accelerator.image}",
            *(() if tpu.capacity == "on-demand" else (f"--{tpu.capacity}",)),
            *(("--internal-ips",) if tpu.internal_ips else ()),
            *tpu.create_flags,
        )
        return self._command(*words, "--async", purpose=f"request the TPU {tpu.name}")

    def list(self) -> Command:
        """List all TPUs of the zone, as JSON."""
        return self._command("list", "--format=json", purpose=f"query the TPU {self.tpu.name}")

    def delete(self) -> Command:
        """Delete the TPU, and wait for it."""
        return self._command("delete", self.tpu.name, purpose=f"delete the TPU {self.tpu.name}")

    def ssh(self, worker: int, script: str, purpose: str) -> Command:
        """Run a shell command on one worker; the worker's name is appended to the purpose."""
        words = ("ssh", self.tpu.name, f"--worker={worker}", *self._internal, *_KEEPALIVE)
        return self._command(
            *words, f"--command={script}", purpose=f"{purpose} worker {worker} of {self.tpu.name}"
        )

    def copy(self, worker: int, files: Sequence[str], folder: str) -> Command:
        """Copy local files into a folder of one worker, relative to its home folder."""
        words = ("scp", *files, f"{self.tpu.name}:{folder}/", f"--worker={worker}")
        purpose = f"copy files to worker {worker} of {self.tpu.name}"
        return self._command(*words, *self._internal, purpose=purpose)

    @property
    def _internal(self) -> tuple[str, ...]:
        return ("--internal-ip",) if self.tpu.internal_ips else ()

    def _command(self, *words: str, purpose: str) -> Command:
        place = (("--zone", self.tpu.zone), ("--project", self.tpu.project))
        flags = [f"{flag}={value}" for flag, value in place if value]
        return Command((*_VM, *words, *flags, "--quiet"), purpose)


_LONGEST_WAIT = 60.0


def backoff(first: float, limit: float = _LONGEST_WAIT) -> Iterator[float]:
    """Yield seconds to wait, each twice the one before, up to a limit.

    Example:
        >>> waits = backoff(10, limit=30)
        >>> [next(waits) for _ in range(4)]
        [10, 20, 30, 30]
    """
    while True:
        yield min(first, limit)
        first *= 2


@dataclass(frozen=True)
class Session:
    """One call of a script.

    Attributes:
        settings: Settings of the call.
        runner: Runs the commands.
        report: Prints a line about the progress.
        sleep: Waits for some seconds.
    """

    settings: CloudSettings
    runner: Runner
    report: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep

    @cached_property
    def gcloud(self) -> Gcloud:
        """Commands for this TPU.

        Raises:
            CloudError: The name of the TPU is missing or invalid.
        """
        check_name(self.settings.tpu.name)
        return Gcloud(self.settings.tpu)

    @cached_property
    def accelerator(self) -> Accelerator:
        """Type of the TPU.

        Raises:
            CloudError: The type is missing or unknown.
        """
        return read_accelerator(self.settings.tpu.accelerator)

    def retry(
        self, command: Command, is_final: Callable[[Finished], bool] = lambda done: False
    ) -> Finished:
        """Run a command until it succeeds, `--ssh_tries` times at most.

        Args:
            command: The command; running it several times must do no harm.
            is_final: Whether another attempt could not help.

        Returns:
            The last attempt.
        """
        wait = self.settings.wait
        waits = backoff(wait.ssh_wait)
        done = self.runner.run(command)
        for attempt in range(2, wait.ssh_tries + 1):
            if done.code == 0 or is_final(done):
                break
            pause = next(waits)
            self.report(
                f"could not {command.purpose} (exit code {done.code}: {done.last_error}); attempt "
                f"{attempt} of {wait.ssh_tries} in {pause:g} s"
            )
            self.sleep(pause)
            done = self.runner.run(command)
        return done
