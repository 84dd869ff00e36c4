"""Preflight: compile a program for TPUs or GPUs elsewhere, and report memory, time and cost.

| folder or module | contents |
|---|---|
| `preflight_run`, `compilation` | `preflight()`: shard arguments, compile, report |
| `memory_breakdown`, `time_estimate` | memory by argument, result and temporary; step time |
| `attribution/` | causes of collectives, time by source line, scores that leave VMEM |
| `report/` | the report: data model, JSON schema, comparison, budget, prices, profiles beside it |
| `render/` | reports in a terminal, as HTML pages, and as traces for Perfetto |
| `target_loading` | programs named `module:function` |

The public names are in `xlashard.preflights`.
"""
