"""Parameters of a pjit-ed function: static and donated ones, and the paths of their leaves."""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count, islice
from typing import Any

import jax

from xlashard._jax.tree_definitions import leaf_paths
from xlashard.core.array import Array
from xlashard.core.array.placement.tree_prefix import TreeNode
from xlashard.core.pjit.options import Selected
from xlashard.core.pjit.shardings.resources import (
    UNSPECIFIED,
    Resource,
    ResourceTree,
    expand,
)
from xlashard.core.program.signature import Signature, positions_text
from xlashard.errors import ArgumentError, ResourceError, counted
from xlashard.support.lazily import dataclass

# What jax.tree_util.tree_flatten calls, as each call of a donating function does.
_flatten = jax.tree_util.default_registry.flatten
_flatten_one_level = jax.tree_util.default_registry.flatten_one_level


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

    def flatten_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        """Return the dynamic leaves of a call, in the order in which JAX flattens, and a tree."""
        if not self.static_argnums and not self.static_argnames:
            return _flatten((args, kwargs))
        return _flatten([value for _, _, value in self._dynamic(args, kwargs)])

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

    def are_exclusive(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if only the first arguments are donated, and no array shares their buffers.

        The donated arrays get a mark of the call, by which one that is given twice is found.
        A call that feeds results back needs no other check. It is a single loop over containers, as
        after a program over several devices no cache of the processor holds its code, and the
        memory that flattening allocates takes several times as long as the loop.
        """
        first = self._donated_first
        if not first or kwargs:
            return False
        mark = object()
        nodes: list[Any] = [args if len(args) == first else args[:first]]
        for node in nodes:
            kind = type(node)
            if kind is list or kind is tuple:
                children = node
            elif kind is dict:
                children = node.values()
            elif (level := _flatten_one_level(node)) is not None:
                children = level[0]
            else:  # no Array
                return False
            for x in children:
                if type(x) is not Array:
                    nodes.append(x)
                elif (exclusive := x._exclusive) and exclusive is not mark:
                    x._exclusive = mark
                else:
                    return False
        others = _flatten(args[first:])[0] if len(args) > first else ()
        return not any([type(x) is Array and x._exclusive is mark for x in others])

    def donated_leaves(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the leaves of the donated arguments of a call, and those of the other ones."""
        first = self._donated_first
        if first and not kwargs:
            if len(args) <= first:
                return _flatten(args)[0], []
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
