"""Serializes compiled functions, and loads them.

A file contains PJRT's executable, the closed-over values, and a header in JSON: names, trees,
types, shardings, donation, and the environment that the executable depends on. It contains no
pickle, so that reading it imports and calls nothing that it names. But PJRT runs the machine code
of the executable: load only files that you trust like a program.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax

from xlashard.errors import ArgumentError, SavedProgramError
from xlashard.pjit.compile import CompiledProgram
from xlashard.pjit.stages.info import StageInfo
from xlashard.pjit.stages.tree_json import fits, tree_from_json, tree_to_json, unknown_nodes
from xlashard.program.runtime.environment import LoadTarget
from xlashard.program.saved.container import Contents, pack, reading, unpack
from xlashard.program.saved.program import load_program, save_program
from xlashard.program.saved.values import type_from_json, type_to_json

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
    program, sections = save_program(compiled.program, compiled.consts)
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
        taken, returned = sum(kept) + int(program["consts"]), len(program["out"])
        lengths = {len(kept), len(paths), len(donated), len(saved_avals), trees[0].num_leaves}
        if len(lengths) > 1 or taken != len(program["in"]) or returned != trees[1].num_leaves:
            # no-catalogue: needs an invalid header with a valid checksum
            raise ValueError("arguments and results that do not match in number")
    program_donates = (*(False,) * (taken - sum(kept)), *compress(donated, kept))
    restored = load_program(program, contents, target, program_donates)
    # The types of the program's own arguments contain the mesh if it is explicit.
    taken_avals = iter(restored.program.parts.in_avals[len(restored.consts) :])
    in_avals = tuple(next(taken_avals) if k else a for a, k in zip(saved_avals, kept, strict=True))
    info = StageInfo(
        name=name,
        in_tree=trees[0],
        out_tree=trees[1],
        in_avals=in_avals,
        out_avals=restored.program.parts.out_avals,
        paths=paths,
        donated=donated,
        moves_arguments=header.get("moves") is True,
    )
    return info, CompiledProgram(restored.program, None, restored.consts, kept)


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
    found = dict.fromkeys(p.partition("[")[0].partition(".")[0] for p in paths)
    count = len(args["tuple"])
    shown = list(found)[:count] + [f"arg{i}" for i in range(len(found), count)]
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
