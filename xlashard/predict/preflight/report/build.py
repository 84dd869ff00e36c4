"""Build the report of a compiled or rejected program: devices, mesh, values, throughput, cost."""

import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.topologies import cuda_plugin_version, libtpu_version
from xlashard._jax.trace.tracing import explicit_sharding
from xlashard._version import __version__
from xlashard.analysis.explain.descriptions import describe_donations
from xlashard.analysis.explain.explain import find_all
from xlashard.analysis.explain.model import CollectiveReport, ValueReport
from xlashard.analysis.explain.sections import read_causes
from xlashard.analysis.explain.unmet_requests import fitting_axes
from xlashard.analysis.programs.program import Compilation, ProgramValue
from xlashard.analysis.programs.source_lines import distinguish_lines
from xlashard.core.sharding import Mesh
from xlashard.hlo.compiler_log import read_general_warnings
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.preflight.attribution.attribution import describe_traffic
from xlashard.predict.preflight.attribution.step_lines import add_lines
from xlashard.predict.preflight.attribution.vmem_spill import SpillFinder
from xlashard.predict.preflight.memory_breakdown import describe_memory, describe_values
from xlashard.predict.preflight.report.measured import Calibration
from xlashard.predict.preflight.report.preflight_model import (
    AdviceReport,
    AxisReport,
    Suggestion,
    TimeEstimate,
    TopologyReport,
    VersionsReport,
)
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.report.pricing import (
    Price,
    ThroughputReport,
    Workload,
    describe_price,
)
from xlashard.predict.preflight.report.step_model import SpillReport
from xlashard.predict.preflight.time_estimate import estimate_time, schedule_step
from xlashard.predict.targets.base_topology import BaseTopology, axis_links, mesh_coordinates
from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.gpu.topologies import GpuTopology
from xlashard.predict.targets.tpu.generations import Generation
from xlashard.predict.targets.tpu.topologies import Topology
from xlashard.support.collector import collector_paused


def describe_topology(topology: BaseTopology) -> TopologyReport:
    """Return the figures of the devices for a report.

    Args:
        topology: Topology that the program is compiled for.
    """
    chip = topology.chip
    if isinstance(topology, GpuTopology):
        shape, wraps = (topology.nodes, topology.gpus_per_node), (False, False)
        within, between = topology.chip.node_bandwidth, topology.network_bandwidth
    else:
        assert isinstance(topology, Topology)
        shape, wraps = topology.shape, topology.wraps
        within, between = topology.chip.ici_bandwidth, topology.chip.device_dcn_bandwidth
    return TopologyReport(
        name=topology.name,
        generation=chip.name,
        slices=topology.slices,
        shape=shape,
        wraps=wraps,
        links=chip.links,
        chips=topology.chips,
        devices=topology.num_devices,
        hosts=topology.hosts,
        hbm_bytes=chip.device_hbm_bytes,
        available_bytes=chip.available_bytes,
        peak_flops=chip.device_peak_flops,
        hbm_bandwidth=chip.device_hbm_bandwidth,
        ici_bandwidth=within,
        dcn_bandwidth=between,
    )


def describe_mesh(topology: BaseTopology, mesh: Mesh) -> tuple[AxisReport, ...]:
    """Return the position of each mesh axis on the torus, in mesh order.

    Args:
        topology: Topology of the mesh devices.
        mesh: Mesh in any device order.

    Raises:
        TopologyError: If the mesh has devices of another topology.
    """
    return tuple(_describe_axis(topology, mesh, number) for number in range(mesh.devices.ndim))


def _describe_axis(topology: BaseTopology, mesh: Mesh, number: int) -> AxisReport:
    axis = axis_links(topology, mesh, (mesh.axis_names[number],))
    coordinates = np.moveaxis(mesh_coordinates(topology, mesh), number, -2)
    names = [dimension.name for dimension in topology.dimensions]
    position = np.zeros(coordinates.shape[:-1], np.int64)
    for part in axis.parts:
        at = coordinates[..., names.index(part.dimension)]
        position = position * part.size + at // part.stride % part.size
    is_ascending = np.array_equal(position, np.broadcast_to(np.arange(axis.size), position.shape))
    return AxisReport(
        name=mesh.axis_names[number],
        size=axis.size,
        along=tuple((part.dimension, part.size) for part in axis.parts),
        ring=axis.ring,
        strides=tuple(part.stride for part in axis.parts) if is_ascending else (),
    )


REPLICATED_ABOVE = 2**20
"""Default minimum bytes of the fully replicated values that a report lists."""


def _fully_replicated(
    program: Compilation, reports: Sequence[ValueReport], least: int
) -> tuple[ValueReport, ...]:
    """Return the fully replicated inputs and outputs that mesh axes could shard, largest first.

    Args:
        program: The program.
        reports: Reports of its inputs and outputs.
        least: Minimum bytes of a value to list.
    """
    values = (*program.arguments, *program.closed_over, *program.results)
    whole = [
        report
        for value, report in zip(values, reports, strict=True)
        if report.used
        and report.device_bytes >= least
        and _is_needlessly_replicated(program, value)
    ]
    return tuple(sorted(whole, key=lambda r: -r.device_bytes))


def _is_needlessly_replicated(program: Compilation, value: ProgramValue) -> bool:
    """Return True if a value is replicated although a mesh axis divides one of its dimensions.

    The type of a value prescribes its sharding on Explicit axes: the user chose it.
    """
    mesh, sharding = program.mesh, value.sharding
    if explicit_sharding(value.aval) is not None:
        return False
    if mesh is None or sharding is None or sharding.num_devices == 1:
        return False
    if not sharding.rank_tiling(value.aval.ndim).is_replicated:
        return False
    return any(fitting_axes(size, mesh.shape) for size in value.aval.shape)


