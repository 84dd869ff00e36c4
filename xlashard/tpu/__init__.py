"""TPU topologies and device meshes on them, on a machine without a TPU.

`generations` holds public chip figures, `topology_names` parses names, `mesh_layout` lays mesh axes
on a torus, `topologies` makes device meshes, and `links` computes the bandwidth along mesh axes.
"""

from typing import TYPE_CHECKING

from xlashard.lazily import on_demand

if TYPE_CHECKING:
    from xlashard.tpu.generations import GENERATIONS, Generation
    from xlashard.tpu.links import AxisLinks, axis_links
    from xlashard.tpu.topologies import Topology, topology
else:
    # The command line completes names of topologies without importing JAX.
    __getattr__, __dir__ = on_demand(
        __name__,
        globals(),
        {
            "xlashard.tpu.generations": ("GENERATIONS", "Generation"),
            "xlashard.tpu.links": ("AxisLinks", "axis_links"),
            "xlashard.tpu.topologies": ("Topology", "topology"),
        },
    )

__all__ = ["GENERATIONS", "AxisLinks", "Generation", "Topology", "axis_links", "topology"]
