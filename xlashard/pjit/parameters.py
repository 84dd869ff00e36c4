"""The parameters of a pjit-ed function: which are static or donated, how leaves are named."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from xlashard.errors import ArgumentError, ResourceError
from xlashard.pjit.options import PjitOptions
from xlashard.pjit.resources import UNSPECIFIED, Resource, ResourceTree, expand

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function, by position.

    Attributes:
        function: The function's name.
        names: The names of positional parameters, where Python knows them.
        static_argnums: Positions of static parameters.
        static_argnames: Names of static parameters.
        donate_argnums: Positions of donated parameters.
        donate_argnames: Names of donated parameters.
    """

    function: str
    names: tuple[str, ...]
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]

    @classmethod
    def of(
        cls, fun: Callable[..., Any], static: tuple[Any, Any], options: PjitOptions
    ) -> "Parameters":
        """Reads a function's signature and settles positions and names by it.

        Raises:
            ArgumentError: If a parameter is both static and donated, or does not exist.
        """
        names, variadic = _positional_names(fun)
        argnums = _settle(options.donate_argnums, names, variadic, "donate_argnums")
        by_name = tuple(names.index(n) for n in options.donate_argnames if n in names)
        by_position = tuple(names[i] for i in argnums if i < len(names))
        donate_argnums = tuple(sorted({*argnums, *by_name}))
        donate_argnames = tuple(sorted({*options.donate_argnames, *by_position}))
        static_argnums, static_argnames = tuple(static[0]), tuple(static[1])
        both = sorted({*donate_argnums} & {*static_argnums})
        named_both = sorted({*donate_argnames} & {*static_argnames})
        if both or named_both:
            which = named_both[0] if named_both else f"argument {both[0]}"
            raise ArgumentError(
                f"{which} is both static and donated; a static argument has no buffers to give "
                "away: take it out of donate_argnums"
            )
        function = getattr(fun, "__name__", type(fun).__name__)
        return cls(
            function, names, static_argnums, static_argnames, donate_argnums, donate_argnames
        )

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Checks what jaxlib does not say well: hashable static arguments, donated positions.

        Raises:
            ArgumentError: With the argument's name.
        """
        for i in self.static_argnums:
            if i < len(args):
                _check_hashable(args[i], self.name(i))
        for name in self.static_argnames:
            if name in kwargs:
                _check_hashable(kwargs[name], name)
        past = [i for i in self.donate_argnums if i >= len(args) and i >= len(self.names)]
        if past:
            raise ArgumentError(
                f"donate_argnums names argument {past[0]}, but {self.function} was called with "
                f"{len(args)} positional arguments"
            )

    def name(self, position: int) -> str:
        """The name of a positional parameter."""
        return self.names[position] if position < len(self.names) else f"args[{position}]"

    def _dynamic(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, bool, Any]], list[tuple[str, bool, Any]]]:
        """`(name, donated, value)` of positional and of keyword arguments, without static ones."""
        positional = [
            (self.name(i), i in self.donate_argnums, arg)
            for i, arg in enumerate(args)
            if i not in self.static_argnums
        ]
        keyword = [
            (name, name in self.donate_argnames, kwargs[name])
            for name in sorted(kwargs)
            if name not in self.static_argnames
        ]
        return positional, keyword

    def paths(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[str], list[Any]]:
        """The path and the value of each dynamic leaf, in the order in which JAX flattens."""
        positional, keyword = self._dynamic(args, kwargs)
        paths: list[str] = []
        values: list[Any] = []
        for name, _, value in (*positional, *keyword):
            for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
                paths.append(name + jax.tree_util.keystr(path))
                values.append(leaf)
        return paths, values

    def donated(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, ...]:
        """For each dynamic leaf whether it is donated."""
        if not self.donate_argnums and not self.donate_argnames:
            return (False,) * len(jax.tree_util.tree_leaves(self._values(args, kwargs)))
        positional, keyword = self._dynamic(args, kwargs)
        flags: list[bool] = []
        for _, donated, value in (*positional, *keyword):
            flags += [donated] * len(jax.tree_util.tree_leaves(value))
        return tuple(flags)

    def _values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        positional, keyword = self._dynamic(args, kwargs)
        return [value for _, _, value in (*positional, *keyword)]

    def expand_in(self, tree: ResourceTree, in_tree: Any) -> list[Resource]:
        """One resource for each argument's leaf, from a tuple with one entry per parameter.

        An argument passed by keyword takes the entry of the parameter of that name; keyword-only
        parameters have none and are left where they are.

        Raises:
            ResourceError: If the tuple does not fit the arguments.
        """
        args_tree, kwargs_tree = in_tree.children()
        entries = tree.tree()
        dynamic = [i for i in range(len(self.names)) if i not in self.static_argnums]
        given = args_tree.num_nodes and len(args_tree.children())
        keywords = _keywords(kwargs_tree)
        by_keyword = {
            name: dynamic.index(self.names.index(name))
            for name in keywords
            if name in self.names and self.names.index(name) in dynamic
        }
        expected = max([given, *(i + 1 for i in by_keyword.values())])
        if (
            not isinstance(entries, tuple)
            or isinstance(entries, Resource)
            or (type(entries) is not tuple)
        ):
            raise ResourceError(
                f"{tree.what} must be a tuple with one entry per argument of {self.function}, or "
                f"one sharding for all of them; it is a {type(entries).__name__}: "
                f"{tree.what}=({type(entries).__name__.lower()}_of_shardings,)"
            )
        if len(entries) < expected or (len(entries) > expected and not keywords):
            raise ResourceError(self._count_text(tree, len(entries), expected, args_tree))
        out: list[Resource] = []
        for i, subtree in enumerate(args_tree.children()):
            out += self._expand_one(tree, i, subtree, dynamic)
        for name, subtree in zip(keywords, kwargs_tree.children(), strict=True):
            if name in by_keyword:
                out += self._expand_one(tree, by_keyword[name], subtree, dynamic)
            else:
                out += [Resource(UNSPECIFIED)] * subtree.num_leaves
        return out

    def _expand_one(
        self, tree: ResourceTree, entry: int, subtree: Any, dynamic: Sequence[int]
    ) -> list[Resource]:
        name = self.name(dynamic[entry]) if entry < len(dynamic) else f"args[{entry}]"
        leaves, treedef = jax.tree_util.tree_flatten(
            tree.tree()[entry], is_leaf=lambda x: isinstance(x, Resource)
        )
        part = ResourceTree(tree.what, tuple(leaves), treedef)
        return expand(part, subtree, lambda path: name + jax.tree_util.keystr(tuple(path)))

    def _count_text(self, tree: ResourceTree, given: int, expected: int, args_tree: Any) -> str:
        names = [self.name(i) for i in range(len(self.names)) if i not in self.static_argnums]
        said = (
            f"{tree.what} has {given} entries, but {self.function} was called with {expected} "
            f"arguments ({', '.join(names[:expected])}): give one entry for each"
        )
        if expected == 1 and given > 1:
            kind = args_tree.children()[0].node_data()
            if kind is not None and kind[0] in (tuple, list):
                said += f"; for the one argument that is a {kind[0].__name__} write "
                said += f"{tree.what}=((...),)"
        return said


def _keywords(kwargs_tree: Any) -> list[str]:
    data = kwargs_tree.node_data()
    return [] if data is None else list(data[1])


def _positional_names(fun: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """The names of positional parameters, and whether there may be more of them."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return (), True
    names = tuple(p.name for p in parameters if p.kind in _POSITIONAL)
    return names, any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)


def _settle(
    argnums: tuple[int, ...], names: tuple[str, ...], variadic: bool, what: str
) -> tuple[int, ...]:
    settled = []
    for i in argnums:
        position = i + len(names) if i < 0 and not variadic else i
        if position < 0 or (position >= len(names) and not variadic):
            raise ArgumentError(
                f"{what} names argument {i}, but the function takes {len(names)} positional "
                f"arguments: ({', '.join(names)})"
            )
        settled.append(position)
    return tuple(settled)


def _check_hashable(value: Any, name: str) -> None:
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"the static argument {name} is a {type(value).__name__}, which can't be hashed: pass "
            "a hashable value such as a tuple, or leave it out of static_argnums"
        ) from None
