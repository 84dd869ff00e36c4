"""Recording of removed names and behaviours that a program uses, with their lines.

Python calls the recorder in the middle of the program, with the program's own objects. It compares
their identities and types, and reads attributes of Python's own types through their descriptors:
an attribute, `isinstance` or `==` would run code of the program (of a proxy that is not ready).
"""

import contextlib
import inspect
import linecache
import os
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from types import BuiltinMethodType, CodeType, FrameType, MethodType
from typing import Any

from xlashard._jax.legacy_api import call_when_set, code_of_reads
from xlashard._jax.runtime.tracebacks import JAX_FOLDER
from xlashard.core.sharding import Mesh
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.entries.keywords import SIGNATURES, keyword_entries
from xlashard.legacy.modes import config_flags as flags
from xlashard.legacy.modes.pjit import LegacyFunction
from xlashard.legacy.modules import Entry, entries
from xlashard.legacy.modules.keywords import convert_arguments
from xlashard.legacy.modules.maps import ThreadResources

# Code in these folders is not the user's program.
_NOT_USER_CODE = (
    str(Path(__file__).parents[1]) + os.sep,
    JAX_FOLDER,
    "<frozen ",
)
_FREE_TOOLS = (3, 4)
"""Tool ids of `sys.monitoring` that have no predefined use."""


_CONTEXTS = contextlib.__file__
"""File of `contextlib`, through which programs enter contexts."""

_PARTIAL_FUNCTION: Any = vars(partial)["func"]

_PJIT = LegacyFunction.__init__.__code__
"""Code that `pjit` runs once it has flattened the resources."""

_CONVERSION = convert_arguments.__code__
"""Code that runs where a call has removed keywords."""

_CALLED_BY_NAME = re.compile(r"\w+\s*\(")


@dataclass(frozen=True)
class Use:
    """Use of a removed name at a line of a program.

    Attributes:
        entry: The entry of the name.
        file: The file.
        line: The line number, from 1.
        count: The number of times that it ran.
    """

    entry: Entry
    file: str
    line: int
    count: int


type _Place = tuple[str, str, int]
"""Name, file and line."""


