"""TPU topologies, device meshes on them, and preflight reports, on a machine without a TPU.

`generations` holds public chip figures, `topology_names` parses names, `mesh_layout` lays mesh axes
on a torus, `topologies` makes device meshes, and `links` computes the bandwidth along mesh axes.
`preflight` reports the memory, time and cost of a program.
"""

from xlashard.tpu.generations import GENERATIONS, Generation
from xlashard.tpu.links import AxisLinks, axis_links
from xlashard.tpu.topologies import Topology, topology

__all__ = ["GENERATIONS", "AxisLinks", "Generation", "Topology", "axis_links", "topology"]
