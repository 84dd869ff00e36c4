"""Comparison of an old program with its migrated form: what both print and compute."""

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from xlashard.legacy.migration import recorded_run
from xlashard.legacy.migration.migrated_program import COMMENT, migrate

TOLERANCE = 1e-4
"""Relative tolerance of numbers: programs of other shardings add in another order."""

_SMALL = 1e-6
_LARGE_FILE = 2**24
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WITH_LIBRARIES = """
import sys
from xlashard.legacy.migration import recorded_run
from xlashard.legacy.run_command import install_libraries

install_libraries()
recorded_run.main(sys.argv[1:])
"""
_FOR_OTHER_FILES = """
import json, sys
from xlashard.legacy.run_command import RunCommand, run_old_program
from xlashard.support.program_runner import ScriptOrModule

report, libraries, migrated, recorder, *words = sys.argv[1:]
program = ScriptOrModule(recorder, False, words)
files = frozenset(json.loads(migrated))
run_old_program(RunCommand(program, True, report, libraries == "--libraries", {}, files), {})
"""
_TRACEBACK = "Traceback (most recent call last):\n"
_NOT_COPIED = (".git", "__pycache__", ".venv", "venv", "node_modules")


@dataclass(frozen=True)
class RunDifference:
    """First difference between two runs.

    Attributes:
        place: The line of the old program, as `train.py:3`.
        migrated_place: The line of the migrated program.
        what: The printed line or the variable.
        old: What the old program had.
        new: What the migrated program has.
    """

    place: str
    migrated_place: str
    what: str
    old: str
    new: str


@dataclass(frozen=True)
class CheckResult:
    """Result of a comparison.

    Attributes:
        lines: Number of compared lines of output.
        values: Number of compared variables.
        difference: The first difference; None if the runs are equal.
        unstable: What differs between two runs of the old program too, and was not compared.
        marks: Comments of lines that need manual changes, with their places.
        needs: Lines of files that weren't migrated, and the removed names that they use: the
            migrated program requires the runner because of them.
    """

    lines: int
    values: int
    difference: RunDifference | None
    unstable: Sequence[str]
    marks: Sequence[str]
    needs: Sequence[str] = ()


@dataclass(frozen=True)
class _Use:
    file: Path
    line: int
    name: str
    today: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class _RecordedRun:
    code: int
    lines: Sequence[tuple[str, str]]
    values: Mapping[str, tuple[Any, int]]
    files: Sequence[str]
    errors: str
    uses: Sequence[Mapping[str, Any]] = ()

    def list_uses(self, sources: Collection[Path]) -> tuple[list[_Use], list[_Use]]:
        """Return the uses of removed names in some files of the program, and in all others."""
        uses = [
            _Use(Path(line["file"]), line["line"], use["name"], use["today"])
            for use in self.uses
            # A behaviour without a name, such as `with mesh:`, is also today's.
            if use["gone"] and use["library"] == "JAX"
            for line in use["lines"]
        ]
        inside = [use for use in uses if use.file in sources]
        return inside, [use for use in uses if use.file not in sources]


