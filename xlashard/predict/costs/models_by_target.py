"""Cost models by target: rates, operations and network of the chips of a topology."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from xlashard.hlo.module import HloModule
from xlashard.predict.costs.gpu.gpu_operation import GpuOperationModel, GpuRates, gpu_rates
from xlashard.predict.costs.gpu.nccl import NcclModel
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.costs.network_model import NetworkModel
from xlashard.predict.costs.operation import OperationModel
from xlashard.predict.costs.rates import Rates, rates_of
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.gpu.gpu_models import GpuModel
from xlashard.predict.targets.gpu.topologies import GpuTopology
from xlashard.predict.targets.tpu.generations import Generation
from xlashard.predict.targets.tpu.topologies import Topology

if TYPE_CHECKING:
    from jax.sharding import Mesh


def rates_for(chip: Chip) -> Rates:
    """Return the rates that a device of a chip reaches.

    Args:
        chip: Figures of the chip.
    """
    if isinstance(chip, GpuModel):
        return gpu_rates(chip)
    assert isinstance(chip, Generation)
    return rates_of(chip)


def operations_for(
    module: HloModule, rates: Rates, kernel_costs: Mapping[str, KernelCost] | None = None
) -> OperationModel[Rates]:
    """Return the times of the operations of a module.

    Args:
        module: Compiled module.
        rates: Rates of a device.
        kernel_costs: Costs of kernels that the caller gives, by name.
    """
    if isinstance(rates, GpuRates):
        return GpuOperationModel(module, rates, kernel_costs)
    return OperationModel(module, rates, kernel_costs)


def network_for(
    topology: BaseTopology, mesh: "Mesh", rates: Rates | None = None
) -> NetworkModel | NcclModel:
    """Return the network between the devices of a mesh.

    Args:
        topology: Topology of the devices.
        mesh: Mesh of the program.
        rates: Rates of a device; those of published measurements if None.
    """
    if isinstance(topology, GpuTopology):
        return NcclModel(topology, mesh, rates)
    assert isinstance(topology, Topology)
    return NetworkModel(topology, mesh, rates)
