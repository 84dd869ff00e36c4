"""Report of all programs that a script compiled, and what changed from one to another."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rich.console import RenderableType
from rich.text import Text

from xlashard.analysis.explain.comparison import Comparison, markdown_text
from xlashard.analysis.explain.program_report import ProgramReport
from xlashard.analysis.explain.report_changes import compare_programs
from xlashard.analysis.explain.tables import (
    Page,
    PrintableReport,
    SerializableReport,
    decided_text,
    listing,
    near_text,
)
from xlashard.errors import counted
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import error_text, in_bytes
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard.analysis.explain import explain
    from xlashard.analysis.programs.from_script import RecordedProgram
else:
    # For programs that a script compiled; saved reports are compared without JAX.
    explain = deferred("xlashard.analysis.explain.explain")

FORMAT = 1
"""Version of the JSON format. It grows when a field changes its meaning or is removed."""


@dataclass(frozen=True)
class ScriptProgram:
    """A program of a script.

    Attributes:
        name: The function's name.
        source: File and line where the function is defined; empty if no Python code defines it.
        caller: File and line of the first call.
        calls: Number of calls; 0 for a program that was only lowered.
        report: Report of the program; None if `error` is set.
        error: Reason why the program can't be explained; empty otherwise.
        function: Number of the function object: two that were made of one line have two numbers.
            It is 0 for a program that was only lowered.
    """

    name: str
    source: str
    caller: str
    calls: int
    report: ProgramReport | None
    error: str = ""
    function: int = 0


@dataclass(frozen=True)
class OmittedPrograms:
    """Programs of a script without a report.

    Attributes:
        count: Number of programs.
        calls: Number of their calls.
        largest: Name of the program with the most bytes; empty without programs.
        largest_bytes: Bytes of its arguments and results.
    """

    count: int
    calls: int
    largest: str
    largest_bytes: int


@dataclass(frozen=True, repr=False)
class ScriptReport(SerializableReport):
    """Programs that a script compiled, by their first call. Written by `xlashard explain -- ...`.

    Attributes:
        script: The script and its arguments.
        outcome: How the script ended.
        why: The limit that stopped it, or its exception or exit code.
        programs: The programs with a report.
        omitted: The other programs: operations outside of `jit`, or those that were not selected.
    """

    _format = ReportFormat("script report", FORMAT, "xlashard explain --json FILE -- python ...")

    script: str
    outcome: Literal["finished", "stopped", "failed"]
    why: str
    programs: tuple[ScriptProgram, ...]
    omitted: OmittedPrograms

    def _sections(self, page: Page) -> Iterator[RenderableType | None]:
        seen: dict[tuple[str, str, int], ScriptProgram] = {}
        places: set[tuple[str, str]] = set()
        for program in self.programs:
            place = program.name, program.source
            yield _heading(program, seen.get((*place, program.function)), place in places)
            seen[*place, program.function] = program
            places.add(place)
            if program.report is None:
                yield Text(f"  can't be explained: {program.error}\n")
                continue
            yield from program.report._sections(page)
            yield Text("")
        yield self._summary(page)
        yield _omitted_text(self.omitted)
        if self.outcome != "finished":
            yield Text(f"  {self.script} {self.outcome}: {self.why}")

    def _summary(self, page: Page) -> RenderableType | None:
        heading = f"{len(self.programs)} of {self.script}"
        return listing(
            Page(page.width, True),
            ("Programs", heading),
            (">calls", ">devices", ">holds", ">sends", "program", "defined at"),
            self.programs,
            _row,
        )


def _heading(program: ScriptProgram, earlier: ScriptProgram | None, is_known: bool) -> Text:
    """Return the line above the report of a program: its name, source, calls and caller.

    Args:
        program: The program.
        earlier: The last program of the same function before.
        is_known: Whether another function of its name and line had a program before.
    """
    parts = [f"defined at {_near(program.source)}"] if program.source else []
    if program.calls:
        parts.append(f"{counted(program.calls, 'call')} from {_near(program.caller)}")
    else:
        parts.append(f"lowered at {_near(program.caller)}")
    if earlier is not None:
        parts.append(f"compiled again for {_changed_arguments(earlier, program)}")
    elif is_known:
        parts.append("of a new function object: make and jit it once")
    return Text.assemble((f"▶ {program.name}", "bold"), "  ", (", ".join(parts), "dim"))


def _near(place: str) -> str:
    """Shorten the path of `folder/train.py:12`."""
    file, _, line = place.rpartition(":")
    return near_text(file, int(line)) if line.isdecimal() else place


def _changed_arguments(old: ScriptProgram, new: ScriptProgram) -> str:
    """Return what differs in the arguments of two programs: `w P() → P('model') and 2 more`."""
    if old.report is None or new.report is None:
        return "other arguments"
    before = {value.path: value for value in old.report.inputs}
    changed = []
    for now in new.report.inputs:
        was = before.get(now.path, now)
        if was.type != now.type:
            changed.append(f"{now.path} {was.type} → {now.type}")
        elif was.weak_type != now.weak_type:
            texts = (f"{'weakly typed ' * v.weak_type}{v.type}" for v in (was, now))
            changed.append(f"{now.path} {' → '.join(texts)}")
        elif was.spec != now.spec:
            # A program drops an argument that it does not use, with its sharding.
            changed.append(f"{now.path} {was.spec or 'not used'} → {now.spec or 'not used'}")
        elif was.decided_by != now.decided_by:
            origins = f"{decided_text(was)} → {decided_text(now)}"
            changed.append(f"{now.path} sharded by {origins}")
    if not changed:
        return "other arguments"
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{changed[0]}{more}"


def _row(program: ScriptProgram) -> Sequence[RenderableType]:
    report = program.report
    calls, named = str(program.calls or ""), (program.name, _near(program.source))
    if report is None:
        return calls, "", "", "", *named
    memory = report.memory
    holds = "" if memory is None else in_bytes(memory.total_bytes - memory.code_bytes)
    sent = sum(c.sent_bytes for c in report.collectives)
    sends = in_bytes(sent) if report.place.num_devices > 1 else ""
    return calls, str(report.place.num_devices), holds, sends, *named


def _omitted_text(omitted: OmittedPrograms) -> Text | None:
    if not omitted.count:
        return None
    return Text(
        f"  and {counted(omitted.count, 'small program')}, {counted(omitted.calls, 'call')}; the "
        f"largest is {omitted.largest} with {in_bytes(omitted.largest_bytes)} of arguments and "
        "results"
    )


def summarize_omitted(programs: "Sequence[RecordedProgram]") -> OmittedPrograms:
    """Return the number and the largest of the programs without a report."""
    largest = max(programs, key=lambda p: p.nbytes, default=None)
    return OmittedPrograms(
        count=len(programs),
        calls=sum(p.calls for p in programs),
        largest="" if largest is None else largest.name,
        largest_bytes=0 if largest is None else largest.nbytes,
    )


def explain_recorded(program: "RecordedProgram", values: str = "") -> ScriptProgram:
    """Explain a program of a script; an error becomes part of the result.

    Args:
        program: The program.
        values: Pattern of the values inside to show; empty for none.
    """
    report, error = None, ""
    try:
        report = explain.explain(program, values=values)
    except Exception as e:
        error = error_text(e)
    place = program.name, program.source, program.caller, program.calls
    return ScriptProgram(*place, report, error, program.function)


@dataclass(frozen=True, repr=False)
class ScriptComparison(PrintableReport):
    """Changes of the programs of a script. Made by `compare_scripts`.

    Attributes:
        title: The script and its arguments, or the name of a single program.
        programs: Changes of each program that both reports have.
        added: Names of programs that only the second report has.
        removed: Names of programs that only the first report has.
    """

    _print_all = "comparison.print(all=True)"

    title: str
    programs: tuple[Comparison, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """True if nothing but the compile time changed."""
        return not (self._changed or self.added or self.removed)

    @property
    def regressions(self) -> tuple[str, ...]:
        """Return what became worse, one line each, with the name of the program."""
        return tuple(f"{c.new}: {line}" for c in self.programs for line in c.regressions)

    @property
    def _changed(self) -> list[Comparison]:
        return [comparison for comparison in self.programs if not comparison.is_same]

    def _others(self) -> list[tuple[str, str]]:
        """Return the names of programs without changes, and of those in one report only."""
        same = [comparison.new for comparison in self.programs if comparison.is_same]
        groups = (("Unchanged", same), ("Only before", self.removed), ("Only after", self.added))
        return [(title, ", ".join(names)) for title, names in groups if names]

    def _sections(self, page: Page) -> Iterator[RenderableType]:
        for comparison in self._changed:
            yield from comparison._sections(page)
            yield Text("")
        for title, names in self._others():
            yield Text.assemble((f"{title}  ", "bold"), names)

    def __repr__(self) -> str:
        return f"<ScriptComparison of {self.title}; print it>"

    def to_markdown(self) -> str:
        """Return the changes as Markdown, for a comment on a pull request."""
        worse = sum(bool(comparison.regressions) for comparison in self.programs)
        programs = counted(len(self.programs), "program")
        parts = [
            f"## Programs of {markdown_text(self.title)}",
            f"**{worse} of {programs} became worse.**" if worse else "No program became worse.",
        ]
        parts += [comparison.to_markdown().strip() for comparison in self._changed]
        parts += [f"{title}: {markdown_text(names)}" for title, names in self._others()]
        return "\n\n".join(parts) + "\n"


def compare_scripts(
    old: ScriptReport | ProgramReport, new: ScriptReport | ProgramReport
) -> ScriptComparison:
    """Compare the programs of two reports of a script, which are matched by name.

    Programs of one name, such as one that was compiled for two shapes, are matched in their order.

    Args:
        old: Report before the change, of a script or of a single program.
        new: Report after the change.
    """
    before, after = dict(named_programs(old)), dict(named_programs(new))
    both = [name for name in after if name in before]
    compared = (compare_programs(before[name], after[name]) for name in both)
    return ScriptComparison(
        title=new.script if isinstance(new, ScriptReport) else new.name,
        programs=tuple(map(_with_title, compared, both)),
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
    )


def _with_title(comparison: Comparison, name: str) -> Comparison:
    return replace(comparison, old=name, new=name)


def named_programs(report: ScriptReport | ProgramReport) -> list[tuple[str, ProgramReport]]:
    """Return the explained programs of a report with names of their own: `step`, `step (2)`."""
    if isinstance(report, ProgramReport):
        return [(report.name, report)]
    seen: Counter[str] = Counter()
    named = []
    for program in report.programs:
        seen[program.name] += 1
        number = seen[program.name]
        if program.report is not None:
            name = program.name if number == 1 else f"{program.name} ({number})"
            named.append((name, program.report))
    return named
