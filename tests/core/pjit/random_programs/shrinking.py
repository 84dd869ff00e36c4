"""Shrink a failing program while it fails with the same kind."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.core.pjit.random_programs.description import KEY, Program, Step, Value, names_in

MOST_ROUNDS = 60
SIMPLE = "constant"
CALLS_ONE = ("inner_jit", "inner_pjit", "remat")


def shrink(program: Program, first_failing: Callable[[Sequence[Program]], int | None]) -> Program:
    """Return the smallest failing program found.

    Args:
        program: A failing program.
        first_failing: Returns the position of the first program that fails with the same kind.
    """
    for _ in range(MOST_ROUNDS):
        smaller = list(_smaller(program))
        found = first_failing(smaller)
        if found is None:
            break
        program = smaller[found]
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield smaller programs, the largest steps first."""
    for i in range(len(program.results)):
        kept = program.results[:i] + program.results[i + 1 :]
        if kept:
            yield replace(program, results=kept).pruned()
    for steps in _fewer(program.steps):
        yield replace(program, steps=steps).pruned()
    used = {r.value.name for r in program.results}.union(*(s.needs for s in program.steps))
    for i, argument in enumerate(program.arguments):
        if argument.value.name not in used:
            yield replace(program, arguments=_without(program.arguments, i))
    silent = (
        ("prefix", None),
        ("ins", None),
        ("call", "call"),
        ("backwards", False),
        ("first", 0),
        ("automatic", ()),
        ("explicit", False),
        ("options", ()),
        ("manner", "named"),
        ("container", "tuple"),
    )
    for name, value in silent:
        if getattr(program, name) != value:
            yield replace(program, **{name: value})
    yield from _less_specified(program)


def _less_specified(program: Program) -> Iterator[Program]:
    """Yield programs with one sharding, placement or donation less."""
    silent = {"resource": "UNSPECIFIED", "placed": None, "donated": False, "wrapped": ""}
    for field in ("arguments", "results"):
        for i, each in enumerate(getattr(program, field)):
            for name, value in silent.items():
                if getattr(each, name, value) != value:
                    changed = replace(each, **{name: value})
                    yield replace(program, **{field: _with(getattr(program, field), i, changed)})


def _fewer(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    """Yield statements with one, possibly in a function, replaced by a simple one."""
    for i, step in enumerate(steps):
        if step.operation == SIMPLE:
            continue
        for text in _instead(steps[:i], step):
            simple = replace(step, operation=SIMPLE, text=text, blocks=())
            yield _with(steps, i, simple)
        if step.operation in CALLS_ONE:
            yield (*steps[:i], *_inlined(step), *steps[i + 1 :])
    for i, step in enumerate(steps):
        for j, block in enumerate(step.blocks):
            for fewer in _fewer(block.steps):
                blocks = _with(step.blocks, j, replace(block, steps=fewer))
                yield _with(steps, i, replace(step, blocks=blocks))


def _inlined(step: Step) -> Iterator[Step]:
    """Return the statements of the function that a step calls on one value."""
    (block,) = step.blocks
    given = step.text[step.text.rindex("(") + 1 : -1]
    yield Step(SIMPLE, block.params, given)
    yield from block.steps
    yield Step(SIMPLE, step.targets, block.results[0])


def _instead(before: Sequence[Step], step: Step) -> Iterator[str]:
    """Yield replacements for the value of a statement: a name that it reads, or a constant."""
    if len(step.targets) == 1:
        (target,) = step.targets
        read = names_in([step.text])
        for earlier in before:
            for value in earlier.targets:
                if value.name in read and (value.shape, value.dtype) == (
                    target.shape,
                    target.dtype,
                ):
                    yield value.name
    yield ", ".join(map(_constant, step.targets))


def _constant(value: Value) -> str:
    if value.dtype == KEY:
        return f"keys({value.shape})"
    return f"jnp.asarray(numbers({value.shape}, {value.dtype!r}))"


def _with[T](things: tuple[T, ...], i: int, thing: T) -> tuple[T, ...]:
    return (*things[:i], thing, *things[i + 1 :])


def _without[T](things: tuple[T, ...], i: int) -> tuple[T, ...]:
    return (*things[:i], *things[i + 1 :])
