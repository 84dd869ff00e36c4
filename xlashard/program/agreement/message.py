"""What is said of programs that differ: one text, the same in every process."""

from collections.abc import Mapping

from xlashard.config import CHECK_PROGRAMS
from xlashard.errors import counted
from xlashard.processes import format_processes
from xlashard.program.agreement.difference import Difference
from xlashard.program.agreement.subject import Subject


def error_text(
    came: Mapping[int, Subject],
    pair: tuple[int, int],
    found: Difference,
    before: tuple[str, ...],
) -> str:
    """The text of the error.

    Args:
        came: What each process came with.
        pair: Of which two the difference is told.
        found: The difference.
        before: The programs that all of them ran before.
    """
    names = dict.fromkeys(came[p].first[1].partition("(")[0] for p in pair)
    alike = found.kind in ("version", "flags")
    what = "are not set up alike" if alike else "are not about to run the same program"
    lines = [f"{' and '.join(names)}: the processes {what}, so none of them runs it"]
    sides: dict[tuple[str, str], list[int]] = {}
    for process, said in came.items():
        sides.setdefault(said.first, []).append(process)
    for (_, brief), processes in sides.items():
        lines.append(f"  {format_processes(processes)}: {brief}")
    lines.append(found.title)
    lines += [
        f"  process {process}: {text}"
        for process, text in zip(pair, (found.one, found.other), strict=True)
    ]
    if found.lines:
        lines.append(f"  (- is of process {pair[0]}, + of process {pair[1]})")
        lines += [f"    {line}" for line in found.lines]
    if before:
        count = counted(came[pair[0]].number - 1, "program")
        lines.append(f"They agreed on {count} before, the last one last: {', '.join(before)}")
    lines.append(f"To mend it, {found.fix}. ({CHECK_PROGRAMS}=0 turns the comparison off.)")
    return "\n".join(lines)
