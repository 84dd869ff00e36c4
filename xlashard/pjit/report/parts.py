"""What a report of a program is made of, as frozen values of plain types."""

from dataclasses import dataclass
from typing import Literal

from xlashard.program.collectives import CollectiveKind
from xlashard.wording import typed

type Decided = Literal["caller", "argument", "default", "partitioner", "function", "unknown"]
"""Who decided where a value lies: the caller's resource; the committed argument itself; the rule
for scalars and for single devices; the partitioner; the function, for what it closes over. A
compiled stage has forgotten who decided that of its arguments, a loaded one also of its results."""


@dataclass(frozen=True)
class ValueReport:
    """An argument or a result.

    Attributes:
        path: As a person would write it: `state['params']['w']`, `result[0]`.
        shape: Its shape.
        dtype: Its dtype's name.
        spec: How it is dealt out: `P('data')`, or XLA's text where no mesh names it.
        decided_by: Who decided that.
        nbytes: Bytes of the whole value.
        device_bytes: Bytes of the part on one device.
        copies: How many devices hold each part.
        memory_kind: The memory it lies in, where that is not the default one.
        used: False for an argument that the program leaves out, for no result needs it; it has no
            `spec`, and takes no bytes on the devices.
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

    @property
    def type(self) -> str:
        """`float32[8,16]`."""
        return typed(self.dtype, self.shape)


@dataclass(frozen=True)
class SourceLine:
    """A line of source.

    Attributes:
        file: The file's path.
        line: The line, from 1 on.
        function: The function around it; empty if unknown.
        in_user_file: Whether the file is none of Python's own, of an installed package or of
            xlashard.
    """

    file: str
    line: int
    function: str
    in_user_file: bool


@dataclass(frozen=True)
class CollectiveReport:
    """Collectives that do the same for the same reason, together.

    All bytes are those of one device in one execution of the program: a collective in a loop counts
    once for each of its runs.

    Attributes:
        kind: `all-gather`, `all-reduce`, ...
        along: The mesh axes as text, `data, model`; `model:(2)2` for groups of 2 in an axis that is
            first cut into 2 blocks; the groups in words where they are those of no axes.
        axes: The names of those axes; None where the groups are those of no axes.
        count: How many there are in the program's text.
        times: How often one of them runs.
        times_known: False where a loop around one has no known trip count; it counts as one run.
        conditional: Whether one stands in a branch that may not be taken; it counts as taken.
        asynchronous: Whether other work goes on between its start and its end.
        operands: Types of what a device puts in, of one of them.
        results: Types of what a device gets out, of one of them.
        operand_bytes: Bytes that a device puts in.
        result_bytes: Bytes that a device gets out.
        payload_bytes: Bytes of the larger of the two.
        sent_bytes: Bytes that a device sends under an algorithm that wastes none.
        op_name: What JAX called the operation whose value it deals with; empty if XLA doesn't say.
        argument: The path of the argument that it gathers or exchanges as it came, or empty.
        source: The line of that operation: the innermost of the user's files, else the innermost.
        needed_by: For a gather, and where XLA doesn't say the operation's line: what JAX called
            the nearest operation that uses the result; else empty.
        needed_by_source: The line of that.
        groups: Where they are those of no axes: the positions of the devices of each group, or of
            a permutation source and target of each pair.
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
    """An argument that does not lie as the program wants it, and is moved before each such call.

    Attributes:
        path: The argument.
        source: How it lies: a spec, `device 0`, or `host`.
        target: How the program wants it.
        device_bytes_moved: Bytes that go from one device to another, all devices together.
        host_bytes: Bytes that go from the host to the devices of this process.
    """

    path: str
    source: str
    target: str
    device_bytes_moved: int
    host_bytes: int


@dataclass(frozen=True)
class DonationReport:
    """An argument that was donated, or could be.

    Attributes:
        path: The argument.
        donated: Whether it was.
        result: The result that takes over its buffers in the compiled program, or, for one that
            was not donated, could take them over; empty for none.
        device_bytes: Bytes of the argument on one device.
        reason: For a donated one without a result, why, where that is known.
    """

    path: str
    donated: bool
    result: str
    device_bytes: int
    reason: str = ""

    @property
    def is_reused(self) -> bool:
        """Whether the compiled program really writes a result into its buffers."""
        return self.donated and bool(self.result)


type ReplicationKind = Literal["result", "open dimension", "constraint"]


@dataclass(frozen=True)
class ReplicationReport:
    """A value that is held more often than anyone said it should be.

    Attributes:
        kind: `result`: nothing was said of it, and it came out whole along `axes`, along which an
            argument is cut; `open dimension`: its spec leaves `dims` UNCONSTRAINED, and the
            partitioner left them whole; `constraint`: a with_sharding_constraint closes `dims`, for
            which the program gathers the value along `axes` at that line.
        path: The argument or result; for a constraint the type of the value.
        spec: How it is dealt out.
        dims: The dimensions.
        axes: The mesh axes that could cut them, or along which they are gathered.
        wasted_bytes: Bytes on one device more than if those axes cut it; for a constraint the bytes
            that the gathers add on one device, all runs together.
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
class CostReport:
    """XLA's estimates for one device. It counts the body of a loop once.

    Attributes:
        flops: Floating-point operations.
        bytes_accessed: Bytes read and written in memory.
    """

    flops: float
    bytes_accessed: float


@dataclass(frozen=True)
class MemoryReport:
    """What the program takes of one device's memory, in bytes, as the compiler planned it.

    Attributes:
        argument_bytes: Its arguments.
        result_bytes: Its results, those included that take over buffers of arguments.
        alias_bytes: Buffers of arguments that results take over.
        temporary_bytes: What it needs besides, while it runs.
        code_bytes: The program itself.
        peak_bytes: What the compiler calls the most in use at once (on CPU it leaves temporaries
            out); None where it doesn't say.
        host_bytes: What it takes of the host's memory.
    """

    argument_bytes: int
    result_bytes: int
    alias_bytes: int
    temporary_bytes: int
    code_bytes: int
    peak_bytes: int | None
    host_bytes: int


@dataclass(frozen=True)
class PlaceReport:
    """Where the program runs.

    Attributes:
        platform: `cpu`, `tpu`, `gpu`.
        device_kind: The kind of device: `TPU v5p`.
        num_devices: How many.
        num_processes: How many processes hold them.
        mesh: Names and sizes of the mesh axes; empty without a mesh.
        partitioner: `shardy` or `gspmd`.
        xlashard: Version of this package.
        jax: Version of JAX.
        jaxlib: Version of jaxlib.
        runtime: What the PJRT plugin says of its version.
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


@dataclass(frozen=True, repr=False)
class ReportFields:
    """The facts of a report; `ProgramReport`, which can print them, says what each is."""

    name: str
    place: PlaceReport
    cost: CostReport | None
    memory: MemoryReport | None
    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    collectives: tuple[CollectiveReport, ...]
    moves: tuple[MoveReport, ...]
    donations: tuple[DonationReport, ...]
    replications: tuple[ReplicationReport, ...]
