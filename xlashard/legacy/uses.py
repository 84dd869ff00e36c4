"""Which names of the era a program uses, and at which of its lines."""

import linecache
import os
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from xlashard._jax.era import tell_when_set
from xlashard._jax.frames import JAX_FOLDER
from xlashard.legacy import flags
from xlashard.legacy.table import Entry, entries

# Whoever runs in these folders is not the program that is asked about.
_NOT_THE_PROGRAM = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    JAX_FOLDER,
    "<frozen ",
)
_FREE_TOOLS = (3, 4)
"""Numbers of tools that Python's monitoring gives to nobody in particular."""


_CALLED_BY_NAME = re.compile(r"\w+\s*\(")


@dataclass(frozen=True)
class Use:
    """A name of the era at a line of a program.

    Attributes:
        entry: The name.
        file: The file of the line.
        line: Its number, from 1.
        count: How often it ran.
    """

    entry: Entry
    file: str
    line: int
    count: int


type _Place = tuple[str, str, int]
"""Name, file and line."""


class Recorder:
    """Counts the uses of the era's names, from `start` to `end`.

    An import is a use, and so is asking a module for a name, calling what was imported, and setting
    a flag.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._asked: Counter[_Place] = Counter()
        self._called: Counter[_Place] = Counter()
        # What a file has asked for, by identity: these are the calls to count in it. The values
        # are kept, so that no other object can have the identity of one of them.
        self._known: defaultdict[str, dict[int, tuple[Entry, Any]]] = defaultdict(dict)
        self._tool: int | None = None
        self._endings: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begins to count calls and settings; `listen` counts what is asked for."""
        for flag in flags.OWN:
            entry = entries()[f"jax.config.{flag.name}"]
            self._endings.append(tell_when_set(flag, _flag_listener(self, entry)))
        monitoring = sys.monitoring
        free = [tool for tool in _FREE_TOOLS if monitoring.get_tool(tool) is None]
        if not free:
            return
        self._tool = free[0]
        monitoring.use_tool_id(self._tool, "xlashard.legacy")
        monitoring.register_callback(self._tool, monitoring.events.CALL, self._call)
        monitoring.set_events(self._tool, monitoring.events.CALL)

    def end(self) -> None:
        """Counts no longer."""
        for end in self._endings:
            end()
        self._endings.clear()
        if self._tool is not None:
            monitoring = sys.monitoring
            # Some Pythons go on calling when the number is free, until all modules are torn down.
            monitoring.set_events(self._tool, monitoring.events.NO_EVENTS)
            monitoring.register_callback(self._tool, monitoring.events.CALL, None)
            monitoring.free_tool_id(self._tool)
            self._tool = None

    def listen(self, entry: Entry, value: Any, frame: FrameType) -> None:
        """Counts that a name was asked for.

        Args:
            entry: The name.
            value: What it is.
            frame: Who asked.
        """
        file = frame.f_code.co_filename
        if file.startswith(_NOT_THE_PROGRAM):
            return
        with self._lock:
            self._entries[entry.name] = entry
            self._known[file][id(value)] = entry, value
            self._asked[entry.name, file, frame.f_lineno] += 1

    def uses(self) -> Sequence[Use]:
        """What was counted, by name, file and line."""
        with self._lock:
            places = sorted({*self._asked, *self._called})
            # A call by its full name asks for the name and calls it: one use.
            return [
                Use(self._entries[place[0]], *place[1:], max(self._asked[place], called))
                for place in places
                for called in (self._called[place],)
            ]

    def _call(self, code: CodeType, offset: int, function: Any, argument: Any) -> Any:
        """Python is about to call something somewhere."""
        known = self._known.get(code.co_filename, {})
        found = known.get(id(getattr(function, "__func__", function)))
        line = _line_of_name(code, offset) if found else None
        if not found or line is None:
            # Python does not ask again about this place.
            return sys.monitoring.DISABLE
        entry, _ = found
        place = entry.name, code.co_filename, line
        with self._lock:
            self._called[place] += 1
        return None


def _flag_listener(recorder: Recorder, entry: Entry) -> Callable[[], None]:
    def told() -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            frame = frame.f_back
        if frame is not None:
            recorder.listen(entry, entry, frame)

    return told


@lru_cache(maxsize=4096)
def _line_of_name(code: CodeType, offset: int) -> int | None:
    """The line of a call, if what is called stands there as a name alone.

    Where it stands behind a dot, it was asked for there, and counted.
    """
    line, _, column, _ = next(islice(code.co_positions(), offset // 2, None))
    if line is None or column is None:
        return line
    text = linecache.getline(code.co_filename, line).encode()[column:].decode()
    return line if _CALLED_BY_NAME.match(text) else None
