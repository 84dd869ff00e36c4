"""Entry point of the scripts: flags, help and exit codes."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

from xlashard.cloud.cloud_settings import CloudSettings, load_settings
from xlashard.cloud.session import Runner, Session
from xlashard.errors import CloudError
from xlashard.train.config.schema import Leaf, leaves, reference
from xlashard.train.errors import RunError
from xlashard.wording import print_error, printable

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


def removed(replacement: str) -> None:
    """Exit with an error that names the replacement of a removed script."""
    print_error(f"{os.path.basename(sys.argv[0])} was removed: {replacement}")
    sys.exit(2)


def run(argv: Sequence[str], step: Step, groups: Sequence[str], description: str | None) -> int:
    """Run a step as a command line requests.

    Returns:
        The exit code: that of the step, 2 for invalid flags or settings, 1 for another failure.
    """
    # A terminal that lacks a letter shows another one.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    parser = _parser(os.path.basename(argv[0]), groups, description)
    try:
        values = vars(parser.parse_args(list(argv[1:])))
    except SystemExit as error:
        return int(error.code or 0)
    flags = {key: value for key, value in values.items() if "." in key and value is not None}
    dry = values["dry_run"]
    on_sigterm = signal.signal(signal.SIGTERM, signal.default_int_handler)
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


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
