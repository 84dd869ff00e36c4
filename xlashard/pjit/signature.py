"""The signature of a function: how positions and names of its parameters go together."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from xlashard.errors import ArgumentError, counted
from xlashard.lazily import dataclass

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def function_name(fun: Callable[..., Any]) -> str:
    """The name of a function, of what a partial calls, or of a callable object's class."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


@dataclass(frozen=True)
class Signature:
    """What is known of a function's parameters.

    Attributes:
        function: The function's name.
        names: The names of positional parameters, in order.
        by_keyword: The names that an argument may be passed under, `**more` not counted.
        rest: The name of `*rest`, or None; `"args"` for a function without a signature.
        more: The name of `**more`, or None; `"kwargs"` for a function without a signature.
        python: The signature as `inspect` returns it, or None.
    """

    function: str
    names: tuple[str, ...]
    by_keyword: frozenset[str]
    rest: str | None
    more: str | None
    python: inspect.Signature | None

    @classmethod
    def of(cls, fun: Callable[..., Any]) -> "Signature":
        """Reads it, where Python knows one."""
        name = function_name(fun)
        try:
            signature = inspect.signature(fun)
        except (TypeError, ValueError):
            return cls(name, (), frozenset(), "args", "kwargs", None)
        parameters = signature.parameters.values()
        kinds = {p.kind: p.name for p in parameters}
        return cls(
            function=name,
            names=tuple(p.name for p in parameters if p.kind in _POSITIONAL),
            by_keyword=frozenset(p.name for p in parameters if p.kind in _NAMED),
            rest=kinds.get(inspect.Parameter.VAR_POSITIONAL),
            more=kinds.get(inspect.Parameter.VAR_KEYWORD),
            python=signature,
        )

    def name(self, position: int) -> str:
        """What a positional argument is called: `x`, `rest[0]`."""
        if position < len(self.names):
            return self.names[position]
        return f"{self.rest or 'args'}[{position - len(self.names)}]"

    def keyword(self, name: str) -> str:
        """What an argument passed by keyword is called: `x`, `more['y']`."""
        return name if name in self.by_keyword else f"{self.more}[{name!r}]"

    def settle(
        self, argnums: Sequence[int] | None, argnames: Sequence[str] | None, what: str
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the selected positions and names.

        Where only one of the two was given, the other follows from the signature; where both were,
        each stands as given: a parameter may be static when passed by position alone.

        Args:
            argnums: Positions, of which negative ones count from the end, or None.
            argnames: Names, or None.
            what: `"static"` or `"donate"`, for errors.

        Raises:
            ArgumentError: If one does not exist.
        """
        positions = {self._position(i, what) for i in argnums or ()}
        names = set(argnames or ())
        for name in argnames or ():
            if name not in self.by_keyword and self.more is None:
                raise ArgumentError(
                    f"{what}_argnames holds {name!r}, but {self.function} has no such parameter: "
                    + self._names_text(name)
                )
        if argnums is None:
            positions = {self.names.index(n) for n in names if n in self.names}
        if argnames is None:
            names = {self.names[i] for i in positions if i < len(self.names)} & self.by_keyword
        return tuple(sorted(positions)), tuple(sorted(names))

    def _position(self, i: int, what: str) -> int:
        settled = i + len(self.names) if i < 0 and self.rest is None else i
        if settled < 0 or (settled >= len(self.names) and self.rest is None):
            raise ArgumentError(
                f"{what}_argnums holds {i}, but {self.function} takes "
                f"{counted(len(self.names), 'positional argument')} {self.describe()}: give "
                + positions_text(len(self.names))
            )
        return settled

    def describe(self) -> str:
        """`(x, y)`, the positional parameters."""
        return f"({', '.join(self.names)})"

    def _names_text(self, wrong: str) -> str:
        """Which names there are, and which one of them was probably meant."""
        known = [*self.names, *sorted(self.by_keyword.difference(self.names))]
        close = difflib.get_close_matches(wrong, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"it takes ({', '.join(known)}){hint}"


def positions_text(count: int) -> str:
    """The positions that so many arguments have, for messages."""
    if count > 1:
        return f"positions from 0 to {count - 1}"
    return "position 0" if count else "none"
