"""Report of all programs that a script compiled, and what changed from one to another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from xlashard.analysis.explain.comparison import Comparison, compare_programs
from xlashard.analysis.explain.model import ValueReport
from xlashard.analysis.explain.program_report import ProgramReport
from xlashard.analysis.explain.sections import decided_text
from xlashard.analysis.report.cells import TableCell, join_cell
from xlashard.analysis.report.parts import Column, Head, PagePanel, Section, distinct_names
from xlashard.analysis.report.printable import (
    Part,
    SerializableReport,
    list_panels,
)
from xlashard.analysis.report.texts import near_text
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

    @property
    def cost(self) -> tuple[float, float, float]:
        """FLOP and sent bytes of all calls on a device, and the bytes that it holds."""
        calls = max(self.calls, 1)
        flops = self.report.cost.flops if self.report and self.report.cost else 0.0
        return calls * flops, calls * float(self.sent or 0), float(self.held or 0)

    @property
    def sent(self) -> int | None:
        """Bytes that a device sends in one call; None on one device."""
        if self.report is None or self.report.place.num_devices == 1:
            return None
        return sum(c.sent_bytes for c in self.report.collectives)

    @property
    def held(self) -> int | None:
        """Bytes that a device holds, without the program itself."""
        memory = None if self.report is None else self.report.memory
        return None if memory is None else memory.total_bytes - memory.code_bytes


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

    _kind = "explain"
    _footer = ProgramReport._footer
    _format = ReportFormat("script report", FORMAT, "xlashard explain --json FILE -- python ...")

    script: str
    outcome: Literal["finished", "stopped", "failed"]
    why: str
    programs: tuple[ScriptProgram, ...]
    omitted: OmittedPrograms

    def parts(self) -> Iterator[Part]:
        """Yield the head and the sections of each program, and a table of all."""
        for program, heading in zip(self.programs, self._headings(), strict=True):
            yield heading
            if program.report is not None:
                yield from program.report.parts()
        yield self._overview()

    def _headings(self) -> Iterator[Head]:
        """Yield the line above the report of each program."""
        seen: dict[tuple[str, str, int], ScriptProgram] = {}
        places: set[tuple[str, str]] = set()
        for program in self.programs:
            place = program.name, program.source
            yield _make_head(program, seen.get((*place, program.function)), place in places)
            seen[*place, program.function] = program
            places.add(place)

    def _overview(self, links: Sequence[TableCell] = ()) -> Section["_Row"]:
        """Return the table of the programs, the costliest first if they link to their panels."""
        rest = [_omitted_text(self.omitted)] * bool(self.omitted.count)
        if self.outcome != "finished":
            rest.append(f"{self.script} {self.outcome}: {self.why}")
        programs = self.programs
        if links:
            programs = sorted(programs, key=lambda program: program.cost, reverse=True)
        names = iter(links)
        rows = [_Row(next(names, p.name) if p.report else p.name, p) for p in programs]
        note = f"{len(self.programs)} of {self.script}"
        return replace(_PROGRAMS, note=note, rows=rows, rest=rest)

    def page_title(self) -> str:
        """Return the title of its page: the script."""
        return self.script

    def panels(self, others: Sequence[Part] = ()) -> Sequence[PagePanel]:
        """Return a panel of all programs, and one of each, the costliest first.

        Args:
            others: Further parts of the first panel.
        """
        named = zip(_name_programs(self), self.programs, self._headings(), strict=True)
        panels = [
            PagePanel(name, (heading, *p.report.parts()), p.report.page_data())
            for name, p, heading in sorted(named, key=lambda each: each[1].cost, reverse=True)
            if p.report is not None
        ]
        return list_panels(panels, self._overview, others)


def _make_head(program: ScriptProgram, earlier: ScriptProgram | None, is_known: bool) -> Head:
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
    error = [("can't be explained", join_cell(program.error))] * (program.report is None)
    return Head(f"▶ {program.name}", [", ".join(parts)], notes=error, is_line=True)


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
        pairs = zip(
            _describe_argument(before.get(now.path, now)), _describe_argument(now), strict=True
        )
        different = ((words, one, other) for (words, one), (_, other) in pairs if one != other)
        if first := next(different, None):
            words, one, other = first
            changed.append(f"{now.path} {words}{one} → {other}")
    if not changed:
        return "other arguments"
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{changed[0]}{more}"


def _describe_argument(value: ValueReport) -> Iterator[tuple[str, str]]:
    """Yield what a program is compiled for, each with the words before it."""
    yield "", f"{'weakly typed ' * value.weak_type}{value.type}"
    # A program that drops an argument has no sharding of it.
    yield "", value.spec or "not used"
    yield "sharded by ", decided_text(value)


class _Row(NamedTuple):
    """Program in a table of several, with its name or a link to its panel."""

    name: TableCell | str
    program: ScriptProgram


def _count_collectives(row: _Row) -> int | None:
    report = row.program.report
    return None if report is None else sum(c.times for c in report.collectives)


_PROGRAMS = Section[_Row](
    id="programs",
    title="Programs",
    columns=(
        Column("program", "name"),
        Column(">calls", lambda row: row.program.calls or None, "number"),
        Column(">devices", "program.report.place.num_devices", "number"),
        Column(">holds", "program.held", "bytes", "Each device, without the program itself"),
        Column(">sends", "program.sent", "bytes", "Each device in one call"),
        Column(">collectives", _count_collectives, "number"),
        Column(">work", "program.report.cost.flops", "flop"),
        Column("defined at", lambda row: _near(row.program.source), "code"),
    ),
    printed=">calls | >devices | >holds | >sends | program | defined at",
    most=10**6,
)


def _omitted_text(omitted: OmittedPrograms) -> str:
    return (
        f"and {counted(omitted.count, 'small program')}, {counted(omitted.calls, 'call')}; the "
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
class ScriptComparison(SerializableReport):
    """Changes of the programs of a script. Made by `compare_scripts`.

    Attributes:
        title: The script and its arguments, or the name of a single program.
        programs: Changes of each program that both reports have.
        added: Names of programs that only the second report has.
        removed: Names of programs that only the first report has.
    """

    _format = ReportFormat("comparison of programs", 1, "compare_scripts(...).to_json()")
    _print_all = "comparison.print(all=True)"
    _kind = "comparison"

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

    def parts(self) -> Iterator[Part]:
        """Yield what changed in each program, and the names of the others."""
        worse = sum(bool(comparison.regressions) for comparison in self.programs)
        programs = counted(len(self.programs), "program")
        yield Head(
            title=f"Programs of {self.title}",
            headline=f"{worse} of {programs} became worse."
            if worse
            else "No program became worse.",
            facts=self._others(),
            severity="costly" if worse else "",
            is_outer=True,
        )
        for comparison in self._changed:
            yield from comparison.parts()

    def __repr__(self) -> str:
        return f"<ScriptComparison of {self.title}; print it>"


def compare_scripts(
    old: ScriptReport | ProgramReport, new: ScriptReport | ProgramReport
) -> ScriptComparison:
    """Compare the programs of two reports of a script, which are matched by name.

    Programs of one name, such as one that was compiled for two shapes, are matched in their order.

    Args:
        old: Report before the change, of a script or of a single program.
        new: Report after the change.
    """
    title = new.script if isinstance(new, ScriptReport) else new.name
    return compare_named(
        title, dict(named_programs(old)), dict(named_programs(new)), compare_programs
    )


def compare_named[R](
    title: str,
    old: Mapping[str, R],
    new: Mapping[str, R],
    compare: Callable[[R, R], Comparison],
) -> ScriptComparison:
    """Compare the programs of one name.

    Args:
        title: What they are programs of.
        old: Reports before the change by distinct names.
        new: Reports after the change.
        compare: Compares two reports.
    """
    return ScriptComparison(
        title=title,
        programs=tuple(
            replace(compare(old[name], report), old=name, new=name)
            for name, report in new.items()
            if name in old
        ),
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
    )


NUMBERED = "{} ({})"
"""Name of a program beside earlier ones of its name: `step (2)`."""


def named_programs(report: ScriptReport | ProgramReport) -> list[tuple[str, ProgramReport]]:
    """Return the explained programs of a report with names of their own: `step`, `step (2)`."""
    if isinstance(report, ProgramReport):
        return [(report.name, report)]
    programs = zip(_name_programs(report), report.programs, strict=True)
    return [(name, p.report) for name, p in programs if p.report is not None]


def _name_programs(report: ScriptReport) -> Iterator[str]:
    return distinct_names((program.name for program in report.programs), NUMBERED)
