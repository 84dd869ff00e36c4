"""Hardware that TPUs and GPUs share: chips, topologies, meshes on them and links along axes.

The room behind it is `xlashard.predict.targets`.
"""

from typing import TYPE_CHECKING

from xlashard.support.lazily import on_demand

if TYPE_CHECKING:
    from xlashard.predict.targets.base_topology import AxisLinks, BaseTopology, axis_links
    from xlashard.predict.targets.chip import Chip
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        globals(),
        {
            "xlashard.predict.targets.base_topology": ("AxisLinks", "BaseTopology", "axis_links"),
            "xlashard.predict.targets.chip": ("Chip",),
        },
    )

__all__ = ["AxisLinks", "BaseTopology", "Chip", "axis_links"]
