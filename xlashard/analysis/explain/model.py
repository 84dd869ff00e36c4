"""Data model of program reports: frozen values of plain types."""

from dataclasses import dataclass
from typing import Literal

from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.hlo.collective_kinds import CollectiveKind
from xlashard.support.formatting import typed

type Decided = Literal[
    "caller", "auto", "argument", "default", "partitioner", "function", "unknown"
]
"""Origin of a value's sharding: the caller's request; the search under `AUTO`; the committed
argument itself; the default of scalars and single devices; the partitioner; the function, for
closed-over values. It is unknown for arguments of a compiled stage, and for results of a loaded
one."""


@dataclass(frozen=True)
class ValueReport:
    """An argument or a result.

    Attributes:
        path: Its path in Python: `state['params']['w']`, `result[0]`.
        shape: Its shape.
        dtype: Its dtype's name.
        spec: Its sharding: `P('data')`, or XLA's text if it has no mesh.
        decided_by: Origin of its sharding.
        nbytes: Bytes of the whole value.
        device_bytes: Bytes of the shard on one device; in a preflight, of its buffer in HBM with
            padding.
        copies: Number of devices that hold each shard.
        memory_kind: Its memory kind, unless that is the default.
        used: False for an argument that the program drops because no result depends on it; it has
            no `spec`, and takes no bytes on the devices.
        weak_type: True for the type of a Python number, which arithmetic with another type takes.
        aliased: In a preflight, the argument whose buffer a result reuses, or the result that
            reuses the buffer of an argument; else empty.
        donated: In a preflight, whether the argument was donated.
        runner_up: In a plan, the spec of the layout that came second, where it is another one.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    decided_by: Decided
    nbytes: int
    device_bytes: int
    copies: int
    memory_kind: str | None = None
    used: bool = True
    weak_type: bool = False
    aliased: str = ""
    donated: bool = False
    runner_up: str = ""

    @property
    def type(self) -> str:
        """Return the dtype and shape: `float32[8,16]`."""
        return typed(self.dtype, self.shape)


type Origin = Literal[
    "",
    "constraint",
    "explicit",
    "gradient",
    "argument",
    "rematerialization",
    "result",
    "reduction",
    "resharding",
]
"""Cause of a collective; empty if unknown. Required by the program: a `constraint`; an `explicit`
collective in a shard_map; the reduction of a `gradient` over data-parallel devices; a `reduction`
over a sharded dimension; an `argument` or `result` gathered because of its sharding; the
`rematerialization` of a value, by `jax.checkpoint` or XLA, that repeats a collective of the forward
pass. Not required: a `resharding` that the partitioner inserts between two operations.
"""


@dataclass(frozen=True)
class CollectiveReport:
    """Equal collectives with the same cause; in a preflight with their price.

    All bytes are those of one device in one execution of the program: a collective in a loop counts
    once per iteration.

    Attributes:
        kind: `all-gather`, `all-reduce`, ...
        along: The mesh axes as text, `data, model`; `model:(2)2` for groups of 2 in each of 2
            blocks of an axis; a description of the groups if they follow no axes.
        axes: The names of those axes; None if the groups follow no axes.
        times_known: False if an enclosing loop has no known trip count, and counts as one
            iteration.
        conditional: True if one is in a branch that may not be taken; it counts as taken.
        asynchronous: True if other work overlaps with it.
        operands: Types of the operands on one device, of one instruction.
        results: Types of the results on one device, of one instruction.
        op_name: JAX's name of the operation whose value it transfers; empty if unknown to XLA.
        argument: The path of the argument that it gathers or exchanges unchanged, or empty.
        source: The line of that operation: the innermost of the user's files, else the innermost.
        needed_by: Of a gather, or if XLA has no line of the operation: JAX's name of the nearest
            consumer of the result; else empty.
        needed_by_source: The line of the consumer.
        count: Number of instructions in the program.
        times: Number of executions, all instructions together.
        operand_bytes: Bytes of the operands.
        result_bytes: Bytes of the results.
        payload_bytes: The larger of the two.
        sent_bytes: Bytes that a device sends with a bandwidth-optimal algorithm.
        groups: If they follow no axes: the device positions of each group, or source and target
            of each pair of a permutation.
        network: Network that carries most of the bytes; empty if unknown.
        seconds: Time of all runs at link bandwidth.
        origin: Cause of the collectives; empty if unknown.
        suggestion: Code change that removes them, if they are not required; else empty.
    """

    kind: CollectiveKind
    along: str
    axes: tuple[str, ...] | None
    times_known: bool
    conditional: bool
    asynchronous: bool
    operands: tuple[str, ...]
    results: tuple[str, ...]
    op_name: str
    argument: str
    source: SourceLine | None
    needed_by: str
    needed_by_source: SourceLine | None
    count: int = 0
    times: int = 0
    operand_bytes: int = 0
    result_bytes: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    groups: tuple[tuple[int, ...], ...] | None = None
    network: Literal["", "ici", "dcn"] = ""
    seconds: float = 0.0
    origin: Origin = ""
    suggestion: str = ""

    @property
    def requested(self) -> bool:
        """Return False for collectives that neither the program nor a sharding requires."""
        return self.origin != "resharding"


@dataclass(frozen=True)
class MoveReport:
    """Argument that is resharded or uploaded before each such call.

    Attributes:
        path: The argument.
        source: Its sharding: a spec, `device 0`, or `host`.
        target: The sharding that the program requires.
        device_bytes_moved: Bytes transferred between devices, all devices together.
        host_bytes: Bytes transferred from the host to the devices of this process.
    """

    path: str
    source: str
    target: str
    device_bytes_moved: int
    host_bytes: int

    @property
    def nbytes(self) -> int:
        """Return all bytes that move."""
        return self.device_bytes_moved + self.host_bytes


@dataclass(frozen=True)
class DonationReport:
    """Argument that was donated, or could be.

    Attributes:
        path: The argument.
        donated: True if it was donated.
        result: The result that reuses its buffers in the compiled program, or could reuse them if
            it were donated; empty without one.
        device_bytes: Bytes of the argument on one device.
    """

    path: str
    donated: bool
    result: str
    device_bytes: int

    @property
    def is_reused(self) -> bool:
        """Return True if the compiled program writes a result into its buffers."""
        return self.donated and bool(self.result)


@dataclass(frozen=True)
class CostReport:
    """XLA's estimates for one device. The body of a loop counts once.

    Attributes:
        flops: Floating-point operations.
        bytes_accessed: Bytes read and written in memory.
    """

    flops: float
    bytes_accessed: float


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one device that the compiler planned for the program, in bytes.

    Attributes:
        argument_bytes: Its arguments.
        result_bytes: Its results, including those that reuse buffers of arguments.
        alias_bytes: Buffers of arguments that results reuse.
        temporary_bytes: Temporary buffers.
        code_bytes: The program itself.
        peak_bytes: Peak by the compiler (on CPU without temporaries); None if not reported.
        host_bytes: Host memory.
    """

    argument_bytes: int
    result_bytes: int
    alias_bytes: int
    temporary_bytes: int
    code_bytes: int
    peak_bytes: int | None
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the bytes of arguments, other results, temporaries and code."""
        return sum(nbytes for _, nbytes in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Return the bytes of arguments, other results, temporaries and code, by name."""
        return (
            ("arguments", self.argument_bytes),
            ("results", self.result_bytes - self.alias_bytes),
            ("temporaries", self.temporary_bytes),
            ("code", self.code_bytes),
        )


