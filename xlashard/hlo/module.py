"""Modules of HLO: computations, instructions and their attributes, as both readers return them."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from typing import Any

from xlashard.errors import GroupTextError
from xlashard.geometry.groups import ReplicaGroups, SourceTargetPairs
from xlashard.hlo.buffers import Allocation
from xlashard.hlo.collective_kinds import KINDS
from xlashard.hlo.shapes import KNOWN_DTYPES, Shape
from xlashard.support.lazily import dataclass

_OPCODES = """
    abs acos acosh add add-dependency after-all all-gather-done all-gather-start all-reduce-done
    all-reduce-start and asin asinh async-done async-start async-update atan2 atanh batch-norm-grad
    batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil
    cholesky clamp count-leading-zeros collective-permute-done collective-permute-start compare
    complex concatenate conditional constant convert convolution copy copy-done copy-start cosine
    cosh custom-call divide domain dot dynamic-reshape dynamic-slice dynamic-update-slice erf
    exponential exponential-2 exponential-minus-one fft floor fusion gather get-dimension-size
    get-tuple-element imag infeed iota is-finite log log-2 log-plus-one logistic map maximum minimum
    multiply multiply-high negate not opt-barrier or outfeed pad parameter partition-id popcnt power
    ragged-dot real recv recv-done reduce reduce-precision reduce-window remainder replica-id
    reshape reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz
    round-nearest-even rsqrt scaled-dot scatter select select-and-scatter send send-done
    set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine sinh slice
    sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve tuple while xor
"""
OPCODES = frozenset((*_OPCODES.split(), *KINDS))
"""Opcodes that the analysis knows, of xla/hlo/ir/hlo_opcode.h.

