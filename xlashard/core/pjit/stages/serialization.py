"""Serialize compiled functions and the structures of their pytrees, and load them.

A file contains PJRT's executable, the closed-over values, and a header in JSON: names, trees,
types, shardings, donation, and the environment that the executable depends on. It contains no
pickle, so that reading it imports and calls nothing that it names. But PJRT runs the machine code
of the executable: load only files that you trust like a program.

Of trees, Python's containers are written as such. A node of any other class (a namedtuple, a
registered dataclass, a module of a neural network library) is written as the qualified name of its
class and its static data, if these are plain values, or classes and functions of a module. Reading
imports nothing and calls nothing: a class is looked up among the imported modules. A node with
other static data (a closure, a bound method) is written as unknown; the reader must pass the tree.
"""

import base64
import collections
import enum
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.shardings import read_reduction, reduction_arguments
from xlashard._jax.tree_definitions import make_node
from xlashard.core.pjit.stages.info import StageInfo
from xlashard.core.program.environment import LoadTarget
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.program.saved_format import (
    Contents,
    pack,
    reading,
    type_from_json,
    type_to_json,
    unpack,
)
from xlashard.core.program.saved_program import load_program, save_program
from xlashard.core.sharding import PartitionSpec
from xlashard.errors import ArgumentError, SavedProgramError

type TreeDef = Any
type Json = Any

_LEAF = jax.tree_util.tree_structure(0)
_NONE = jax.tree_util.tree_structure(None)
_SEQUENCES: dict[str, type] = {"tuple": tuple, "list": list}
_KEYED: dict[str, type] = {"dict": dict, "OrderedDict": collections.OrderedDict}


class UnwritableError(Exception):
    """A value of a static part that no file can hold."""


def tree_to_json(tree: TreeDef) -> Json:
    """Return a tree as JSON."""
    if jax.tree_util.treedef_is_leaf(tree) and tree == _LEAF:
        return "*"
    if tree == _NONE:
        return None
    kind, data = tree.node_data()
    children = [tree_to_json(child) for child in tree.children()]
    for name, known in _SEQUENCES.items():
        if kind is known:
            return {name: children}
    try:
        for name, known in _KEYED.items():
            if kind is known:
                return {name: children, "keys": [_write(key) for key in data]}
        node = {"class": _write_place(kind), "data": _write(data), "children": children}
        if make_node((kind, _read(node["data"])), tree.children()) == tree:
            return node
    except UnwritableError:
        pass
    return {"unknown": f"{kind.__module__}.{kind.__qualname__}", "children": children}


def tree_from_json(saved: Json) -> TreeDef:
    """Return the tree of JSON that `tree_to_json` wrote.

    Raises:
        SavedProgramError: If a class is not found, or is no node.
        ValueError: Or another error of reading, if the JSON is invalid.
    """
    if saved == "*":
        return _LEAF
    if saved is None:
        return _NONE
    for name, kind in _SEQUENCES.items():
        if name in saved:
            return make_node((kind, None), map(tree_from_json, saved[name]))
    for name, kind in _KEYED.items():
        if name in saved:
            keys = [_read(key) for key in saved["keys"]]
            children = [tree_from_json(child) for child in saved[name]]
            if len(keys) != len(children) or len(set(keys)) != len(keys):
                # no-catalogue: needs an invalid header with a valid checksum
                raise ValueError(f"{len(children)} entries for the keys {keys}")
            return make_node((kind, tuple(keys) if kind is not dict else keys), children)
    kind = _find(saved["class"])
    children = [tree_from_json(child) for child in saved["children"]]
    fields = getattr(kind, "_fields", None)
    if not isinstance(kind, type) or (fields is not None and len(fields) != len(children)):
        raise SavedProgramError(_changed_text(saved["class"], len(children)))
    try:
        return make_node((kind, _read(saved["data"])), children)
    except RuntimeError:
        raise SavedProgramError(_changed_text(saved["class"], len(children))) from None


def _changed_text(place: str, count: int) -> str:
    return (
        f"the saved program's trees have a node of the class {place} with {count} children, which "
        "is no node with as many children here: register it as it was where the program was saved, "
        "or give deserialize() the trees, in_tree= and out_tree="
    )


def unknown_nodes(saved: Json) -> list[str]:
    """Return the classes of nodes that were written as unknown."""
    if not isinstance(saved, dict):
        return []
    kinds = [saved["unknown"]] if "unknown" in saved else []
    for name in (*_SEQUENCES, *_KEYED, "children"):
        for child in saved.get(name, ()):
            kinds += unknown_nodes(child)
    return list(dict.fromkeys(kinds))


