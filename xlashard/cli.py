"""The command line: ``xlashard COMMAND``, or ``python -m xlashard COMMAND``.

This module reads the words and nothing else. What a command does stands in a module of its own,
named in `_COMMANDS` and imported when it is asked for, so that ``--help`` does not pay for it.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {"train": "xlashard.train.command"}
_EXTRAS = {"matplotlib": "train", "optax": "train"}


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        words: The command line without the program's name; by default that of this process.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong use or settings, 130 stopped by Ctrl-C.
    """
    arguments = make_parser().parse_args(words)
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


def make_parser() -> argparse.ArgumentParser:
    """The words that the command line understands."""
    parser = argparse.ArgumentParser(
        prog="xlashard", description="Arrays, shardings and pjit over many devices."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands.add_parser("train", help="train a byte-level transformer on text"))
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains a byte-level transformer as a TOML file says, and leaves settings, measurements "
        "and a loss curve in RUNS/NAME. Ctrl-C stops it and keeps what was measured."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the settings file, such as configs/tiny.toml"
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        nargs="+",
        help="text files or folders of them, instead of the prose that ships with Python",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="settings that win over the file's, such as model.layers=4",
    )
    parser.add_argument("--name", help="folder of the results below RUNS; default: the file's name")
    parser.add_argument("--steps", type=int, metavar="N", help="the same as --set training.steps=N")
    parser.add_argument(
        "--runs", metavar="FOLDER", default="runs", help="where the results go (default: runs)"
    )
    parser.add_argument(
        "--keys", action="store_true", help="print every key with its type and default, and end"
    )