class Recorder:
    """Recorder of uses of removed names, from `start` to `end`.

    Uses are: importing a name, reading it from a module, calling it (also under another name or
    in another file), passing it to a function such as `functools.partial`, reading or setting a
    flag, and the behaviours `with mesh:` and `in_axis_resources=None`.

    Attributes:
        failure: What ended the program before its last line: `KeyError`, `exit code 2`; empty if
            it ran to its end.
    """

    def __init__(self) -> None:
        self.failure = ""
        # Reentrant: a signal handler or `__del__` of the program may run while it is held.
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._accesses: Counter[_Place] = Counter()
        self._called: Counter[_Place] = Counter()
        # Objects that a file has read, by identity: their calls are counted in this file. Keeping
        # the objects alive keeps the identities unique.
        self._known: defaultdict[str, dict[int, tuple[Entry, Any]]] = defaultdict(dict)
        # Functions and classes that today's JAX lacks: a call of one is a use in every file.
        self._shared: dict[int, tuple[Entry, Any]] = {}
        self._watched: dict[CodeType, Callable[[FrameType], Sequence[Entry]]] = {}
        self._tool: int | None = None
        self._endings: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start to count calls and flags; `listen` counts accesses."""
        for flag in flags.OWN:
            entry = entries()[f"jax.config.{flag.name}"]
            self._endings.append(call_when_set(flag, partial(self._flag_set, entry)))
        monitoring = sys.monitoring
        free = [tool for tool in _FREE_TOOLS if monitoring.get_tool(tool) is None]
        if not free:
            return
        self._tool = free[0]
        monitoring.use_tool_id(self._tool, "xlashard.legacy")
        monitoring.register_callback(self._tool, monitoring.events.CALL, self._call)
        monitoring.register_callback(self._tool, monitoring.events.PY_START, self._enter)
        monitoring.set_events(self._tool, monitoring.events.CALL)
        self._watched = observed_code()
        for code in self._watched:
            monitoring.set_local_events(self._tool, code, monitoring.events.PY_START)

    def end(self) -> None:
        """Stop counting."""
        for end in self._endings:
            end()
        self._endings.clear()
        if self._tool is not None:
            monitoring = sys.monitoring
            # Some Python versions keep calling after the tool id is freed, until shutdown.
            monitoring.set_events(self._tool, monitoring.events.NO_EVENTS)
            for code in self._watched:
                monitoring.set_local_events(self._tool, code, monitoring.events.NO_EVENTS)
            for event in (monitoring.events.CALL, monitoring.events.PY_START):
                monitoring.register_callback(self._tool, event, None)
            monitoring.free_tool_id(self._tool)
            self._tool = None

    def record_failure(self, error: BaseException) -> None:
        """Record the exception that ends the program; `sys.exit(0)` is a normal end."""
        if type(error) is not SystemExit:
            self.failure = type(error).__name__
            return
        code = error.code
        if code is not None:
            # As in Python: the exit code is 1 where the program passes a message.
            number = int(code) if issubclass(type(code), int) else 1
            self.failure = f"exit code {number}" if number else ""

    def listen(self, entry: Entry, value: Any, frame: FrameType) -> None:
        """Count an access to a name.

        Args:
            entry: The entry of the name.
            value: The object.
            frame: The accessing frame.
        """
        file = frame.f_code.co_filename
        if file.startswith(_NOT_USER_CODE):
            return
        if entry.library != "JAX":
            # `np.int` is Python's `int`: a call of `int` is not a use of it.
            self._count(self._accesses, entry, file, frame.f_lineno)
            return
        with self._lock:
            self._known[file][id(value)] = entry, value
            if _is_legacy_object(value):
                self._shared.setdefault(id(value), (entry, value))
        self._count(self._accesses, entry, file, frame.f_lineno)

    def _flag_set(self, entry: Entry) -> None:
        """Count the setting of a flag, at the line of the program."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_USER_CODE):
            frame = frame.f_back
        if frame is not None:
            self.listen(entry, entry, frame)

    def _count(self, counter: Counter[_Place], entry: Entry, file: str, line: int) -> None:
        with self._lock:
            self._entries[entry.name] = entry
            counter[entry.name, file, line] += 1

    def uses(self) -> Sequence[Use]:
        """Return the counted uses, sorted by name, file and line."""
        with self._lock:
            places = sorted({*self._accesses, *self._called})
            # A call by its full name is an access and a call, and counts once.
            return [
                Use(self._entries[place[0]], *place[1:], max(self._accesses[place], called))
                for place in places
                for called in (self._called[place],)
            ]

    def _call(self, code: CodeType, offset: int, function: Any, argument: Any) -> Any:
        """Count a call of a recorded object, or a call with it as the first argument."""
        file = code.co_filename
        known = self._recorded(file, _called(function))
        handed_on = known is None and argument is not sys.monitoring.MISSING
        if handed_on:
            known = self._recorded(file, [argument])
        place = _place_of_call(code, offset) if known else None
        if known is None or place is None:
            # Disable the event at this call site.
            return sys.monitoring.DISABLE
        entry, value = known
        first, last, by_name = place
        if not (handed_on or by_name):
            # An attribute: counted already if it was read from a shim.
            lines = range(first, last + 1)
            if id(value) not in self._shared or any(
                self._accesses[entry.name, file, line] for line in lines
            ):
                return sys.monitoring.DISABLE
        self._count(self._called, entry, file, first)
        return None

    def _recorded(self, file: str, values: Sequence[Any]) -> tuple[Entry, Any] | None:
        """Return the first of some values that a file has read, or that today's JAX lacks."""
        if file.startswith(_NOT_USER_CODE):
            return None
        known = self._known.get(file, {})
        matches = (known.get(id(value)) or self._shared.get(id(value)) for value in values)
        return next((each for each in matches if each is not None), None)

    def _enter(self, code: CodeType, offset: int) -> None:
        """Count the behaviour of a watched function, at the calling line of the program."""
        frame: FrameType | None = sys._getframe(1)
        entries_of_call = self._watched[code](frame)
        caller = frame.f_back
        skipped = _NOT_USER_CODE if code in (_PJIT, _CONVERSION) else _CONTEXTS
        while caller is not None and caller.f_code.co_filename.startswith(skipped):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename.startswith(_NOT_USER_CODE):
            return
        for entry in entries_of_call:
            self._count(self._called, entry, caller.f_code.co_filename, caller.f_lineno)