def fits(saved: Json, tree: Json) -> bool:
    """Return True if a tree, as JSON, is the saved one."""
    if isinstance(saved, list) and isinstance(tree, list):
        return len(saved) == len(tree) and all(map(fits, saved, tree))
    if not isinstance(saved, dict) or not isinstance(tree, dict):
        return saved == tree
    if "unknown" in saved:
        kind = tree.get("unknown", str(tree.get("class")).replace(":", "."))
        return saved["unknown"] == kind and fits(saved["children"], tree["children"])
    return saved.keys() == tree.keys() and all(fits(saved[key], tree[key]) for key in saved)


def _write_place(value: Any) -> str:
    """Return the qualified name `module:name` of a class, function or singleton."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if name is None and module in sys.modules:
        known = vars(sys.modules[module]).items()
        name = next((name for name, other in known if other is value), None)
    place = f"{module}:{name}"
    try:
        known_value = _find(place)
    except SavedProgramError:
        known_value = None
    if known_value is not value:
        raise UnwritableError(place)  # no-catalogue: caught: the node is written as unknown
    return place


def _find(place: str) -> Any:
    """Return the object of a qualified name, without importing or calling anything."""
    module, _, name = place.partition(":")
    if module not in sys.modules:
        raise SavedProgramError(
            f"the saved program's trees have {name} of {module}, which is not imported here: write "
            f"import {module.partition('.')[0]} before deserialize(), or give it the trees, "
            "in_tree= and out_tree="
        )
    value: Any = sys.modules[module]
    for part in name.split("."):
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
        if value is None:
            raise SavedProgramError(
                f"the saved program's trees have {name} of {module}, which is not there any more: "
                "give deserialize() the trees, in_tree= and out_tree="
            )
    return value


def _write(value: Any) -> Json:
    """Return a plain value, or the qualified name of a class or function."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) in _VALUES:
        name, write = _VALUES[type(value)]
        return {name: write(value)}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, enum.Enum):
        return {"enum": _write_place(type(value)), "name": value.name}
    if isinstance(value, PartitionSpec):
        if not value.unreduced and not value.reduced:
            return {"spec": _write_all(value.partitions)}
        parts = (value.partitions, value.unreduced, value.reduced, read_reduction(value))
        return {"spec_of": _write_all(parts)}
    return {"place": _write_place(value)}


def _write_all(values: Iterable[Any]) -> list[Json]:
    return list(map(_write, values))


_VALUES: dict[type, tuple[str, Callable[[Any], Json]]] = {
    float: ("float", float.hex),
    complex: ("complex", lambda value: [value.real.hex(), value.imag.hex()]),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    tuple: ("tuple", _write_all),
    list: ("list", _write_all),
    dict: ("dict", lambda value: list(map(_write_all, value.items()))),
    frozenset: ("frozenset", lambda value: sorted(map(_write, value), key=repr)),
}


def _read(saved: Json) -> Any:
    if not isinstance(saved, Mapping):
        return saved
    (kind, content), *_ = saved.items()
    if kind == "enum":
        enumeration = _find(content)
        if not (isinstance(enumeration, type) and issubclass(enumeration, enum.Enum)):
            # no-catalogue: needs an invalid header with a valid checksum
            raise ValueError(f"{content} is no enumeration")
        return enumeration[saved["name"]]
    return _READERS[kind](content)


def _full_spec(partitions: Any, unreduced: Any, reduced: Any, reduction: str) -> PartitionSpec:
    return PartitionSpec(*partitions, **reduction_arguments(unreduced, reduced, reduction))


_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "tuple": lambda items: tuple(map(_read, items)),
    "list": lambda items: list(map(_read, items)),
    "dict": lambda pairs: {_read(k): _read(v) for k, v in pairs},
    "frozenset": lambda items: frozenset(map(_read, items)),
    "dtype": np.dtype,
    "spec": lambda entries: PartitionSpec(*map(_read, entries)),
    "spec_of": lambda parts: _full_spec(*map(_read, parts)),
    "place": _find,
}


type Trees = tuple[Any, Any]
"""The trees of `(args, kwargs)` and of the result that the user passed, or None."""


def save(kind: str, info: StageInfo, compiled: CompiledProgram) -> bytes:
    """Return a compiled function as bytes.

    Args:
        kind: The name of its class.
        info: Its names, trees and types.
        compiled: Its program.

    Raises:
        SavedProgramError: If it depends on objects of this process.
    """
    if compiled.stateful:
        raise SavedProgramError(
            f"{info.name} can't be saved: it has references (jax.new_ref) or tokens, which live "
            "in one process; pass arrays and return the new ones"
        )
    program, sections = save_program(compiled)
    header = {
        "kind": kind,
        "face": {
            "name": info.name,
            "paths": list(info.paths),
            "donated": list(info.donated),
            "kept": list(compiled.kept),
            "moves": info.moves_arguments,
            "in": [type_to_json(aval) for aval in info.in_avals],
            "in_tree": tree_to_json(info.in_tree),
            "out_tree": tree_to_json(info.out_tree),
        },
        "program": program,
    }
    return pack(header, sections)


