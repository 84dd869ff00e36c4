"""Processes in messages, and names given by users in keys."""

import urllib.parse
from collections.abc import Sequence

_PROCESSES_SHOWN = 8


def named_processes(processes: Sequence[int]) -> str:
    """`process 3`, `processes 1, 2`; long lists are cut."""
    shown = ", ".join(map(str, processes[:_PROCESSES_SHOWN]))
    more = len(processes) - _PROCESSES_SHOWN
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {shown}{f' and {more} more' if more > 0 else ''}"


def key_part(name: str) -> str:
    """A name without what separates the parts of a key; different names stay different."""
    return urllib.parse.quote(name, safe="")