@dataclass(frozen=True)
class PlaceReport:
    """Devices and versions that the program runs on.

    Attributes:
        platform: `cpu`, `tpu`, `gpu`.
        device_kind: The kind of device: `TPU v5p`.
        num_devices: Number of devices.
        num_processes: Number of processes that they belong to.
        mesh: Names and sizes of the mesh axes; empty without a mesh.
        partitioner: `shardy` or `gspmd`.
        xlashard: Version of this package.
        jax: Version of JAX.
        jaxlib: Version of jaxlib.
        runtime: Version that the PJRT plugin reports.
    """

    platform: str
    device_kind: str
    num_devices: int
    num_processes: int
    mesh: tuple[tuple[str, int], ...]
    partitioner: str
    xlashard: str
    jax: str
    jaxlib: str
    runtime: str


type UnmetKind = Literal[
    "argument",
    "argument without sharding",
    "callback that gathers",
    "compiler warning",
    "constraint",
    "constraint that gathers",
    "device_put",
    "donation",
    "miscompilation",
    "rematerialization",
    "result",
    "result of a callback",
    "unconstrained dimension",
    "uneven constraint",
]
"""Kind of an `UnmetRequest`."""

WHOLE: frozenset[UnmetKind] = frozenset(
    (
        *("argument without sharding", "callback that gathers", "constraint that gathers"),
        *("result", "result of a callback", "unconstrained dimension"),
    )
)
"""Kinds of values that each device holds or gathers whole without a request."""


