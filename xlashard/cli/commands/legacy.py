"""``xlashard legacy``: run programs of 2022 and 2023, or rewrite them for today's JAX."""

import argparse
import ast
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

import xlashard
from xlashard.cli.commands.result_files import check_writable
from xlashard.cli.commands.source_files import SourceFile, read_source, write_source
from xlashard.errors import ArgumentError, XlashardError, counted
from xlashard.support.consoles import make_console
from xlashard.support.formatting import print_error
from xlashard.support.lazily import deferred
from xlashard.support.program_runner import parse_script

if TYPE_CHECKING:
    from xlashard.legacy import run_command
    from xlashard.legacy.migration import CheckResult, Migrated
else:
    # For programs to run; files are migrated without JAX.
    run_command = deferred("xlashard.legacy.run_command")

_DEEPEST = 300
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@dataclass(frozen=True)
class _File:
    """A program before and after.

    Attributes:
        source: The file.
        before: The text as it is.
        after: The text as it is to be.
    """

    source: SourceFile
    before: str
    after: "Migrated"


def run(arguments: argparse.Namespace) -> int:
    """Run ``xlashard legacy``.

    Args:
        arguments: The words, parsed; `script` has those after `--`.

    Returns:
        The exit code: 0; 1 if a file could not be read, parsed or written, or if a migrated program
        differs from the old one; 2 for wrong use. A
        script that fails ends the process as it would end Python.
    """
    try:
        _check_words(arguments)
        if arguments.check:
            return _check_by_running(arguments)
        if arguments.migrate:
            return _migrate(arguments)
        _ = xlashard.Array  # Requires JAX and valid variables in the environment.
        command = _command(arguments)
        flags = run_command.set_flags(command.flags)
    except XlashardError as error:
        print_error(error)
        return 2
    # An error of the program is Python's to print.
    return run_command.run_old_program(command, flags)


def _check_words(arguments: argparse.Namespace) -> None:
    """Check that the words either migrate files or run a script."""
    words = {
        "--report": arguments.report is not None,
        "--libraries": arguments.libraries,
        **dict.fromkeys(arguments.flags, True),
    }
    running = [word for word, is_there in words.items() if is_there]
    if arguments.check and (not arguments.script or arguments.migrate is None):
        raise ArgumentError(
            "--check compares runs of a program: write --migrate --check -- python old_train.py"
        )
    others = [word for word in running if word != "--libraries"]
    if arguments.check and (others or arguments.write):
        raise ArgumentError(f"--check is invalid together with {(*others, '--write')[0]}")
    if arguments.migrate == [] and not arguments.check:
        raise ArgumentError("--migrate requires a file: write --migrate old_train.py")
    if arguments.check:
        return
    if arguments.migrate and (arguments.script or running):
        what = "a script after --" if arguments.script else running[0]
        raise ArgumentError(
            f"--migrate is invalid together with {what}: it rewrites files and runs none"
        )
    if arguments.write and not arguments.migrate:
        raise ArgumentError("--write writes what --migrate shows: write --migrate FILE --write")
    if not (arguments.migrate or arguments.script):
        raise ArgumentError(
            "which program? Write -- python old_train.py to run it, or --migrate old_train.py to "
            "rewrite it"
        )


def _command(arguments: argparse.Namespace) -> "run_command.RunCommand":
    """Return the program to run, its flags and its report."""
    check_writable(arguments.report)
    program = parse_script(arguments.script).program
    flags = dict(map(run_command.parse_flag, arguments.flags))
    has_report = arguments.report is not None
    report_file = arguments.report or ""
    return run_command.RunCommand(program, has_report, report_file, arguments.libraries, flags)


