"""TPU topologies, and what a program would do on one, on a machine without a TPU."""

from xlashard.tpu.topologies import Topology, topology

__all__ = ["Topology", "topology"]
