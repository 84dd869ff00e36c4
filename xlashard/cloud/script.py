"""What makes a script of a step: its flags, its help, and how it ends."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from absl import flags

from xlashard.cloud.commands import DryRunner, SystemRunner
from xlashard.cloud.retrying import SystemClock
from xlashard.cloud.session import Session
from xlashard.cloud.settings import CloudSettings, load_settings
from xlashard.errors import CloudError
from xlashard.train.errors import RunError
from xlashard.train.schema import Leaf, leaves
from xlashard.wording import print_error, printable

type Step = Callable[[Session, Sequence[str]], int]
"""A step: with what it was asked for, and the words that are no flags; gives an exit code."""


def start(step: Step, groups: Sequence[str], about: str | None) -> None:
    """Runs a script: parses its flags, does its step, and ends this process.

    Args:
        step: What it does.
        groups: Of the settings that it has flags for, such as ``tpu``.
        about: What `--help` says first.
    """
    values = flags.FlagValues()
    define_flags(groups, values)
    sys.exit(run(sys.argv, values, step, about))


def run(words: Sequence[str], values: flags.FlagValues, step: Step, about: str | None) -> int:
    """Does what a command line says.

    Args:
        words: The program's name, and the rest.
        values: The flags that it has.
        step: What is done.
        about: What `--help` says first.

    Returns:
        The exit code: 0 done, 2 wrong flags or settings, 1 something failed, or what the job ended
        with.
    """
    # A terminal that lacks a letter shows another one; it does not end the run.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        values.set_gnu_getopt(True)  # Flags may come after words.
        rest = values(list(words))[1:]
    except flags.Error as error:
        return _wrong(f"{error}\nSee --help")
    if values["help"].value:
        print(f"{(about or '').strip()}\n\n{_help(values)}")
        return 0
    try:
        return step(_session(values), rest)
    except CloudError as error:
        return _wrong(str(error), error.code)
    except RunError as error:  # A setting that there is not, or that can't be so.
        return _wrong(str(error))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _wrong(text: str, code: int = 2) -> int:
    print_error(text)
    return code or 1


def define_flags(groups: Sequence[str], values: flags.FlagValues) -> None:
    """Defines a flag for each setting of some groups, by the setting's own name.

    Args:
        groups: Of settings.
        values: Where they are defined.
    """
    flags.DEFINE_string(
        "config", "", "a TOML file with settings by group ([tpu], [run], ...)", flag_values=values
    )
    flags.DEFINE_bool("dry_run", False, "show every command, and run none", flag_values=values)
    flags.DEFINE_bool("help", False, "show this", flag_values=values, short_name="h")
    for leaf in leaves(CloudSettings):
        if leaf.path.partition(".")[0] in groups:
            _define(leaf, values)


def _define(leaf: Leaf, values: flags.FlagValues) -> None:
    name, note = leaf.path.rpartition(".")[2], _note(leaf)
    if get_origin(leaf.kind) is Literal:
        flags.DEFINE_enum(name, None, list(get_args(leaf.kind)), note, flag_values=values)
    elif get_origin(leaf.kind) is tuple:
        flags.DEFINE_multi_string(name, None, note, flag_values=values)
    elif leaf.kind is bool:
        flags.DEFINE_bool(name, None, note, flag_values=values)
    elif leaf.kind is int:
        flags.DEFINE_integer(name, None, note, flag_values=values)
    elif leaf.kind is float:
        flags.DEFINE_float(name, None, note, flag_values=values)
    else:
        flags.DEFINE_string(name, None, note, flag_values=values)


def _note(leaf: Leaf) -> str:
    if get_origin(leaf.kind) is tuple:
        return f"{leaf.note}; may be repeated"
    return leaf.note if leaf.default in ("", None) else f"{leaf.note} (default: {leaf.default})"


def _help(values: flags.FlagValues) -> str:
    """The flags, those of each group together."""
    by_name = {leaf.path.rpartition(".")[2]: leaf for leaf in leaves(CloudSettings)}
    groups: dict[str, list[str]] = {}
    for name in values:
        if name in ("h", "no"):
            continue
        flag, leaf = values[name], by_name.get(name)
        word = f"--{name}" if flag.boolean else f"--{name}={_shape(flag)}"
        group = leaf.path.partition(".")[0] if leaf else ""
        groups.setdefault(group, []).append(f"  {word:<28} {_note(leaf) if leaf else flag.help}")
    parts = [
        f"[{group}]\n" + "\n".join(lines) if group else "\n".join(lines)
        for group, lines in sorted(groups.items())
    ]
    return "Flags, and the tables of --config that hold the same settings:\n" + "\n\n".join(parts)


def _shape(flag: Any) -> str:
    choices = getattr(flag.parser, "enum_values", None)
    return "|".join(choices) if choices else flag.parser.flag_type().split()[-1].upper()


def given_flags(values: flags.FlagValues) -> Mapping[str, Any]:
    """The settings that the command line speaks of, by their paths."""
    found = {}
    for leaf in leaves(CloudSettings):
        name = leaf.path.rpartition(".")[2]
        if name in values and values[name].value is not None:
            found[leaf.path] = values[name].value
    return found


def _session(values: flags.FlagValues) -> Session:
    settings = load_settings(values["config"].value or "", given_flags(values))
    dry = values["dry_run"].value
    if dry:
        return Session(settings, DryRunner(), SystemClock(), lambda text: None)
    return Session(settings, SystemRunner(), SystemClock(), _say)


def _say(text: str) -> None:
    """To standard error: standard output has the workers' lines, or the commands of a dry run."""
    print(f"xlashard: {printable(text)}", file=sys.stderr, flush=True)