def _migrate(arguments: argparse.Namespace) -> int:
    """Show what changes in some programs, and write it if `--write` is given."""
    failed = False
    files = []
    for path in dict.fromkeys(arguments.migrate):
        try:
            files.append(_read(path))
        except ArgumentError as error:
            print_error(error)
            failed = True
    changed = [file for file in files if file.after.code != file.before]
    for file in changed:
        _show(file)
    if arguments.write:
        for file in changed:
            try:
                write_source(file.source, file.after.code)
            except ArgumentError as error:
                print_error(error)
                failed = True
    print(_summary(changed, arguments.write), file=sys.stderr)
    return int(failed)


def _check_by_running(arguments: argparse.Namespace) -> int:
    """Run a program and its migrated form, and print how they compare."""
    # Needs libcst, which a run does without.
    from xlashard.legacy.migration import check_migration

    script = parse_script(arguments.script)
    program, root = script.program, Path.cwd().resolve()
    words = [program.target, *program.arguments]
    if program.is_module:
        words = ["-m", *words]
    else:
        path = Path(program.target).resolve()
        if not path.is_relative_to(root):
            root = path.parent
        words[0] = str(path.relative_to(root))
    files = [_read(path).source.path for path in arguments.migrate]
    paths = [Path(each).resolve() for each in files]
    result = check_migration(root, words, paths, libraries=arguments.libraries)
    _print_check(result)
    return int(result.difference is not None)


def _print_check(result: "CheckResult") -> None:
    for mark in result.marks:
        print(f"marked: {mark}")
    if result.unstable:
        names = ", ".join(result.unstable[:5]) + ", ..." * (len(result.unstable) > 5)
        print(f"not compared, since two runs of the old program differ: {names}")
    if result.needs:
        rest = f" and {counted(len(result.needs) - 1, 'other line')}" * (len(result.needs) > 1)
        print(
            f"not migrated: {result.needs[0]}{rest}; the migrated program still requires "
            "`xlashard legacy -- python ...`"
        )
    difference = result.difference
    if difference is None:
        lines = counted(result.lines, "line")
        print(f"equal: {lines} of output, {counted(result.values, 'variable')}")
        return
    print(f"differs: {difference.what}, {difference.place or 'old'} became", end=" ")
    print(difference.migrated_place or "migrated")
    print(f"  old: {difference.old}\n  new: {difference.new}")


def _read(path: str) -> _File:
    source = read_source(path)
    before = source.text
    _check(path, before)
    # Needs libcst, which a run does without.
    from xlashard.legacy.migration import migrate

    return _File(source, before, migrate(before))


def _check(path: str, code: str) -> None:
    """Refuse what is not Python, and what the parser of libcst has no room for on its stack."""
    deepest = 0
    try:
        nodes: list[tuple[ast.AST, int]] = [(ast.parse(code, path), 1)]
        while nodes:
            node, depth = nodes.pop()
            deepest = max(deepest, depth)
            nodes += [(child, depth + 1) for child in ast.iter_child_nodes(node)]
    except SyntaxError as error:
        raise ArgumentError(
            f"{path}:{error.lineno or 1} is not Python: {error.msg}; correct this line first"
        ) from None
    except (ValueError, MemoryError, RecursionError):
        deepest = _DEEPEST + 1
    if deepest > _DEEPEST:
        raise ArgumentError(
            f"{path} is nested more than {_DEEPEST} deep, or holds a NUL: write its longest "
            "expression as several"
        )


def _show(file: _File) -> None:
    console = make_console()
    lines = difflib.unified_diff(
        file.before.splitlines(),
        file.after.code.splitlines(),
        file.source.path,
        f"{file.source.path} (migrated)",
        lineterm="",
    )
    for line in lines:
        console.print(Text(line, _STYLES.get(line[:1], "")), soft_wrap=True)


def _summary(changed: Sequence[_File], write: bool) -> str:
    if not changed:
        return "no file has a name of 2022 or 2023 to change"
    text = f"{counted(len(changed), 'file')} with changes"
    marked = sum(file.after.marked for file in changed)
    if marked:
        text += f", {counted(marked, 'line')} for a human marked by `# xlashard:`"
    return text if write else f"{text}; to write them, add --write"