def _called(function: Any) -> list[Any]:
    """Return the called objects: also the function of a `partial`, or the class of a method."""
    if issubclass(type(function), partial):
        function = _PARTIAL_FUNCTION.__get__(function)
    kind = type(function)
    if kind is not MethodType and kind is not BuiltinMethodType:
        return [function]
    owner = function.__self__
    called = function.__func__ if kind is MethodType else function
    return [called, *[owner] * issubclass(type(owner), type)]


def _is_legacy_object(value: Any) -> bool:
    """Return True for a function or class of this package."""
    of_module = getattr(value, "__module__", None)
    return callable(value) and isinstance(of_module, str) and of_module.startswith("xlashard.")


@lru_cache(maxsize=4096)
def _place_of_call(code: CodeType, offset: int) -> tuple[int, int, bool] | None:
    """Return first and last line of a call, and True if the called object is a plain name."""
    line, last, column, _ = next(islice(code.co_positions(), offset // 2, None))
    if line is None:
        return None
    if column is None:
        return line, last or line, True
    text = linecache.getline(code.co_filename, line).encode()[column:].decode()
    return line, last or line, _CALLED_BY_NAME.match(text) is not None


type Watcher = Callable[[FrameType], Sequence[Entry]]
"""Returns the entries that a call stands for, from the frame of the called function."""

BEHAVIOURS = WITH_MESH, NONE_IN, NONE_OUT = tuple(
    Entry(name, "", "differs", "", today, note)
    for name, today, note in (
        (
            "with mesh:",
            "with jax.set_mesh(mesh):",
            "JAX deprecates `with mesh:`, and jax.jit does not read its mesh for a PartitionSpec "
            "in in_shardings or out_shardings.",
        ),
        (
            "in_axis_resources=None",
            "in_shardings=jax.P()",
            "None replicated the argument; in jax.jit's in_shardings it keeps the argument's own "
            "sharding.",
        ),
        (
            "out_axis_resources=None",
            "out_shardings=jax.P()",
            "None replicated the result; in jax.jit's out_shardings it lets the compiler choose.",
        ),
    )
)

_GDA = "jax.experimental.global_device_array.GlobalDeviceArray"
_MEMBERS = {
    "mesh": "x.sharding.mesh",
    "mesh_axes": "x.sharding.spec",
    "local_shards": "x.addressable_shards",
    "local_data": "x.addressable_data(0)",
}


def observed_code() -> dict[CodeType, Watcher]:
    """Return the functions to watch, by their code objects."""
    env = ThreadResources.env
    reads_mesh = (entries()["jax.experimental.maps.thread_resources"],)
    return {
        Mesh.__enter__.__code__: lambda _: (WITH_MESH,),
        _PJIT: _none_in_resources,
        _CONVERSION: _removed_keywords,
        code_of_reads(): _read_flag,
        _code(env.fget): lambda _: reads_mesh,
        _code(env.fset): lambda _: reads_mesh,
        **dict(_members()),
    }


def _members() -> Iterator[tuple[CodeType, Watcher]]:
    """Yield the members of a GlobalDeviceArray that today's arrays lack, by their code."""
    for name, today in _MEMBERS.items():
        member = vars(GlobalDeviceArray)[name]
        entry = replace(entries()[_GDA], name=f"{_GDA}.{name}", today=today, note="")
        yield _code(getattr(member, "fget", member)), lambda _, entry=entry: (entry,)


def _code(function: Any) -> CodeType:
    return inspect.unwrap(function).__code__


def _read_flag(frame: FrameType) -> Sequence[Entry]:
    flag = frame.f_locals.get("flag")
    return tuple(entries()[f"jax.config.{own.name}"] for own in flags.OWN if own is flag)


def _removed_keywords(frame: FrameType) -> Sequence[Entry]:
    call = frame.f_locals
    signature, entries_of_function = SIGNATURES[call["name"]], keyword_entries()[call["name"]]
    keywords = signature.keywords.keys() & call["kwargs"].keys()
    positional = signature.list_positional(len(call["args"]))
    return [entries_of_function[name] for name in (*sorted(keywords), *positional)]


def _none_in_resources(frame: FrameType) -> Sequence[Entry]:
    options = frame.f_locals["options"]
    return [
        behaviour
        for behaviour, resources in (
            (NONE_IN, options.in_resources),
            (NONE_OUT, options.out_resources),
        )
        if any(resource.value is None for resource in resources.leaves)
    ]
