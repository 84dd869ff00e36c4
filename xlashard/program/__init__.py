"""Programs: annotated StableHLO modules, compiled, that map buffer handles to buffer handles."""

import typing as _typing

from xlashard.lazily import on_demand as _on_demand
from xlashard.program.ir.annotate import is_open, sharding_text
from xlashard.program.ir.donation import Donation, plan_donation
from xlashard.program.ir.emit import write_main
from xlashard.program.ir.plan import (
    Partitioner,
    ProgramPlan,
    ValuePlan,
    open_dims,
    option_items,
)
from xlashard.program.runtime.compile import LoweredProgram, compile_program, lower_program
from xlashard.program.runtime.execute import Program, ProgramParts

if _typing.TYPE_CHECKING:
    from xlashard.program.hlo.analysis import read_collectives
    from xlashard.program.hlo.collectives import Collective, CollectiveTotal, summarize
    from xlashard.program.ir.parsed_module import (
        ModuleValue,
        ParsedModule,
        lower_parsed_module,
        parse_module,
        partitioner_for,
    )
else:
    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.program.hlo.analysis": ("read_collectives",),
            "xlashard.program.hlo.collectives": ("Collective", "CollectiveTotal", "summarize"),
            "xlashard.program.ir.parsed_module": (
                "ParsedModule",
                "ModuleValue",
                "lower_parsed_module",
                "partitioner_for",
                "parse_module",
            ),
        },
    )

__all__ = [
    "Collective",
    "CollectiveTotal",
    "Donation",
    "LoweredProgram",
    "ModuleValue",
    "ParsedModule",
    "Partitioner",
    "Program",
    "ProgramParts",
    "ProgramPlan",
    "ValuePlan",
    "compile_program",
    "is_open",
    "lower_parsed_module",
    "lower_program",
    "open_dims",
    "option_items",
    "parse_module",
    "partitioner_for",
    "plan_donation",
    "read_collectives",
    "sharding_text",
    "summarize",
    "write_main",
]