def load(
    kind: str, data: bytes, target: LoadTarget, trees: Trees
) -> tuple[StageInfo, CompiledProgram]:
    """Return the compiled function of serialized bytes.

    Args:
        kind: The name of its expected class.
        data: The bytes.
        target: The devices and flags to run with.
        trees: The trees of arguments and results; None for those of the file.

    Raises:
        ArgumentError: If an argument has the wrong type.
        SavedProgramError: If the file is damaged, was made for another class or environment, or
            lacks a tree.
    """
    contents = unpack(data)
    with reading():
        saved_kind = str(contents.header["kind"])
        if saved_kind != kind:
            raise SavedProgramError(
                f"this is a saved {saved_kind}, no {kind}: write {saved_kind}.deserialize(data)"
            )
        header = contents.header["face"]
        paths = tuple(map(str, header["paths"]))
        trees = _trees(header, paths, trees)
    return _loaded(header, contents, target, trees)


def _loaded(
    header: Any, contents: Contents, target: LoadTarget, trees: Trees
) -> tuple[StageInfo, CompiledProgram]:
    with reading():
        program, name = contents.header["program"], str(header["name"])
        kept = tuple(map(bool, header["kept"]))
        paths = tuple(map(str, header["paths"]))
        donated = tuple(map(bool, header["donated"]))
        saved_avals = tuple(map(type_from_json, header["in"]))
        num_operands, returned = sum(kept) + int(program["consts"]), len(program["out"])
        lengths = {len(kept), len(paths), len(donated), len(saved_avals), trees[0].num_leaves}
        if (
            len(lengths) > 1
            or num_operands != len(program["in"])
            or returned != trees[1].num_leaves
        ):
            # no-catalogue: needs an invalid header with a valid checksum
            raise ValueError("arguments and results that do not match in number")
    restored = load_program(program, contents, target, (kept, donated))
    # The types of the program's own arguments contain the mesh if it is explicit.
    taken_avals = iter(restored.in_avals[len(restored.consts) :])
    in_avals = tuple(next(taken_avals) if k else a for a, k in zip(saved_avals, kept, strict=True))
    info = StageInfo(
        name=name,
        in_tree=trees[0],
        out_tree=trees[1],
        in_avals=in_avals,
        out_avals=restored.out_avals,
        paths=paths,
        donated=donated,
        moves_arguments=header.get("moves") is True,
    )
    return info, restored


def _trees(header: Any, paths: Sequence[str], trees: Trees) -> Trees:
    """Return the trees that the user passed, checked against the file, and others of the file."""
    sides = ("in_tree", "out_tree")
    for side, tree in zip(sides, trees, strict=True):
        if tree is not None:
            _check_tree(header[side], side, tree)
    unknown = [
        s for s, t in zip(sides, trees, strict=True) if t is None and unknown_nodes(header[s])
    ]
    if unknown:
        raise SavedProgramError(_unknown_text(header, paths, unknown))
    in_tree, out_tree = (
        tree_from_json(header[side]) if tree is None else tree
        for side, tree in zip(sides, trees, strict=True)
    )
    return in_tree, out_tree


def _check_tree(saved: Any, side: str, tree: Any) -> None:
    if not isinstance(tree, jax.tree_util.PyTreeDef):
        raise ArgumentError(
            f"{side} must be a PyTreeDef, not {type(tree).__name__}: write "
            f"{side}=jax.tree.structure(...)"
        )
    if not fits(saved, tree_to_json(tree)):
        whole = "((args, ...), {name: arg, ...})" if side == "in_tree" else "the result"
        raise SavedProgramError(
            f"{side} is {tree}, which is not the structure of the saved program's: it must be that "
            f"of {whole}, as it was compiled"
        )


def _unknown_text(header: Any, paths: Sequence[str], sides: Sequence[str]) -> str:
    kinds = list(dict.fromkeys(k for side in sides for k in unknown_nodes(header[side])))
    args, names = header["in_tree"]["tuple"]
    parameters = dict.fromkeys(p.partition("[")[0].partition(".")[0] for p in paths)
    count = len(args["tuple"])
    shown = list(parameters)[:count] + [f"arg{i}" for i in range(len(parameters), count)]
    tuple_code = f"({', '.join(shown)}{',' if count == 1 else ''})"
    keywords = ", ".join(f"{key!r}: {key}" for key in names["keys"])
    code = {
        "in_tree": f"jax.tree.structure(({tuple_code}, {{{keywords}}}))",
        "out_tree": "jax.tree.structure(result)",
    }
    keyword_code = ", ".join(f"{side}={code[side]}" for side in sides)
    return (
        f"the saved program's trees have a node of {', '.join(kinds)}, whose static part (a "
        "function, or an object of its own) no file can hold: give the trees of such values, "
        f"deserialize(data, {keyword_code})"
    )
