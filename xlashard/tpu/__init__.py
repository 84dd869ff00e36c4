"""TPU topologies, and what a program would do on one, on a machine without a TPU.

`generations` has what is public of the chips and `names` what a name stands for; `layout` lays axes
on a torus, `meshes` makes device meshes of that for a `Topology` of `topologies`, and `links` says
how fast the devices along the axes of any mesh talk. What a program would take, do and cost is told
by `preflight`.
"""

from xlashard.tpu.generations import GENERATIONS, Generation
from xlashard.tpu.links import AxisLinks, axis_links
from xlashard.tpu.topologies import Topology, topology

__all__ = ["GENERATIONS", "AxisLinks", "Generation", "Topology", "axis_links", "topology"]
