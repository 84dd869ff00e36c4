"""pjit: functions of arrays as programs over many devices."""

from xlashard.pjit.api import explain_recompile, jit, pjit
from xlashard.pjit.compiled import Compiled
from xlashard.pjit.constraint import with_sharding_constraint
from xlashard.pjit.prepare import PROGRAMS
from xlashard.pjit.recompile.report import RecompileReport
from xlashard.pjit.report import ProgramReport, explain
from xlashard.pjit.resources import AUTO, UNSPECIFIED
from xlashard.pjit.stablehlo import StableHLOProgram, compile_stablehlo
from xlashard.pjit.stages import Lowered, Traced
from xlashard.pjit.step import BoundStep

__all__ = [
    "AUTO",
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
