"""Formatting of process lists, and quoting of user-given names in keys of the store."""

import urllib.parse
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

_PROCESSES_SHOWN = 8


def format_processes(processes: Sequence[int]) -> str:
    """Return `process 3` or `processes 1, 2`; lists of more than eight processes are truncated."""
    shown = ", ".join(map(str, processes[:_PROCESSES_SHOWN]))
    more = len(processes) - _PROCESSES_SHOWN
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {shown}{f' and {more} more' if more > 0 else ''}"


def processes_of(devices: Iterable[Any]) -> tuple[int, ...]:
    """Return the sorted process indices that own the given devices."""
    return tuple(sorted({device.process_index for device in devices}))


def group_by_value[T: Hashable](by_process: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Group processes by value, largest group first.

    Example:
        >>> group_by_value({0: "a", 1: "b", 2: "b"})
        [('b', [1, 2]), ('a', [0])]
    """
    groups: dict[T, list[int]] = {}
    for process in sorted(by_process):
        groups.setdefault(by_process[process], []).append(process)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))


def format_by_process(by_process: Mapping[int, str]) -> str:
    """Format a text per process, grouped by equal text: `processes 1, 2: b; process 0: a`."""
    return "; ".join(f"{format_processes(who)}: {what}" for what, who in group_by_value(by_process))


def quote_key(name: str) -> str:
    """Escape separators in one part of a key; distinct names stay distinct."""
    return urllib.parse.quote(name, safe="")