Asynchronous forms of others, such as `slice-start`, are known by their base.
"""


@dataclass(frozen=True)
class Frame:
    """A line of a program's source.

    Attributes:
        file: The file's path.
        line: The line, from 1 on.
        function: The function around it, where that is known.
    """

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True)
class WindowDimension:
    """Window of a convolution or reduction along one dimension.

    Attributes:
        size: Number of positions.
        stride: Step of the window.
        before: Padding before the first element; negative if elements are skipped.
        base_dilation: Step between elements of the operand.
        window_dilation: Step between positions of the window.
    """

    size: int = 1
    stride: int = 1
    before: int = 0
    base_dilation: int = 1
    window_dilation: int = 1


@dataclass(frozen=True)
class Attributes:
    """Attributes of an instruction; those that it lacks have their defaults.

    Attributes:
        op_name: JAX's name of the operation: `f/jvp()/while/body/dot`; empty if unknown.
        frames: Source lines that the operation comes from, the innermost first.
        parameter_number: Argument number of a `parameter`.
        tuple_index: Index of a `get-tuple-element`.
        integers: Values of a `constant` of integers, row by row; empty for more than 2²⁰ elements,
            and where the text leaves them out.
        direction: Comparison of a `compare`: `LT`.
        call_target: Target of a `custom-call`.
        channel: Channel of a collective, send or recv.
        groups: Replica groups of a collective.
        pairs: Source-target pairs of a permutation.
        global_ids: Whether the groups number the devices of all replicas and partitions.
        contracting_dims: Contracted dimensions of the left operand of a `dot`.
        dim_labels: Dimensions of a `convolution`: `b01f_01io->b01f`.
        window: Window of a convolution or reduction, by dimension.
        fft_length: Lengths of an `fft`.
        slice_sizes: Size of the slices of a `gather`, by dimension of its operand.
        window_dims: Dimensions of the updates of a `scatter` that are in a slice.
        inserted_dims: Dimensions of the operand of a `scatter` in which a slice has size 1 and
            the updates have none.
        precision: Requested precision of each operand of a product; empty for the default.
        backend_config: Configuration by the compiler, mostly JSON; its cycle estimates on TPU.
        frontend: Frontend attributes.
        sharding: Sharding in HLO's syntax; empty in a partitioned module.
        control_predecessors: Names of the instructions that run before it without being operands.
        strange: What the reader did not understand.
    """

    op_name: str = ""
    frames: tuple[Frame, ...] = ()
    parameter_number: int = 0
    tuple_index: int | None = None
    integers: tuple[int, ...] = ()
    direction: str = ""
    call_target: str = ""
    channel: int | None = None
    groups: ReplicaGroups | None = None
    pairs: SourceTargetPairs | None = None
    global_ids: bool = False
    contracting_dims: tuple[int, ...] = ()
    dim_labels: str = ""
    window: tuple[WindowDimension, ...] = ()
    fft_length: tuple[int, ...] = ()
    slice_sizes: tuple[int, ...] = ()
    window_dims: tuple[int, ...] = ()
    inserted_dims: tuple[int, ...] = ()
    precision: tuple[str, ...] = ()
    backend_config: str = ""
    frontend: Mapping[str, str] = field(default_factory=dict)
    sharding: str = ""
    control_predecessors: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()

    @property
    def integer(self) -> int | None:
        """Value of a `constant` that is one integer."""
        return self.integers[0] if len(self.integers) == 1 else None

    @property
    def convolution_labels(self) -> tuple[str, str, str] | None:
        """Dimension labels of operand, kernel and result of a convolution; None without them."""
        match = re.match(r"(\w+)_(\w+)->(\w+)", self.dim_labels)
        return None if match is None else (match[1], match[2], match[3])


@dataclass(frozen=True, eq=False)
class Instruction:
    """An operation of a computation.

    Attributes:
        name: Its name, which is unique in the module.
        opcode: Its opcode.
        shape: Type of its value.
        operands: Names of its operands.
        calls: Names of the computations that it calls: body and condition of a `while`, the
            branches of a `conditional`, select and scatter of a `select-and-scatter`.
        is_root: Whether its value is that of the computation.
        read: Reads the attributes.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    calls: tuple[str, ...]
    is_root: bool
    read: Callable[[], Attributes] = field(repr=False)

    @cached_property
    def attributes(self) -> Attributes:
        """Return its attributes, which are read at first use."""
        return self.read()

    @property
    def op_name(self) -> str:
        """Return JAX's name of the operation; empty if unknown."""
        return self.attributes.op_name

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Return the source lines that the operation comes from, the innermost first."""
        return self.attributes.frames

    @property
    def repeated_calls(self) -> tuple[str, ...]:
        """Return the computations that it calls, without the condition of a loop."""
        return self.calls[:1] if self.opcode == "while" else self.calls

    @property
    def rendezvous(self) -> str:
        """Return the rendezvous name shared by a send and its recv; empty for other instructions.

        Transfers between slices of TPUs are sends to and receives from the host.
        """
        if self.opcode not in ("send", "recv"):
            return ""
        return self.attributes.frontend.get("_xla_host_transfer_rendezvous", "")

    @property
    def base_opcode(self) -> str:
        """Return the opcode without `-start`, `-update` or `-done`."""
        for ending in ("-start", "-update", "-done"):
            if self.opcode.endswith(ending) and not self.opcode.startswith("async-"):
                return self.opcode.removesuffix(ending)
        return self.opcode


@dataclass(frozen=True)
class Computation:
    """A list of instructions.

    Attributes:
        name: Its name.
        instructions: Its instructions by name, in the order of the schedule if there is one.
    """

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction | None:
        """Return the instruction whose value is the computation's."""
        return next((i for i in self.instructions.values() if i.is_root), None)

    @cached_property
    def parameters(self) -> list[Instruction]:
        """Return its parameters by number."""
        parameters = (i for i in self.instructions.values() if i.opcode == "parameter")
        return sorted(parameters, key=lambda i: i.attributes.parameter_number)

    @cached_property
    def targets(self) -> frozenset[str]:
        """Return the targets of its custom calls."""
        calls = (i for i in self.instructions.values() if i.opcode == "custom-call")
        return frozenset(target for call in calls if (target := call.attributes.call_target))

    @property
    def starts_collective(self) -> bool:
        """Return whether it is a fusion that starts a collective, which other fusions continue.

        TPU's compiler spreads an asynchronous collective over the operations that hide it: a fusion
        that starts it, fusions that push it on beside their own work, and one that ends it, each
        with a copy of the instruction.
        """
        return "AsyncCollectiveStart" in self.targets

    @property
    def ends_collective(self) -> bool:
        """Return whether it is a fusion that ends a collective of another fusion."""
        return "AsyncCollectiveDone" in self.targets

    @property
    def continues_collective(self) -> bool:
        """Return whether it is a fusion that pushes on or ends a collective of another fusion."""
        pushes_on = self.name.startswith("async_collective_fusion")
        return (pushes_on or self.ends_collective) and not self.starts_collective

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Return the instructions that use each value, in their order."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return users

    def partner(self, transfer: Instruction) -> Instruction | None:
        """Return the recv of a send, or the send of a recv; None for one without a partner."""
        other = "recv" if transfer.opcode == "send" else "send"
        others = (i for i in self.instructions.values() if i.opcode == other)
        return next((i for i in others if i.rendezvous == transfer.rendezvous), None)

    def operand_arrays(self, instruction: Instruction) -> list[Shape]:
        """Return the operand arrays of one of its instructions, in their layouts."""
        named = (self.instructions.get(name) for name in instruction.operands)
        return [array for i in named if i is not None for array in i.shape.arrays]


