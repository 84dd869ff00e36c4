"""Texts for the fields of a preflight report, shared by terminal and HTML."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from xlashard.analysis.explain.sections import list_remedies
from xlashard.errors import counted
from xlashard.predict.preflight.report.preflight_model import (
    AxisReport,
    MemoryBreakdown,
    PreflightFields,
    TimeEstimate,
    TopologyReport,
)
from xlashard.predict.preflight.report.pricing import PriceReport, ThroughputReport
from xlashard.predict.preflight.report.step_model import SpillReport
from xlashard.predict.targets.chip import Links
from xlashard.support.formatting import (
    in_amount,
    in_bytes,
    in_seconds,
    numbered,
    signed,
    sizes_text,
)


class ResourceNames(NamedTuple):
    """Names of what takes the time of a step.

    Attributes:
        share: Part of the time of a schedule; empty for a bound that is no part.
        short: Short name of what bounds a step; empty for units of the cores, as are the others.
        bound: Its name in words.
        detail: Its name for readers who don't know the chips.
    """

    share: str
    short: str = ""
    bound: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Words:
    """Names of what a report shows, by the kind of its chips.

    Attributes:
        chip: A chip.
        group: Chips with faster links than the network.
        layout: Place of mesh axes.
        resources: What takes the time of a step.
        available: Memory that a program may use.
        reserves: Clause about the rest of the memory.
    """

    chip: str
    group: str
    layout: str
    resources: Mapping[str, ResourceNames]
    available: str
    reserves: str

    @property
    def shares(self) -> Mapping[str, str]:
        """Parts of the time of a schedule."""
        return {name: each.share for name, each in self.resources.items() if each.share}

    @property
    def networks(self) -> Mapping[str, str]:
        """Short names of networks."""
        return {name: self.resources[name].short for name in ("ici", "dcn")}


_COMPUTE = ResourceNames("", "compute", "arithmetic", "arithmetic")
_LAUNCHES = ResourceNames(
    "launches", "launches", "launches of operations", "the launches of its operations"
)
_HOST = ResourceNames(
    "waiting for the host", "host", "transfers to and from the host", "the host's memory"
)
_TPU = Words(
    chip="chip",
    group="slice",
    layout="torus",
    resources={
        "compute": _COMPUTE,
        "hbm": ResourceNames("HBM", "HBM", "HBM", "the chip's memory (HBM)"),
        "kernel": ResourceNames("kernels"),
        "launch": _LAUNCHES,
        "host": _HOST,
        "matrix": ResourceNames("matrix units"),
        "vector": ResourceNames("vector unit"),
        "vmem": ResourceNames("VMEM", "VMEM", "VMEM", "the memory of its cores (VMEM)"),
        "ici": ResourceNames(
            "waiting for ICI", "ICI", "links within a slice", "the links between chips (ICI)"
        ),
        "dcn": ResourceNames(
            "waiting for DCN", "DCN", "network between slices", "the network between slices (DCN)"
        ),
    },
    available="what the compiler lets a program use",
    reserves="the runtime reserves",
)


def _gpu_words(links: str) -> Words:
    within, network = f"the links within a node ({links})", "network between nodes"
    return Words(
        chip="GPU",
        group="node",
        layout="nodes",
        resources={
            "compute": _COMPUTE,
            "hbm": ResourceNames("HBM", "HBM", "HBM", "the GPU's memory (HBM)"),
            "kernel": ResourceNames("kernels"),
            "launch": _LAUNCHES,
            "host": _HOST,
            "matrix": ResourceNames("tensor cores"),
            "vector": ResourceNames("CUDA cores"),
            "ici": ResourceNames(f"waiting for {links}", links, links, within),
            "dcn": ResourceNames("waiting for the network", "network", network, f"the {network}"),
        },
        available="the share of the memory that JAX's allocator takes",
        reserves="JAX's allocator leaves",
    )


WORDS: Mapping[Links, Words] = {
    "ici": _TPU,
    "nvlink": _gpu_words("NVLink"),
    "pcie": _gpu_words("PCIe"),
}
"""Names by the links of chips."""


def words_of(topology: TopologyReport) -> Words:
    """Return the names of what a report on a topology shows."""
    return WORDS[topology.links]


ESTIMATE = "compiled without code, which the memory lacks"
"""Note on a report whose compilation was stopped before code generation."""


def topology_text(topology: TopologyReport) -> str:
    """Return the topology with its number of chips: `2 × v5p:4x4x2 (64 chips)`."""
    devices = ""
    if topology.devices != topology.chips:
        devices = f", {topology.devices:,} devices"
    chips = counted(topology.chips, words_of(topology).chip)
    return f"{topology_name(topology)} ({chips}{devices})"


def topology_name(topology: TopologyReport) -> str:
    """Return the topology with its number of slices: `2 × v5p:4x4x2`."""
    return slices_text(topology.name, topology.slices)


def slices_text(topology: str, slices: int) -> str:
    """Return the name of a topology with its number of slices: `2 × v5p:4x4x2`."""
    return topology if slices == 1 else f"{slices} × {topology}"


def axes_text(mesh: Sequence[AxisReport]) -> str:
    """Return the axes of a mesh with their sizes: `data=4 × model=2`."""
    return sizes_text((axis.name, axis.size) for axis in mesh)


def memory_summary(report: PreflightFields) -> str:
    """Return the memory use and the bytes to spare or missing."""
    m = report.memory
    have = in_bytes(m.available_bytes)
    if report.outcome == "fits":
        spare = f"{in_bytes(m.spare_bytes)} ({m.spare_bytes / m.available_bytes:.0%}) to spare"
        return f"{in_bytes(m.total_bytes)} of {have} of HBM on each device, {spare}"
    needs = f"needs {in_bytes(m.total_bytes)} of HBM on each device"
    if m.fits:
        return f"{needs}, which the compiler could not fit into {have}"
    return f"{needs}, {in_bytes(-m.spare_bytes)} more than the {have} available"


def memory_headline(memory: MemoryBreakdown, fits: bool) -> str:
    """Return the bytes to spare or missing, as the headline of a page."""
    available, spare = in_bytes(memory.available_bytes), in_bytes(abs(memory.spare_bytes))
    if fits:
        return f"{spare} to spare of {available} on each device"
    if memory.fits:
        used = in_bytes(memory.total_bytes)
        return f"The compiler did not fit {used} into the {available} of each device"
    return f"{spare} more than the {available} of each device"


def time_summary(report: PreflightFields) -> str:
    """Return the time with its error, what bounds it, the roofline, and what the time lacks."""
    time = report.time
    text = (
        f"{step_time_text(time)} ({error_text(time)}), bound by "
        f"{words_of(report.topology).resources[time.bound].bound}; "
        f"at least {in_seconds(time.roofline_seconds)} by the roofline"
    )
    if time.is_lower_bound:
        text += f"; without {unknown_work(time)}"
    if time.unknown_kernels:
        first = time.unknown_kernels[0][0]
        text += f"; give a cost: kernel_costs={{{first!r}: seconds}}, or --kernel-cost NAME=TIME"
    return text


def step_time_text(time: TimeEstimate) -> str:
    """Return the time: `3.1 ms`, `at least 3.1 ms`."""
    return f"{'at least ' * time.is_lower_bound}{in_seconds(time.seconds)}"


def unknown_work(time: TimeEstimate) -> str:
    """Return what the time of a lower bound lacks."""
    kernels = dict(time.unknown_kernels)
    calls = [call for call in time.unknown_calls if call[0] not in kernels]
    parts = (
        f"the kernels of unknown cost: {numbered(time.unknown_kernels)}" * bool(kernels),
        f"the calls of unknown cost: {numbered(calls)}" * bool(calls),
        f"more than one iteration of {counted(time.unknown_loops, 'loop')} of unknown trip count"
        * bool(time.unknown_loops),
    )
    return ", and ".join(filter(None, parts))


def error_text(time: TimeEstimate) -> str:
    """Return the error of the time: `-8 % to +10 %`, `-8 % or more`."""
    above = "or more" if time.above is None else f"to {time.above * 100:+.0f} %"
    return f"{time.below * 100:+.0f} % {above}"


def peak_text(throughput: ThroughputReport) -> str:
    """Return the peak of a device that MFU is a share of: `459 TFLOP/s bf16`."""
    dtype = throughput.peak_dtype.replace("bfloat", "bf")
    return f"{in_thousands(throughput.peak_flops)}FLOP/s {dtype}"


def throughput_text(throughput: ThroughputReport) -> str:
    """Return tokens per second in all and on each device, MFU and parameters."""
    workload = throughput.workload
    parameters = f"{in_amount(workload.parameters)} parameters"
    if workload.active_parameters != workload.parameters:
        parameters += f", {in_amount(workload.active_parameters)} of them active"
    speed = f"{in_amount(throughput.tokens_per_second)} tokens/s"
    speed += f", {in_amount(throughput.device_tokens_per_second)} on each device"
    use = f"{throughput.utilisation:.1%} of {peak_text(throughput)}"
    details = f"{parameters}, {in_amount(workload.tokens)} tokens a step"
    return f"{speed}, at an MFU of {use} ({details})"


def price_summary(price: PriceReport, chip: str) -> str:
    """Return the cost of a step, an hour and 10⁹ tokens."""
    text = f"{price.format_amount(price.step)} a step, {price.format_amount(price.hour)} an hour"
    if price.billion_tokens is not None:
        text += f", {price.format_amount(price.billion_tokens)} for a billion tokens"
    return f"{text} (at {price.format_amount(price.chip_hour)} a {chip} and hour)"


def mesh_text(mesh: Sequence[AxisReport]) -> str:
    """Return the position of each mesh axis on the torus, or on the nodes of GPUs."""
    return ", ".join(_axis(axis) for axis in mesh if axis.size > 1)


def is_visible_ring(axis: AxisReport) -> bool:
    """Return whether a mesh axis is a ring of more than two chips.

    Two chips along a dimension, or the two devices of a chip, have a single link. The GPUs of a
    node have a switch.
    """
    chips = [count for dimension, count in axis.along if dimension not in _GROUPS]
    return axis.ring and (len(chips) > 1 or max(chips, default=0) > 2)


_GROUPS: Mapping[str, str] = {
    "core": "the cores of a chip",
    "slice": "the slices",
    "gpu": "the GPUs of a node",
    "node": "the nodes",
}
"""Dimensions other than those of a torus."""


def _axis(axis: AxisReport) -> str:
    if not axis.along:
        return f"{axis.name} across several dimensions"
    along = " and ".join(_GROUPS.get(d, d) for d, _ in axis.along)
    if is_visible_ring(axis):
        return f"{axis.name} around {along}"
    return f"{axis.name} along {along}"


def three_digits(number: float) -> str:
    """Return a number with three digits, or more if it is larger: `4.05`, `128`, `12,300`."""
    if abs(number) >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


def in_thousands(number: float) -> str:
    """Return a large number with an SI prefix: `1.23 M`."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{three_digits(number / size)} {unit}"
    return three_digits(number)