_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@collector_paused()
def build_report(
    compilation: Compilation,
    topology: BaseTopology,
    mesh: Mesh,
    *,
    title: str = "",
    workload: Workload | None = None,
    price: Price | None = None,
    replicated_above: int = REPLICATED_ABOVE,
    kernel_costs: Mapping[str, KernelCost] | None = None,
    calibration: Calibration | None = None,
    is_laid_out: bool | None = None,
) -> PreflightReport:
    """Return the report of a compiled program.

    Args:
        compilation: Program compiled for the topology.
        topology: The topology.
        mesh: The mesh.
        title: Title of the report.
        workload: Workload of a training step.
        price: Price of a chip-hour.
        replicated_above: Minimum bytes of the fully replicated values to list.
        kernel_costs: Costs of kernels by name.
        calibration: Measured slowdowns of the chip; None for the published rates.
        is_laid_out: Whether xlashard laid out the mesh; None for a mesh of unknown origin, which
            is taken to be if its devices have that order.
    """
    if is_laid_out is None:
        is_laid_out = np.array_equal(topology.mesh(mesh.shape).devices, mesh.devices)
    chips = describe_topology(topology)
    memory = describe_memory(compilation, topology)
    rates = None if calibration is None else calibration.rates(topology.chip)
    schedule = schedule_step(compilation, topology, mesh, kernel_costs, rates)
    time = estimate_time(compilation, topology, mesh, kernel_costs, schedule, rates)
    other_bytes = memory.argument_bytes + memory.result_bytes + memory.constant_bytes
    time = add_lines(time, compilation, schedule, mesh, other_bytes + memory.code_bytes)
    inputs, outputs = describe_values(compilation, compilation.module)
    tokens = None if workload is None else workload.tokens
    traffic, suggestions = describe_traffic(compilation, topology, mesh, schedule.collectives)
    report = PreflightReport(
        name=compilation.name,
        title=title,
        outcome="fits" if memory.fits and not compilation.too_large else "out of memory",
        topology=chips,
        mesh=describe_mesh(topology, mesh),
        partitioner=compilation.plan.partitioner.value,
        memory=memory,
        time=time,
        traffic=traffic,
        inputs=inputs,
        outputs=outputs,
        donations=describe_donations(compilation),
        replicated=_fully_replicated(compilation, (*inputs, *outputs), replicated_above),
        replicated_above=replicated_above,
        throughput=_throughput(workload, time, chips),
        price=None if price is None else describe_price(price, time.seconds, chips.chips, tokens),
        compile_seconds=compilation.seconds,
        versions=_versions(compilation, topology, calibration),
        is_estimate=compilation.is_estimate,
        spills=_find_spills(compilation, topology.chip),
        forgotten=compilation.program.unknown,
        is_laid_out=is_laid_out,
        degraded=compilation.degraded,
        warnings=read_general_warnings(compilation.log),
        advice=_list_advice(traffic, suggestions),
        excerpts=read_causes(traffic),
        **find_all(compilation, PreflightReport),
    )
    return distinguish_lines(report)


def _list_advice(
    traffic: Sequence[CollectiveReport], suggestions: Mapping[str, Suggestion]
) -> tuple[AdviceReport, ...]:
    """Return suggestions that are not tried, those of the longest collectives first."""
    seconds = dict.fromkeys(suggestions, 0.0)
    for row in traffic:
        if row.suggestion:
            seconds[row.suggestion] += row.seconds
    advice = [AdviceReport(text, (suggestions[text],), seconds[text]) for text in suggestions]
    return tuple(sorted(advice, key=lambda each: -each.removable_seconds))


def _find_spills(compilation: Compilation, chip: Chip) -> tuple[SpillReport, ...]:
    """Return the attention scores that leave VMEM, which GPUs don't have."""
    if not isinstance(chip, Generation):
        return ()
    return SpillFinder(compilation.module, chip, compilation.sources).find()


def _throughput(
    workload: Workload | None, time: TimeEstimate, topology: TopologyReport
) -> ThroughputReport | None:
    """Return tokens per second and MFU, or None without a workload."""
    if workload is None or not time.seconds:
        return None
    peak, devices = dict(topology.peak_flops)["bfloat16"], topology.devices
    return ThroughputReport(
        workload=workload,
        tokens_per_second=workload.tokens / time.seconds,
        utilisation=workload.model_flops / (time.seconds * peak * devices),
        device_tokens_per_second=workload.tokens / time.seconds / devices,
        peak_flops=peak,
    )


def _versions(
    compilation: Compilation, topology: BaseTopology, calibration: Calibration | None
) -> VersionsReport:
    set_outside = [(name, os.environ[name]) for name in _FLAGS if os.environ.get(name)]
    options = [("compiler_options", f"{name}={value}") for name, value in compilation.options]
    if calibration is not None:
        options.append(("rates", f"{calibration.chip}, measured by published time: {calibration}"))
    is_gpu = isinstance(topology, GpuTopology)
    return VersionsReport(
        xlashard=__version__,
        jax=jax.__version__,
        jaxlib=executables.jaxlib_version(),
        libtpu="" if is_gpu else libtpu_version() or "",
        cuda_plugin=cuda_plugin_version() or "" if is_gpu else "",
        runtime=compiler.client_of(topology.devices[0]).platform_version,
        flags=(*set_outside, *options),
    )