@dataclass(frozen=True)
class UnmetRequest:
    """Request that the program does not follow, or a value that it leaves whole without one.

    Attributes:
        kind: `miscompilation`: an operation that this release of jaxlib is known to compile to
            wrong values; `argument`: the sharding of an argument of which the program takes the
            shape only; `argument without sharding`: large, and left whole; `callback that gathers`:
            one device calls a Python function with the whole of a sharded value; `compiler
            warning`: of XLA, about one operation; `constraint`: on an abstract mesh, where nothing
            else places the program; `constraint that gathers`: it unshards dimensions, for which
            the program gathers the value at its line; `device_put`: inside of the program, on
            automatic axes; `donation`: no result takes over the buffers; `rematerialization`: XLA
            replicates a value on its way from one sharding to another; `result` and `result of a
            callback`: whole, without a requested sharding; `unconstrained dimension`: left whole;
            `uneven constraint`: it shards a dimension that it does not divide.
        path: The argument or result; for others the type of the value.
        requested: The requested sharding, `donated`, or `unspecified`.
        actual: What the program does instead.
        nbytes: For a value that is left whole, bytes on one device in excess of a sharded one; for
            a constraint or callback that gathers, the bytes that the gathers add on one device, all
            executions together; for an uneven constraint, those of padding in one copy of the
            value; for a donation, those of the argument on one device; else those of the whole
            value.
        reason: Why; empty if unknown.
        advice: What to write instead; empty without advice.
        source: Line of a constraint, `device_put` or operation.
    """

    kind: UnmetKind
    path: str
    requested: str
    actual: str
    nbytes: int
    reason: str
    advice: str = ""
    source: SourceLine | None = None

    @property
    def is_whole(self) -> bool:
        """Return True for a value that each device holds or gathers whole without a request."""
        return self.kind in WHOLE


@dataclass(frozen=True)
class ConstantReport:
    """Closed-over array that `jax.jit` puts into the program of each device, whole.

    Attributes:
        path: The variable by which the function reaches it: `params['w']`; `closed over [0]` where
            it is unknown.
        shape: Its shape.
        dtype: Its dtype.
        spec: Its sharding outside of the program, such as `P('data')`; empty for a host array.
        nbytes: Its bytes on each device.
        argument_bytes: Bytes on each device if it is passed as an argument, with that sharding.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    nbytes: int
    argument_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Return the bytes that passing it as an argument saves on each device."""
        return self.nbytes - self.argument_bytes


type Pass = Literal["forward", "backward", "rematerialized"]
"""Pass of a value inside: `rematerialized` values are those of the forward pass, computed again in
the backward pass by `jax.checkpoint`."""


@dataclass(frozen=True)
class InnerValueReport:
    """Equal values inside of a program, of one operation.

    Attributes:
        name: Its name by `checkpoint_name`, or its name scopes and operation: `attention/tanh`.
        op_name: JAX's name of the operation: `jit(step)/jvp(attention)/tanh`; empty if unknown.
        shape: Shape of the whole value; in a loop that of one iteration, in `shard_map` that of a
            shard.
        dtype: Its dtype's name.
        spec: The sharding that the partitioner chose: `P('data')`, XLA's text if it has no spec,
            `in shard_map`, or `unknown`.
        device_bytes: Bytes of the shard on one device; 0 if the sharding is unknown.
        copies: Number of devices that hold each shard; 0 if it is unknown.
        in_pass: The pass that computes it.
        source: The line of the operation.
        times: Number of times that it is computed in one execution.
        count: Number of equal values.
        reason: Reason why the sharding is unknown, or for which names nothing was found; else
            empty.
    """

    name: str
    op_name: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    device_bytes: int
    copies: int
    in_pass: Pass
    source: SourceLine | None
    times: int = 1
    count: int = 1
    reason: str = ""

    @property
    def type(self) -> str:
        """Return the dtype and shape: `float32[8,16]`."""
        return typed(self.dtype, self.shape)


@dataclass(frozen=True)
class RepeatedReport:
    """Work that every device repeats on whole values.

    Attributes:
        operation: JAX's name of it: `dot_general`, `sort`; of a chain of elementwise operations
            that of the first.
        operands: Types of its operands, without scalars.
        result: Type of its result.
        devices: Number of devices that repeat it.
        count: Number of instructions in the program.
        times: Number of executions, all instructions together.
        flops: FLOP of a product or FFT on each device, all executions together; 0 for others.
        share: Part of the FLOP of all products and FFTs on a device; for other operations, of the
            bytes that all operations read and write; from 0 to 1.
        argument: Path of a replicated argument whose dimension a mesh axis could shard; or empty.
        spec: Sharding of that argument to try: `P('data')`; or empty.
        constraint: Line of a constraint that leaves an operand whole, if no argument does.
        source: Line of the operation.
        nbytes: Bytes that other operations than products and FFTs read and write on each device.
    """

    operation: str
    operands: tuple[str, ...]
    result: str
    devices: int
    count: int
    times: int
    flops: int
    share: float
    argument: str
    spec: str
    constraint: SourceLine | None
    source: SourceLine | None
    nbytes: int = 0
