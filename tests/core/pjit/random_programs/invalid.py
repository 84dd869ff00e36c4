"""Draw programs with one mistake in how they are compiled, which `jax.jit` refuses or not."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.core.pjit.random_programs.description import Argument, Program, Result
from tests.core.pjit.random_programs.dice import Dice
from tests.core.pjit.random_programs.generator import draw_program

type Spoiler = Callable[[Dice, Program], Program]

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("donate_argnums", 9),
    ("donate_argnums", -1),
    ("donate_argnums", -9),
    ("donate_argnums", (0, 0)),
    ("donate_argnums", "v0"),
    ("donate_argnums", 0.5),
    ("donate_argnames", "absent"),
    ("donate_argnames", 0),
    ("static_argnums", 0),
    ("static_argnums", 9),
    ("static_argnums", (0, 0)),
    ("static_argnames", "absent"),
    ("static_argnames", 1),
    ("backend", "cpu"),
    ("backend", "absent"),
    ("keep_unused", "yes"),
    ("inline", 3),
    ("compiler_options", "xla"),
    ("absent", True),
)
"""Keywords of jit with a value that is invalid, or looks so."""

RESOURCES = ("'x'", "3", "jax.devices()[0]", "place", "jnp.float32", "object()", "()", "{}")
"""Expressions that are no shardings, or the empty tree where one leaf is."""

PREFIXES = (
    "(UNSPECIFIED,) * 9",
    "(UNSPECIFIED,)",
    "()",
    "{'absent': UNSPECIFIED}",
    "(UNSPECIFIED, (UNSPECIFIED, UNSPECIFIED))",
    "{'a': UNSPECIFIED}",
)
"""Trees that fit few arguments and results; a list for a tuple fits here and not in `jax.jit`."""


def _invalid_spec(dice: Dice, shape: tuple[int, ...], program: Program) -> str:
    """Return a spec that does not fit a shape, or that is invalid at the boundary of a program."""
    axes = [name for name, size in program.axes if size > 1] or [program.axes[0][0]]
    axis = dice.pick(axes)
    size = dict(program.axes)[axis]
    uneven = [i for i, length in enumerate(shape) if length % size]
    nones = ["None"] * len(shape)
    specs = [
        [*nones, "None"],
        [*nones, repr(axis)],
        [repr(axis), repr(axis), *nones[2:]],
        [f"({axis!r}, {axis!r})", *nones[1:]],
        ["'absent'", *nones[1:]],
        ["P.UNCONSTRAINED", *nones[1:]],
        [f"({axis!r}, P.UNCONSTRAINED)", *nones[1:]],
        ["3", *nones[1:]],
    ]
    if uneven:
        at = dice.pick(uneven)
        specs += [[*nones[:at], repr(axis), *nones[at + 1 :]]] * 4
    return f"place(P({', '.join(dice.pick(specs))}))"


def _argument(dice: Dice, program: Program, make: Callable[[Argument], Argument]) -> Program:
    chosen = dice.below(len(program.arguments))
    arguments = list(program.arguments)
    arguments[chosen] = make(arguments[chosen])
    return replace(program, arguments=tuple(arguments))


def _spec_of_argument(dice: Dice, program: Program) -> Program:
    def make(argument: Argument) -> Argument:
        spec = _invalid_spec(dice, argument.value.shape, program)
        return replace(argument, resource=spec)

    return _argument(dice, program, make)


def _spec_of_result(dice: Dice, program: Program) -> Program:
    chosen = dice.pick(program.results)
    spec = _invalid_spec(dice, chosen.value.shape, program)
    results = (Result(r.value, spec) if r is chosen else r for r in program.results)
    return replace(program, results=tuple(results), prefix=None)


def _no_sharding(dice: Dice, program: Program) -> Program:
    wrong = dice.pick(RESOURCES)
    if dice.chance(0.5):
        return _argument(dice, program, lambda a: replace(a, resource=wrong))
    chosen = dice.pick(program.results)
    results = (Result(r.value, wrong) if r is chosen else r for r in program.results)
    return replace(program, results=tuple(results), prefix=None)


def _prefix(dice: Dice, program: Program) -> Program:
    wrong = dice.pick(PREFIXES)
    return replace(program, **{"ins" if dice.chance(0.5) else "prefix": wrong})


def _option(dice: Dice, program: Program) -> Program:
    name, value = dice.pick(OPTIONS)
    arguments = tuple(replace(a, donated=False) for a in program.arguments)
    others = tuple(option for option in program.options if option[0] != name)
    return replace(program, arguments=arguments, options=(*others, (name, value)))


def _elsewhere(dice: Dice, program: Program) -> Program:
    """Commit an argument to one device, possibly outside of the program's mesh."""

    def make(argument: Argument) -> Argument:
        device = f"jax.devices()[{dice.pick([0, 7])}]"
        text = f"jax.device_put({argument.text}, {device})"
        return replace(argument, text=text, placed=None, donated=False)

    return _argument(dice, program, make)


def _placed_otherwise(dice: Dice, program: Program) -> Program:
    """Commit an argument to another sharding than `in_shardings` requests."""
    axis, size = dice.pick(program.axes)

    def make(argument: Argument) -> Argument:
        shape = argument.value.shape
        if not shape or shape[0] % size:
            return argument
        specs = dice.sample(["P()", f"P({axis!r})"], 2)
        return replace(argument, resource=f"place({specs[0]})", placed=specs[1])

    return _argument(dice, program, make)


SPOILERS: tuple[Spoiler, ...] = (
    *(_spec_of_argument, _spec_of_argument, _spec_of_argument),
    *(_spec_of_result, _spec_of_result, _spec_of_result),
    *(_no_sharding, _prefix, _prefix, _option, _option, _elsewhere, _placed_otherwise),
)


@functools.lru_cache(maxsize=256)
def draw_invalid(seed: int) -> Program:
    """Return the program of a seed with one mistake, always the same.

    Arguments that are donated twice are not among the mistakes: `jax.jit` may hang over them.
    """
    dice = Dice(seed + 2 * 10**9)
    return dice.pick(SPOILERS)(dice, draw_program(seed))
