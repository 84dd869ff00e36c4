"""Hardware that TPUs and GPUs share: chips, topologies, meshes on them and links along axes.

`chip` holds the figures of a chip, `mesh_layout` lays mesh axes on the dimensions of a topology,
`base_topology` makes meshes of compile-only devices, `links` finds the links along mesh axes.
"""

from typing import TYPE_CHECKING

from xlashard.lazily import on_demand

if TYPE_CHECKING:
    from xlashard.hardware.base_topology import AxisLinks, BaseTopology
    from xlashard.hardware.chip import Chip
    from xlashard.hardware.links import axis_links
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        globals(),
        {
            "xlashard.hardware.base_topology": ("AxisLinks", "BaseTopology"),
            "xlashard.hardware.chip": ("Chip",),
            "xlashard.hardware.links": ("axis_links",),
        },
    )

__all__ = ["AxisLinks", "BaseTopology", "Chip", "axis_links"]
