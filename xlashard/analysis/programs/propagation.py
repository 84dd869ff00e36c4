"""Shardings that the partitioner chooses for values inside of a program.

A compiled module has the shapes of shards, and no shardings. XLA's dump from before the pass that
divides the values has both the whole values and their shardings, Shardy's as well as GSPMD's.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from xlashard.analysis.programs.program import Compilation, LoweredModule, WatchedValues
from xlashard.core.program.compile import compile_request, compiler_errors
from xlashard.core.program.plan import option_items
from xlashard.core.program.remote_compile import compile_module
from xlashard.errors import ArgumentError
from xlashard.hlo.hlo_program import read
from xlashard.workers.dump_folder import temporary_dump_folder

_PASS = "spmd-partitioning"
"""End of the name of the pass that divides values; that for TPUs has a prefix."""


def dump_options(folder: Path, pattern: str = "") -> dict[str, Any]:
    """Return the compiler options that write its dumps to a folder.

    Args:
        folder: The folder.
        pattern: Pattern of the values whose shardings a report shows; empty for none.
    """
    options = {"xla_dump_hlo_as_proto": True, "xla_dump_to": str(folder)}
    return options | ({"xla_dump_hlo_pass_re": _PASS} if pattern else {})


def parse_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of the names of values.

    Raises:
        ArgumentError: If it is invalid.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ArgumentError(
            f"values={pattern!r} is an invalid regular expression ({error}): write parts of names, "
            "such as values='attention|logits'"
        ) from None


def watch_values(
    lowered: LoweredModule | Compilation, compiled: Compilation, pattern: str
) -> Compilation:
    """Return a compiled program with the values inside that a report shows.

    The module is compiled once more, for its dumps, with the same options.

    Args:
        lowered: The module of the program.
        compiled: The program.
        pattern: Pattern of the values.

    Raises:
        ArgumentError: If the pattern is invalid, or the module is not known.
    """
    parse_pattern(pattern)
    if isinstance(lowered, Compilation):
        raise ArgumentError(
            f"values={pattern!r} needs more than {compiled.name}, which is compiled already and "
            "keeps no module with shardings: pass its Lowered, or the function and its arguments"
        )
    with temporary_dump_folder() as folder:
        options = option_items(dump_options(folder, pattern))
        request = compile_request(lowered.plan, lowered.body, options)
        with compiler_errors(lowered.plan, request, lowered.module):
            compile_module(lowered.module, request)
        return read_watched(compiled, folder, pattern)


def read_watched(compiled: Compilation, folder: Path, pattern: str) -> Compilation:
    """Return a compiled program with the values inside that a report shows.

    Args:
        compiled: The program.
        folder: Folder of the compiler's dumps, by `dump_options` with the pattern.
        pattern: Pattern of the values.
    """
    dumps = sorted(folder.glob(f"*.before_*{_PASS}.hlo.pb"))
    # A program of one device is not divided.
    is_propagated = bool(dumps) or len(compiled.devices) == 1
    module = read((dumps or sorted(folder.glob("*.before_optimizations.hlo.pb")))[0])
    watched = WatchedValues(parse_pattern(pattern), module, is_propagated)
    return replace(compiled, watched=watched)
