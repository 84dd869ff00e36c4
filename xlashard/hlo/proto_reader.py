"""Reader of XLA's own format of modules, HloModuleProto, and of its buffer assignment.

The numbers of the fields are those of xla/service/hlo.proto and xla/xla_data.proto in
https://github.com/openxla/xla. Attributes of instructions are decoded at their first use.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, partial

import numpy as np

from xlashard.errors import GroupTextError
from xlashard.geometry.groups import ReplicaGroups, SourceTargetPairs, iota_order, mesh_groups
from xlashard.hlo.buffers import read_allocations
from xlashard.hlo.collective_kinds import has_groups, has_pairs
from xlashard.hlo.module import (
    Attributes,
    Computation,
    Frame,
    HloModule,
    Instruction,
    WindowDimension,
    callees_first,
    groups_or_strange,
)
from xlashard.hlo.op_sharding import op_sharding_text
from xlashard.hlo.shapes import shape_of
from xlashard.support.collector import collector_paused
from xlashard.support.wire import Message, SerializedFields, message_type

_FILE = message_type(module=(1, bytes), entry=(2, str), assignment=(3, bytes))
"""HloProto, which has no field 2, or HloModuleProto, which has the name of its entry there."""

_INSTRUCTION = message_type(
    name=(1, str),
    opcode=(2, str),
    shape=(3, bytes),
    parameter_number=(9, int),
    id=(35, int),
    operands=(36, [int]),
    called=(38, [int]),
)
"""HloInstructionProto, without the attributes."""

_COMPUTATION = message_type(
    name=(1, str), instructions=(2, [_INSTRUCTION]), id=(5, int), root=(6, int)
)
_NUMBERS = message_type(numbers=(1, [int]))
_SEQUENCE = message_type(computation=(1, int), instructions=(2, _NUMBERS))
_ALIAS = message_type(result=(1, [int]), parameter=(2, int), part=(3, [int]))
_MODULE = message_type(
    name=(1, str),
    computations=(3, [_COMPUTATION]),
    program_shape=(4, message_type(result=(2, bytes))),
    entry=(6, int),
    schedule=(7, message_type(sequences=(1, [_SEQUENCE]))),
    aliases=(8, message_type(entries=(1, [_ALIAS]))),
    result_sharding=(12, [bytes]),
    parameter_shardings=(14, [bytes]),
    devices=(15, message_type(replicas=(1, int), partitions=(2, int))),
    stack_frames=(17, bytes),
)
_STACK_FRAMES = message_type(
    files=(1, [str]),
    functions=(2, [str]),
    places=(3, [message_type(file=(1, int), function=(2, int), line=(3, int))]),
    frames=(4, [message_type(place=(1, int), parent=(2, int))]),
)

_METADATA = message_type(op_name=(2, str), file=(3, str), line=(4, int), frame=(15, int))
_LITERAL = message_type(
    u8=(3, bytes),
    s32=(4, [int]),
    s64=(5, [int]),
    u32=(6, [int]),
    u64=(7, [int]),
    s8=(15, bytes),
    u16=(16, bytes),
    s16=(17, bytes),
)
_WINDOW = message_type(
    size=(1, int), stride=(2, int), before=(3, int), dilation=(5, int), base_dilation=(6, int)
)
_CONVOLUTION = message_type(
    kernel_input=(3, int),
    kernel_output=(4, int),
    kernel_spatial=(6, [int]),
    batch=(7, int),
    feature=(8, int),
    result_batch=(9, int),
    result_feature=(10, int),
    spatial=(11, [int]),
    result_spatial=(12, [int]),
)
_IOTA = message_type(groups=(1, int), size=(2, int), dims=(3, [int]), order=(4, [int]))
_AXIS = message_type(axis=(1, int), part=(2, message_type(before=(1, int), size=(2, int))))
_MESH = message_type(
    axes=(1, [message_type(name=(1, str), size=(2, int))]),
    devices=(2, [int]),
    iota=(3, message_type(dims=(1, [int]), order=(2, [int]))),
)
_ATTRIBUTES = message_type(
    shape=(3, bytes),
    metadata=(7, _METADATA),
    literal=(8, bytes),
    parameter_number=(9, int),
    tuple_index=(13, int),
    window=(15, message_type(dimensions=(1, [_WINDOW]))),
    convolution=(16, _CONVOLUTION),
    channel=(26, int),
    call_target=(28, str),
    dot_lhs_contracting=(30, _NUMBERS),
    fft_length=(32, [int]),
    slice_sizes=(34, [int]),
    control_predecessors=(37, [int]),
    sharding=(40, [bytes]),
    backend_config=(43, str),
    scatter=(48, message_type(window=(1, [int]), inserted=(2, [int]))),
    groups=(49, [_NUMBERS]),
    precision=(51, _NUMBERS),
    pairs=(52, SerializedFields),
    direction=(63, str),
    frontend=(68, message_type(entries=(1, [message_type(key=(1, str), value=(2, str))]))),
    global_ids=(71, int),
    listed_groups=(87, message_type(groups=(1, [_NUMBERS]), iota=(2, _IOTA))),
    iota_groups=(92, _IOTA),
    mesh_groups=(93, message_type(mesh=(1, _MESH), axes=(2, [_AXIS]))),
)
"""HloInstructionProto, of which groups have had several fields."""
_PAIRS = message_type(pairs=(52, [message_type(source=(1, int), target=(2, int))]))


@collector_paused()
def read_proto(data: bytes, buffers: bytes = b"") -> HloModule:
    """Read a serialized HloProto or HloModuleProto.

    Args:
        data: The serialized message.
        buffers: A serialized BufferAssignmentProto; by default that of the HloProto.

    Raises:
        ValueError: The bytes are neither.
    """
    file = _FILE(data)
    module = _MODULE(data if file.entry else file.module)
    if not module.computations:
        # no-catalogue: `read` reports it with the source
        raise ValueError("the message has no computations")
    return _ModuleReader(module).module(buffers or (b"" if file.entry else file.assignment))


def buffers_of(data: bytes) -> bytes:
    """Return the serialized BufferAssignmentProto of a serialized HloProto.

    Raises:
        ValueError: The bytes are cut off, or have no buffer assignment.
    """
    assignment = _FILE(data).assignment
    if not assignment:
        raise ValueError("no buffer assignment")  # no-catalogue: a report states its reason
    return assignment


class _ModuleReader:
    """Names and tables of one module, to which instructions refer by number."""

    def __init__(self, module: Message) -> None:
        self._module = module
        self._computation_names = {c.id: c.name for c in module.computations}
        self._by_id = {i.id: i for c in module.computations for i in c.instructions}
        self._frames: dict[int, tuple[Frame, ...]] = {}
        self._known_pairs: dict[bytes, SourceTargetPairs] = {}
        self._schedule = {s.computation: s.instructions.numbers for s in module.schedule.sequences}
        devices = module.devices
        self._replicas, self._partitions = devices.replicas or 1, devices.partitions or 1
        # A module that was not assigned to devices does not specify their number.
        self._unread = Counter([] if devices.data else ["number of devices"])

    def module(self, buffers: bytes) -> HloModule:
        # An asynchronous start stands for a computation of one operation.
        computations = {
            c.name: self._computation(c)
            for c in self._module.computations
            if c.id not in self._wrapped
        }
        entry = self._computation_names.get(self._module.entry, "")
        result = self._module.program_shape.result
        return HloModule(
            name=self._module.name,
            computations=callees_first(entry, computations),
            entry=entry,
            num_partitions=self._partitions,
            num_replicas=self._replicas,
            result=shape_of(result) if result else None,
            aliases=self._aliases(),
            shardings=self._shardings(),
            allocations=read_allocations(buffers, self._by_id, self._unread),
            unread=dict(+self._unread),
        )

    def _computation(self, message: Message) -> Computation:
        instructions, order = message.instructions, self._schedule.get(message.id)
        if order is not None:
            instructions = [self._by_id[number] for number in order]
        read = [self._instruction(i, i.id == message.root) for i in instructions]
        return Computation(message.name, {i.name: i for i in read})

    def _instruction(self, message: Message, is_root: bool) -> Instruction:
        opcode, called, source = message.opcode, message.called, message
        if opcode.startswith("async-") and (wrapped := self._wrapped_by(message)):
            # As text does, name the one operation that the computation holds.
            opcode = wrapped.opcode + opcode.removeprefix("async")
            called, source = wrapped.called, wrapped
        if opcode.endswith(("-update", "-done")):
            # The start of an asynchronous call names the computation.
            called = ()
        return Instruction(
            name=message.name,
            opcode=opcode,
            shape=shape_of(message.shape),
            operands=self._list_names(message.operands),
            calls=tuple([self._computation_names.get(n, f"#{n}") for n in called]),
            is_root=is_root,
            read=partial(self._attributes, message, source, opcode),
        )

    def _list_names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        by_id = self._by_id
        return tuple([by_id[n].name if n in by_id else f"#{n}" for n in numbers])

    def _wrapped_by(self, message: Message) -> Message | None:
        """Return the only operation of the computation that an asynchronous instruction runs."""
        while not message.called and message.operands:
            # An update or a done continues its first operand.
            message = self._by_id[message.operands[0]]
        return self._wrapped.get(message.called[0]) if message.called else None

    @cached_property
    def _wrapped(self) -> dict[int, Message]:
        """The only operation, on all parameters in order, of each computation that is started."""
        wrapped = {}
        starts = [m for m in self._by_id.values() if m.opcode == "async-start"]
        started = {number for start in starts for number in start.called}
        for computation in self._module.computations:
            if computation.id not in started:
                continue
            others = [i for i in computation.instructions if i.opcode != "parameter"]
            if len(others) != 1:
                continue
            places = {
                i.id: i.parameter_number for i in computation.instructions if i is not others[0]
            }
            operands = [places.get(n) for n in others[0].operands]
            if operands == list(range(len(places))):
                wrapped[computation.id] = others[0]
        return wrapped

    def _attributes(self, instruction: Message, operation: Message, opcode: str) -> Attributes:
        """Return the attributes of an instruction.

        Args:
            instruction: The instruction, which has the metadata.
            operation: The operation that it stands for, where it starts or ends one.
            opcode: The opcode.
        """
        own = message = _ATTRIBUTES(instruction.data)
        if operation is not instruction:
            message = _ATTRIBUTES(operation.data)
        strange: list[str] = []
        # The end of an operation has the groups of its start no second time, as in text.
        ends = operation is not instruction and opcode.endswith("-done")
        groups = None if ends else groups_or_strange(lambda: self._groups(message, opcode), strange)
        return Attributes(
            op_name=own.metadata.op_name,
            frames=self._frames_of(own.metadata),
            parameter_number=message.parameter_number,
            tuple_index=message.tuple_index if opcode == "get-tuple-element" else None,
            integers=_integers(message) if opcode == "constant" else (),
            direction=message.direction,
            call_target=message.call_target,
            channel=None if ends else message.channel or None,
            groups=groups,
            pairs=self._pairs(message.pairs) if has_pairs(opcode) else None,
            global_ids=not ends and bool(message.global_ids),
            contracting_dims=tuple(message.dot_lhs_contracting.numbers),
            dim_labels=_dim_labels(message.convolution) if message.convolution.data else "",
            window=tuple(
                [
                    WindowDimension(w.size, w.stride, w.before, w.base_dilation, w.dilation)
                    for w in message.window.dimensions
                ]
            ),
            fft_length=tuple(message.fft_length),
            slice_sizes=tuple(message.slice_sizes),
            window_dims=tuple(message.scatter.window),
            inserted_dims=tuple(message.scatter.inserted),
            precision=_precision(message.precision.numbers),
            backend_config=own.backend_config,
            frontend={entry.key: entry.value for entry in own.frontend.entries},
            sharding=op_sharding_text(own.sharding[-1]) if own.sharding else "",
            control_predecessors=self._list_names(own.control_predecessors),
            strange=tuple(strange),
        )

    def _pairs(self, data: bytes) -> SourceTargetPairs:
        # 512 devices exchange values hundreds of times, in a few dozen ways.
        if data not in self._known_pairs:
            pairs = tuple((pair.source, pair.target) for pair in _PAIRS(data).pairs)
            self._known_pairs[data] = SourceTargetPairs(pairs)
        return self._known_pairs[data]

    def _groups(self, message: Message, opcode: str) -> ReplicaGroups | None:
        if message.mesh_groups.data:
            return _mesh_groups(message.mesh_groups)
        listed, iota = message.listed_groups, message.iota_groups
        iota = iota if iota.data else listed.iota
        if iota.data:
            return ReplicaGroups.iota(iota.groups, iota.size, tuple(iota.dims), tuple(iota.order))
        if not has_groups(opcode):
            return None
        groups = [tuple(group.numbers) for group in (*message.groups, *listed.groups)]
        if not any(groups):
            return ReplicaGroups.everyone(self._replicas * self._partitions)
        return ReplicaGroups.of_list(groups)

    def _frames_of(self, metadata: Message) -> tuple[Frame, ...]:
        if number := metadata.frame:
            if number not in self._frames:
                self._frames[number] = self._stack(number)
            return self._frames[number]
        return (Frame(metadata.file, metadata.line),) if metadata.file and metadata.line else ()

    def _stack(self, number: int) -> tuple[Frame, ...]:
        table = self._stack_frames
        stack: list[Frame] = []
        while 0 < number <= len(table.frames) and len(stack) <= len(table.frames):
            # Ids count from 1.
            frame = table.frames[number - 1]
            place = _item(table.places, frame.place, Message())
            file = _item(table.files, place.file, "")
            stack.append(Frame(file, place.line, _item(table.functions, place.function, "")))
            number = frame.parent
        return tuple(stack)

    @cached_property
    def _stack_frames(self) -> Message:
        return _STACK_FRAMES(self._module.stack_frames)

    def _aliases(self) -> dict[int, int]:
        aliases = {}
        for entry in self._module.aliases.entries:
            # The first number of the parameter's index counts where arguments are one tuple.
            number = entry.part[0] if entry.part else entry.parameter
            aliases[entry.result[0] if entry.result else 0] = number
        return aliases

    def _shardings(self) -> tuple[tuple[str, ...], str] | None:
        if not self._module.result_sharding:
            return None
        arguments = tuple(map(op_sharding_text, self._module.parameter_shardings))
        return arguments, op_sharding_text(self._module.result_sharding[-1])


def _item[T](table: Sequence[T], number: int, default: T) -> T:
    return table[number - 1] if 0 < number <= len(table) else default


_MOST_INTEGERS = 1 << 20
"""Elements up to which the values of a constant are read."""


def _integers(constant: Message) -> tuple[int, ...]:
    """Return the values of a constant of integers, row by row; nothing for others."""
    shape = shape_of(constant.shape)
    if shape.dtype[0] not in "su" or shape.size > _MOST_INTEGERS:
        return ()
    values = getattr(_LITERAL(constant.literal), shape.dtype, ())
    if isinstance(values, bytes):
        width = {"u8": "u1", "s8": "i1", "u16": "<u2", "s16": "<i2"}[shape.dtype]
        values = np.frombuffer(values, width).tolist()
    return tuple(values)


def _mesh_groups(groups: Message) -> ReplicaGroups:
    """Return the replica groups along axes of a mesh.

    Raises:
        GroupTextError: The mesh lacks an axis or a part of one.
    """
    mesh = groups.mesh
    sizes = {axis.name: axis.size for axis in mesh.axes}
    names = list(sizes)
    devices = tuple(mesh.devices) or None
    if mesh.iota.data:
        devices = iota_order(tuple(mesh.iota.dims), tuple(mesh.iota.order))
    parts = []
    for axis in groups.axes:
        if axis.axis >= len(names):
            # no-catalogue: no compiler writes it
            raise GroupTextError(f"a mesh of {len(names)} axes has no axis {axis.axis}")
        parts.append((names[axis.axis], axis.part.before or 1, axis.part.size))
    return mesh_groups(sizes, parts, devices)


def _dim_labels(dims: Message) -> str:
    """Return the dimensions of a convolution in the notation of HLO text."""

    def labels(first: str, at: int, second: str, other: int, spatial: Iterable[int]) -> str:
        places = {at: first, other: second}
        places |= {place: str(i) for i, place in enumerate(spatial)}
        return "".join([places[i] for i in sorted(places)])

    operand = labels("b", dims.batch, "f", dims.feature, dims.spatial)
    kernel = labels("i", dims.kernel_input, "o", dims.kernel_output, dims.kernel_spatial)
    result = labels("b", dims.result_batch, "f", dims.result_feature, dims.result_spatial)
    return f"{operand}_{kernel}->{result}"


def _precision(numbers: Sequence[int]) -> tuple[str, ...]:
    """Return the precision of each operand; empty for the default."""
    if not any(numbers):
        return ()
    names = ("default", "high", "highest", "packed_nibble")
    return tuple([names[n] if n < len(names) else str(n) for n in numbers])
