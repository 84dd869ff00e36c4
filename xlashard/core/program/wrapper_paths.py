"""Paths of arguments and results that wrappers of `jax.jit` pass to JAX in trees of their own."""

import functools
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

import jax
import numpy as np
from jax.tree_util import all_leaves, keystr, tree_flatten_with_path, tree_leaves

from xlashard._jax.runtime.tracebacks import library_frame
from xlashard._jax.trace.observed_programs import caller_locals, pmap_under_way
from xlashard._jax.tree_definitions import leaf_paths, outline
from xlashard.core.program.signature import Signature, function_name
from xlashard.support.lazily import dataclass
from xlashard.support.tracebacks import is_users_file

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
        if "flax.nnx" not in sys.modules:
            return None
        args, out = (outline(tree, range(tree.num_leaves)) for tree in (in_tree, out_tree))
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
        result_paths = [""] * out_tree.num_leaves
        for path, index, _ in _leaves(args):
            roots[_key(path[0]), _key(path[1])] = _root(path, arg_names[index])
        position = dict(zip(holders[1], holders[0], strict=True))
        for path, index, below in _leaves(out):
            side, root, rest = _key(path[0]), "result", below[1:]
            if side < 2:
                key = _key(path[1]) if side else position[_key(path[1])]
                root, rest = roots[side, key], below[2:]
            result_paths[index] = root + keystr(rest)
        return cls(_argument_paths(args, arg_names), tuple(result_paths))


def nnx_argument_paths(in_tree: Any, arg_names: Paths) -> Paths:
    """Return the user's paths of the arguments of a call, which may be one of `nnx.jit`.

    Args:
        in_tree: The tree of `(args, kwargs)` that JAX saw.
        arg_names: JAX's path of each argument.
    """
    if "flax.nnx" not in sys.modules:
        return arg_names
    names = tuple(_STATE.sub(r".\1", name) for name in arg_names)
    return _argument_paths(outline(in_tree, range(in_tree.num_leaves)), names)


def _argument_paths(args: Any, arg_names: Paths) -> Paths:
    paths = list(arg_names)
    for path, index, below in _leaves(args):
        paths[index] = _root(path, arg_names[index]) + keystr(below[2:])
    return tuple(paths)


def _root(path: "_Path", name: str) -> str:
    """Return the argument of a leaf, by the leaf's path in `(args, kwargs)` and its name."""
    return name.removesuffix(keystr(path[2:]))


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
    module = _merged(split)
    paths: dict[int, _Path] = {}
    for path, index in jax.tree_util.tree_flatten_with_path(module)[0]:
        # Of a variable that two attributes share, the first.
        if isinstance(index, int):
            paths.setdefault(index, path)
    return paths


def _merged(split: Any) -> Any:
    """Return the module of its definition and list of leaves; None if it is no tree."""
    definition = getattr(split, "_graphdef", None)
    if definition is None or len(split.states) != 1:
        return None
    try:
        module = sys.modules["flax.nnx"].merge(definition, split.states[0])
    except (KeyError, ValueError, TypeError):
        # It refers to a module of an earlier argument.
        return None
    return None if _has_cycle(module) else module


def _has_cycle(value: Any, around: tuple[int, ...] = ()) -> bool:
    """Return True for a module that holds itself, which JAX's trees can't."""
    nnx = sys.modules["flax.nnx"]
    if isinstance(value, nnx.Module | getattr(nnx, "Pytree", nnx.Module)):
        parts = vars(value).values()
    elif isinstance(value, dict):
        parts = value.values()
    else:
        parts = value if isinstance(value, list | tuple) else ()
    inside = (*around, id(value))
    return id(value) in around or any(_has_cycle(part, inside) for part in parts)


