"""pjit: functions of arrays as programs over many devices."""

import typing as _typing

from xlashard.lazily import on_demand as _on_demand
from xlashard.pjit.api import explain_recompile as explain_recompile
from xlashard.pjit.api import jit as jit
from xlashard.pjit.api import pjit as pjit
from xlashard.pjit.compile import PROGRAMS as PROGRAMS
from xlashard.pjit.constraint import with_sharding_constraint as with_sharding_constraint
from xlashard.pjit.shardings.resources import AUTO as AUTO
from xlashard.pjit.shardings.resources import FROM_GDA as FROM_GDA
from xlashard.pjit.shardings.resources import UNSPECIFIED as UNSPECIFIED

if _typing.TYPE_CHECKING:
    from xlashard.pjit.recompile.recompile_report import RecompileReport as RecompileReport
    from xlashard.pjit.report import ProgramReport as ProgramReport
    from xlashard.pjit.report import explain as explain
    from xlashard.pjit.stages.bound_step import BoundStep as BoundStep
    from xlashard.pjit.stages.compiled import Compiled as Compiled
    from xlashard.pjit.stages.recorded import RecordedProgram as RecordedProgram
    from xlashard.pjit.stages.recorded import record_programs as record_programs
    from xlashard.pjit.stages.stablehlo import StableHLOProgram as StableHLOProgram
    from xlashard.pjit.stages.stablehlo import compile_stablehlo as compile_stablehlo
    from xlashard.pjit.stages.traced import Lowered as Lowered
    from xlashard.pjit.stages.traced import Traced as Traced
else:
    _names = {
        "xlashard.pjit.recompile.recompile_report": ("RecompileReport",),
        "xlashard.pjit.report": ("ProgramReport", "explain"),
        "xlashard.pjit.stages.bound_step": ("BoundStep",),
        "xlashard.pjit.stages.compiled": ("Compiled",),
        "xlashard.pjit.stages.recorded": ("RecordedProgram", "record_programs"),
        "xlashard.pjit.stages.stablehlo": ("StableHLOProgram", "compile_stablehlo"),
        "xlashard.pjit.stages.traced": ("Lowered", "Traced"),
    }
    __getattr__, __dir__ = _on_demand(__name__, globals(), _names)
