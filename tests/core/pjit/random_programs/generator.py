"""Draw programs."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from tests.core.pjit.random_programs import calling, contracting, elementwise, shaping
from tests.core.pjit.random_programs.description import (
    FLOATS,
    Argument,
    Program,
    Result,
    Step,
    Value,
)
from tests.core.pjit.random_programs.dice import Dice
from tests.core.pjit.random_programs.pool import Frame, NoFit, Pool
from tests.core.pjit.random_programs.running import CALLS, CALLS_OF_TREES, MANNERS, SMOOTH_CALLS
from tests.core.pjit.random_programs.specs import UNCONSTRAINED, draw_spec

# None of 3 × 2: moving a value from ("y", "x") to ("x", "y") there ends the process in XLA's
# partitioner, with jax.jit as well.
MESHES = (
    (("x", 8),),
    (("x", 4), ("y", 2)),
    (("x", 2), ("y", 4)),
    (("x", 2), ("y", 2), ("z", 2)),
    (("x", 2), ("y", 2)),
    (("x", 4), ("y", 1)),
    (("x", 1), ("y", 4)),
    (("x", 2), ("y", 1), ("z", 2)),
    (("x", 1), ("y", 1)),
    (("x", 6),),
    (("x", 3),),
)
SIZES = (1, 2, 3, 4, 4, 6, 7, 8, 8, 8, 12, 16, 16, 24)
_GROUPS = (elementwise.OPERATIONS, shaping.OPERATIONS, contracting.OPERATIONS)
_SHARDING = {
    name: calling.OPERATIONS[name]
    for name in ("constrain", "inner_pjit", "spread", "twice", "close_over", "by_hand")
}
# Each is drawn as often as it occurs.
CHOICES = (*_GROUPS, *_GROUPS, calling.OPERATIONS, _SHARDING)
OPERATIONS = {name: draw for group in CHOICES for name, draw in group.items()}
DEVICES = 8
"""Number of devices; a mesh may have the last ones."""
# Each draw may turn out not to fit.
ATTEMPTS = 200


def grow(pool: Pool, count: int) -> Iterator[Step]:
    """Draw statements, each of which may use the previous ones."""
    made = 0
    for _ in range(ATTEMPTS):
        if made == count:
            return
        name, operation = pool.dice.pick(list(pool.dice.pick(CHOICES).items()))
        try:
            step = pool.add(name, operation(pool))
        except (NoFit, TypeError, ValueError, NotImplementedError, IndexError, ZeroDivisionError):
            continue  # tracing refuses invalid shapes or dtypes
        made += 1
        yield step


@functools.lru_cache(maxsize=256)
def draw_program(seed: int) -> Program:
    """Return the program of a seed, always the same."""
    dice = Dice(seed)
    axes = dice.pick(MESHES)
    call = dice.pick(CALLS)
    sizes = tuple(dice.pick(SIZES) for _ in range(3)) + ((0,) if dice.chance(0.08) else ())
    names = itertools.count()
    frame = Frame(axes, sizes, grow, names)
    arguments = tuple(_argument(dice, frame) for _ in range(dice.between(1, 3)))
    if call in SMOOTH_CALLS:
        arguments = (_argument(dice, frame, "float32"), *arguments)
    values = [a.value for a in arguments]
    pool = Pool(dice, frame, values, smooth=call in SMOOTH_CALLS, forward=call == "jvp")
    steps = tuple(grow(pool, dice.between(4, 10)))
    program = _finished(dice, seed, axes, call, arguments, steps).pruned()
    return _with_automatic_axes(_with_reductions(_with_partial_sums(program)))


def _with_partial_sums(program: Program) -> Program:
    """Compute a result on explicit axes through partial sums, or return partial sums."""
    dice = Dice(program.seed + 10**9)  # its own, by which other programs stay as they are
    axes = [name for name, size in program.axes if size > 1]
    # XLA fails to make partial sums of complex numbers and of arrays without elements.
    fitting = [r for r in program.results if r.value.kind in "fi" and r.value.size]
    if not (program.explicit and program.partitioner == "shardy" and axes and fitting):
        return program
    axis, chosen = dice.pick(axes), dice.pick(fitting)
    value = replace(chosen.value, name="v9999")
    step = Step("doubled", (value,), f"doubled({chosen.value.name}, {axis!r})")
    resource = f"place(P(unreduced={{{axis!r}}}))" if dice.chance(0.5) else chosen.resource
    results = tuple(Result(value, resource) if r is chosen else r for r in program.results)
    # Without a mesh in force, JAX requires one for uncommitted values.
    return replace(program, manner="set_mesh", steps=(*program.steps, step), results=results)


_OF_REDUCED = ("{0} * {1}", "jnp.sin({0}) * 2", "{1} @ {0}", "jnp.split({0}, 2)[1] + 1", "{0}")


def _with_reductions(program: Program) -> Program:
    """Take an argument that is unreduced or reduced over an explicit axis, and compute with it."""
    dice = Dice(program.seed + 2 * 10**9)  # see `_with_partial_sums`
    axes = [name for name, size in program.axes if size > 1]
    fits = program.explicit and program.partitioner == "shardy" and axes
    if not fits or program.ins or dice.chance(0.4):
        return program
    kind, axis = dice.pick(["reduced", "unreduced"]), dice.pick(axes)
    value = Value("v9997", (8, 8), "float32", False)
    made = replace(value, name="v9998")
    placed = f"P(None, None, {kind}={{{axis!r}}})"
    text = f"gathered({value.name} + {value.name})"
    if kind == "reduced":
        text = dice.pick(_OF_REDUCED).format(value.name, "numbers((8, 8), 'float32', 5)")
    argument = Argument(value, f"numbers({value.shape}, 'float32', 3)", "UNSPECIFIED", placed)
    return replace(
        program,
        manner="set_mesh",
        arguments=(*program.arguments, argument),
        steps=(*program.steps, Step("reductions", (made,), text)),
        results=(*program.results, Result(made, "UNSPECIFIED")),
    )


def _with_automatic_axes(program: Program) -> Program:
    """Leave some axes of a mesh automatic beside explicit ones."""
    dice = Dice(program.seed + 3 * 10**9)  # see `_with_partial_sums`
    names = [name for name, _ in program.axes]
    partial = {"doubled", "reductions"} & set(program.operations())
    if not program.explicit or len(names) < 2 or partial or dice.chance(0.3):
        return program
    chosen = dice.sample(names, dice.between(1, len(names) - 1))
    return replace(program, automatic=tuple(sorted(chosen)))


def _argument(dice: Dice, frame: Frame, dtype: str | None = None) -> Argument:
    name = f"v{next(frame.names)}"
    dtype = dtype or dice.pick([*FLOATS, "float32", "float32", "float32", *_OTHERS])
    shape = tuple(dice.pick(frame.sizes) for _ in range(dice.pick([0, 1, 2, 2, 2, 3])))
    while Value("", shape, dtype).size > 2048:
        shape = shape[1:]
    if dtype == "weak":
        value = Value(name, (), "float32", True, 1.5)
        return Argument(value, "1.5", "UNSPECIFIED")
    if dtype == "key":
        shape = shape[:1] if dice.chance(0.5) else ()
        text = f"keys({shape}, {dice.below(100)})"
    else:
        text = f"numbers({shape}, {dtype!r}, {dice.below(100)})"
    value = Value(name, shape, dtype, True, 20.0 if dtype in ("int32", "uint8", "int8") else 1.0)
    spec = draw_spec(dice, shape, frame.axes)
    way = dice.below(5)
    resource = f"place({spec})" if way < 2 else "UNSPECIFIED"
    placed = spec if way in (1, 2) else None
    donated = dtype != "key" and dice.chance(0.1)
    if way == 3 and dice.chance(0.5):
        resource = "None"
    return Argument(value, text, resource, placed, donated)


_OTHERS = ("int32", "int32", "uint8", "bool", "complex64", "key", "key", "weak")


def _finished(
    dice: Dice,
    seed: int,
    axes: tuple[tuple[str, int], ...],
    call: str,
    arguments: tuple[Argument, ...],
    steps: tuple[Step, ...],
) -> Program:
    """Return the program with its results."""
    made = [t for step in steps for t in step.targets] or [a.value for a in arguments]
    if call in SMOOTH_CALLS:
        made = [v for v in made if v.kind == "f"] or [arguments[0].value]
    chosen = [made[-1], *dice.sample(made[:-1], dice.below(4))]
    if dice.chance(0.1) and call not in SMOOTH_CALLS:
        chosen.append(arguments[0].value)
    results = tuple(Result(v, _result_resource(dice, v, axes)) for v in chosen)
    prefix = None
    if dice.chance(0.15):
        prefix = dice.pick(["place(P())", "UNSPECIFIED", "place(None)", "None"])
    if call in CALLS_OF_TREES:
        # Dice of their own, by which other programs stay as they are.
        kinds = Dice(seed + 4 * 10**9)
        # The stages of JAX would make the class of types.
        containers = ["dict"] if call == "lower" else ["dict", "checked"]
        arguments = tuple(
            replace(a, wrapped=kinds.pick(containers)) if dice.chance(0.15) else a
            for a in arguments
        )
    explicit = dice.chance(0.15)
    count = math.prod(size for _, size in axes)
    return Program(
        seed=seed,
        axes=axes,
        backwards=dice.chance(0.15),
        manner=dice.pick([m for m in MANNERS if m != "with" or not explicit]),
        call=call,
        partitioner=dice.pick(["shardy", "gspmd"]),
        arguments=arguments,
        steps=steps,
        results=results,
        container=dice.pick(["tuple", "dict", "nested", "holes", "bare"]),
        prefix=prefix,
        options=tuple((name, True) for name in ("keep_unused", "inline") if dice.chance(0.1)),
        first=dice.pick([0, 0, 0, DEVICES - count]),
        explicit=explicit,
        bare=Dice(seed + 5 * 10**9).chance(0.5),
    )


def _result_resource(dice: Dice, value: Value, axes: tuple[tuple[str, int], ...]) -> str:
    if dice.chance(0.4):
        return dice.pick(["UNSPECIFIED", "UNSPECIFIED", "UNSPECIFIED", "None"])
    # GSPMD replicates a result of which it would shard an open dimension unevenly, whatever its
    # other dimensions are to be.
    count = math.prod(size for _, size in axes)
    spec = draw_spec(dice, value.shape, axes, opening=0.1, opens=lambda n: n % count == 0)
    # An argument or result of `jax.jit` may not leave a dimension to the partitioner.
    return "UNSPECIFIED" if UNCONSTRAINED in spec else f"place({spec})"
