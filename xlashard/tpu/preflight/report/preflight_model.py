"""What a preflight report is made of, as frozen values of plain types.

All bytes, FLOP and seconds are those of one device and one execution of the program, loops counted
by how often they run, unless a field says otherwise.

The facts of a preflight report, without what shows and keeps them.
"""

from dataclasses import dataclass
from typing import Literal

from xlashard.pjit.report.parts import (
    CollectiveReport,
    DonationReport,
    ReplicationReport,
    SourceLine,
    ValueReport,
)
from xlashard.pjit.report.records import Record

type Bound = Literal["compute", "hbm", "ici", "dcn"]
"""What a program waits for: arithmetic, the chip's memory, the links between the chips of a slice,
the network between slices."""

type Origin = Literal[
    "constraint", "explicit", "gradient", "argument", "result", "reduction", "resharding"
]
"""Why a collective is there. Asked for: a `constraint` in the program; an `explicit` one, that the
program itself calls in a shard_map; the sum of a `gradient` over
the devices that share a batch; a `reduction` over a dimension that is cut by the program's own
shardings; an `argument` or `result` that is gathered because of how the caller placed it. Not asked
for: a `resharding` that the partitioner put in between two operations."""


@dataclass(frozen=True)
class TopologyReport:
    """The devices that the program was compiled for.

    Attributes:
        name: As libtpu writes it: `v5p:4x4x4`.
        generation: `v5p`.
        slices: How many slices.
        shape: Chips along each dimension of one slice.
        wraps: For each dimension, whether its links close to a ring.
        chips: How many chips, in all slices.
        devices: How many devices, in all slices.
        hosts: How many hosts, in all slices.
        hbm_bytes: HBM that a device has.
        available_bytes: What the compiler lets a program use of it.
        peak_flops: By dtype, `bfloat16` and `int8`, FLOP per second of one device.
        hbm_bandwidth: Bytes per second of one device.
        ici_bandwidth: Bytes per second of one link in one direction.
        dcn_bandwidth: Bytes per second of one device's share of its host's network.
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


@dataclass(frozen=True)
class AxisReport:
    """A mesh axis and where it lies on the torus.

    Attributes:
        name: Of the axis.
        size: Of the axis.
        along: The dimensions of the torus that it runs along, each with the number of chips: `x`,
            `y`, `z`, `core` (the two devices of one chip), `slice`; empty where it follows none.
        ring: Whether each step along it goes to a neighbour and the last closes the ring.
        strides: How far apart the axis's neighbours are in each of these dimensions; more than 1
            where another axis has the places between. Empty where nobody has said.
    """

    name: str
    size: int
    along: tuple[tuple[str, int], ...]
    ring: bool
    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class BufferReport:
    """An argument or result in the memory of a device.

    Attributes:
        path: `state['params']['w']`, `result[0]`.
        type: `float32[8,16]`.
        spec: How it is dealt out: `P('data')`.
        device_bytes: Bytes on one device, as it lies there, padding included.
        copies: How many devices hold each part.
        aliased: For a result, the argument whose memory it takes over; for an argument, the result
            that takes its memory; else empty.
        donated: For an argument, whether it was donated.
    """

    path: str
    type: str
    spec: str
    device_bytes: int
    copies: int
    aliased: str = ""
    donated: bool = False


@dataclass(frozen=True)
class TemporaryReport:
    """A temporary that is alive when most memory is in use.

    Attributes:
        name: The HLO instruction that makes it.
        type: Its type on one device: `bf16[512,4096]`.
        device_bytes: Bytes on one device, padding included.
        op_name: What JAX called the operation; empty if unknown.
        source: The line of that operation: the innermost of the user's files, else the innermost.
        count: How many alike are alive together, all of them in `device_bytes`.
    """

    name: str
    type: str
    device_bytes: int
    op_name: str
    source: SourceLine | None
    count: int = 1


@dataclass(frozen=True)
class MemoryBreakdown:
    """What the program takes of one device's HBM.

    Attributes:
        available_bytes: What the compiler lets a program use.
        total_bytes: What it needs at its peak, all together.
        argument_bytes: Its arguments.
        result_bytes: Its results, without those that take over an argument's memory.
        alias_bytes: Memory of arguments that results take over; part of `argument_bytes`.
        temporary_bytes: The heap of what it needs besides, with the gaps between its values;
            `memory_analysis()` of a compiled TPU program counts those gaps twice.
        constant_bytes: Constants.
        code_bytes: The program itself; 0 where the compiler gave up before it made any, and the
            least that it can be where it was too much.
        arguments: By leaf, the largest first.
        results: By leaf, the largest first.
        temporaries: Those alive at the peak of the heap, the largest first; empty where the
            compiler doesn't tell.
        host_bytes: What it takes of the host's memory.
    """

    available_bytes: int
    total_bytes: int
    argument_bytes: int
    result_bytes: int
    alias_bytes: int
    temporary_bytes: int
    constant_bytes: int
    code_bytes: int
    arguments: tuple[BufferReport, ...]
    results: tuple[BufferReport, ...]
    temporaries: tuple[TemporaryReport, ...]
    host_bytes: int = 0

    @property
    def spare_bytes(self) -> int:
        """What is left of the available memory; negative where it doesn't fit."""
        return self.available_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        """Whether the program fits."""
        return self.spare_bytes >= 0


