"""pjit: functions of arrays as programs over many devices."""

import typing as _typing

from xlashard.lazily import on_demand as _on_demand
from xlashard.pjit.api import explain_recompile, jit, pjit
from xlashard.pjit.constraint import with_sharding_constraint
from xlashard.pjit.prepare import PROGRAMS
from xlashard.pjit.resources import AUTO, FROM_GDA, UNSPECIFIED

if _typing.TYPE_CHECKING:
    from xlashard.pjit.compiled import Compiled
    from xlashard.pjit.recompile.recompile_report import RecompileReport
    from xlashard.pjit.report import ProgramReport, explain
    from xlashard.pjit.stablehlo import StableHLOProgram, compile_stablehlo
    from xlashard.pjit.stages import Lowered, Traced
    from xlashard.pjit.step import BoundStep
else:
    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.pjit.compiled": ("Compiled",),
            "xlashard.pjit.recompile.recompile_report": ("RecompileReport",),
            "xlashard.pjit.stages": ("Lowered", "Traced"),
            "xlashard.pjit.step": ("BoundStep",),
            "xlashard.pjit.report": ("ProgramReport", "explain"),
            "xlashard.pjit.stablehlo": ("StableHLOProgram", "compile_stablehlo"),
        },
    )

__all__ = [
    "AUTO",
    "FROM_GDA",
    "PROGRAMS",
    "UNSPECIFIED",
    "BoundStep",
    "Compiled",
    "Lowered",
    "ProgramReport",
    "RecompileReport",
    "StableHLOProgram",
    "Traced",
    "compile_stablehlo",
    "explain",
    "explain_recompile",
    "jit",
    "pjit",
    "with_sharding_constraint",
]
