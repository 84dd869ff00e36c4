"""One call of a script: flags and exit codes, its settings, and its commands of gcloud."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Literal, get_args, get_origin

from xlashard.cli.cloud.cloud_settings import (
    Accelerator,
    CloudSettings,
    TpuSettings,
    check_name,
    load_settings,
    manifest,
    read_accelerator,
)
from xlashard.errors import CloudError
from xlashard.support.background import (
    drop_output,
    end_process,
    handling_signals,
)
from xlashard.support.consoles import replace_unencodable
from xlashard.support.formatting import print_error, printable
from xlashard.train.config.schema import Leaf, leaves, reference
from xlashard.train.errors import RunError

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
        # no-catalogue: needs a cloud, for which tests/cli/cloud has a stand-in
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
            end_process(process)
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
            # no-catalogue: needs a cloud, for which tests/cli/cloud has a stand-in
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


type Step = Callable[[Session], int]
"""A step of a script, which returns an exit code."""


def start(step: Step, groups: Sequence[str], description: str | None) -> None:
    """Run a script: parse its flags, run its step, and exit.

    Args:
        step: The step.
        groups: Groups of settings that have flags, such as ``tpu``.
        description: Head of the help.
    """
    sys.exit(run(sys.argv, step, groups, description))


def print_manifest(session: "Session") -> int:
    """Print the manifest of a job on GKE.

    Raises:
        CloudError: A setting is missing or invalid.
    """
    print(manifest(session.settings), end="")
    return 0


def removed(replacement: str) -> None:
    """Exit with an error that names the replacement of a removed script."""
    print_error(f"{os.path.basename(sys.argv[0])} was removed: {replacement}")
    sys.exit(2)


def run(argv: Sequence[str], step: Step, groups: Sequence[str], description: str | None) -> int:
    """Run a step as a command line requests.

    Returns:
        The exit code: that of the step, 2 for invalid flags or settings, 1 for another failure.
    """
    replace_unencodable()
    parser = _parser(os.path.basename(argv[0]), groups, description)
    try:
        values = vars(parser.parse_args(list(argv[1:])))
    except SystemExit as error:
        return int(error.code or 0)
    flags = {key: value for key, value in values.items() if "." in key and value is not None}
    dry = values["dry_run"]
    with handling_signals(signal.default_int_handler, [signal.SIGTERM]):
        try:
            settings = load_settings(values["config"], flags)
            return step(Session(settings, Runner(dry), (lambda text: None) if dry else _report))
        except CloudError as error:
            print_error(error)
            return error.code or 1
        except RunError as error:  # A setting is unknown or invalid.
            print_error(error)
            return 2
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130
        except BrokenPipeError:
            return drop_output()


def _report(text: str) -> None:
    print(f"xlashard: {printable(text)}", file=sys.stderr, flush=True)


def _parser(
    program: str, groups: Sequence[str], description: str | None
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        program,
        usage=f"{program} [--config=FILE] [--FLAG=VALUE ...]",
        description=description,
        epilog="The headings are the tables of --config that hold the same settings.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--dry_run", action="store_true", help="print every command, run none")
    defaults = {path: default for path, _, default, _ in reference(CloudSettings)}
    headings = {group: parser.add_argument_group(f"[{group}]") for group in groups}
    for leaf in leaves(CloudSettings):
        group, _, name = leaf.path.partition(".")
        if group in headings:
            note = leaf.note.replace("%", "%%")
            if leaf.default not in ("", ()):
                note += f" (default: {defaults[leaf.path]})"
            headings[group].add_argument(
                f"--{name}", dest=leaf.path, default=None, help=note, **_kind(leaf)
            )
    return parser


def _kind(leaf: Leaf) -> dict[str, Any]:
    """Return the arguments of `add_argument` that depend on the type of a setting."""
    if leaf.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(leaf.kind) is Literal:
        return {"choices": get_args(leaf.kind)}
    if get_origin(leaf.kind) is tuple:
        return {"action": "append", "metavar": "TEXT"}
    return {"type": leaf.kind, "metavar": {int: "N", float: "X", str: "TEXT"}[leaf.kind]}
