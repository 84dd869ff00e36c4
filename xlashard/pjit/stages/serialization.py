"""Compiled functions as bytes, and back.

A file holds PJRT's executable, what the program closes over, and a header in JSON that says the
rest: names, trees, types, shardings, donation, and what the executable depends on. There is no
pickle in it: reading one imports nothing and calls nothing that it names. But the executable is
machine code, which PJRT runs: load only what you trust as you would trust a program.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax

from xlashard.errors import ArgumentError, SavedProgramError
from xlashard.pjit.compile import CompiledProgram
from xlashard.pjit.stages.info import StageInfo
from xlashard.pjit.stages.tree_json import fits, tree_from_json, tree_to_json, unknown_nodes
from xlashard.program.runtime.environment import Target
from xlashard.program.saved.container import Contents, pack, reading, unpack
from xlashard.program.saved.program import load_program, save_program
from xlashard.program.saved.values import type_from_json, type_to_json

type Trees = tuple[Any, Any]
"""The trees of `(args, kwargs)` and of the result that somebody gave; None for none."""


def save(kind: str, info: StageInfo, compiled: CompiledProgram) -> bytes:
    """A compiled function as bytes.

    Args:
        kind: The name of its class.
        info: Its outside.
        compiled: Its program.

    Raises:
        SavedProgramError: If it needs what only this process has.
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


def load(kind: str, data: bytes, target: Target, trees: Trees) -> tuple[StageInfo, CompiledProgram]:
    """The compiled function of such bytes.

    Args:
        kind: The name of the class that it should be of.
        data: The bytes.
        target: Where it is to run.
        trees: The trees of arguments and results, None for those that the file says.

    Raises:
        ArgumentError: If an argument is of the wrong kind.
        SavedProgramError: If the file is damaged, was made for something else, or does not say
            its trees.
    """
    contents = unpack(data)
    with reading():
        saved_kind = str(contents.header["kind"])
        if saved_kind != kind:
            raise SavedProgramError(
                f"this is a saved {saved_kind}, no {kind}: write {saved_kind}.deserialize(data)"
            )
        said = contents.header["face"]
        paths = tuple(map(str, said["paths"]))
        trees = _trees(said, paths, trees)
    return _joined(said, contents, target, trees)


def _joined(
    said: Any, contents: Contents, target: Target, trees: Trees
) -> tuple[StageInfo, CompiledProgram]:
    with reading():
        described, name = contents.header["program"], str(said["name"])
        kept = tuple(map(bool, said["kept"]))
        paths = tuple(map(str, said["paths"]))
        donated = tuple(map(bool, said["donated"]))
        said_avals = tuple(map(type_from_json, said["in"]))
        taken, given = sum(kept) + int(described["consts"]), len(described["out"])
        lengths = {len(kept), len(paths), len(donated), len(said_avals), trees[0].num_leaves}
        if len(lengths) > 1 or taken != len(described["in"]) or given != trees[1].num_leaves:
            # no-catalogue: needs an invalid header with a valid checksum
            raise ValueError("arguments and results that do not match in number")
    program_donates = (*(False,) * (taken - sum(kept)), *compress(donated, kept))
    restored = load_program(described, contents, target, program_donates)
    # Those that the program takes have their mesh in their type, where it is explicit.
    taken_avals = iter(restored.program.parts.in_avals[len(restored.consts) :])
    in_avals = tuple(next(taken_avals) if k else a for a, k in zip(said_avals, kept, strict=True))
    info = StageInfo(
        name=name,
        in_tree=trees[0],
        out_tree=trees[1],
        in_avals=in_avals,
        out_avals=restored.program.parts.out_avals,
        paths=paths,
        donated=donated,
        moves_arguments=said.get("moves") is True,
    )
    return info, CompiledProgram(restored.program, None, restored.consts, kept)


def _trees(said: Any, paths: Sequence[str], given: Trees) -> Trees:
    """The trees: those given, if they are what was saved, else those that the file says."""
    sides = ("in_tree", "out_tree")
    for side, tree in zip(sides, given, strict=True):
        if tree is not None:
            _check_tree(said[side], side, tree)
    unknown = [s for s, t in zip(sides, given, strict=True) if t is None and unknown_nodes(said[s])]
    if unknown:
        raise SavedProgramError(_unknown_text(said, paths, unknown))
    in_tree, out_tree = (
        tree_from_json(said[side]) if tree is None else tree
        for side, tree in zip(sides, given, strict=True)
    )
    return in_tree, out_tree


def _check_tree(said: Any, side: str, tree: Any) -> None:
    if not isinstance(tree, jax.tree_util.PyTreeDef):
        raise ArgumentError(
            f"{side} must be a PyTreeDef, not {type(tree).__name__}: write "
            f"{side}=jax.tree.structure(...)"
        )
    if not fits(said, tree_to_json(tree)):
        whole = "((args, ...), {name: arg, ...})" if side == "in_tree" else "the result"
        raise SavedProgramError(
            f"{side} is {tree}, which is not the structure of the saved program's: it must be that "
            f"of {whole}, as it was compiled"
        )


def _unknown_text(said: Any, paths: Sequence[str], sides: Sequence[str]) -> str:
    kinds = list(dict.fromkeys(k for side in sides for k in unknown_nodes(said[side])))
    args, names = said["in_tree"]["tuple"]
    found = dict.fromkeys(p.partition("[")[0].partition(".")[0] for p in paths)
    count = len(args["tuple"])
    shown = list(found)[:count] + [f"arg{i}" for i in range(len(found), count)]
    tuple_code = f"({', '.join(shown)}{',' if count == 1 else ''})"
    keywords = ", ".join(f"{key!r}: {key}" for key in names["keys"])
    code = {
        "in_tree": f"jax.tree.structure(({tuple_code}, {{{keywords}}}))",
        "out_tree": "jax.tree.structure(result)",
    }
    given = ", ".join(f"{side}={code[side]}" for side in sides)
    return (
        f"the saved program's trees have a node of {', '.join(kinds)}, whose static part (a "
        "function, or an object of its own) no file can hold: give the trees of such values, "
        f"deserialize(data, {given})"
    )