def most_worthwhile(report: PreflightFields) -> str:
    """Return the code change that saves most, with its price; empty without one."""
    available = report.memory.available_bytes
    remedies = [(nbytes / available, change) for nbytes, change in list_remedies(report)]
    best = report.advice[0] if report.advice else None
    text = ""
    if best is not None and best.outcome in ("helps", "within the error"):
        step = f"{signed(in_seconds)(best.seconds or 0.0)} a step"
        step += ", within the error" * (best.outcome == "within the error")
        memory = signed(in_bytes)(best.memory_bytes or 0)
        text = f"{best.text}: {step}, {memory} on each device"
        if best.outcome == "helps":
            is_cure = report.outcome != "fits"
            share = 1.0 if is_cure else -(best.seconds or 0.0) / report.time.seconds
            remedies.append((share, text))
    share, remedy = max(remedies, default=(0.0, ""))
    return remedy if share >= _LEAST_SHARE else text


_LEAST_SHARE = 0.005
"""Share of the memory, or of the step, below which a code change is not worth a line."""


def severity(report: PreflightFields) -> Literal["fits", "costly", "not"]:
    """Return the colour of a report: `costly` if devices hold whole values without a request."""
    if report.outcome != "fits":
        return "not"
    is_costly = any(u.is_whole and u.nbytes for u in report.unmet)
    helps = any(each.outcome == "helps" for each in report.advice)
    return "costly" if is_costly or helps else "fits"


