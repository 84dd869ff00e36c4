"""Run the Python script of a command line with the programs that it compiles recorded.

JAX is imported by the script, not before: the script may set variables that JAX reads then. Reports
are made in the same process, because a traced program can't leave it.
"""

import _thread
import argparse
import contextlib
import importlib
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import xlashard
from xlashard.config import read_flags
from xlashard.errors import ArgumentError, XlashardError, counted
from xlashard.support.background import handling_signals, repeating
from xlashard.support.formatting import closest, in_bytes, print_error, printable
from xlashard.support.import_hook import when_imported
from xlashard.support.program_runner import (
    ProgramNotFoundError,
    ProgramStopped,
    ScriptOrModule,
    parse_script,
)
from xlashard.support.program_runner import run as run_program

if TYPE_CHECKING:
    from xlashard._jax.trace.observed_programs import ObservedCall
    from xlashard.analysis.programs.from_script import RecordedProgram

_EVERY = 15.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class StopRule:
    """When to stop a script.

    Attributes:
        calls: Calls of one program that counts; None without a limit.
        seconds: Seconds since the start; None without a limit.
    """

    calls: int | None = None
    seconds: float | None = None


@dataclass
class ScriptRun:
    """Result of running a script.

    Attributes:
        title: The script and its arguments.
        outcome: How it ended.
        why: The stop rule that applied, or the exit code.
        programs: The recorded programs, by their first use.
    """

    title: str
    outcome: Literal["finished", "stopped", "failed"] = "finished"
    why: str = ""
    programs: "list[RecordedProgram]" = field(default_factory=list)

    @property
    def described(self) -> str:
        """Return how the script ended, with the reason."""
        return f"{self.outcome}, {self.why}," if self.why else self.outcome


def run_script(
    program: ScriptOrModule,
    stop: StopRule,
    counts: "Callable[[RecordedProgram], bool]",
    on_call: Callable[..., list[Any]] | None = None,
) -> ScriptRun:
    """Run a script as `__main__`, and record its programs.

    Ctrl-C, and a limit, raise `ProgramStopped` in the script, at its next call of a program or in
    its main thread.

    Args:
        program: The script.
        stop: When to stop it.
        counts: Returns True for the programs whose calls count for `stop`.
        on_call: Returns the results of a call, as for `ProgramRecorder`.

    Raises:
        ArgumentError: If the module does not exist.
    """
    title = " ".join([program.target, *program.arguments])
    result = ScriptRun(printable(title if len(title) < 60 else title[:57] + "..."))
    recorder = _LazyRecorder(result, stop, counts, on_call)
    hook = sys.excepthook
    began = time.monotonic()
    with (
        when_imported("jax", recorder.begin),
        repeating(partial(_show_progress, result, began), _EVERY, "progress"),
        _stoppable(recorder, stop),
    ):
        try:
            run_program(program)
        except ProgramStopped as stopped:
            if isinstance(stopped.__cause__, KeyboardInterrupt):
                raise stopped.__cause__ from None
            result.outcome, result.why = "stopped", str(stopped)
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                result.outcome, result.why = "failed", f"exit code {exit_.code}"
        except ProgramNotFoundError as error:
            raise ArgumentError(str(error)) from None  # no-catalogue: the module is imported
        except BaseException as error:
            # Its traceback is printed.
            result.outcome, result.why = "failed", type(error).__name__
        finally:
            recorder.end()
            # A script that fails leaves it silent.
            sys.excepthook = hook
    return result


class _LazyRecorder:
    """Observer that imports the rest of this package with the first program.

    JAX may be imported by an import of this package, which is not complete then.
    """

    def __init__(
        self,
        result: ScriptRun,
        stop: StopRule,
        counts: "Callable[[RecordedProgram], bool]",
        on_call: Callable[..., list[Any]] | None,
    ) -> None:
        self._result = result
        self._stop = stop
        self._counts = counts
        self._on_call = on_call
        self._recorder: Any = None
        self._calls: Counter[tuple[str, str]] = Counter()
        self.end: Callable[[], None] = lambda: None
        self.reason = ""

    def begin(self) -> None:
        topologies = importlib.import_module("xlashard._jax.runtime.topologies")
        observing = importlib.import_module("xlashard._jax.trace.observed_programs")
        undo = contextlib.ExitStack()
        undo.enter_context(topologies.quiet_backends())
        undo.callback(observing.observe(self))
        with contextlib.suppress(AttributeError):
            undo.enter_context(xlashard.watch())
        self.end = undo.close

    def lowered(self, program: Any) -> None:
        self._inner().lowered(program)

    def failed(self, error: Exception) -> None:
        self._inner().failed(error)

    def called(self, call: "ObservedCall") -> list[Any]:
        return self._inner().called(call)

    def _inner(self) -> Any:
        if self.reason and threading.current_thread() is threading.main_thread():
            raise ProgramStopped(self.reason)
        if self._recorder is None:
            recorded = importlib.import_module("xlashard.analysis.programs.from_script")
            self._recorder = recorded.ProgramRecorder(self._result.programs, self._called)
        return self._recorder

    def _called(self, recorded: "RecordedProgram", call: "ObservedCall") -> list[Any]:
        limit = self._stop.calls
        # A function may be compiled again for its second call.
        function = recorded.name, recorded.source
        self._calls[function] += 1
        if limit is not None and self._calls[function] > limit and self._counts(recorded):
            recorded.calls -= 1
            if not recorded.calls and self._result.programs[-1] is recorded:
                self._result.programs.pop()
            self.stop(f"{recorded.name} was called {counted(limit, 'time')}")
        return call.run() if self._on_call is None else self._on_call(recorded, call)

    def stop(self, reason: str) -> None:
        """Stop the script, from any of its threads."""
        self.reason = reason
        if threading.current_thread() is not threading.main_thread():
            _thread.interrupt_main()
        raise ProgramStopped(reason)


