"""Time estimate of a program: bounds by resource, and the time of its schedule."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from xlashard.hlo.collectives import Collective, along_text
from xlashard.hlo.module import HloModule
from xlashard.predict.costs.cost_analysis import analyze_cost
from xlashard.predict.costs.gpu.gpu_operation import find_multipliers, find_unrated
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.costs.kernel_work import is_kernel, kernel_name, unmatched_costs
from xlashard.predict.costs.models_by_target import network_for, operations_for, rates_for
from xlashard.predict.costs.network_model import NetworkCost
from xlashard.predict.costs.rates import Rates, product_seconds
from xlashard.predict.costs.schedule import StepSchedule, walk_schedule
from xlashard.predict.preflight.error_bar import error_bar, error_parts, measure_kernel_spread
from xlashard.predict.preflight.report.preflight_model import AxisTraffic, Bound, TimeEstimate
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.gpu.gpu_models import GpuModel
from xlashard.predict.targets.tpu.topologies import Topology
from xlashard.support.formatting import in_bytes
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from xlashard.analysis.programs.program import Compilation
    from xlashard.core.sharding import named
else:
    # For programs on a mesh; the bounds by resource are computed without one.
    named = deferred("xlashard.core.sharding.named")


def estimate_time(
    compilation: "Compilation",
    topology: BaseTopology,
    mesh: "Mesh",
    kernel_costs: Mapping[str, KernelCost] | None = None,
    schedule: StepSchedule | None = None,
    rates: Rates | None = None,
) -> TimeEstimate:
    """Return the time of one execution, and lower bounds by resource.

    The time follows the compiler's schedule, with each operation at the rates that published
    measurements show (`rates`). The bounds let each resource run at its peak, independent of the
    others: matrix units by operand dtype, HBM, the links of each dimension (collectives on
    the same dimension run in sequence), and the network between slices. The longest is the
    roofline; no schedule is faster.

    Args:
        compilation: The program, compiled or rejected for its memory.
        topology: Topology of the program.
        mesh: Mesh of the program.
        kernel_costs: Costs of kernels that the caller gives, by name.
        schedule: Result of `schedule_step`; None to make it.
        rates: Rates of a device; those of published measurements if None.
    """
    module = compilation.module
    chip = topology.chip
    work = analyze_cost(module, kernel_costs, on_gpu=isinstance(chip, GpuModel))
    schedule = schedule or schedule_step(compilation, topology, mesh, kernel_costs, rates)
    collectives = schedule.collectives
    resources: dict[Bound, float] = {
        "compute": compute_seconds(work.matmul_flops, chip),
        "hbm": work.hbm_bytes / chip.device_hbm_bandwidth,
        "ici": _busiest(collectives),
        "dcn": sum(c.times * cost.dcn_seconds for c, cost in collectives),
    }
    roofline = max(resources.values())
    shares = schedule.by_resource()
    kernels = measure_kernel_spread(module, schedule, chip, kernel_costs, rates)
    slowest = slowest_slice_seconds(schedule.seconds, collectives, topology)
    known = {"dcn": resources["dcn"], "slowest_slice": slowest, "kernels": kernels, "chip": chip}
    parts = error_parts(shares, **known)
    unknown_calls = work.unknown_calls + count_unrated(module, schedule)
    below, above = error_bar(parts)
    products = count_products(module, schedule) if isinstance(chip, GpuModel) else ()
    estimate = TimeEstimate(
        flops=work.flops,
        flops_by_dtype=tuple(sorted(work.matmul_flops.items(), key=lambda item: -item[1])),
        hbm_bytes=work.hbm_bytes,
        traffic=_traffic(collectives, mesh),
        compute_seconds=resources["compute"],
        hbm_seconds=resources["hbm"],
        ici_seconds=resources["ici"],
        dcn_seconds=resources["dcn"],
        roofline_seconds=roofline,
        bound=_bound(resources if roofline > schedule.seconds else shares),
        seconds=max(schedule.seconds + slowest, roofline),
        below=below,
        above=above,
        slowest_slice_seconds=slowest,
        error_parts=tuple((cause, *part) for cause, part in parts.items() if any(part)),
        shares=tuple(sorted(shares.items(), key=lambda item: -item[1])),
        kernels=tuple(sorted(_runs_of_kernels(schedule, known=True).items())),
        unknown_kernels=tuple(sorted(_runs_of_kernels(schedule, known=False).items())),
        unmatched_kernel_costs=unmatched_costs(module, kernel_costs or {}),
        unknown_loops=work.unknown_loops,
        elementwise_flops=work.elementwise,
        transcendentals=work.transcendental,
        unknown_calls=tuple(sorted(unknown_calls.items())),
        products=products,
        assumptions=tuple(_list_assumptions(chip, dict(products))),
        not_understood=tuple(sorted(module.not_understood.items())),
    )
    return replace(estimate, above=None) if estimate.is_lower_bound else estimate


def slowest_slice_seconds(
    seconds: float,
    collectives: Iterable[tuple[Collective, NetworkCost]],
    topology: BaseTopology,
) -> float:
    """Return the time for which slices wait for the slowest of them.

    Slices that exchange values run as fast as the slowest. Their times are taken as normally
    distributed: the slowest of `n` is later by the expected maximum of `n` such times.

    Args:
        seconds: Time of a step of one slice.
        collectives: Collectives of the step with their network costs.
        topology: Topology of the devices.
    """
    slices = topology.slices if isinstance(topology, Topology) else 1
    if slices < 2 or not any(cost.dcn_bytes for _, cost in collectives):
        return 0.0
    # Blom, Statistical Estimates and Transformed Beta-Variables (1958).
    slowest = NormalDist().inv_cdf((slices - 0.375) / (slices + 0.25))
    return seconds * _SPREAD_OF_SLICES * slowest


_SPREAD_OF_SLICES = 0.05
"""Standard deviation of the step times of slices by their mean: the one constant of the time that
comes from training runs, for all chips and models. It was chosen by hand, with all published losses
of 2 to 32 slices in sight, those of 32B on v5e too, so no run tests it. Least squares over the runs
on several slices of `benchmarks/published_runs.toml` give 0.064."""


def schedule_step(
    compilation: "Compilation",
    topology: BaseTopology,
    mesh: "Mesh",
    kernel_costs: Mapping[str, KernelCost] | None = None,
    rates: Rates | None = None,
) -> StepSchedule:
    """Return the times of a program's operations in the compiler's order.

    Args:
        compilation: The program, compiled or rejected for its memory.
        topology: Topology of the program.
        mesh: Mesh of the program.
        kernel_costs: Costs of kernels that the caller gives, by name.
        rates: Rates of a device; those of published measurements if None.
    """
    rates = rates or rates_for(topology.chip)
    if limit := dict(compilation.options).get(_SCOPED_VMEM):
        rates = replace(rates, scoped_vmem_bytes=1024.0 * int(limit))
    model = operations_for(compilation.module, rates, kernel_costs)
    collectives = network_costs(compilation, topology, mesh, rates)
    return walk_schedule(compilation.module, collectives, model, rates)


_SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"


def network_costs(
    compilation: "Compilation", topology: BaseTopology, mesh: "Mesh", rates: Rates | None = None
) -> list[tuple[Collective, NetworkCost]]:
    """Return the collectives of a program with the network costs of one run.

    Args:
        compilation: The program, compiled or rejected for its memory.
        topology: Topology of the program.
        mesh: Mesh of the program.
        rates: Rates of a device; those of published measurements if None.
    """
    network = network_for(topology, mesh, rates)
    return [(c, network.of(c)) for c in compilation.module.collectives_on(mesh)]


def count_unrated(module: HloModule, schedule: StepSchedule) -> Counter[str]:
    """Return the runs of operations without published times, by opcode, if they may matter.

    A scatter with atomics was reported to take 36 times as long as one pass over its bytes. Where
    40 times their time is less than a twentieth of the step, the error bar holds it.

    Args:
        module: The program.
        schedule: Its schedule.
    """
    runs_by_opcode: Counter[str] = Counter()
    seconds = 0.0
    for operation, runs in schedule.on_cores():
        if not operation.known and not is_kernel(operation.instruction):
            computation = module.computations[operation.computation]
            opcode = find_unrated(module, computation, operation.instruction)
            runs_by_opcode[opcode] += round(runs)
            seconds += runs * operation.seconds
    return runs_by_opcode if 40 * seconds > 0.05 * schedule.seconds else Counter()


def count_products(module: HloModule, schedule: StepSchedule) -> tuple[tuple[str, int], ...]:
    """Return the runs of products of a schedule on GPUs by what multiplies.

    Args:
        module: The program.
        schedule: Its schedule.
    """
    counts = Counter[str]()
    for operation, runs in schedule:
        computation = module.computations[operation.computation]
        for name in find_multipliers(module, computation, operation.instruction):
            counts[name] += round(runs)
    return tuple(sorted(counts.items()))


def _list_assumptions(chip: Chip, products: Mapping[str, int]) -> Iterator[str]:
    """Yield what the time on a GPU takes for granted."""
    if not isinstance(chip, GpuModel):
        return
    if "triton" in products:
        yield (
            "products in Triton's kernels take the time of cuBLAS's; without a GPU XLA tunes none, "
            "and its choice may change the time by a third and add some 30 MiB of workspace"
        )
    yield "the host starts a step in time; its part of a call is unknown and not counted"
    yield (
        f"each operation reads and writes HBM: values that stay in the L2 cache "
        f"({in_bytes(chip.l2_bytes)}) take less, at a rate that is not published"
    )


_ARITHMETIC = ("matrix", "vector", "kernel")
"""Units whose time is bound by `compute`."""


def _bound(seconds: Mapping[Any, float]) -> Bound:
    """Return the resource that takes most of the time."""
    sums: dict[Any, float] = defaultdict(float)
    for resource, part in seconds.items():
        sums["compute" if resource in _ARITHMETIC else resource] += part
    return max(sums, key=lambda name: sums[name], default="compute")


def _runs_of_kernels(schedule: StepSchedule, *, known: bool) -> dict[str, int]:
    """Return the number of runs of kernels of known or unknown cost, by name."""
    runs_by_name: dict[str, int] = defaultdict(int)
    for operation, runs in schedule:
        if operation.known == known and is_kernel(operation.instruction):
            runs_by_name[kernel_name(operation.instruction)] += round(runs)
    return dict(runs_by_name)


def compute_seconds(matmul_flops: Mapping[str, float], chip: Chip) -> float:
    """Return the time of matrix products at peak FLOP/s.

    Args:
        matmul_flops: FLOP by dtype; `bfloat16 x6` counts six passes.
        chip: Figures of the chip.
    """
    peaks = dict(chip.device_peak_flops)
    return sum(product_seconds(flops, dtype, peaks) for dtype, flops in matmul_flops.items())


def _busiest(collectives: Iterable[tuple[Collective, NetworkCost]]) -> float:
    """Return the time of the dimension with the busiest links."""
    busy: dict[str, float] = defaultdict(float)
    for collective, cost in collectives:
        for dimension in cost.dimensions:
            busy[dimension] += collective.times * cost.seconds
    return max(busy.values(), default=0.0)


def _traffic(
    collectives: Iterable[tuple[Collective, NetworkCost]], mesh: "Mesh"
) -> tuple[AxisTraffic, ...]:
    grid = named.grid_of(mesh)
    sums: dict[tuple[str, str], list[float]] = {}
    for collective, cost in collectives:
        along = along_text(collective, grid)
        for network, sent, seconds in (
            ("ici", cost.sent_bytes, cost.seconds),
            ("dcn", cost.dcn_bytes, cost.dcn_seconds),
        ):
            if sent:
                total = sums.setdefault((along, network), [0.0, 0.0])
                total[0] += collective.times * sent
                total[1] += collective.times * seconds
    traffic = [
        AxisTraffic(along, "dcn" if network == "dcn" else "ici", round(sent), seconds)
        for (along, network), (sent, seconds) in sums.items()
    ]
    return tuple(sorted(traffic, key=lambda t: (-t.seconds, -t.sent_bytes, t.along)))
