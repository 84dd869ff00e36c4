"""The command line: ``xlashard COMMAND``, or ``python -m xlashard COMMAND``.

This module parses arguments only. Each command is implemented in a module of its own, named in
`_TASKS` and imported when the command runs, so that ``--help`` does not import it.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from xlashard.commands.cli_args import (
    add_compile,
    add_legacy,
    add_pod,
    add_preflight,
    add_train,
)
from xlashard.wording import printable


class _Command(NamedTuple):
    """A subcommand.

    Attributes:
        summary: One line for ``xlashard --help``.
        example: A command line.
        module: Name of the module whose `run` executes it.
        add_arguments: Function that adds its arguments to a parser.
    """

    summary: str
    example: str
    module: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


_TASKS = {
    "Predict a program on TPU chips, on a machine without one": {
        "preflight": _Command(
            "report whether it fits, the time of a step, collectives and cost",
            "xlashard preflight --topology v5p-128 configs/8b_v5p_64.toml",
            "xlashard.commands.preflight",
            add_preflight,
        ),
        "compile": _Command(
            "compile it into a file that the chips run",
            "xlashard compile --topology v5p-128 configs/8b_v5p_64.toml",
            "xlashard.commands.compile",
            add_compile,
        ),
    },
    "Train": {
        "train": _Command(
            "train a byte-level transformer on text, or resume a run",
            "xlashard train --config configs/tiny.toml",
            "xlashard.train.command",
            add_train,
        ),
    },
    "Run on several processes": {
        "pod": _Command(
            "run a command in every process of an emulated pod",
            "xlashard pod -n 4 -d 2 -- python script.py",
            "xlashard.testing.pod_command",
            add_pod,
        ),
    },
    "Use programs of 2022 and 2023": {
        "legacy": _Command(
            "rewrite them for today's JAX, as a diff first",
            "xlashard legacy --migrate old_train.py",
            "xlashard.commands.legacy",
            add_legacy,
        ),
    },
}
_COMMANDS = {name: command for task in _TASKS.values() for name, command in task.items()}
_EPILOG = """\
Options of a command: xlashard COMMAND --help.
What a program sends and holds, and how an array lies on its devices, is shown in Python:
xlashard.explain(function, *arguments) and xlashard.visualize(array).
"""
_EXTRAS = {"libcst": "legacy", "matplotlib": "train", "optax": "train", "orbax": "train"}


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        words: The command line without the program's name; by default that of this process.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong use or settings, 130 stopped by Ctrl-C.
    """
    arguments, unknown = make_parser().parse_known_args(words)
    if unknown:
        # With the usage of the command, not with that of all commands together.
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return importlib.import_module(_COMMANDS[arguments.command].module).run(arguments)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        print(
            f"error: `xlashard {arguments.command}` needs {error.name}. Write:\n"
            f"  pip install 'xlashard[{extra}]'",
            file=sys.stderr,
        )
        return 1


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are printable, whatever the words are."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="xlashard",
        usage="xlashard COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_description(),
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        prog="xlashard",
        help=argparse.SUPPRESS,
    )
    for name, command in _COMMANDS.items():
        command.add_arguments(commands.add_parser(name))
    return parser


def _description() -> str:
    """Return the text of ``--help`` that lists the commands by task."""
    lines = ["Arrays, shardings and pjit over many devices."]
    for task, commands in _TASKS.items():
        lines += ["", f"{task}:"]
        for name, command in commands.items():
            lines += [f"  {name:<10} {command.summary}", f"  {'':<10} $ {command.example}"]
    return "\n".join(lines)