@contextlib.contextmanager
def _stoppable(recorder: _LazyRecorder, stop: StopRule) -> Iterator[None]:
    """Let Ctrl-C and the limit of time stop the script."""

    def stopped(*_: object) -> None:
        recorder.reason = recorder.reason or "Ctrl-C"
        raise ProgramStopped(recorder.reason)

    def late() -> None:
        recorder.reason = recorder.reason or f"{stop.seconds:g} s are over"
        _thread.interrupt_main()

    timer = threading.Timer(stop.seconds or 0.0, late)
    timer.daemon = True
    with handling_signals(stopped, [signal.SIGINT]):
        if stop.seconds is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _show_progress(result: ScriptRun, began: float) -> None:
    """Print a line of progress to standard error."""
    programs = [p for p in result.programs if not p.is_operation]
    most = max(programs, key=lambda p: p.calls, default=None)
    calls = f", {most.name} called {counted(most.calls, 'time')}" if most and most.calls else ""
    print(
        f"xlashard: {result.title} has run for {time.monotonic() - began:.0f} s: "
        f"{counted(len(programs), 'program')}{calls}; Ctrl-C ends it and shows the report",
        file=sys.stderr,
        flush=True,
    )


def check_script_options(arguments: argparse.Namespace) -> None:
    """Check the options that select the programs of a script.

    Raises:
        ArgumentError: If one is invalid, or no script follows `--`.
    """
    for name in ("programs", "stop_after", "min_bytes", "run"):
        if getattr(arguments, name, None) not in (None, []) and not arguments.script:
            word = f"--{name.replace('_', '-')}"
            raise ArgumentError(
                f"{word} is for the programs of a script: leave it out, or write -- python train.py"
            )
    if "" in arguments.programs:
        raise ArgumentError("--programs is empty: write a name, or a glob such as 'train_*'")
    matches("", arguments.programs)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a program's name matches one of the patterns.

    Args:
        name: The name.
        patterns: Globs such as `train_*`, or regular expressions such as `/(train|eval)_step/`.

    Raises:
        ArgumentError: If a regular expression is invalid.
    """
    for pattern in patterns:
        is_glob = len(pattern) <= 2 or not pattern[0] == pattern[-1] == "/"
        try:
            if fnmatchcase(name, pattern) if is_glob else re.search(pattern[1:-1], name):
                return True
        except re.error as error:
            raise ArgumentError(
                f"--programs {pattern} is no regular expression ({error}): write a glob such as "
                "'train_*', or '/(train|eval)_step/'"
            ) from None
    return False


def select(
    result: ScriptRun, patterns: Sequence[str], least: int | None
) -> "list[RecordedProgram]":
    """Return the programs of a script that are reported.

    Args:
        result: The run of the script.
        patterns: Patterns of names, as for `matches`; all names if empty.
        least: Bytes of arguments and results that a program must have; None leaves out operations
            unless a pattern names them.

    Raises:
        ArgumentError: If no program has such a name or size.
    """

    def is_selected(program: "RecordedProgram") -> bool:
        if patterns and not matches(program.name, patterns):
            return False
        if least is not None:
            return program.nbytes >= least
        return bool(patterns) or not program.is_operation

    selected = [program for program in result.programs if is_selected(program)]
    if not selected:
        raise ArgumentError(_nothing_selected(result, patterns, least))
    return selected


def _nothing_selected(result: ScriptRun, patterns: Sequence[str], least: int | None) -> str:
    """Return the error about a script none of whose programs is selected."""
    request = f" named {' or '.join(patterns)}" if patterns else ""
    names = sorted({p.name for p in result.programs if not p.is_operation})
    if least is not None:
        largest = max(result.programs, key=lambda p: p.nbytes)
        request += f" of {in_bytes(least)}"
        known = f"the largest, {largest.name}, has {in_bytes(largest.nbytes)}"
    elif names:
        known = f"its programs are {', '.join(names)}"
        close = closest(patterns[0], names)
        known += f"; did you mean {close}?" if close else ""
    else:
        request, operations = " under jit", counted(len(result.programs), "operation")
        known = f"write --min-bytes 0 for its {operations} outside of jit"
    return f"{result.title} {result.described} and compiled no program{request}: {known}"


def run(arguments: argparse.Namespace) -> int:
    """Run ``xlashard run``.

    Args:
        arguments: The words, parsed; `script` has those after `--`.

    Returns:
        The exit code of a script that ends well: 0; 2 for wrong use. A script that fails ends the
        process as it would end Python.
    """
    try:
        if not arguments.script:
            raise ArgumentError("which program? Write xlashard run -- python train.py")
        program = parse_script(arguments.script).program
        read_flags(os.environ)
    except XlashardError as error:
        print_error(error)
        return 2
    # An error of the script is Python's to print.
    try:
        with (
            contextlib.ExitStack() as settings,
            when_imported("jax", partial(_apply_settings, settings)),
        ):
            run_program(program)
    except ProgramNotFoundError as error:
        print_error(error)
        return 2
    return 0


def _apply_settings(settings: contextlib.ExitStack) -> None:
    """Run the body of the package, which reads the environment, unless that imports JAX itself.

    Functions of `jax.jit` are watched for `explain_recompile`.

    Args:
        settings: Ends the watch.
    """
    with contextlib.suppress(AttributeError):
        _ = xlashard.Array
        settings.enter_context(xlashard.watch())
