"""Programs: annotated StableHLO modules, compiled, that map buffer handles to buffer handles."""

import typing as _typing

from xlashard.lazily import on_demand as _on_demand

if _typing.TYPE_CHECKING:
    from xlashard.program.hlo.collectives import read_collectives as read_collectives
    from xlashard.program.hlo.collectives import summarize as summarize
else:
    _names = {"xlashard.program.hlo.collectives": ("read_collectives", "summarize")}
    __getattr__, __dir__ = _on_demand(__name__, globals(), _names)
