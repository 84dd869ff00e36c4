"""What a program would take, do and cost on a TPU topology, without a TPU.

| modules | what is in them |
|---|---|
| `api`, `placing`, `compilation` | `preflight`: arguments on the topology, the program compiled |
| `machine`, `memory`, `values`, `timing`, `traffic` | what a report says, by the compilation |
| `buffers`, `operations`, `holdings`, `liveness` | what `memory` reads from the buffer assignment |
| `tiles`, `flops`, `hbm`, `work`, `clocks`, `schedule` | what `timing` counts in the HLO |
| `wires`, `megascale` | collectives on links, for `timing` and `traffic` |
| `flow`, `layouts`, `cases`, `shapes` | what is found out about a collective |
| `origins`, `remedies` | who asked for it, what would remove it, for `traffic` |
| `parts`, `fields`, `report`, `schema` | the report: its values, itself, its JSON |
| `words`, `screen`, `summary`, `page` | a report as a person reads it |
| `comparison`, `differences`, `comparison_text` | two reports |
| `budget`, `money` | a report and its limits, prices |
| `targets`, `sweep` | programs by their names; every mesh, in processes of their own |
"""

import typing as _typing

from xlashard.lazily import on_demand as _on_demand

if _typing.TYPE_CHECKING:
    from xlashard.tpu.preflight.api import preflight
    from xlashard.tpu.preflight.budget import Breach, Limit, broken_limits, read_budget
    from xlashard.tpu.preflight.comparison import Comparison, compare
    from xlashard.tpu.preflight.parts import Workload
    from xlashard.tpu.preflight.report import PreflightReport
    from xlashard.tpu.preflight.schema import make_schema
else:
    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.tpu.preflight.api": ("preflight",),
            "xlashard.tpu.preflight.budget": ("Breach", "Limit", "broken_limits", "read_budget"),
            "xlashard.tpu.preflight.comparison": ("Comparison", "compare"),
            "xlashard.tpu.preflight.parts": ("Workload",),
            "xlashard.tpu.preflight.report": ("PreflightReport",),
            "xlashard.tpu.preflight.schema": ("make_schema",),
        },
    )

__all__ = [
    "Breach",
    "Comparison",
    "Limit",
    "PreflightReport",
    "Workload",
    "broken_limits",
    "compare",
    "make_schema",
    "preflight",
    "read_budget",
]
