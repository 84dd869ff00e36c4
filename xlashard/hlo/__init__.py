"""Analysis of compiled programs: `read` returns a module of optimised HLO as Python objects.

Computations, instructions and their attributes; the call graph with trip counts of loops;
collectives with the mesh axes that they run along; the buffer assignment with live ranges; and the
source line of every operation.
"""

import typing as _typing

from xlashard.support.lazily import on_demand as _on_demand

if _typing.TYPE_CHECKING:
    from xlashard.hlo.buffers import Allocation, BufferValue, PeakBuffer
    from xlashard.hlo.call_graph import CallSite
    from xlashard.hlo.collectives import Collective, CollectiveTotal, summarize
    from xlashard.hlo.hlo_program import HloProgram, read, read_collectives, read_modules
    from xlashard.hlo.module import Attributes, Computation, Frame, Instruction, WindowDimension
    from xlashard.hlo.shapes import Shape
else:
    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.hlo.buffers": ("Allocation", "BufferValue", "PeakBuffer"),
            "xlashard.hlo.call_graph": ("CallSite",),
            "xlashard.hlo.collectives": ("Collective", "CollectiveTotal", "summarize"),
            "xlashard.hlo.hlo_program": ("HloProgram", "read", "read_collectives", "read_modules"),
            "xlashard.hlo.module": (
                *("Attributes", "Computation", "Frame", "Instruction", "WindowDimension"),
            ),
            "xlashard.hlo.shapes": ("Shape",),
        },
    )

__all__ = [
    "Allocation",
    "Attributes",
    "BufferValue",
    "CallSite",
    "Collective",
    "CollectiveTotal",
    "Computation",
    "Frame",
    "HloProgram",
    "Instruction",
    "PeakBuffer",
    "Shape",
    "WindowDimension",
    "read",
    "read_collectives",
    "read_modules",
    "summarize",
]
