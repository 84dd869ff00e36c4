"""Paths of the modules that `nnx.jit` passes to JAX as flat lists of arrays."""

import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.tree_util import keystr

from xlashard.lazily import dataclass

type Paths = tuple[str, ...]


@dataclass(frozen=True)
class NnxPaths:
    """Paths of a program of `nnx.jit`, as users write them.

    A result that is a module's new state has the path of that argument.

    Attributes:
        arguments: The path of each argument.
        results: The path of each result.
    """

    arguments: Paths
    results: Paths

    @classmethod
    def of(
        cls, in_tree: Any, out_tree: Any, arg_names: Paths, fun: Any = None
    ) -> "NnxPaths | None":
        """Return the paths of a program of `nnx.jit`; None for another one.

        Args:
            in_tree: The tree of `(args, kwargs)` that JAX saw.
            out_tree: The tree of the result that JAX saw.
            arg_names: JAX's path of each argument.
            fun: The function, if known; else a program with modules is one of `nnx.jit`.
        """
        if fun is not None and not type(fun).__module__.startswith("flax.nnx"):
            return None
        args, out = (tree.unflatten(range(tree.num_leaves)) for tree in (in_tree, out_tree))
        if not (isinstance(out, tuple) and len(out) == 3 and isinstance(out[0], tuple)):
            return None
        if fun is None and not _has_module((args, out)):
            return None
        # Static arguments are no part of the tree of arguments, and None in that of results.
        holders = [
            [i for i, arg in enumerate(side) if _has_module(arg)] for side in (args[0], out[0])
        ]
        if len(holders[0]) != len(holders[1]) or not isinstance(out[1], dict):
            return None
        roots: dict[Any, str] = {}
        taken, given = list(arg_names), [""] * out_tree.num_leaves
        for path, index, below in _leaves(args):
            root = arg_names[index].removesuffix(keystr(path[2:]))
            roots[_key(path[0]), _key(path[1])] = root
            taken[index] = root + keystr(below[2:])
        position = dict(zip(holders[1], holders[0], strict=True))
        for path, index, below in _leaves(out):
            side, root, rest = _key(path[0]), "result", below[1:]
            if side < 2:
                key = _key(path[1]) if side else position[_key(path[1])]
                root, rest = roots[side, key], below[2:]
            given[index] = root + keystr(rest)
        return cls(tuple(taken), tuple(given))


def _key(entry: Any) -> Any:
    """Return the index or key of an entry of a path."""
    return getattr(entry, "idx", getattr(entry, "key", None))


type _Path = tuple[Any, ...]


def _leaves(tree: Any) -> Iterator[tuple[_Path, int, _Path]]:
    """Yield the path of each leaf in JAX's tree, its index, and its path in the user's tree."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_module)[0]:
        if not _is_module(leaf):
            yield path, leaf, path
            continue
        inner = jax.tree_util.tree_flatten_with_path(leaf)[0]
        names = _module_paths(leaf)
        for below, index in inner:
            yield (*path, *below), index, (*path, *names.get(index, below))


def _has_module(tree: Any) -> bool:
    return any(map(_is_module, jax.tree_util.tree_leaves(tree, is_leaf=_is_module)))


def _is_module(value: Any) -> bool:
    """Return True for a module of nnx, split into its definition and a list of arrays."""
    return type(value).__name__ == "NodeStates" and hasattr(value, "states")


def _module_paths(split: Any) -> dict[int, _Path]:
    """Return the path of each leaf below a module, by the leaf's index."""
    nnx, definition = sys.modules["flax.nnx"], getattr(split, "_graphdef", None)
    if definition is None or len(split.states) != 1:
        return {}
    try:
        module = nnx.merge(definition, split.states[0])
    except (KeyError, ValueError, TypeError):
        # It refers to a module of an earlier argument.
        return {}
    paths: dict[int, _Path] = {}
    for path, index in jax.tree_util.tree_flatten_with_path(module)[0]:
        # Of a variable that two attributes share, the first.
        if isinstance(index, int):
            paths.setdefault(index, path)
    return paths
