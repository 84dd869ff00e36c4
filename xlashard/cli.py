"""The command line: ``xlashard COMMAND``, or ``python -m xlashard COMMAND``.

This module reads the words and nothing else. What a command does stands in a module of its own,
named in `_COMMANDS` and imported when it is asked for, so that ``--help`` does not pay for it.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from xlashard.commands.cli_args import (
    add_compile,
    add_legacy,
    add_preflight,
    add_settings,
    count,
    seconds,
)
from xlashard.wording import printable

_COMMANDS = {
    "train": "xlashard.train.command",
    "pod": "xlashard.testing.launch.pod_command",
    "preflight": "xlashard.commands.preflight",
    "compile": "xlashard.commands.compile",
    "legacy": "xlashard.commands.legacy",
}
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
        return importlib.import_module(_COMMANDS[arguments.command]).run(arguments)
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
    """The words that the command line understands."""
    parser = _Parser(prog="xlashard", description="Arrays, shardings and pjit over many devices.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands.add_parser("train", help="train a byte-level transformer on text"))
    _add_pod(commands.add_parser("pod", help="run a command in every process of an emulated pod"))
    add_preflight(
        commands.add_parser("preflight", help="say what a program would take and cost on TPU chips")
    )
    add_compile(commands.add_parser("compile", help="compile a program for TPU chips into a file"))
    add_legacy(
        commands.add_parser("legacy", help="migrate programs of 2022 and 2023 to today's JAX")
    )
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(parser=parser)
    parser.description = (
        "Trains a byte-level transformer with the settings of a TOML file, and leaves settings, "
        "measurements and a loss curve in RUNS/NAME. Ctrl-C or SIGTERM stops it and leaves a "
        "checkpoint, from which --resume continues."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the settings file, such as configs/tiny.toml"
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        nargs="?",
        const="",
        help="go on with a run from its last checkpoint, in its folder and with its settings; "
        "without RUN: with the last one in RUNS",
    )
    parser.add_argument(
        "--auto-resume",
        action="store_true",
        help="resume the newest run of that name in RUNS that has a checkpoint; start it if there "
        "is none. For jobs that are restarted after preemption",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        nargs="+",
        help="text files or folders of them, instead of the prose that ships with Python",
    )
    add_settings(parser)
    parser.add_argument("--name", help="folder of the results below RUNS; default: the file's name")
    parser.add_argument("--steps", type=int, metavar="N", help="the same as --set training.steps=N")
    parser.add_argument(
        "--runs", metavar="FOLDER", default="runs", help="where the results go (default: runs)"
    )
    parser.add_argument(
        "--keys", action="store_true", help="print every key with its type and default, and end"
    )


def _add_pod(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(parser=parser)
    parser.usage = (
        "xlashard pod [-n N] [-d D] [--timeout S] [--grace S] [--only I,J] -- COMMAND ..."
    )
    parser.description = (
        "Runs a command in N processes of this machine that JAX can join to a pod, each with D "
        "emulated CPU devices: jax.distributed.initialize() and xlashard.multihost.initialize() "
        "find their place by themselves. Every line of output has the number of its process. When "
        "one fails the others are ended, and when this command ends in any way, so do all."
    )
    parser.add_argument(
        *("-n", "--processes"),
        type=count,
        default=2,
        metavar="N",
        help="how many processes (default: 2)",
    )
    parser.add_argument(
        *("-d", "--devices"),
        type=count,
        default=1,
        metavar="D",
        help="how many emulated devices each has (default: 1)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        help="seconds after which all show the stacks of their threads and are ended",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        default=5.0,
        metavar="S",
        help="seconds that the others have when one has failed (default: 5)",
    )
    parser.add_argument(
        "--only",
        type=_numbers,
        metavar="I,J",
        help="show the output of these processes alone; of another that fails, its last lines",
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as python script.py"
    )


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if all(word.isascii() and word.isdecimal() for word in words):
        return sorted({int(word) for word in words})
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of processes such as 0,2")
