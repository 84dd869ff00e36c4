"""Available values of a program, and how an operation chooses among them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from tests.core.pjit.random_programs.description import Block, Step, Value
from tests.core.pjit.random_programs.dice import Dice
from tests.core.pjit.random_programs.environment import plain_names
from tests.core.pjit.random_programs.text import block_text

MOST_ELEMENTS = 4096
MOST_DIMS = 4
LARGEST = 300.0


class NoFit(Exception):
    """No available value fits an operation."""


@dataclass(frozen=True)
class Drawn:
    """Expression that an operation has drawn.

    Attributes:
        text: The expression, of one value or a tuple of values.
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
    """Settings of a whole program.

    Attributes:
        axes: Names and sizes of the mesh's axes.
        sizes: Lengths of dimensions that occur.
        grow: Draws a number of statements into a pool.
        names: Counter for names.
    """

    axes: tuple[tuple[str, int], ...]
    sizes: tuple[int, ...]
    grow: Callable[["Pool", int], Iterator[Step]]
    names: Iterator[int]


@dataclass
class Pool:
    """Values that the next statement may use.

    Attributes:
        dice: Source of choices.
        frame: Settings of the whole program.
        values: The available values.
        depth: Number of enclosing functions.
        taken: Axes of the mesh that a constraint here may not use.
        smooth: True if derivatives are taken of everything here.
        forward: True for forward derivatives, which functions with only a backward rule lack.
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
        """Draw one of the values, newer ones more often.

        Args:
            kinds: Letters of accepted kinds.
            least: Lowest accepted rank.
            exact: True if rounding errors in it would change the result by much.
            kink: True if rounding errors would change the derivative by much.
            full: True if it must have elements.
            where: Further condition.

        Raises:
            NoFit: No value fits.
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
        """Return a value of that shape and dtype: an available one, or a constant."""
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
        """Return a constant of the program."""
        shape = tuple(shape)
        if dtype == "key":
            raise NoFit
        text = f"numbers({shape}, {dtype!r}, {self.dice.below(100)})"
        return Value(text, shape, dtype, True, 20.0 if dtype in ("int32", "uint8", "int8") else 1.0)

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(size for _, size in self.frame.axes)

    def axis(self, value: Value) -> int:
        """Draw one of its dimensions."""
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
        """Return an expression, by default as exact as the values and no larger."""
        if exact is None:
            exact = all(v.exact for v in values)
        if limit is None:
            limit = max((v.limit for v in values), default=1.0)
        return Drawn(text, exact, limit, blocks)

    def inner(self, params: Sequence[Value], *, closed: bool = False, **changed: object) -> "Pool":
        """Return the pool of a function: its parameters and, if not closed, the values outside."""
        outside = [] if closed or self.dice.chance(0.7) else list(self.values)
        if changed.get("smooth"):
            outside = [v for v in outside if v.exact or v.kind != "f"]
        pool = replace(self, values=outside + list(params), depth=self.depth + 1)
        return replace(pool, **changed)

    def add(self, operation: str, drawn: Drawn) -> Step:
        """Add a statement, whose results become available.

        Raises:
            NoFit: Its results would be too large.
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
        """Return the types of an expression by tracing it."""
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
    """Return the dtype of a name."""
    return jax.random.key(0).dtype if name == "key" else jax.numpy.dtype(name)


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype."""
    return "key" if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else str(dtype)
