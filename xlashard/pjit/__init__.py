"""pjit: functions of arrays as programs over many devices."""

import typing as _typing

from xlashard.lazily import on_demand as _on_demand
from xlashard.pjit.api import explain_recompile, jit, pjit
from xlashard.pjit.compile import PROGRAMS
from xlashard.pjit.constraint import with_sharding_constraint
from xlashard.pjit.shardings.resources import AUTO, FROM_GDA, UNSPECIFIED

if _typing.TYPE_CHECKING:
    from xlashard.pjit.recompile.recompile_report import RecompileReport
    from xlashard.pjit.report import ProgramReport, explain
    from xlashard.pjit.stages.bound_step import BoundStep
    from xlashard.pjit.stages.compiled import Compiled
    from xlashard.pjit.stages.stablehlo import StableHLOProgram, compile_stablehlo
    from xlashard.pjit.stages.traced import Lowered, Traced
else:
    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.pjit.stages.compiled": ("Compiled",),
            "xlashard.pjit.recompile.recompile_report": ("RecompileReport",),
            "xlashard.pjit.stages.traced": ("Lowered", "Traced"),
            "xlashard.pjit.stages.bound_step": ("BoundStep",),
            "xlashard.pjit.report": ("ProgramReport", "explain"),
            "xlashard.pjit.stages.stablehlo": ("StableHLOProgram", "compile_stablehlo"),
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