@dataclass(frozen=True)
class AxisTraffic:
    """What goes over the links of some mesh axes.

    Attributes:
        along: The axes as text: `data, model`.
        network: `ici` or `dcn`.
        sent_bytes: Bytes that a device sends.
        seconds: How long that takes at the speed of the links.
    """

    along: str
    network: Literal["ici", "dcn"]
    sent_bytes: int
    seconds: float


@dataclass(frozen=True)
class TimeEstimate:
    """How long one execution takes, from below, and what it waits for.

    Attributes:
        flops: Floating-point operations that the chip does, those done again by remat included.
        flops_by_dtype: Those of matrix multiplications, by the dtype that they multiply.
        hbm_bytes: Bytes read and written in HBM.
        traffic: What goes between devices, by mesh axes, the most first.
        compute_seconds: FLOP at the chip's peak.
        hbm_seconds: HBM bytes at the chip's bandwidth.
        ici_seconds: The traffic within slices; axes that share links one after the other.
        dcn_seconds: The traffic between slices.
        roofline_seconds: The longest of these four.
        bound: Which that is.
        compiler_seconds: The compiler's own estimate, loops counted; None where it gives none.
        unknown_loops: Loops of which nobody knows how often they run; they count as one run.
        elementwise_flops: Those of `flops` that are no part of a matrix multiplication.
        transcendentals: Those of `flops` that are values of exp, tanh and the like, one each.
        unknown_calls: Custom calls of which nobody knows what they calculate, by name, and how
            often each runs; they count as nothing.
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
    compiler_seconds: float | None
    unknown_loops: int = 0
    elementwise_flops: float = 0.0
    transcendentals: float = 0.0
    unknown_calls: tuple[tuple[str, int], ...] = ()

    @property
    def seconds(self) -> float:
        """The longer of the roofline and the compiler's estimate."""
        return max(self.roofline_seconds, self.compiler_seconds or 0.0)


@dataclass(frozen=True)
class TrafficReport:
    """Collectives that do the same for the same reason.

    Attributes:
        collective: What they do, how often, of how many bytes, along which axes, from which line.
        network: Over which links most of their bytes go.
        seconds: How long they take at the speed of those links, all runs together.
        origin: Why they are there.
        requested: Whether the program's text or the caller's shardings ask for them.
        suggestion: What to write to be rid of them, where they were not asked for; else empty.
    """

    collective: CollectiveReport
    network: Literal["ici", "dcn"]
    seconds: float
    origin: Origin
    requested: bool
    suggestion: str = ""


@dataclass(frozen=True)
class Workload:
    """What a step of training does, in the units of whoever trains.

    Attributes:
        tokens: Tokens of one step, over all devices.
        model_flops: FLOP that the model's formula asks for in one step, over all devices.
        parameters: How many numbers the model has.
        active_parameters: How many of those take part in each token.
    """

    tokens: int
    model_flops: float
    parameters: int
    active_parameters: int


@dataclass(frozen=True)
class ThroughputReport:
    """How fast a training step is, by the time estimate.

    Attributes:
        workload: What a step does.
        tokens_per_second: Over all devices.
        utilisation: Model FLOP by what the chips could do in that time, from 0 to 1.
    """

    workload: Workload
    tokens_per_second: float
    utilisation: float


@dataclass(frozen=True)
class PriceReport:
    """What it costs, by a price that the caller gave.

    Attributes:
        chip_hour: The price of one chip for an hour.
        currency: Of the prices, as the caller wrote it; empty if they didn't.
        step: Of one execution, over all chips.
        hour: Of an hour of all chips.
        billion_tokens: Of 10⁹ tokens; None without a workload.
    """

    chip_hour: float
    currency: str
    step: float
    hour: float
    billion_tokens: float | None


@dataclass(frozen=True)
class VersionsReport:
    """What the report depends on besides the program.

    Attributes:
        xlashard: Version of this package.
        jax: Version of JAX.
        jaxlib: Version of jaxlib.
        libtpu: Version of libtpu.
        runtime: What libtpu says of its build.
        flags: Compiler flags by where they were set: `XLA_FLAGS`, `LIBTPU_INIT_ARGS`, and options
            of the call.
    """

    xlashard: str
    jax: str
    jaxlib: str
    libtpu: str
    runtime: str
    flags: tuple[tuple[str, str], ...]


FORMAT = 2
"""Number of the JSON format. It grows when a field changes its meaning or goes away."""

RECORD = Record("preflight report", FORMAT, "xlashard.preflight(f, ...).to_json()")
"""How a report travels as JSON."""


@dataclass(frozen=True, repr=False)
class PreflightFields:
    """The facts of a report; `PreflightReport`, which can print them, says what each is."""

    name: str
    title: str
    outcome: Literal["fits", "out of memory"]
    topology: TopologyReport
    mesh: tuple[AxisReport, ...]
    partitioner: str
    memory: MemoryBreakdown
    time: TimeEstimate
    traffic: tuple[TrafficReport, ...]
    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    donations: tuple[DonationReport, ...]
    replications: tuple[ReplicationReport, ...]
    replicated: tuple[ValueReport, ...]
    replicated_above: int
    throughput: ThroughputReport | None
    price: PriceReport | None
    compile_seconds: float
    versions: VersionsReport
