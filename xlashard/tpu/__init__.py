"""TPU topologies, and what a program would do on one, on a machine without a TPU."""

from xlashard.tpu.generations import GENERATIONS, Generation
from xlashard.tpu.links import AxisLinks, axis_links
from xlashard.tpu.topologies import Topology, topology

__all__ = ["GENERATIONS", "AxisLinks", "Generation", "Topology", "axis_links", "topology"]
