"""Names of a function's parameters, and of the leaves of its calls."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xlashard._jax.tree_definitions import leaf_paths
from xlashard.errors import ArgumentError, counted
from xlashard.support.lazily import dataclass

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def function_name(fun: Callable[..., Any]) -> str:
    """Return the name of a function, of what a partial calls, or of a callable object's class."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


@dataclass(frozen=True)
class Signature:
    """Names and kinds of a function's parameters.

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
        """Inspect a function; one without a signature takes any arguments."""
        name = function_name(fun)
        try:
            signature = inspect.signature(fun)
        except (TypeError, ValueError):
            return cls(name, (), frozenset(), "args", "kwargs", None)
        parameters = [(p.kind, p.name) for p in signature.parameters.values()]
        kinds = dict(parameters)
        return cls(
            function=name,
            names=tuple([name for kind, name in parameters if kind in _POSITIONAL]),
            by_keyword=frozenset([name for kind, name in parameters if kind in _NAMED]),
            rest=kinds.get(inspect.Parameter.VAR_POSITIONAL),
            more=kinds.get(inspect.Parameter.VAR_KEYWORD),
            python=signature,
        )

    def name(self, position: int) -> str:
        """Return the name of a positional argument: `x`, `rest[0]`."""
        if position < len(self.names):
            return self.names[position]
        return f"{self.rest or 'args'}[{position - len(self.names)}]"

    def keyword(self, name: str) -> str:
        """Return the name of an argument passed by keyword: `x`, `more['y']`."""
        return name if name in self.by_keyword else f"{self.more}[{name!r}]"

    def paths(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Return the path of each leaf of a call, in the order in which JAX flattens."""
        named = [(self.name(i), value) for i, value in enumerate(args)]
        named += [(self.keyword(name), kwargs[name]) for name in sorted(kwargs)]
        return [path for name, value in named for path in leaf_paths(value, name)]

    def resolve(
        self, argnums: Sequence[int] | None, argnames: Sequence[str] | None, what: str
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the selected positions and names.

        If only one of the two is there, the other follows from the signature. If both are, they
        are independent: a parameter may be static only when passed by position.

        Args:
            argnums: Positions, of which negative ones count from the end, or None.
            argnames: Names, or None.
            what: `"static"` or `"donate"`, for errors.

        Raises:
            ArgumentError: If a position or name does not exist.
        """
        if argnums is None and argnames is None:  # as of most functions
            return (), ()
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
        position = i + len(self.names) if i < 0 and self.rest is None else i
        if position < 0 or (position >= len(self.names) and self.rest is None):
            raise ArgumentError(
                f"{what}_argnums holds {i}, but {self.function} takes "
                f"{counted(len(self.names), 'positional argument')} "
                f"({', '.join(self.names)}): give {positions_text(len(self.names))}"
            )
        return position

    def _names_text(self, wrong: str) -> str:
        """Return the names that exist, and the one closest to a wrong name."""
        known = [*self.names, *sorted(self.by_keyword.difference(self.names))]
        close = difflib.get_close_matches(wrong, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"it takes ({', '.join(known)}){hint}"


def positions_text(count: int) -> str:
    """Return the valid positions of a number of arguments, for messages."""
    if count > 1:
        return f"positions from 0 to {count - 1}"
    return "position 0" if count else "none"
