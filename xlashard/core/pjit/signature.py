"""Parameters of a pjit-ed function: static and donated ones, and the paths of their leaves."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count, islice
from typing import Any

import jax

from xlashard.core.array.placement.target import leaf_paths
from xlashard.core.array.placement.tree_prefix import TreeNode
from xlashard.core.pjit.options import Selected
from xlashard.core.pjit.shardings.resources import (
    UNSPECIFIED,
    Resource,
    ResourceTree,
    expand,
)
from xlashard.errors import ArgumentError, ResourceError, counted
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
        parameters = signature.parameters.values()
        kinds = {p.kind: p.name for p in parameters}
        return cls(
            function=name,
            names=tuple([p.name for p in parameters if p.kind in _POSITIONAL]),
            by_keyword=frozenset([p.name for p in parameters if p.kind in _NAMED]),
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


# What jax.tree_util.tree_flatten calls: each call of a donating function does it twice.
_flatten = jax.tree_util.default_registry.flatten


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function, by position and by name.

    Attributes:
        signature: The function's signature.
        static_argnums: Positions of static parameters.
        static_argnames: Names of static parameters.
        donate_argnums: Positions of donated parameters.
        donate_argnames: Names of donated parameters.
    """

    signature: Signature
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        static: Selected,
        donate: Selected,
    ) -> "Parameters":
        """Read a function's signature, and resolve positions and names by it.

        Raises:
            ArgumentError: If a parameter is both static and donated, or does not exist.
        """
        signature = Signature.of(fun)
        static_nums, static_names = signature.resolve(static.argnums, static.argnames, "static")
        donate_nums, donate_names = signature.resolve(donate.argnums, donate.argnames, "donate")
        both = [signature.name(i) for i in donate_nums if i in static_nums]
        both += [n for n in donate_names if n in static_names]
        if both:
            raise ArgumentError(
                f"{both[0]} is both static and donated; a static argument has no buffers to give "
                "away: take it out of donate_argnums"
            )
        return cls(signature, static_nums, static_names, donate_nums, donate_names)

    @property
    def donates(self) -> bool:
        """Return True if a call may take over buffers of its arguments."""
        return bool(self.donate_argnums or self.donate_argnames)

    @cached_property
    def _donated_first(self) -> int:
        """Return the number of donated positions if they come first and none is static, else 0."""
        numbers = self.donate_argnums
        leads = not self.static_argnums and numbers == tuple(range(len(numbers)))
        return len(numbers) if leads else 0

    @cached_property
    def _donated_positions(self) -> frozenset[int]:
        return frozenset(self.donate_argnums)

    @cached_property
    def needs_check(self) -> bool:
        """Return True if a call can fail `check_call`."""
        return bool(self.static_argnums or self.static_argnames or self.donate_argnums)

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that static arguments are hashable and donated positions exist.

        Raises:
            ArgumentError: With the argument's name.
        """
        for i in self.static_argnums:
            if i < len(args):
                _check_hashable(args[i], self.signature.name(i))
        for name in self.static_argnames:
            if name in kwargs:
                _check_hashable(kwargs[name], name)
        named = len(self.signature.names)
        past = [i for i in self.donate_argnums if i >= len(args) and i >= named]
        if past:
            raise ArgumentError(
                f"donate_argnums holds {past[0]}, but {self.signature.function} was called with "
                f"{counted(len(args), 'positional argument')}: give "
                f"{positions_text(len(args))}"
            )

    def _dynamic(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, bool, Any]]:
        """Return `(name, donated, value)` of dynamic arguments, positional ones first."""
        positional = [
            (self.signature.name(i), i in self._donated_positions, arg)
            for i, arg in enumerate(args)
            if i not in self.static_argnums
        ]
        keyword = [
            (self.signature.keyword(name), name in self.donate_argnames, kwargs[name])
            for name in sorted(kwargs)
            if name not in self.static_argnames
        ]
        return positional + keyword

    def leaves(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return the dynamic leaves of a call, in the order in which JAX flattens."""
        if not self.static_argnums and not self.static_argnames:
            return _flatten((args, kwargs))[0]
        return _flatten([value for _, _, value in self._dynamic(args, kwargs)])[0]

    def paths(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
        """Return the path of each dynamic leaf."""
        return [
            path
            for name, _, value in self._dynamic(args, kwargs)
            for path in leaf_paths(value, name)
        ]

    def statics(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[str, Any, bool], ...]:
        """Return name and value of each static argument, and True if it was passed by name."""
        positions = [i for i in self.static_argnums if i < len(args)]
        return (
            *[(self.signature.name(i), args[i], False) for i in positions],
            *[(name, kwargs[name], True) for name in self.static_argnames if name in kwargs],
        )

    def donated(
        self, args: Sequence[Any], kwargs: dict[str, Any], num_leaves: int
    ) -> tuple[bool, ...]:
        """Return for each of the dynamic leaves of a call if it is donated."""
        if not self.donates:
            return (False,) * num_leaves
        flags: list[bool] = []
        for _, donated, value in self._dynamic(args, kwargs):
            flags += [donated] * len(_flatten(value)[0])
        return tuple(flags)

    def donated_leaves(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the leaves of the donated arguments of a call, and those of the other ones."""
        first = self._donated_first
        if first and not kwargs:
            return _flatten(args[:first])[0], _flatten(args[first:])[0]
        donated, others = [], []
        for i, value in enumerate(args):
            if i not in self.static_argnums:
                (donated if i in self._donated_positions else others).append(value)
        for name, value in kwargs.items():
            if name not in self.static_argnames:
                (donated if name in self.donate_argnames else others).append(value)
        return _flatten(donated)[0], _flatten(others)[0]

    def expand_in(self, tree: ResourceTree, in_tree: Any) -> list[Resource]:
        """Return one resource for each argument's leaf, from one or from a tuple of them.

        A tuple has one entry for each parameter.

        An argument passed by keyword takes the entry of the parameter of that name; keyword-only
        parameters have none and are unspecified. Parameters left to their defaults may have
        entries.

        Raises:
            ResourceError: If the tuple does not fit the arguments.
        """
        if tree.is_leaf:
            return [tree.leaves[0]] * in_tree.num_leaves
        args_tree, kwargs_tree = in_tree.children()
        positional, keywords = args_tree.children(), kwargs_tree.node_data()[1]
        if not keywords and args_tree == tree.treedef:
            return list(tree.leaves)
        positions = self.dynamic_positions(len(positional))
        entry_of = {
            name: len(self.dynamic_positions(before=self.signature.names.index(name)))
            for name in keywords
            if name in self.signature.names
        }
        needed = max([len(positional), *(i + 1 for i in entry_of.values())])
        entries = self._entries(tree, needed, args_tree)
        out: list[Resource] = []
        for position, entry, subtree in zip(positions, entries, positional, strict=False):
            out += expand(entry, subtree, self.signature.name(position))
        for name, subtree in zip(keywords, kwargs_tree.children(), strict=True):
            if name in entry_of:
                out += expand(entries[entry_of[name]], subtree, name)
            else:
                out += [Resource(UNSPECIFIED)] * subtree.num_leaves
        return out

    def dynamic_positions(self, number: int | None = None, *, before: int = 0) -> list[int]:
        """Return the first positions that are not static.

        Args:
            number: How many of them; None for all before a position.
            before: That position.
        """
        if number is None:
            return [i for i in range(before) if i not in self.static_argnums]
        return list(islice((i for i in count() if i not in self.static_argnums), number))

    def _entries(self, tree: ResourceTree, needed: int, args_tree: Any) -> Sequence[ResourceTree]:
        """Return the entries of a tuple of resources, if the arguments need as many."""
        kind = TreeNode(tree.treedef, tree.leaves).kind
        entries, function = tree.children, self.signature.function
        if kind is not tuple:
            raise ResourceError(
                f"{tree.what} must be a tuple with one entry per argument of {function}, or one "
                f"sharding for all of them; it is a {kind.__name__}: write "
                f"{tree.what}=({tree.text()},)"
            )
        entries_text = counted(len(entries), "entry", "entries")
        named = self.dynamic_positions(before=len(self.signature.names))
        if len(entries) < needed or (self.signature.rest is not None and len(entries) > needed):
            verb, named = "was called with", self.dynamic_positions(needed)
        elif len(entries) > needed and len(entries) > len(named):
            verb = "takes"
        else:
            return entries
        names = ", ".join(map(self.signature.name, named))
        raise ResourceError(
            f"{tree.what} has {entries_text}, but {function} {verb} "
            f"{counted(len(named), 'argument')} ({names}): give one entry for each"
            + _tuple_hint(tree, needed, args_tree)
        )


def _tuple_hint(tree: ResourceTree, needed: int, args_tree: Any) -> str:
    """Return a hint for a single argument that is itself a tuple or a list."""
    if needed != 1 or args_tree.num_nodes < 2:
        return ""
    kind = args_tree.children()[0].node_data()
    if kind is None or kind[0] not in (tuple, list):
        return ""
    return f"; for the one argument that is a {kind[0].__name__} write {tree.what}=({tree.text()},)"


def _check_hashable(value: Any, name: str) -> None:
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"the static argument {name} is a {type(value).__name__}, which can't be hashed: pass "
            "a hashable value such as a tuple, or leave it out of static_argnums"
        ) from None
