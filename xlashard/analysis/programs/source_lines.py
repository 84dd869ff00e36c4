"""Lines of the user's program that a report shows, and how they are picked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import zip_longest
from operator import is_
from typing import Any

from xlashard.hlo.module import Frame
from xlashard.support.formatting import name_file
from xlashard.support.tracebacks import is_of_package, is_users_file


@dataclass(frozen=True)
class SourceLine:
    """A line of source.

    Attributes:
        file: The file's path, or `cell 3` of a notebook.
        line: The line, from 1 on.
        function: The function around it; empty if unknown.
        in_user_file: False for files of Python, of installed packages and of xlashard.
        callers: The frames of the user's files around it, innermost first, up to the function that
            became the program.
        distinct: Positions in `callers` of the frames that distinguish it from other stacks of the
            report with this line, innermost first.
    """

    file: str
    line: int
    function: str
    in_user_file: bool
    callers: tuple[Frame, ...] = ()
    distinct: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class SourceLocator:
    """Picks the line of a stack that a report shows.

    Attributes:
        function: The name of the function that became the program.
        file: Its file.
    """

    function: str
    file: str

    @classmethod
    def of(cls, described: str | None) -> "SourceLocator":
        """Make a locator for a function that JAX describes as `step at model.py:12`."""
        name, _, place = (described or "").partition(" at ")
        return cls(name, place.rpartition(":")[0])

    def line(self, frames: Sequence[Frame]) -> SourceLine | None:
        """Return the innermost line of the user's files inside the function.

        Where an installed package has the whole program, its files are the user's. Without one of
        them, the line is the innermost.

        Args:
            frames: A stack, innermost first. Its outer end is the code that traced the function.
        """
        own = [i for i, frame in enumerate(frames) if self._is_of_function(frame)]
        inside = frames[: own[-1] + 1] if own else frames
        if not inside:
            return None
        users = [f for f in inside if self._is_users_file(f.file)]
        users = users or [f for f in inside if self._is_of_package(f.file)]
        frame, *callers = map(_name_cell, users or inside[:1])
        return SourceLine(frame.file, frame.line, frame.function, bool(users), tuple(callers))

    def own_line(self, frames: Sequence[Frame]) -> SourceLine | None:
        """Return `line(frames)`, or None if a known function is not on the stack."""
        if self.file and not any(map(self._is_of_function, frames)):
            return None
        return self.line(frames)

    @cached_property
    def _is_users_file(self) -> Callable[[str], bool]:
        return cache(is_users_file)

    @cached_property
    def _is_of_package(self) -> Callable[[str], bool]:
        return cache(lambda file: is_of_package(file, self.file))

    def _is_of_function(self, frame: Frame) -> bool:
        return frame.file == self.file and frame.function.rpartition(".")[2] == self.function


def _name_cell(frame: Frame) -> Frame:
    file = name_file(frame.file)
    return frame if file == frame.file else replace(frame, file=file)


def distinguish_lines[T](report: T) -> T:
    """Return a report whose lines name their callers where several stacks have one line."""
    stacks: dict[tuple[str, int], dict[SourceLine, None]] = {}
    values: list[Any] = [report]
    while values:
        value = values.pop()
        if isinstance(value, SourceLine):
            stacks.setdefault((value.file, value.line), {})[value] = None
        elif isinstance(value, tuple):
            values.extend(value)
        else:
            values.extend([getattr(value, name) for name in _list_fields(type(value))])
    apart = {
        source: replace(source, distinct=_branches(source.callers, [s.callers for s in sources]))
        for sources in stacks.values()
        for source in sources
        if len(sources) > 1
    }
    return _change_lines(report, apart) if apart else report


@lru_cache(maxsize=512)
def _list_fields(cls: type) -> tuple[str, ...]:
    """Return the fields of a dataclass; none for other classes."""
    return tuple([field.name for field in fields(cls)]) if is_dataclass(cls) else ()


def _branches(stack: Sequence[Frame], others: Iterable[Sequence[Frame]]) -> tuple[int, ...]:
    """Return the positions at which others of some stacks part from a stack."""
    parted = set()
    for other in others:
        pairs = zip_longest(stack, other)
        parted.add(next((i for i, (one, two) in enumerate(pairs) if one != two), len(stack)))
    return tuple(sorted(i for i in parted if i < len(stack)))


def _change_lines(value: Any, changes: Mapping[SourceLine, SourceLine]) -> Any:
    """Return a value of frozen dataclasses and tuples with some of its lines changed."""
    if isinstance(value, SourceLine):
        return changes.get(value, value)
    if isinstance(value, tuple):
        changed_items = tuple([_change_lines(item, changes) for item in value])
        return value if all(map(is_, changed_items, value)) else changed_items
    old = {name: getattr(value, name) for name in _list_fields(type(value))}
    new = {name: _change_lines(part, changes) for name, part in old.items()}
    changed = {name: part for name, part in new.items() if part is not old[name]}
    return replace(value, **changed) if changed else value
