"""Differences between two programs, the most informative first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

from xlashard.config import CHECK_PROGRAMS
from xlashard.errors import counted
from xlashard.lazily import dataclass
from xlashard.processes import format_processes
from xlashard.program.consistency.fingerprint import ProgramDescription, Proposal, ValueDescription
from xlashard.program.consistency.listing import (
    Listing,
    first_difference,
    place_text,
    small_diff,
)


@dataclass(frozen=True)
class Difference:
    """A difference, and advice.

    Attributes:
        kind: Kind of the difference.
        title: The difference, as a sentence.
        one: Value of the first process.
        other: Value of the other process.
        fix: Advice.
        lines: Diff of the two modules.
    """

    kind: str
    title: str
    one: str
    other: str
    fix: str
    lines: tuple[str, ...] = ()


type Look = Callable[[ProgramDescription, ProgramDescription], Difference | None]
"""Comparison of one property of two programs."""


def find_difference(one: ProgramDescription, other: ProgramDescription) -> Difference:
    """Return the most informative difference of two programs."""
    results = (look(one, other) for look in _LOOKS)
    return next(difference for difference in results if difference is not None)


def environment_difference(one: Mapping[str, str], other: Mapping[str, str]) -> Difference | None:
    """Return the first version or variable that differs between two processes."""
    for name in dict.fromkeys((*one, *other)):
        texts = [variables.get(name, "") for variables in (one, other)]
        if texts[0] == texts[1]:
            continue
        if name.isupper():
            shown = [_only(a, b) for a, b in (texts, texts[::-1])]
            title = f"The environment variable {name} is not the same:"
            fix = f"start all processes with the same {name}"
            return Difference("flags", title, shown[0], shown[1], fix)
        fix = "install the same versions on every machine of the pod"
        shown = [f"{name} {text}" for text in texts]
        return Difference("version", f"The versions of {name} are not the same:", *shown, fix=fix)
    return None


def _only(flags: str, others: str) -> str:
    left = [flag for flag in flags.split() if flag not in others.split()]
    return " ".join(left) or "nothing more"


def _of_programs(
    kind: str, title: str, text: Callable[[ProgramDescription], str], fix: str
) -> Look:
    """Return the comparison of a text about the program."""

    def look(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
        mine, peer = text(one), text(other)
        return None if mine == peer else Difference(kind, title, mine, peer, fix)

    return look


def _of_values(kind: str, title: str, text: Callable[[ValueDescription], str], fix: str) -> Look:
    """Return the comparison of a text about each argument and result, which the title names."""

    def look(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
        for path, *pair in _values(one, other):
            mine, peer = map(text, pair)
            if mine != peer:
                return Difference(kind, title.format(path), mine, peer, fix)
        return None

    return look


def _types(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
    fix = (
        "call it with arrays of one global shape and dtype in every process; a process's own part "
        "of the data becomes one by xlashard.make_array_from_process_local_data"
    )
    for number, pair in enumerate(zip(one.arguments, other.arguments, strict=False)):
        if pair[0].type != pair[1].type:
            path = _path(pair[0], number)
            title = f"The argument {path} is not of one type:"
            return Difference("argument", title, pair[0].type, pair[1].type, fix)
    counts = [len(story.arguments) for story in (one, other)]
    if counts[0] == counts[1]:
        return None
    longer = max(one.arguments, other.arguments, key=len)
    number = min(counts)
    title = f"It takes more arguments in one of them, the first of which is {
        _path(longer[number], number)
    }:"
    texts = [counted(count, "argument") for count in counts]
    return Difference("argument", title, texts[0], texts[1], fix)


def _path(value: ValueDescription, number: int) -> str:
    return value.path or f"{number} (an array that the function closes over)"


def _values(
    one: ProgramDescription, other: ProgramDescription
) -> Iterator[tuple[str, ValueDescription, ValueDescription]]:
    for number, (mine, peer) in enumerate(zip(one.arguments, other.arguments, strict=True)):
        yield f"the argument {_path(mine, number)}", mine, peer
    for number, (mine, peer) in enumerate(zip(one.results, other.results, strict=False)):
        yield mine.path or f"the result {number}", mine, peer


def _settings(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
    for name in sorted({*one.settings, *other.settings}):
        texts = [story.settings.get(name, "not given") for story in (one, other)]
        if texts[0] != texts[1]:
            return Difference(
                "option",
                f"The setting {name!r} is not the same:",
                texts[0],
                texts[1],
                "compile it under the same settings in every process",
            )
    return None


def _closed(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
    for mine, peer in zip(one.closed, other.closed, strict=False):
        if mine != peer:
            return Difference(
                "closed over",
                f"Its values are not the same: {mine[0]}",
                *(f"{kind}, of the digest {digest[:12]}" for _, kind, digest in (mine, peer)),
                fix="compute or read it alike in every process (the same seed, the same file), or "
                "send one process's by xlashard.multihost.broadcast_one_to_all",
            )
    return None


def _operations(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
    if not one.text or not other.text:
        return None
    mine, peer = Listing(one.text), Listing(other.text)
    number = first_difference(mine.lines, peer.lines)
    if number is None:
        return None
    return Difference(
        "operation",
        f"The first operation that differs, in line {number + 1} of the module:",
        place_text(mine.place(number), one.code),
        place_text(peer.place(number), other.code),
        "let nothing that differs between processes (jax.process_index(), the time, a random "
        "number of Python or NumPy, the order of a set) reach the traced function; what must "
        "differ goes in as data",
        tuple(small_diff(mine.lines, peer.lines, number)),
    )


def _unknown(one: ProgramDescription, other: ProgramDescription) -> Difference:
    if not one.text or not other.text:
        return Difference(
            "module",
            "They were compiled of other modules:",
            *(
                f"{story.name}, " + ("compiled here" if story.text else "from a file")
                for story in (one, other)
            ),
            fix="load the same file in every process",
        )
    return Difference(
        "module",
        "Their digests differ, and their texts don't:",
        f"{len(one.text)} characters of StableHLO",
        f"{len(other.text)} characters of StableHLO",
        "compare them by lower(...).as_text(debug_info=True)",
    )


_LOOKS: Sequence[Look] = (
    _of_programs(
        "order",
        "They are at different functions:",
        attrgetter("name"),
        "call the same functions in the same order in every process; look for a call under an `if` "
        "on jax.process_index(), or in a loop that is longer in some processes",
    ),
    _types,
    _of_values(
        "sharding",
        "The sharding of {} is not the same:",
        attrgetter("sharding"),
        "give the same in_shardings and out_shardings, on the same mesh, in every process, and "
        "place the arguments alike",
    ),
    _of_programs(
        "devices",
        "The devices, or their order, are not the same:",
        attrgetter("devices"),
        "make the mesh of the same devices in the same order in every process, for example of "
        "jax.devices(), never of jax.local_devices()",
    ),
    _settings,
    _of_values(
        "donation",
        "Donation, layout or memory of {} is not the same:",
        lambda value: value.rest or "nothing",
        "donate the same arguments, and ask for the same layouts, in every process",
    ),
    _closed,
    _of_programs(
        "callback",
        "It calls other Python functions:",
        lambda program: ", ".join(program.callbacks) or "none",
        "let it call the same Python functions in every process",
    ),
    _operations,
    _unknown,
)


def error_text(
    proposals: Mapping[int, Proposal],
    pair: tuple[int, int],
    difference: Difference,
    before: tuple[str, ...],
) -> str:
    """Return the text of a `ProgramsDifferError`.

    Args:
        proposals: Proposal of each process.
        pair: The two processes that are compared.
        difference: The difference.
        before: Programs that all processes ran before.
    """
    names = dict.fromkeys(proposals[p].first[1].partition("(")[0] for p in pair)
    alike = difference.kind in ("version", "flags")
    what = "are not set up alike" if alike else "are not about to run the same program"
    lines = [f"{' and '.join(names)}: the processes {what}, so none of them runs it"]
    sides: dict[tuple[str, str], list[int]] = {}
    for process, proposal in proposals.items():
        sides.setdefault(proposal.first, []).append(process)
    for (_, brief), processes in sides.items():
        lines.append(f"  {format_processes(processes)}: {brief}")
    lines.append(difference.title)
    lines += [
        f"  process {process}: {text}"
        for process, text in zip(pair, (difference.one, difference.other), strict=True)
    ]
    if difference.lines:
        lines.append(f"  (- is of process {pair[0]}, + of process {pair[1]})")
        lines += [f"    {line}" for line in difference.lines]
    if before:
        count = counted(proposals[pair[0]].number - 1, "program")
        lines.append(f"They agreed on {count} before, the last one last: {', '.join(before)}")
    lines.append(f"To fix this, {difference.fix}. ({CHECK_PROGRAMS}=0 turns the comparison off.)")
    return "\n".join(lines)