@dataclass(frozen=True)
class HloModule:
    """One module, as its reader returns it.

    Attributes:
        name: Its name.
        computations: Its computations by name, callees before callers.
        entry: Name of the computation that runs; empty if the module has none.
        num_partitions: Number of devices per replica.
        num_replicas: Number of replicas.
        result: Type of the result, with its layouts; None if it is not specified.
        aliases: For each result that reuses an argument's buffer, the number of the argument.
        shardings: Shardings of the arguments and that of the result, in HLO's syntax, which the
            partitioner chose or was given; None where the module does not specify them.
        allocations: Buffer assignment; empty if it is unknown.
        unread: What the reader did not understand, with its number.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    num_partitions: int = 1
    num_replicas: int = 1
    result: Shape | None = None
    aliases: Mapping[int, int] = field(default_factory=dict)
    shardings: tuple[tuple[str, ...], str] | None = None
    allocations: tuple[Allocation, ...] = ()
    unread: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def call_graph(self) -> dict[Any, Any]:
        """Return the cache of `call_graph`: call sites, and trip counts by computation and loop."""
        return {}

    @cached_property
    def hbm_bytes(self) -> dict[tuple[str, str], int]:
        """Return the bytes that instructions move, as counted so far, by computation and name."""
        return {}

    @cached_property
    def not_understood(self) -> Mapping[str, int]:
        """Return what the analysis can't take into account, with its number.

        Lines and fields that the reader did not understand, opcodes and dtypes that are unknown,
        invalid replica groups, and calls of computations that the module lacks.
        """
        counts = dict(self.unread)
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                for what in self._strange(instruction):
                    counts[what] = counts.get(what, 0) + 1
        return counts

    def callee(self, caller: Instruction) -> Computation | None:
        """Return the first computation that an instruction calls: of a loop, its body."""
        return self.computations.get(caller.calls[0]) if caller.calls else None

    def inside(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[Computation, Instruction]]:
        """Yield the instructions that a fusion fuses, with their computations; others themselves.

        Args:
            computation: Computation of the instruction.
            instruction: The instruction.
        """
        if instruction.opcode != "fusion":
            yield computation, instruction
            return
        for name in instruction.calls:
            if (home := self.computations.get(name)) is not None:
                for inner in home.instructions.values():
                    yield from self.inside(home, inner)

    def _strange(self, instruction: Instruction) -> list[str]:
        strange = [
            f"dtype {array.dtype}"
            for array in instruction.shape.arrays
            if array.dtype not in KNOWN_DTYPES
        ]
        if instruction.opcode not in OPCODES and instruction.base_opcode not in OPCODES:
            strange.append(f"opcode {instruction.opcode}")
        if instruction.opcode.startswith(KINDS):
            strange += instruction.attributes.strange
        lacking = [name for name in instruction.calls if name not in self.computations]
        return [*strange, *(f"missing computation {name}" for name in lacking)]


def groups_or_strange[T](
    read: Callable[[], T], strange: list[str], what: str = "replica groups, taken as all devices"
) -> T | None:
    """Return the replica groups or pairs of an instruction; None, and a note, if they are invalid.

    Args:
        read: Reads them.
        strange: List of what the reader did not understand, to append to.
        what: The note.
    """
    try:
        return read()
    except GroupTextError:
        strange.append(what)
        return None


def callees_first(entry: str, computations: Mapping[str, Computation]) -> dict[str, Computation]:
    """Return computations in the order in which their first runs end, callees before callers.

    Args:
        entry: Name of the computation that runs.
        computations: Computations by name; those that the entry does not reach stay in front.
    """
    order: dict[str, Computation] = {}
    waiting = [(entry, False)]
    while waiting:
        name, has_callees = waiting.pop()
        if name in order or name not in computations:
            continue
        if has_callees:
            order[name] = computations[name]
            continue
        waiting.append((name, True))
        calls = [n for i in computations[name].instructions.values() for n in i.calls]
        waiting += [(callee, False) for callee in reversed(calls)]
    return {n: c for n, c in computations.items() if n not in order} | order
