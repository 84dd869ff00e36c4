"""Random programs as frozen data, from which their text is written."""

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
    """Value of a program.

    Attributes:
        name: Its name, or an expression that makes it.
        shape: Its shape.
        dtype: The name of its dtype; `key` for keys of random numbers.
        exact: True if every way of computing it gives the same bits. Comparisons and jumps, which
            a rounding error changes, use exact values only.
        limit: Approximate bound of the magnitude of its elements.
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
        """Letter of the dtype: `f`loat, `i`nteger, `b`ool, `c`omplex or `k`ey."""
        if self.dtype in FLOATS:
            return "f"
        return "i" if self.dtype in INTS else self.dtype[0]


@dataclass(frozen=True)
class Step:
    """Statement: names bound to an expression, and the functions that it calls."""

    operation: str
    targets: tuple[Value, ...]
    text: str
    blocks: tuple["Block", ...] = ()

    @property
    def needs(self) -> set[str]:
        """Return the names that it reads, in its functions too."""
        found = names_in([self.text])
        for block in self.blocks:
            found |= block.needs
        return found


@dataclass(frozen=True)
class Block:
    """Function inside a program; it may read names from outside.

    Attributes:
        name: Its name.
        params: Its parameters.
        steps: Its statements.
        results: Expressions that it returns, as a tuple if there are several.
        rules: Lines after it: the rules of a function with a custom derivative.
        decorator: Line above it.
    """

    name: str
    params: tuple[Value, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    decorator: str = ""
    rules: tuple[str, ...] = ()

    @property
    def needs(self) -> set[str]:
        """Return the names that it reads from outside."""
        found = names_in(self.results)
        bound = {p.name for p in self.params}
        for step in self.steps:
            found |= step.needs
            bound |= {t.name for t in step.targets}
        return found - bound


@dataclass(frozen=True)
class Argument:
    """Argument of a program.

    Attributes:
        value: Its name, shape and dtype.
        text: The expression that makes it.
        resource: Its entry of `in_shardings`.
        placed: The spec by which it is sharded before the call, or None for the host.
        donated: True if the program may take over its buffers.
        wrapped: Its container: `dict` (beside a None), `checked` (a class whose constructor
            requires an array), or empty.
    """

    value: Value
    text: str
    resource: str
    placed: str | None = None
    donated: bool = False
    wrapped: str = ""


@dataclass(frozen=True)
class Result:
    """Result of a program, and its entry of `out_shardings`."""

    value: Value
    resource: str


@dataclass(frozen=True)
class Program:
    """Program with its mesh and the kind of its call.

    Attributes:
        seed: Its seed.
        axes: Names and sizes of the mesh's axes.
        backwards: True if the mesh has its devices in reverse order.
        manner: How the mesh is specified; see `running.MANNERS`.
        call: How the program is called; see `running.CALLS`.
        partitioner: `shardy` or `gspmd`.
        arguments: Its arguments.
        steps: Its statements.
        results: Its results.
        container: Container of the results: `tuple`, `dict`, `nested`, `holes` (with a None) or
            `bare`.
        prefix: One `out_shardings` for all results, or None.
        options: Other keywords of pjit, with their values.
        first: The position of the mesh's first device among all devices.
        explicit: True if the axes of the mesh are explicit.
        automatic: Axes that stay automatic beside explicit ones.
        ins: One `in_shardings` for all arguments instead of their own, or None.
        bare: True if its transformation has no `jax.jit` around it, beside JAX.
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
    automatic: tuple[str, ...] = ()
    ins: str | None = None
    bare: bool = False

    def pruned(self) -> "Program":
        """Return the block without unused statements."""
        return replace(self, steps=prune(self.steps, {r.value.name for r in self.results}))

    def operations(self) -> Iterator[str]:
        """Return the operations of its statements and of inner functions."""
        return operations_of(self.steps)


def names_in(texts: Iterable[str]) -> set[str]:
    """Return the names of values in expressions."""
    return {name for text in texts for name in _NAME.findall(text)}


def prune(steps: Iterable[Step], needed: set[str]) -> tuple[Step, ...]:
    """Return the statements on which the needed names depend, with pruned functions."""
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
