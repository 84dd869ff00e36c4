"""The command line: ``xlashard COMMAND``, or ``python -m xlashard COMMAND``.

This module parses arguments only. Each command is implemented in a module of its own, named in
`_TASKS` and imported when the command runs. Neither this module nor what it imports imports JAX,
NumPy or rich: ``--help`` takes the time of Python's start (`xlashard/__init__.py` waits, too).
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import xlashard
from xlashard.cli.parsers import program_parsers, tool_parsers
from xlashard.errors import XlashardError
from xlashard.support.background import drop_output
from xlashard.support.consoles import replace_unencodable
from xlashard.support.formatting import closest, print_error


class _Command(NamedTuple):
    """A subcommand.

    Attributes:
        summary: One line for ``xlashard --help``.
        example: A command line.
        module: Name of the module whose `run` executes it.
        add_arguments: Function that adds its arguments to a parser.
        needs_jax: Whether the module needs `import xlashard`, and with it JAX.
    """

    summary: str
    example: str
    module: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    needs_jax: bool = True


_TASKS = {
    "Look into the programs of a script": {
        "explain": _Command(
            "report what each program of a script sends, holds and computes",
            "xlashard explain -- python train.py",
            "xlashard.cli.commands.explain_command",
            program_parsers.add_explain,
            needs_jax=False,
        ),
        "run": _Command(
            "run a script with checks and logs that environment variables enable",
            "xlashard run -- python train.py",
            "xlashard.cli.commands.script_run",
            program_parsers.add_run,
            needs_jax=False,
        ),
    },
    "Predict a program on TPU chips, on a machine without one": {
        "preflight": _Command(
            "report whether it fits, the time of a step, collectives and cost",
            "xlashard preflight --topology v5p-128 -- python train.py",
            "xlashard.cli.commands.preflight",
            program_parsers.add_preflight,
        ),
        "compile": _Command(
            "compile it into a file that the chips run",
            "xlashard compile --topology v5p-128 configs/8b_v5p_64.toml",
            "xlashard.cli.commands.compile",
            program_parsers.add_compile,
        ),
    },
    "Train": {
        "train": _Command(
            "train a byte-level transformer on text, or resume a run",
            "xlashard train --config configs/tiny.toml",
            "xlashard.train.command",
            tool_parsers.add_train,
        ),
        "reshard-checkpoint": _Command(
            "copy a checkpoint to other shardings or to safetensors, in little memory",
            "xlashard reshard-checkpoint SRC DST --mesh data=8 --rules \"=P('data')\"",
            "xlashard.cli.commands.reshard_checkpoint",
            tool_parsers.add_reshard_checkpoint,
        ),
    },
    "Try several processes on one machine": {
        "pod": _Command(
            "run a command in every process of an emulated pod",
            "xlashard pod -n 4 -d 2 -- python script.py",
            "xlashard.pods.testing.pod_command",
            tool_parsers.add_pod,
        ),
    },
    "Look at a running job": {
        "hosts": _Command(
            "show step, collective, memory and code of each process",
            "xlashard hosts --stacks",
            "xlashard.cli.commands.hosts",
            tool_parsers.add_hosts,
            needs_jax=False,
        ),
    },
    "Use programs of 2022 and 2023": {
        "legacy": _Command(
            "run them unchanged, list the removed names they use, or rewrite them",
            "xlashard legacy --report -- python old_train.py",
            "xlashard.cli.commands.legacy",
            tool_parsers.add_legacy,
            needs_jax=False,
        ),
    },
    "Set up": {
        "doctor": _Command(
            "check versions, devices and compilers of this machine",
            "xlashard doctor",
            "xlashard.cli.commands.doctor",
            tool_parsers.add_doctor,
            needs_jax=False,
        ),
        "completion": _Command(
            "print the completion of commands and options for a shell",
            "xlashard completion bash",
            "xlashard.cli.commands.completion",
            tool_parsers.add_completion,
            needs_jax=False,
        ),
    },
}
_COMMANDS = {name: command for task in _TASKS.values() for name, command in task.items()}
_EPILOG = """\
Options of a command: xlashard COMMAND --help. Versions: xlashard --version.
In Python: xlashard.explain(f, *args), xlashard.preflight(f, *args, topology="v5p-128"),
xlashard.explain_recompile(f), xlashard.visualize(array).
"""
_TRAIN = "'xlashard[train]'"
_REQUIREMENTS = {
    # For all but scripts of another environment, stored reports and the migration.
    "jax": "jax",
    "libcst": "'xlashard[legacy]'",
    **dict.fromkeys(("matplotlib", "optax", "orbax"), _TRAIN),
}
_VERSIONS = ("xlashard", "jax", "jaxlib", "libtpu")


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        words: The command line without the program's name; by default that of this process.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong use or settings, 130 stopped by
        Ctrl-C, 143 by SIGTERM.
    """
    replace_unencodable()
    try:
        try:
            return _run(_parse(sys.argv[1:] if words is None else words))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        print(str(error) or "stopped by Ctrl-C", file=sys.stderr)
        return getattr(error, "exit_code", 128 + signal.SIGINT)
    except BrokenPipeError:
        return drop_output()


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(2)
    words, script = program_parsers.split_script(words)
    arguments, unknown = parser.parse_known_args(words)
    arguments.command_line, arguments.script = words, script
    prefixes = getattr(arguments, "flag_prefixes", ())
    arguments.flags = [word for word in unknown if word.startswith(prefixes)]
    unknown = [word for word in unknown if word not in arguments.flags]
    if unknown:
        # With the usage of the command, not with that of all commands together.
        arguments.parser.error(_unknown_text(unknown, arguments))
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    command = _COMMANDS[arguments.command]
    if arguments.script:
        # Only for scripts: `--help` is to start quickly.
        from xlashard.cli.commands import other_python

        try:
            # Before JAX, which the environment of this process may lack.
            other_python.change_python(arguments.command_line, arguments.script)
        except XlashardError as error:
            print_error(error)
            return 2
    try:
        if command.needs_jax:
            # Any name of the layer: it requires JAX and valid variables in the environment.
            _ = xlashard.Array
    except XlashardError as error:
        print_error(error)
        return 2
    except ModuleNotFoundError as error:
        return _print_missing(error, arguments.command)
    try:
        return importlib.import_module(command.module).run(arguments)
    except ModuleNotFoundError as error:
        return _print_missing(error, arguments.command)


