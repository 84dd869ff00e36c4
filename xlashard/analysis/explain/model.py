"""Data model of program reports: frozen values of plain types."""

from dataclasses import dataclass, field
from typing import Literal

from xlashard.hlo.collective_kinds import CollectiveKind
from xlashard.hlo.module import Frame
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
        device_bytes: Bytes of the shard on one device.
        copies: Number of devices that hold each shard.
        memory_kind: Its memory kind, unless that is the default.
        used: False for an argument that the program drops because no result depends on it; it has
            no `spec`, and takes no bytes on the devices.
        weak_type: True for the type of a Python number, which arithmetic with another type takes.
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

    @property
    def type(self) -> str:
        """Return the dtype and shape: `float32[8,16]`."""
        return typed(self.dtype, self.shape)


@dataclass(frozen=True)
class SourceLine:
    """A line of source.

    Attributes:
        file: The file's path.
        line: The line, from 1 on.
        function: The function around it; empty if unknown.
        in_user_file: False for files of Python, of installed packages and of xlashard.
        callers: The frames of the user's files around it, innermost first, up to the function that
            became the program.
        distinct: Positions in `callers` of the frames that distinguish it from other stacks of the
            report with this line, innermost first.
    """

    file: str
    line: int
    function: str
    in_user_file: bool
    callers: tuple[Frame, ...] = ()
    distinct: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class CollectiveReport:
    """Equal collectives with the same cause.

    All bytes are those of one device in one execution of the program: a collective in a loop counts
    once per iteration.

    Attributes:
        kind: `all-gather`, `all-reduce`, ...
        along: The mesh axes as text, `data, model`; `model:(2)2` for groups of 2 in each of 2
            blocks of an axis; a description of the groups if they follow no axes.
        axes: The names of those axes; None if the groups follow no axes.
        count: Number of instructions in the program.
        times: Number of executions, all instructions together.
        times_known: False if an enclosing loop has no known trip count, and counts as one
            iteration.
        conditional: True if one is in a branch that may not be taken; it counts as taken.
        asynchronous: True if other work overlaps with it.
        operands: Types of the operands on one device, of one instruction.
        results: Types of the results on one device, of one instruction.
        operand_bytes: Bytes of the operands.
        result_bytes: Bytes of the results.
        payload_bytes: The larger of the two.
        sent_bytes: Bytes that a device sends with a bandwidth-optimal algorithm.
        op_name: JAX's name of the operation whose value it transfers; empty if unknown to XLA.
        argument: The path of the argument that it gathers or exchanges unchanged, or empty.
        source: The line of that operation: the innermost of the user's files, else the innermost.
        needed_by: Of a gather, or if XLA has no line of the operation: JAX's name of the nearest
            consumer of the result; else empty.
        needed_by_source: The line of the consumer.
        groups: If they follow no axes: the device positions of each group, or source and target
            of each pair of a permutation.
    """

    kind: CollectiveKind
    along: str
    axes: tuple[str, ...] | None
    count: int
    times: int
    times_known: bool
    conditional: bool
    asynchronous: bool
    operands: tuple[str, ...]
    results: tuple[str, ...]
    operand_bytes: int
    result_bytes: int
    payload_bytes: int
    sent_bytes: int
    op_name: str
    argument: str
    source: SourceLine | None
    needed_by: str
    needed_by_source: SourceLine | None
    groups: tuple[tuple[int, ...], ...] | None = None


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
        reason: For an unused donation, the reason, if known.
    """

    path: str
    donated: bool
    result: str
    device_bytes: int
    reason: str = ""

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
        other = self.result_bytes - self.alias_bytes
        return self.argument_bytes + other + self.temporary_bytes + self.code_bytes


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


type ReplicationKind = Literal["argument", "result", "open dimension", "constraint"]


@dataclass(frozen=True)
class ReplicationReport:
    """Value with more copies than requested.

    Attributes:
        kind: `argument`: it has no sharding, the partitioner left it whole, and it has the bytes of
            a `ReplicationWarning`; `result`: its sharding is unspecified, and it is replicated
            along `axes`, which an argument is sharded over; `open dimension`: its spec leaves
            `dims` UNCONSTRAINED, and the partitioner left them unsharded; `constraint`: a
            with_sharding_constraint unshards `dims`, for which the program gathers the value along
            `axes` at that line.
        path: The argument or result; for a constraint the type of the value.
        spec: Its sharding.
        dims: The dimensions.
        axes: The mesh axes that could shard them, or along which they are gathered.
        wasted_bytes: Bytes on one device in excess of a value sharded over those axes; for a
            constraint the bytes that the gathers add on one device, all executions together.
        source: For a constraint, its line.
    """

    kind: ReplicationKind
    path: str
    spec: str
    dims: tuple[int, ...]
    axes: tuple[str, ...]
    wasted_bytes: int
    source: SourceLine | None = None


@dataclass(frozen=True)
class UnevenReport:
    """Dimension that a constraint shards, and that does not divide evenly.

    Inside of the program the partitioner pads it. A result is not sharded so.

    Attributes:
        type: Type of the constrained value: `float32[10,6]`.
        spec: Sharding of the constraint.
        dim: The dimension.
        size: Its size.
        axes: Names of the mesh axes that shard it; empty if unknown.
        shards: Number of tiles along it.
        shard_size: Size of a padded tile.
        padded_size: Size of the padded dimension.
        empty_shards: Number of tiles that hold padding alone.
        device_bytes: Bytes of the padded tile on one device.
        padding_bytes: Bytes of padding in one copy of the value, all uneven dimensions together.
        whole_bytes: Bytes on one device if the uneven dimensions stay whole.
        result: Path of the result of the program that the constraint makes, or empty.
        result_spec: Sharding of that result in the compiled program, or empty.
        source: Line of the constraint.
    """

    type: str
    spec: str
    dim: int
    size: int
    axes: tuple[str, ...]
    shards: int
    shard_size: int
    padded_size: int
    empty_shards: int
    device_bytes: int
    padding_bytes: int
    whole_bytes: int
    result: str
    result_spec: str
    source: SourceLine | None


@dataclass(frozen=True)
class IgnoredReport:
    """Sharding that the program names, and that nothing in it follows.

    Attributes:
        kind: `constraint`: a with_sharding_constraint on an abstract mesh, where nothing else
            places the program; `device_put`: one inside of the program, on automatic axes;
            `argument`: the sharding of an argument of which the program takes the shape only.
        path: The argument; for the others the type of the value.
        spec: The sharding.
        nbytes: Bytes of the whole value.
        results: For an argument, the results of its shape, which are on one device.
        source: Line of a constraint or `device_put`.
    """

    kind: Literal["constraint", "device_put", "argument"]
    path: str
    spec: str
    nbytes: int
    results: tuple[str, ...]
    source: SourceLine | None


@dataclass(frozen=True)
class RepeatedReport:
    """Product or convolution that every device computes whole, with equal operands.

    Attributes:
        operation: JAX's name of it: `dot_general` or `conv_general_dilated`.
        operands: Types of its operands.
        result: Type of its result.
        devices: Number of devices that repeat it.
        count: Number of instructions in the program.
        times: Number of executions, all instructions together.
        flops: FLOP on each device, all executions together.
        share: Part of the FLOP of all products on a device, from 0 to 1.
        argument: Path of a replicated argument whose dimension a mesh axis could shard; or empty.
        spec: Sharding of that argument to try: `P('data')`; or empty.
        constraint: Line of a constraint that leaves an operand whole, if no argument does.
        source: Line of the operation.
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