def check_migration(
    root: Path, program: Sequence[str], files: Sequence[Path], *, libraries: bool = False
) -> CheckResult:
    """Run a program under the runner and its migrated form on plain JAX, and compare them.

    Both run in a copy of the folder, whose large files are links, so that neither reads what the
    other one wrote there. Files that use removed names and aren't migrated, such as those of old
    libraries, get these names in both runs; a use in a migrated file is a difference.

    Args:
        root: The folder to run in, which has the program's files.
        program: A script, relative to the folder, or `-m` and a module, with its arguments.
        files: The files to migrate; empty for all files in the folder that the program ran.
        libraries: True to give both runs the names that other libraries than JAX took away.
    """
    with tempfile.TemporaryDirectory(prefix="xlashard-check-") as scratch:
        # One path for all runs: what they print about it is equal.
        copy = _Copy(root, Path(scratch).resolve() / (root.name or "program"), program, libraries)
        old = copy.run_old()
        sources = [path.relative_to(root) for path in files] or map(Path, sorted(old.files))
        migrated = {path: migrate(_read(root / path)).code for path in sources}
        _, others = old.list_uses(migrated.keys())
        new = copy.run_migrated(migrated, has_old_files=bool(others))
        kept, _ = new.list_uses(migrated.keys())
        differences = [*_differences(old, new), *map(_describe_use, kept)]
        unstable: list[str] = []
        if differences and new.code == old.code:
            # What differs from run to run, such as times, is no difference.
            again = copy.run_old()
            unstable = [each.what for each in _differences(old, again)]
            differences = [each for each in differences if each.what not in unstable]
    marks = [
        f"{path}:{number} {line.strip().removeprefix(COMMENT)}"
        for path, code in migrated.items()
        for number, line in enumerate(code.splitlines(), 1)
        if line.lstrip().startswith(COMMENT)
    ]
    first = differences[0] if differences else _describe_failure(old)
    compared = len(old.values.keys() & new.values.keys())
    needs = [f"{use} {use.name}" for use in others]
    return CheckResult(len(old.lines), compared, first, unstable, marks, needs)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        encoding, _ = tokenize.detect_encoding(file.readline)
    return path.read_bytes().decode(encoding)


@dataclass(frozen=True)
class _Copy:
    """Copy of a program's folder, which each run makes anew.

    Attributes:
        root: The folder.
        place: The folder of the copy.
        program: A script, relative to the folder, or `-m` and a module, with its arguments.
        libraries: True to give back the names that other libraries than JAX took away.
    """

    root: Path
    place: Path
    program: Sequence[str]
    libraries: bool

    def run_old(self) -> _RecordedRun:
        """Run the program with the removed names, and record their uses."""
        options = [f"--report={self._uses}", *["--libraries"] * self.libraries]
        return self._run(["-m", "xlashard.legacy", *options, "--", recorded_run.__file__], {})

    def run_migrated(self, files: Mapping[Path, str], *, has_old_files: bool) -> _RecordedRun:
        """Run the migrated program.

        Args:
            files: The code of the migrated files.
            has_old_files: True to give the removed names to all other files.
        """
        words = [recorded_run.__file__]
        if has_old_files:
            migrated = json.dumps([str(self.place / path) for path in files])
            libraries = "--libraries" if self.libraries else ""
            words = ["-c", _FOR_OTHER_FILES, str(self._uses), libraries, migrated, *words]
        elif self.libraries:
            words = ["-c", _WITH_LIBRARIES]
        return self._run(words, files)

    @property
    def _uses(self) -> Path:
        return self.place.with_name("uses.json")

    def _run(self, recorder: Sequence[str], files: Mapping[Path, str]) -> _RecordedRun:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(
            self.root,
            self.place,
            symlinks=True,
            ignore=shutil.ignore_patterns(*_NOT_COPIED),
            copy_function=_copy_or_link,
        )
        for path, code in files.items():
            (self.place / path).write_bytes(code.encode())
        record = self.place.with_name("record.json")
        for file in (record, self._uses):
            file.unlink(missing_ok=True)
        command = [sys.executable, *recorder, str(record), *self.program]
        done = subprocess.run(command, cwd=self.place, capture_output=True, text=True, check=False)
        if not record.exists():
            return _RecordedRun(done.returncode, [], {}, [], done.stderr)
        read = json.loads(record.read_text())
        lines = [(line, at) for line, at in read["lines"]]
        values, ran = read["values"], read["files"]
        return _RecordedRun(done.returncode, lines, values, ran, done.stderr, self._read_uses())

    def _read_uses(self) -> Sequence[Mapping[str, Any]]:
        """Read the report of a run, with the program's files relative to its folder."""
        if not self._uses.exists():
            return []
        report = json.loads(self._uses.read_text())
        uses = [*report["uses"], *report["installed"]]
        for line in (line for use in uses for line in use["lines"]):
            file = Path(self.place, line["file"])
            is_own = file.is_relative_to(self.place)
            line["file"] = file.relative_to(self.place) if is_own else file
        return uses


def _copy_or_link(source: str, target: str) -> str:
    if Path(source).stat().st_size < _LARGE_FILE:
        return shutil.copy2(source, target)
    Path(target).symlink_to(source)
    return target