def _print_missing(error: ModuleNotFoundError, command: str) -> int:
    """Print what to install for a command, and return its exit code; raise for other modules."""
    package = error.name or ""
    # A missing module of an installed package, as in an old program, is that program's error.
    if package not in _REQUIREMENTS:
        raise error
    print(
        f"error: `xlashard {command}` needs {package}. Write:\n"
        f"  pip install {_REQUIREMENTS[package]}",
        file=sys.stderr,
    )
    return 1


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are printable, whatever the words are, and suggest known words."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and an error, and exit with 2."""
        self.print_usage(sys.stderr)
        print_error(message)
        self.exit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        close = closest(str(value), map(str, action.choices))
        known = ", ".join(map(str, action.choices))
        advice = f"did you mean {close}?" if close else f"expected one of {known}"
        noun = action.metavar or action.dest
        raise argparse.ArgumentError(None, f"unknown {noun} {value!r}; {advice}")


def _unknown_text(words: Sequence[str], arguments: argparse.Namespace) -> str:
    """Return the error about words that no argument of a command takes."""
    advice = program_parsers.find_script(arguments.command, words)
    if advice:
        return f"a script follows --: {advice}"
    texts = []
    for word in words:
        if not word.startswith("-"):
            continue
        close = closest(word.partition("=")[0], arguments.parser._option_string_actions)
        texts.append(f"unknown option {word}" + (f"; did you mean {close}?" if close else ""))
    return ", ".join(texts) or f"too many arguments: {' '.join(words)}"


class _ShowVersion(argparse.Action):
    """Prints the versions of this package and of JAX, which is not imported for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        # Takes a third of the time of ``--help``, which does without it.
        from importlib import metadata

        for name in _VERSIONS:
            try:
                print(f"{name} {metadata.version(name)}")
            except metadata.PackageNotFoundError:
                print(f"{name} is not installed")
        print(f"Python {sys.version.partition(' ')[0]}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="xlashard",
        usage="xlashard COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_description(),
        epilog=_EPILOG,
    )
    parser.set_defaults(main_parser=parser)
    parser.add_argument(
        "--version",
        action=_ShowVersion,
        nargs=0,
        help="show the versions of xlashard, JAX and libtpu, and exit",
    )
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        prog="xlashard",
        help=argparse.SUPPRESS,
    )
    for name, command in _COMMANDS.items():
        own = commands.add_parser(name, help=command.summary)
        own.set_defaults(parser=own)
        command.add_arguments(own)
    return parser


def _description() -> str:
    """Return the text of ``--help`` that lists the commands by task."""
    lines = ["Shows what sharded JAX programs do before they run."]
    for task, commands in _TASKS.items():
        lines += ["", f"{task}:"]
        for name, command in commands.items():
            lines += [f"  {name:<10} {command.summary}", f"  {'':<10} $ {command.example}"]
    return "\n".join(lines)