def static_parts(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of what decides a program beside arrays: static fields, attributes.

    Args:
        tree: A tree of dicts, sequences, dataclasses and modules. Arrays and `LEAF` are no static
            parts, other leaves are.
        path: Its path.
    """
    if _is_module(tree):
        tree = _merged(tree)
    if tree is LEAF or tree is None or isinstance(tree, _DYNAMIC) or _is_variable(tree):
        return
    if isinstance(tree, dict):
        parts = [(f"{path}[{key!r}]", value) for key, value in tree.items()]
    elif isinstance(tree, tuple) and (fields := getattr(tree, "_fields", ())):
        parts = [(f"{path}.{name}", getattr(tree, name)) for name in fields]
    elif isinstance(tree, list | tuple):
        parts = [(f"{path}[{i}]", value) for i, value in enumerate(tree)]
    elif _is_node(tree):
        # Private attributes are the library's own.
        own = ((name, value) for name, value in vars(tree).items() if name[0] != "_")
        parts = [(f"{path}.{name}", value) for name, value in own]
    else:
        yield path, tree
        return
    for below, part in parts:
        yield from static_parts(part, below)


LEAF = object()
"""Stands for an array in a tree whose arrays are not there."""
_DYNAMIC = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def _is_variable(value: Any) -> bool:
    """Return True for a variable of nnx, which holds an array."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


def _is_node(value: Any) -> bool:
    """Return True for an object whose class is registered as a node of trees."""
    return hasattr(value, "__dict__") and not all_leaves([value])


type Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

_OWN = re.compile(r"dynamic_(?:no)?donate\['(fun|first|rest)'\]\[(\d+)\]")
_FILE, _RESULT = "equinox/_jit.py", "result[1]"


def call_under_way(own: Paths) -> Call | None:
    """Return the call of `eqx.filter_jit` that this thread makes, for the program of these paths.

    Args:
        own: JAX's path of each argument of the program.
    """
    if not any(map(_OWN.fullmatch, own)):
        return None
    values = caller_locals(_FILE, "_call")
    return None if values is None else tuple(values[n] for n in ("jit_wrapper", "args", "kwargs"))


def pmap_call_under_way(own: Paths) -> tuple[Any, Paths] | None:
    """Return the user's function of the call of `jax.pmap` that this thread makes, and its paths.

    JAX passes all arguments to a `jax.jit` of its own as one list.

    Args:
        own: JAX's path of each argument of the program.
    """
    if not all(name.startswith("flat_args[") for name in own):
        return None
    call = pmap_under_way()
    if call is None:
        return None
    user, args, kwargs = call
    paths = tuple(Signature.of(user).paths(args, kwargs))
    return (user, paths) if len(paths) == len(own) else None


def library_call_under_way() -> tuple[Any, list[tuple[str, Any]]]:
    """Return what the user's file calls of a library that calls JAX.

    Returns:
        The user's function inside of a wrapper of the library, or None; and path and value of each
        leaf of the arguments, by the parameters of that function, or else by those of the library.
    """
    frame = library_frame()
    if frame is None:
        return None, []
    names, rest, more, values = inspect.getargvalues(frame)
    args = [values[name] for name in names if name in values]
    positional, keywords = values.get(rest or "", ()), values.get(more or "", {})
    user = next(filter(_is_users_function, map(values.get, frame.f_code.co_freevars)), None)
    if user is None and args and _is_users_function(args[0]):
        user, args = args[0], args[1:]
    if user is None:
        named = [(name, values[name]) for name in names if name in values]
        named += [(f"{rest}[{i}]", value) for i, value in enumerate(positional)]
        named += [(f"{more}[{name!r}]", value) for name, value in keywords.items()]
        paths = [path for name, value in named for path in leaf_paths(value, name)]
        return None, list(zip(paths, tree_leaves([value for _, value in named]), strict=True))
    call = (*args, *positional), keywords
    return user, list(zip(Signature.of(user).paths(*call), tree_leaves(call), strict=True))


def find_code(fun: Any) -> CodeType | None:
    """Return the code of a function, also of one in wrappers; None without Python code."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(inspect.unwrap(fun), "__code__", None)


def _is_users_function(value: Any) -> bool:
    code = find_code(value) if callable(value) else None
    return code is not None and is_users_file(code.co_filename)


def find_users_paths(
    values: Sequence[Any], own: Sequence[str], leaves: Iterable[tuple[str, Any]]
) -> tuple[str, ...]:
    """Return a path of each argument, in the caller's tree where an array is found in it.

    A wrapper passes the arrays of its arguments on in a tree of its own.

    Args:
        values: The arguments.
        own: JAX's path of each.
        leaves: Path and value of each leaf of the caller's arguments.
    """
    paths: dict[int, str | None] = {}
    for path, value in leaves:
        if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            # An array that was passed twice has two paths.
            paths[id(value)] = None if id(value) in paths else path
    return tuple(paths.get(id(value)) or name for value, name in zip(values, own, strict=True))


def is_equinox(fun: Any) -> bool:
    """Return True for a function that `eqx.filter_jit` returned."""
    return type(fun).__module__ == "equinox._jit" and hasattr(fun, "_signature")


def equinox_paths(call: Call, own: Paths, results: Paths) -> tuple[Paths, Paths]:
    """Return the user's paths of the arguments and results of a program of `eqx.filter_jit`.

    Args:
        call: The function, and the arguments of its call.
        own: JAX's path of each argument.
        results: JAX's path of each result.
    """
    fun, args, kwargs = call
    user, bound = fun.__wrapped__, fun._signature.bind(*args, **kwargs)
    signature = Signature.of(user)
    paths = signature.paths(bound.args, bound.kwargs)
    first = len(signature.paths(bound.args[:1], {}))
    name = function_name(user)
    closed = [name + keystr(path) for path, _ in tree_flatten_with_path(user)[0]]
    parts = {"fun": closed, "first": paths[:first], "rest": paths[first:]}

    def named(path: str) -> str:
        match = _OWN.fullmatch(path)
        return parts[match[1]][int(match[2])] if match else path

    return tuple(map(named, own)), tuple(map(_result, results))


def equinox_statics(call: Call) -> list[tuple[str, Any]]:
    """Return path and value of each static part of a call of `eqx.filter_jit`."""
    fun, args, kwargs = call
    user, bound = fun.__wrapped__, fun._signature.bind(*args, **kwargs)
    called = Signature.of(user)
    parts = [
        *((called.name(i), value) for i, value in enumerate(bound.args)),
        *((called.keyword(name), value) for name, value in bound.kwargs.items()),
    ]
    if _is_node(user):
        parts.append((function_name(user), user))
    return [part for path, value in parts for part in static_parts(value, path)]


def _result(path: str) -> str:
    if path == "result[0]":
        return "marker of equinox"
    return "result" + path.removeprefix(_RESULT) if path.startswith(_RESULT) else path
