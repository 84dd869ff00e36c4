"""Data model of a preflight report.

Bytes, FLOP and seconds are per device and execution, with loops counted by trip count, unless a
field states otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xlashard.analysis.explain.model import (
    CollectiveReport,
    ConstantReport,
    DonationReport,
    InnerValueReport,
    RepeatedReport,
    UnmetRequest,
    ValueReport,
)
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.analysis.report.excerpts import Excerpt
from xlashard.predict.preflight.report.pricing import PriceReport, ThroughputReport
from xlashard.predict.preflight.report.step_model import LineTime, SpillReport, Timeline
from xlashard.predict.targets.chip import Links
from xlashard.support.documents import ReportFormat

type Bound = Literal["compute", "launch", "hbm", "vmem", "ici", "dcn", "host"]
"""Resource that bounds the time: arithmetic, the launches of operations, HBM, VMEM of TPUs, links
within a slice or node, the network between them, transfers to and from the host."""


@dataclass(frozen=True)
class TopologyReport:
    """Devices that the program was compiled for.

    Attributes:
        name: Full name: `v5p:4x4x4`, `h100:4x8`.
        generation: Name of the chip: `v5p`, `h100`.
        slices: Number of slices; 1 for GPUs.
        shape: Chips per dimension of a slice; nodes, and GPUs per node.
        wraps: Per dimension, whether the links form a ring.
        chips: Number of chips in all slices or nodes.
        devices: Number of devices in all slices or nodes.
        hosts: Number of hosts in all slices or nodes.
        hbm_bytes: HBM per device.
        available_bytes: HBM per device that the compiler, or JAX's allocator on a GPU, makes
            available to a program.
        peak_flops: FLOP per second per device, by dtype: `bfloat16`, `int8`.
        hbm_bandwidth: Bytes per second per device.
        ici_bandwidth: Bytes per second per ICI link in one direction; of a GPU, by all of its links
            to the other GPUs of its node.
        dcn_bandwidth: Bytes per second per device to other slices or nodes, as its share of the
            host's network.
        links: Links within a slice or node: `ici`, `nvlink`, `pcie`.
    """

    name: str
    generation: str
    slices: int
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    chips: int
    devices: int
    hosts: int
    hbm_bytes: int
    available_bytes: int
    peak_flops: tuple[tuple[str, float], ...]
    hbm_bandwidth: float
    ici_bandwidth: float
    dcn_bandwidth: float
    links: Links = "ici"


@dataclass(frozen=True)
class AxisReport:
    """A mesh axis and its position on the torus, or on the nodes of GPUs.

    Attributes:
        name: Name of the axis.
        size: Size of the axis.
        along: Torus dimensions that the axis follows, with the number of chips: `x`, `y`, `z`,
            `core` (devices of a chip), `slice`; of GPUs `gpu` (within a node) and `node`; empty if
            its groups of devices are no boxes of one shape.
        ring: Whether the devices of the axis form a ring of neighbours in each dimension.
        strides: Distance of neighbours along each of these dimensions; more than 1 if another axis
            lies between. Empty if the devices are in another order than their coordinates.
    """

    name: str
    size: int
    along: tuple[tuple[str, int], ...]
    ring: bool
    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class TemporaryReport:
    """Temporary that is live at the peak of the heap.

    Attributes:
        name: HLO instruction that produces it.
        type: Type on one device: `bf16[512,4096]`.
        device_bytes: Bytes on one device, including padding.
        op_name: JAX name of the operation; empty if unknown.
        source: Line of the operation: the innermost in the user's files, else the innermost.
        count: Number of equal temporaries that are live together; `device_bytes` includes all.
    """

    name: str
    type: str
    device_bytes: int
    op_name: str
    source: SourceLine | None
    count: int = 1


@dataclass(frozen=True)
class RuntimeMemory:
    """Memory of a GPU that the runtime keeps beside the allocator of arrays and programs.

    Attributes:
        name: What keeps it: `CUDA context`, `NCCL buffers`.
        device_bytes: Bytes on one device.
        source: Source of the figure.
    """

    name: str
    device_bytes: int
    source: str


@dataclass(frozen=True)
class MemoryBreakdown:
    """HBM use of the program on one device.

    Attributes:
        available_bytes: HBM that the compiler makes available to a program; of a GPU the share of
            JAX's allocator, or what `runtime` leaves if that is less.
        total_bytes: Peak use.
        argument_bytes: Arguments.
        result_bytes: Results, without those that reuse an argument's buffer.
        alias_bytes: Argument buffers that results reuse; part of `argument_bytes`.
        temporary_bytes: Heap of temporaries, including gaps; `memory_analysis()` of a compiled TPU
            program counts the gaps twice.
        constant_bytes: Constants.
        code_bytes: Generated code; 0 if compilation ended before code generation, and the least
            possible size if the code did not fit.
        temporaries: Temporaries live at the peak of the heap, largest first; empty if the compiler
            does not report them.
        host_bytes: Host memory.
        runtime: Memory of a GPU that the runtime keeps beside `available_bytes`.
    """

    available_bytes: int
    total_bytes: int
    argument_bytes: int
    result_bytes: int
    alias_bytes: int
    temporary_bytes: int
    constant_bytes: int
    code_bytes: int
    temporaries: tuple[TemporaryReport, ...]
    host_bytes: int = 0
    runtime: tuple[RuntimeMemory, ...] = ()

    @property
    def share(self) -> float:
        """Share of the available memory that the program takes."""
        return self.total_bytes / self.available_bytes

    @property
    def spare_bytes(self) -> int:
        """Available bytes minus total bytes; negative if the program doesn't fit."""
        return self.available_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        """True if the program fits."""
        return self.spare_bytes >= 0


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic along some mesh axes.

    Attributes:
        along: Axes as text: `data, model`.
        network: `ici` for links within a slice or node, `dcn` for the network between them.
        sent_bytes: Bytes that a device sends.
        seconds: Time at link bandwidth.
    """

    along: str
    network: Literal["ici", "dcn"]
    sent_bytes: int
    seconds: float


@dataclass(frozen=True)
class TimeEstimate:
    """Time of one execution, its error, lower bounds by resource, and the resource that bounds it.

    Attributes:
        flops: Floating-point operations, including rematerialisation.
        flops_by_dtype: FLOP of matrix products, by operand dtype.
        hbm_bytes: Bytes read and written in HBM.
        traffic: Traffic by mesh axes, most first.
        compute_seconds: FLOP at the chip's peak.
        hbm_seconds: HBM bytes at the chip's bandwidth.
        ici_seconds: Traffic within slices or nodes; axes that share links in sequence.
        dcn_seconds: Traffic between slices or nodes.
        roofline_seconds: Longest of these four.
        bound: Resource that the cores use or wait for most of the time.
        seconds: Time of the compiler's schedule at the rates that measurements show.
        below: Error below `seconds`, as a negative share of it.
        above: Error above `seconds`, as a share of it; None for a lower bound, which lacks loops,
            kernels or calls of unknown length or cost.
        shares: Parts of `seconds` by what the cores use or wait for: `matrix`, `vector`, `hbm`,
            `vmem`, `kernel`, `launch`, `ici`, `dcn`, `host`; the longest first.
        slowest_slice_seconds: Part of `seconds` for which slices wait for the slowest of them.
        error_parts: Parts of `below` and `above` by cause: `model`, `waiting` for links and hosts,
            `hbm`, `dcn`, `slices`, `kernels` of other chips' rates, `ragged` products.
        kernels: Kernels of known cost, by name, with their number of runs.
        unknown_kernels: Kernels of unknown cost, by name, with their number of runs.
        unmatched_kernel_costs: Names in `kernel_costs` that no kernel of the program has.
        unknown_loops: Number of loops with an unknown trip count, counted as one iteration.
        elementwise_flops: Part of `flops` outside matrix products.
        transcendentals: Part of `flops` in transcendental functions such as exp and tanh, one per
            element.
        unknown_calls: Custom calls and operations of unknown cost, by name, with their number of
            runs; counted as zero.
        products: Number of runs of products on GPUs by what multiplies: `cublas`, `cudnn` for its
            convolutions, `triton`. Without a GPU XLA tunes none, and Triton's count as cuBLAS's.
        assumptions: What the time takes for granted, a sentence each.
        not_understood: What else the analysis could not take into account, with its number: lines
            of an unknown form, unknown operations and types.
        lines: Time of the schedule by source line and operation, each 0.1 % or more of it; the
            longest first.
        other_lines_seconds: Time of the shorter ones together.
        timeline: The schedule.
    """

    flops: float
    flops_by_dtype: tuple[tuple[str, float], ...]
    hbm_bytes: float
    traffic: tuple[AxisTraffic, ...]
    compute_seconds: float
    hbm_seconds: float
    ici_seconds: float
    dcn_seconds: float
    roofline_seconds: float
    bound: Bound
    seconds: float
    below: float = 0.0
    above: float | None = 0.0
    shares: tuple[tuple[str, float], ...] = ()
    slowest_slice_seconds: float = 0.0
    error_parts: tuple[tuple[str, float, float], ...] = ()
    kernels: tuple[tuple[str, int], ...] = ()
    unknown_kernels: tuple[tuple[str, int], ...] = ()
    unmatched_kernel_costs: tuple[str, ...] = ()
    unknown_loops: int = 0
    elementwise_flops: float = 0.0
    transcendentals: float = 0.0
    unknown_calls: tuple[tuple[str, int], ...] = ()
    products: tuple[tuple[str, int], ...] = ()
    assumptions: tuple[str, ...] = ()
    not_understood: tuple[tuple[str, int], ...] = ()
    lines: tuple[LineTime, ...] = ()
    other_lines_seconds: float = 0.0
    timeline: Timeline | None = None

    @property
    def is_lower_bound(self) -> bool:
        """True if the time lacks that of loops, kernels or calls of unknown length or cost."""
        return bool(self.unknown_kernels or self.unknown_loops or self.unknown_calls)


@dataclass(frozen=True)
class Suggestion:
    """Another sharding of an argument or of the value of a constraint, or order of mesh axes.

    Attributes:
        path: Path of the argument; empty for a constraint.
        line: File and line of the constraint; None for an argument.
        shape: Shape of the argument, or of the constrained value.
        before: Mesh axes of each dimension in the program.
        after: Mesh axes of each dimension that the suggestion gives.
        returned: True if a result takes the argument's place in the next call, and is sharded
            likewise.
        order: Mesh axes by their communication, the most first, as `topology.mesh(order=...)` takes
            them; empty for another sharding.
        reason: What another order changes: the rate of each axis.
    """

    path: str
    line: tuple[str, int] | None
    shape: tuple[int, ...]
    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]
    returned: bool = False
    order: tuple[str, ...] = ()
    reason: str = ""

    @property
    def text(self) -> str:
        """Code change: `pass in_shardings P('data', None) for x`."""
        if self.order:
            return f"lay out the mesh by order={list(self.order)}: {self.reason}"
        spec = spec_text(self.after)
        if self.line is not None:
            place = f"{Path(self.line[0]).name}:{self.line[1]}"
            # A helper may constrain several values, at one line.
            return f"constrain the value at {place} to {spec}, not {spec_text(self.before)}"
        both = " and out_shardings" * self.returned
        return f"pass in_shardings{both} {spec} for {self.path}"


def spec_text(dims: Sequence[tuple[str, ...]]) -> str:
    """Return the source text of a spec: `P('data', None)`."""
    entries = [repr(a[0]) if len(a) == 1 else repr(tuple(a)) if a else "None" for a in dims]
    return f"P({', '.join(entries)})"


type AdviceOutcome = Literal["helps", "within the error", "no help", "out of memory", "not tried"]


@dataclass(frozen=True)
class AdviceReport:
    """Suggestions that were tried together: compiled for the topology, up to its code.

    Attributes:
        text: The code changes.
        changes: The suggestions.
        removable_seconds: Time of the collectives that the suggestions are meant to remove.
        outcome: `helps`, if the step is faster by more than the report's error, or fits only so;
            `within the error`, if it is faster by less; `no help`; `out of memory`; `not tried`.
        seconds: Change of the estimated time of a step; None if not tried.
        memory_bytes: Change of the peak memory of a device; None if not tried.
    """

    text: str
    changes: tuple[Suggestion, ...]
    removable_seconds: float
    outcome: AdviceOutcome = "not tried"
    seconds: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class VersionsReport:
    """Versions and flags that the report depends on.

    Attributes:
        xlashard: Version of this package.
        jax: Version of JAX.
        jaxlib: Version of jaxlib.
        libtpu: Version of libtpu; empty for GPUs.
        runtime: Build of the compiler.
        flags: Compiler flags by origin: `XLA_FLAGS`, `LIBTPU_INIT_ARGS`, and options of the call;
            measured rates.
        cuda_plugin: Version of JAX's CUDA plugin; empty for TPUs.
    """

    xlashard: str
    jax: str
    jaxlib: str
    libtpu: str
    runtime: str
    flags: tuple[tuple[str, str], ...]
    cuda_plugin: str = ""


FORMAT = 4
"""Version of the JSON format, increased when a field changes its meaning or is removed."""

REPORT_FORMAT = ReportFormat("preflight report", FORMAT, "xlashard.preflight(f, ...).to_json()")
"""JSON serialization of a report."""


@dataclass(frozen=True, repr=False)
class PreflightFields:
    """Fields of a report, documented by `PreflightReport`."""

    name: str
    title: str
    outcome: Literal["fits", "out of memory"]
    topology: TopologyReport
    mesh: tuple[AxisReport, ...]
    partitioner: str
    memory: MemoryBreakdown
    time: TimeEstimate
    traffic: tuple[CollectiveReport, ...]
    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    donations: tuple[DonationReport, ...]
    unmet: tuple[UnmetRequest, ...]
    replicated: tuple[ValueReport, ...]
    replicated_above: int
    throughput: ThroughputReport | None
    price: PriceReport | None
    compile_seconds: float
    versions: VersionsReport
    repeated: tuple[RepeatedReport, ...] = ()
    constants: tuple[ConstantReport, ...] = ()
    is_estimate: bool = False
    spills: tuple[SpillReport, ...] = ()
    forgotten: str = ""
    is_laid_out: bool = False
    degraded: str = ""
    warnings: tuple[str, ...] = ()
    advice: tuple[AdviceReport, ...] = ()
    values: tuple[InnerValueReport, ...] = ()
    excerpts: tuple[Excerpt, ...] = ()

    @property
    def heading(self) -> str:
        """Source of the program, or else the name of the function."""
        return self.title or self.name

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of a training step, over all devices; None for other programs."""
        return None if self.throughput is None else self.throughput.tokens_per_second

    @property
    def utilisation(self) -> float | None:
        """Model FLOP utilisation (MFU) of a training step; None for other programs."""
        return None if self.throughput is None else self.throughput.utilisation
