"""Paths of the modules that `nnx.jit` passes to JAX as flat lists of arrays."""

import inspect
import re
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
        if isinstance(out, tuple) and len(out) == 2 and _are_updates(out[1]):
            arguments = tuple(_STATE.sub(r".\1", name) for name in arg_names)
            return cls(arguments, _with_updates(args, out, arguments))
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


def cached_arguments(fun: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the function and the arguments of `nnx.cached_partial`; None for another function."""
    if getattr(fun, "__code__", None) is None or fun.__code__.co_name != "cache_args_wrapper":
        return None
    cells = inspect.getclosurevars(fun).nonlocals
    return (cells["f"], tuple(cells["cached_args"])) if "cached_args" in cells else None


# Of the state of a module under `nnx.jit(graph=True, graph_updates=False)`.
_STATE = re.compile(r"\.__state__\['(\w+)'\]")


def _are_updates(value: Any) -> bool:
    """Return True for the new values of variables that `nnx.jit(graph=False)` returns."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_list and all(type(u).__name__ == "Updates" and hasattr(u, "_keys") for u in value)


def _with_updates(args: Any, out: Any, arg_names: Paths) -> Paths:
    """Return the path of each result; for a variable's new value that of the argument."""
    known = {
        tuple(map(_key, path)): arg_names[index]
        for path, index in jax.tree_util.tree_flatten_with_path(args)[0]
    }
    paths = ["result" + keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(out[0])[0]]
    for group in out[1]:
        for key, value in zip(group._keys, group._values, strict=True):
            # Those of `nnx.jit_partial` are positions in its first argument.
            start = (0, 0, key)
            if not isinstance(key, int):
                start = ({"args": 0, "kwargs": 1}[_key(key[0])], *map(_key, key[1:]))
            for below, _ in jax.tree_util.tree_flatten_with_path(value)[0]:
                path = (*start, *map(_key, below))
                names = (name for at, name in known.items() if at[: len(path)] == path)
                paths.append(next(names, f"update of {key}"))
    return tuple(paths)


def _key(entry: Any) -> Any:
    """Return the index, key or name of an entry of a path."""
    return getattr(entry, "idx", getattr(entry, "key", getattr(entry, "name", None)))


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