def _differences(old: _RecordedRun, new: _RecordedRun) -> Iterator[RunDifference]:
    """Yield the differences between two runs: exit codes, words of output, variables."""
    reasons = [_find_reason(run.errors) if run.code else "" for run in (old, new)]
    if (old.code, reasons[0]) != (new.code, reasons[1]) or not (old.files and new.files):
        was, became = (
            f"{run.code} {reason}" if run.files else f"{run.code} {reason} (nothing recorded)"
            for run, reason in zip((old, new), reasons, strict=True)
        )
        yield RunDifference(_error_place(old), _error_place(new), "exit code", was, became)
    yield from _text_differences(old.lines, new.lines)
    for key, (value, line) in old.values.items():
        if key not in new.values:
            continue
        other, other_line = new.values[key]
        if not _is_equal(value, other):
            file, function, call, name = key.split(" ", 3)
            what = f"{name} of {function}, return {int(call) + 1}"
            places = f"{file}:{line}", f"{file}:{other_line}"
            yield RunDifference(*places, what, str(value)[:200], str(other)[:200])


def _describe_use(use: _Use) -> RunDifference:
    """Return a use of a removed name, which JAX refuses though the migrated run went on."""
    what = f"{use.name}, which today's JAX lacks"
    return RunDifference("", str(use), what, use.name, f"{use.name}; write: {use.today}")


def _describe_failure(old: _RecordedRun) -> RunDifference | None:
    """Return the failure of a program which both runs share, so that little was compared."""
    if _TRACEBACK not in old.errors or not old.code:
        return None
    place, reason = _error_place(old), _find_reason(old.errors)
    return RunDifference(place, place, "nothing after an error of both programs", reason, reason)


def _find_reason(errors: str) -> str:
    """Return the first line of the error that ended a program; without one the last line."""
    _, is_there, shown = errors.rpartition(_TRACEBACK)
    lines = [line for line in shown.splitlines() if line and not line[0].isspace()]
    return "" if not lines else lines[0] if is_there else lines[-1]


def _error_place(run: _RecordedRun) -> str:
    """Return the last line of the program in its traceback."""
    places = re.findall(r'File "([^"]*)", line (\d+)', run.errors if run.code else "")
    own = [f"{file}:{line}" for path, line in places for file in run.files if path.endswith(file)]
    return own[-1] if own else ""


def _text_differences(
    old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]
) -> Iterator[RunDifference]:
    lines = zip_longest(old, new, fillvalue=("(nothing)", ""))
    for number, ((before, place), (after, new_place)) in enumerate(lines, 1):
        what = f"output line {number}"
        words, new_words = before.split(), after.split()
        if len(words) != len(new_words):
            yield RunDifference(place, new_place, what, before, after)
            continue
        for position, (word, new_word) in enumerate(zip(words, new_words, strict=True), 1):
            if not is_equal_text(word, new_word):
                yield RunDifference(place, new_place, f"{what}, word {position}", before, after)


def is_equal_text(old: str, new: str) -> bool:
    """Return True for equal texts whose numbers are equal within the tolerance.

    Args:
        old: A text.
        new: Another one.

    Example:
        >>> is_equal_text("loss 0.500001", "loss 0.5"), is_equal_text("loss 0.6", "loss 0.5")
        (True, False)
    """
    # JAX prints specs by a shorter name today.
    old, new = (text.replace("PartitionSpec(", "P(") for text in (old, new))
    if _NUMBER.sub("0", old) != _NUMBER.sub("0", new):
        return False
    numbers = zip(_NUMBER.findall(old), _NUMBER.findall(new), strict=True)
    return all(_is_equal(_as_number(a), _as_number(b)) for a, b in numbers)


def _as_number(text: str) -> int | float:
    # Whole numbers are counts and shapes: they are equal or not.
    return float(text) if re.search(r"[.eE]", text) else int(text)


def _is_equal(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_is_equal, old, new))
    if isinstance(old, float) and isinstance(new, float | int):
        both_nan = math.isnan(old) and math.isnan(new)
        return both_nan or math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=_SMALL)
    if isinstance(old, str) and isinstance(new, str):
        return is_equal_text(old, new)
    return old == new
