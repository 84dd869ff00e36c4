"""The devices of a report, and where its mesh lies on them."""

from xlashard.sharding import Mesh
from xlashard.tpu.links import axis_links
from xlashard.tpu.preflight.parts import AxisReport, TopologyReport
from xlashard.tpu.topologies import Topology


def describe_topology(topology: Topology) -> TopologyReport:
    """What a report says of the devices, per device where it says so.

    Args:
        topology: That the program was compiled for.
    """
    generation = topology.generation
    return TopologyReport(
        name=topology.name,
        generation=generation.name,
        slices=topology.slices,
        shape=topology.shape,
        wraps=topology.wraps,
        chips=topology.chips,
        devices=topology.num_devices,
        hosts=topology.hosts,
        hbm_bytes=generation.device_hbm_bytes,
        available_bytes=generation.available_bytes,
        peak_flops=generation.device_peak_flops,
        hbm_bandwidth=generation.device_hbm_bandwidth,
        ici_bandwidth=generation.ici_bandwidth,
        dcn_bandwidth=generation.device_dcn_bandwidth,
    )


def describe_mesh(topology: Topology, mesh: Mesh) -> tuple[AxisReport, ...]:
    """What a report says of each mesh axis, in the order of the mesh.

    Args:
        topology: Whose devices the mesh has.
        mesh: Laid in any way.

    Raises:
        TopologyError: If the mesh has devices that the topology lacks.
    """
    return tuple(_axis(topology, mesh, name) for name in mesh.axis_names)


def _axis(topology: Topology, mesh: Mesh, name: str) -> AxisReport:
    found = axis_links(topology, mesh, (name,))
    along = tuple((part.dimension, part.size) for part in found.parts)
    strides = tuple(part.stride for part in found.parts)
    return AxisReport(name, found.size, along, found.ring, strides)
