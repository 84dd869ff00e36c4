"""What a random program is: frozen data, from which its text is written."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

FLOATS = ("float32", "bfloat16", "float16")
INTS = ("int32", "uint8", "int8")
KEY = "key"

_NAME = re.compile(r"\bv\d+\b")


@dataclass(frozen=True)
class Value:
    """A value of a program.

    Attributes:
        name: Its name, or an expression that makes it.
        shape: Its shape.
        dtype: The name of its dtype; `key` for keys of random numbers.
        exact: Whether every way of computing it gives the same bits. Only of such values may a
            program ask what a rounding error changes: which is larger, where to jump.
        limit: What its elements do not exceed in magnitude, roughly.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    exact: bool = True
    limit: float = 1.0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def kind(self) -> str:
        """`f`loat, `i`nteger, `b`ool, `c`omplex or `k`ey."""
        if self.dtype in FLOATS:
            return "f"
        return "i" if self.dtype in INTS else self.dtype[0]


@dataclass(frozen=True)
class Step:
    """One statement: names bound to an expression, and the functions that it calls."""

    operation: str
    targets: tuple[Value, ...]
    text: str
    blocks: tuple["Block", ...] = ()

    @property
    def needs(self) -> set[str]:
        """The names that it reads, in its functions too."""
        found = names_in([self.text])
        for block in self.blocks:
            found |= block.needs
        return found


@dataclass(frozen=True)
class Block:
    """A function inside a program; it may read names from outside.

    Attributes:
        name: Its name.
        params: Its parameters.
        steps: Its statements.
        results: Expressions that it returns, as a tuple if there are several.
        rules: What is to stand behind it: the rules of a function with a derivative of its own.
        decorator: What stands above it.
    """

    name: str
    params: tuple[Value, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    decorator: str = ""
    rules: tuple[str, ...] = ()

    @property
    def needs(self) -> set[str]:
        """The names that it reads from outside."""
        found = names_in(self.results)
        bound = {p.name for p in self.params}
        for step in self.steps:
            found |= step.needs
            bound |= {t.name for t in step.targets}
        return found - bound


@dataclass(frozen=True)
class Argument:
    """An argument of a program.

    Attributes:
        value: Its name, shape and dtype.
        text: The expression that makes it.
        resource: What `in_shardings` says of it.
        placed: The spec by which it is dealt out before the call, or None for not at all.
        donated: Whether the program may have its buffers.
        wrapped: Whether it stands in a dict, beside a None.
    """

    value: Value
    text: str
    resource: str
    placed: str | None = None
    donated: bool = False
    wrapped: bool = False


@dataclass(frozen=True)
class Result:
    """A result of a program, and what `out_shardings` says of it."""

    value: Value
    resource: str


@dataclass(frozen=True)
class Program:
    """A program, where it runs, and how it is called.

    Attributes:
        seed: What it was drawn from.
        axes: Names and sizes of the mesh's axes.
        backwards: Whether the mesh has its devices in reverse order.
        manner: How the mesh is said; see `running.MANNERS`.
        call: How the program is called; see `running.CALLS`.
        partitioner: `shardy` or `gspmd`.
        arguments: Its arguments.
        steps: Its statements.
        results: Its results.
        container: What they are returned in: `tuple`, `dict`, `nested`, `holes` (with a None) or
            `bare`.
        prefix: What `out_shardings` says of all results in one word, or None.
        options: Other keywords of pjit, with their values.
        first: The position of the mesh's first device among all devices.
        explicit: Whether the axes of the mesh are explicit.
        ins: All of `in_shardings` instead of what the arguments have, or None.
    """

    seed: int
    axes: tuple[tuple[str, int], ...]
    backwards: bool
    manner: str
    call: str
    partitioner: str
    arguments: tuple[Argument, ...]
    steps: tuple[Step, ...]
    results: tuple[Result, ...]
    container: str
    prefix: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    first: int = 0
    explicit: bool = False
    ins: str | None = None

    def pruned(self) -> "Program":
        """Without statements that nothing needs."""
        return replace(self, steps=prune(self.steps, {r.value.name for r in self.results}))

    def operations(self) -> Iterator[str]:
        """The operations of its statements, with those of inner functions."""
        return operations_of(self.steps)


def names_in(texts: Iterable[str]) -> set[str]:
    """The names of values in expressions."""
    return {name for text in texts for name in _NAME.findall(text)}


def prune(steps: Iterable[Step], needed: set[str]) -> tuple[Step, ...]:
    """The statements on which the needed names depend, their functions pruned as well."""
    needed, kept = set(needed), []
    for step in reversed(tuple(steps)):
        if needed.isdisjoint(t.name for t in step.targets):
            continue
        blocks = tuple(
            replace(block, steps=prune(block.steps, names_in(block.results)))
            for block in step.blocks
        )
        kept.append(replace(step, blocks=blocks))
        needed |= kept[-1].needs
    return tuple(reversed(kept))


def operations_of(steps: Iterable[Step]) -> Iterator[str]:
    for step in steps:
        yield step.operation
        for block in step.blocks:
            yield from operations_of(block.steps)
