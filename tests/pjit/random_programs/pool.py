"""The values at hand where a program goes on, and how an operation chooses among them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from tests.pjit.random_programs.description import Block, Step, Value
from tests.pjit.random_programs.dice import Dice
from tests.pjit.random_programs.environment import plain_names
from tests.pjit.random_programs.text import block_text

MOST_ELEMENTS = 4096
MOST_DIMS = 4
LARGEST = 300.0


class NoFit(Exception):
    """No value at hand is what an operation needs."""


@dataclass(frozen=True)
class Drawn:
    """An expression that an operation has chosen.

    Attributes:
        text: The expression; it gives one value or a tuple of them.
        exact: See `Value`.
        limit: See `Value`.
        blocks: The functions that it calls.
    """

    text: str
    exact: bool
    limit: float
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Frame:
    """What holds for a whole program.

    Attributes:
        axes: Names and sizes of the mesh's axes.
        sizes: Lengths of dimensions that occur.
        grow: Draws a number of statements into a pool.
        names: Gives numbers for names.
    """

    axes: tuple[tuple[str, int], ...]
    sizes: tuple[int, ...]
    grow: Callable[["Pool", int], Iterator[Step]]
    names: Iterator[int]


@dataclass
class Pool:
    """The values that a next statement may use.

    Attributes:
        dice: Decides.
        frame: What holds for the whole program.
        values: The values at hand.
        depth: How many functions deep this is.
        taken: Axes of the mesh that a constraint here may not use.
        smooth: Whether derivatives are taken of everything here.
        forward: Whether forwards, so that functions with a rule for backwards alone don't fit.
    """

    dice: Dice
    frame: Frame
    values: list[Value]
    depth: int = 0
    taken: tuple[str, ...] = ()
    smooth: bool = False
    forward: bool = False

    def pick(
        self,
        kinds: str = "f",
        *,
        least: int = 0,
        exact: bool = False,
        kink: bool = False,
        full: bool = False,
        where: Callable[[Value], bool] | None = None,
    ) -> Value:
        """One of the values, newer ones more often.

        Args:
            kinds: Letters of the kinds that will do.
            least: The lowest rank that will do.
            exact: Whether rounding errors in it would change the result by much.
            kink: Whether they would change its derivative by much.
            full: Whether it must have elements.
            where: What else must hold.

        Raises:
            NoFit: If there is none.
        """
        exact = exact or (kink and self.smooth)
        fitting = [
            v
            for v in self.values
            if v.kind in kinds
            and v.ndim >= least
            and (v.exact or not exact or v.kind != "f")
            and (v.size or not full)
            and (where is None or where(v))
        ]
        if not fitting:
            raise NoFit
        newest = fitting[-3:]
        return self.dice.pick(newest if self.dice.chance(0.75) else fitting)

    def operand(self, shape: Sequence[int], dtype: str, *, exact: bool = False) -> Value:
        """A value of that shape and dtype: one at hand, or a constant."""
        shape = tuple(shape)
        exact = exact and dtype in ("float32", "bfloat16", "float16")
        at_hand = [
            v
            for v in self.values
            if (v.shape, v.dtype) == (shape, dtype) and (v.exact or not exact)
        ]
        if at_hand and self.dice.chance(0.75):
            return self.dice.pick(at_hand)
        return self.constant(shape, dtype)

    def constant(self, shape: Sequence[int], dtype: str) -> Value:
        """A value that stands in the program."""
        shape = tuple(shape)
        if dtype == "key":
            raise NoFit
        text = f"numbers({shape}, {dtype!r}, {self.dice.below(100)})"
        return Value(text, shape, dtype, True, 20.0 if dtype in ("int32", "uint8", "int8") else 1.0)

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(size for _, size in self.frame.axes)

    def axis(self, value: Value) -> int:
        """One of its dimensions."""
        if not value.ndim:
            raise NoFit
        return self.dice.below(value.ndim)

    def fresh(self, letter: str = "v") -> str:
        return f"{letter}{next(self.frame.names)}"

    def drawn(
        self,
        text: str,
        *values: Value,
        exact: bool | None = None,
        limit: float | None = None,
        blocks: tuple[Block, ...] = (),
    ) -> Drawn:
        """What an operation has chosen: as exact as the values, and no larger, if not said."""
        if exact is None:
            exact = all(v.exact for v in values)
        if limit is None:
            limit = max((v.limit for v in values), default=1.0)
        return Drawn(text, exact, limit, blocks)

    def inner(self, params: Sequence[Value], *, closed: bool = False, **changed: object) -> "Pool":
        """The pool inside of a function: its parameters and, if not closed, what is outside."""
        outside = [] if closed or self.dice.chance(0.7) else list(self.values)
        if changed.get("smooth"):
            outside = [v for v in outside if v.exact or v.kind != "f"]
        pool = replace(self, values=outside + list(params), depth=self.depth + 1)
        return replace(pool, **changed)

    def add(self, operation: str, drawn: Drawn) -> Step:
        """Makes a statement of a choice, and its results values at hand.

        Raises:
            NoFit: If its results would be too large.
        """
        if drawn.limit > LARGEST:
            raise NoFit
        targets = tuple(
            Value(self.fresh(), tuple(s.shape), dtype_name(s.dtype), drawn.exact, drawn.limit)
            for s in self.shapes(drawn)
        )
        if any(t.size > MOST_ELEMENTS or t.ndim > MOST_DIMS for t in targets):
            raise NoFit
        self.values.extend(targets)
        return Step(operation, targets, drawn.text, drawn.blocks)

    def shapes(self, drawn: Drawn) -> list[jax.ShapeDtypeStruct]:
        """What an expression gives, found by tracing it."""
        step = Step("", (), drawn.text, drawn.blocks)
        needed = step.needs
        known = {v.name: v for v in self.values if v.name in needed}
        lines = [f"def probe({', '.join(known)}):"]
        for block in drawn.blocks:
            lines += block_text(block, "    ")
        lines.append(f"    return {drawn.text}")
        names = dict(plain_names())
        exec("\n".join(lines), names)
        structs = [jax.ShapeDtypeStruct(v.shape, jax_dtype(v.dtype)) for v in known.values()]
        return jax.tree.leaves(jax.eval_shape(names["probe"], *structs))


def jax_dtype(name: str) -> object:
    """The dtype of a name."""
    return jax.random.key(0).dtype if name == "key" else jax.numpy.dtype(name)


def dtype_name(dtype: object) -> str:
    """The name of a dtype."""
    return "key" if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else str(dtype)
