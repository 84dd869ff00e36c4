"""TPU topologies and device meshes on them, on a machine without a TPU.

The room behind it is `xlashard.predict.targets.tpu`.
"""

from typing import TYPE_CHECKING

from xlashard.support.lazily import on_demand

if TYPE_CHECKING:
    from xlashard.predict.targets.base_topology import AxisLinks, axis_links
    from xlashard.predict.targets.tpu.generations import GENERATIONS, Generation
    from xlashard.predict.targets.tpu.topologies import Topology, topology
else:
    # The command line completes names of topologies without importing JAX.
    __getattr__, __dir__ = on_demand(
        __name__,
        globals(),
        {
            "xlashard.predict.targets.base_topology": ("AxisLinks", "axis_links"),
            "xlashard.predict.targets.tpu.generations": ("GENERATIONS", "Generation"),
            "xlashard.predict.targets.tpu.topologies": ("Topology", "topology"),
        },
    )

__all__ = ["GENERATIONS", "AxisLinks", "Generation", "Topology", "axis_links", "topology"]