def spill_remedy(spill: SpillReport) -> str:
    """Return how to keep attention scores in VMEM."""
    return (
        f"the scores of {spill.block:,} queries and keys stay in VMEM: attention_block = "
        f"{spill.block} in [model], or a kernel such as splash attention"
    )


_ERROR_CAUSES = {
    "model": "what a run differs by from its settings",
    "waiting": "waiting for links and hosts",
    "hbm": "HBM traffic",
    "dcn": "transfers between slices",
    "slices": "the slowest slice",
    "kernels": "kernels at the rates of other chips",
    "ragged": "ragged products, of which the sizes of groups are unknown",
}


def error_notes(time: TimeEstimate) -> Iterator[str]:
    """Yield notes on the wait for slices, and on what the error of the time means."""
    if time.slowest_slice_seconds:
        yield (
            f"{in_seconds(time.slowest_slice_seconds)} of the step are a wait for the slowest "
            "slice, as no two slices are equally fast."
        )
    if time.error_parts:
        points = {cause: 100 * (above - below) for cause, below, above in time.error_parts}
        wide = ", ".join(
            f"{points[cause]:.0f} for {_ERROR_CAUSES[cause]}"
            for cause in sorted(points, key=lambda name: -points[name])
            if points[cause] >= 1
        )
        yield f"The error holds nine in ten published runs; its points: {wide}."


def uncounted_work(time: TimeEstimate) -> Iterator[str]:
    """Yield notes on what the times take for granted, and on work that they leave out."""
    for assumption in time.assumptions:
        yield f"Assumed: {assumption}."
    if time.is_lower_bound:
        yield f"The times are without {unknown_work(time)}."
    if time.unmatched_kernel_costs:
        names = ", ".join(map(repr, time.unmatched_kernel_costs))
        kernels = numbered((*time.kernels, *time.unknown_kernels)) or "none"
        yield f"kernel_costs names no kernel of the program: {names}. Its kernels: {kernels}."
    if time.not_understood:
        yield f"Not understood in the compiled program: {numbered(time.not_understood)}."
