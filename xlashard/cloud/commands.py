"""Commands as values, and what runs them or only shows them."""

import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO

from xlashard.errors import CloudError

# Of a command that failed, in an error.
_LAST_LINES = 15


@dataclass(frozen=True)
class Command:
    """A command of this machine.

    Attributes:
        words: The program and its arguments; no shell takes part.
        why: What it is for, as the end of "could not ...".
        given: What it reads from its standard input.
    """

    words: tuple[str, ...]
    why: str
    given: str = ""

    @property
    def text(self) -> str:
        """As it would be typed into a shell."""
        typed = shlex.join(self.words)
        return f"{typed} <<'END'\n{self.given.rstrip()}\nEND" if self.given else typed


@dataclass(frozen=True)
class Finished:
    """A command that is over.

    Attributes:
        command: Which.
        code: Its exit code; less than 0 for the signal that ended it.
        stdout: What it wrote to its standard output.
        stderr: What it wrote to its standard error.
    """

    command: Command
    code: int
    stdout: str = ""
    stderr: str = ""

    def check(self) -> str:
        """What it wrote to its standard output.

        Raises:
            CloudError: It failed.
        """
        if self.code == 0:
            return self.stdout
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()[-_LAST_LINES:]
        said = "".join(f"\n  {line}" for line in lines) or " nothing"
        raise CloudError(  # no-catalogue: needs a cloud
            f"could not {self.command.why} (exit code {self.code}). It said:{said}\n"
            f"The command was:\n  {self.command.text}",
            code=self.code,
        )


class Runner(Protocol):
    """Runs commands, or says which it would run.

    Attributes:
        dry: Whether nothing is run.
    """

    @property
    def dry(self) -> bool: ...  # noqa: D102

    def run(self, command: Command) -> Finished:
        """Runs a command to its end; in a dry run it ends well and says nothing."""
        ...

    def show(self, command: Command) -> int:
        """Runs a command that has this terminal for itself, and gives its exit code."""
        ...

    def start(self, command: Command) -> "subprocess.Popen[bytes] | None":
        """Starts a command whose standard output is read as it comes; None in a dry run."""
        ...


class SystemRunner:
    """Runs commands on this machine."""

    dry = False

    def run(self, command: Command) -> Finished:
        """Runs a command to its end.

        Raises:
            CloudError: There is no such program.
        """
        process = _popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        with _EndedWith(process):
            out, err = process.communicate(command.given.encode())
        texts = (text.decode("utf-8", errors="replace") for text in (out, err))
        return Finished(command, process.returncode, *texts)

    def show(self, command: Command) -> int:
        """Runs a command that has this terminal for itself, and gives its exit code."""
        try:
            return subprocess.call(command.words)
        except FileNotFoundError:
            raise _missing(command) from None  # no-catalogue: needs a cloud

    def start(self, command: Command) -> "subprocess.Popen[bytes]":
        """Starts a command in a session of its own: Ctrl-C in this terminal is not for it."""
        return _popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


class DryRunner:
    """Shows commands in the order in which they would run, and runs none.

    Args:
        out: Where they are written, each after a comment, as lines that a shell takes.
    """

    dry = True

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._lock = threading.Lock()

    def run(self, command: Command) -> Finished:
        """Shows a command."""
        with self._lock:
            print(f"# {command.why}\n{command.text}", file=self._out, flush=True)
        return Finished(command, 0)

    def show(self, command: Command) -> int:
        """Shows a command."""
        return self.run(command).code

    def start(self, command: Command) -> None:
        """Shows a command."""
        self.run(command)


class _EndedWith:
    """Kills a process when the block ends by an error, such as Ctrl-C."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
            self._process.wait()


def _popen(command: Command, stdin: int, stderr: int) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command.words,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise _missing(command) from None  # no-catalogue: needs a cloud


_INSTALLED_BY = {
    "gcloud": "install the Google Cloud SDK (https://cloud.google.com/sdk/docs/install)",
    "kubectl": "install it: gcloud components install kubectl",
}


def _missing(command: Command) -> CloudError:
    program = command.words[0]
    advice = _INSTALLED_BY.get(program, "install it")
    return CloudError(
        f"could not {command.why}: there is no program {program!r} on the PATH; {advice}, or see "
        "what it would be asked for with --dry_run",
        code=127,
    )


type Say = Callable[[str], None]
"""Tells the user something, in a line."""
