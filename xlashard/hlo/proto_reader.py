"""Reader of XLA's own format of modules, HloModuleProto, and of its buffer assignment.

The numbers of the fields are those of xla/service/hlo.proto and xla/xla_data.proto in
https://github.com/openxla/xla. Attributes of instructions are decoded at their first use.
"""

from collections import Counter
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
from xlashard.support.wire import Message


def read_proto(data: bytes, buffers: bytes = b"") -> HloModule:
    """Read a serialized HloProto or HloModuleProto.

    Args:
        data: The serialized message.
        buffers: A serialized BufferAssignmentProto; by default that of the HloProto.

    Raises:
        ValueError: The bytes are neither.
    """
    message = Message(data)
    # HloProto: hlo_module = 1, buffer_assignment = 3. HloModuleProto has its name at 1, and at 2
    # the name of its entry, which no HloProto has.
    if 2 not in message:
        buffers = buffers or message.data(3)
        message = message.message(1)
    if 3 not in message:
        # no-catalogue: `read` reports it with the source
        raise ValueError("the message has no computations")
    return _ModuleReader(message).module(buffers)


def buffers_of(data: bytes) -> bytes:
    """Return the serialized BufferAssignmentProto of a serialized HloProto."""
    return Message(data).data(3)


class _ModuleReader:
    """Names and tables of one module, to which instructions refer by number."""

    def __init__(self, module: Message) -> None:
        # HloModuleProto: name = 1, computations = 3, host_program_shape = 4,
        # entry_computation_id = 6, schedule = 7, input_output_alias = 8,
        # spmd_output_sharding = 12, spmd_parameters_shardings = 14, device_assignment = 15,
        # stack_frame_index = 17.
        self._module = module
        self._computations = module.messages(3)
        # HloComputationProto: name = 1, instructions = 2, id = 5, root_id = 6.
        self._computation_names = {c.number(5): c.text(1) for c in self._computations}
        self._instructions = [c.messages(2) for c in self._computations]
        # HloInstructionProto: name = 1, id = 35; the other fields are read where they are used.
        self._by_id = {i.number(35): i for instructions in self._instructions for i in instructions}
        self._names = {number: i.text(1) for number, i in self._by_id.items()}
        self._frames: dict[int, tuple[Frame, ...]] = {}
        # HloScheduleProto: sequences = 1, a map from computations to their instruction_ids = 1.
        entries = module.message(7).messages(1)
        self._schedule = {e.number(1): e.message(2).numbers(1) for e in entries}
        # DeviceAssignmentProto: replica_count = 1, computation_count = 2.
        devices = module.message(15)
        self._replicas, self._partitions = devices.number(1, 1), devices.number(2, 1)
        # A module that was not assigned to devices does not specify their number.
        self._unread = Counter([] if 15 in module else ["number of devices"])

    def module(self, buffers: bytes) -> HloModule:
        pairs = zip(self._computations, self._instructions, strict=True)
        # An asynchronous start stands for a computation of one operation.
        computations = {
            m.text(1): self._computation(m, instructions)
            for m, instructions in pairs
            if m.number(5) not in self._wrapped
        }
        entry = self._computation_names.get(self._module.number(6), "")
        # ProgramShapeProto: result = 2.
        result = self._module.message(4).data(2)
        return HloModule(
            name=self._module.text(1),
            computations=callees_first(entry, computations),
            entry=entry,
            num_partitions=self._partitions,
            num_replicas=self._replicas,
            result=shape_of(result) if result else None,
            aliases=self._aliases(),
            shardings=self._shardings(),
            allocations=read_allocations(Message(buffers), self._by_id, self._unread),
            unread=dict(+self._unread),
        )

    def _computation(self, message: Message, instructions: list[Message]) -> Computation:
        order = self._schedule.get(message.number(5))
        if order is not None:
            instructions = [self._by_id[number] for number in order]
        root = message.number(6)
        read = (self._instruction(i, i.number(35) == root) for i in instructions)
        return Computation(message.text(1), {i.name: i for i in read})

    def _instruction(self, message: Message, is_root: bool) -> Instruction:
        # opcode = 2, shape = 3, operand_ids = 36, called_computation_ids = 38.
        opcode, called, source = message.text(2), message.numbers(38), message
        if opcode.startswith("async-") and (wrapped := self._wrapped_by(message)):
            # As text does, name the one operation that the computation holds.
            opcode = wrapped.text(2) + opcode.removeprefix("async")
            called, source = wrapped.numbers(38), wrapped
        if opcode.endswith(("-update", "-done")):
            # The start of an asynchronous call names the computation.
            called = ()
        return Instruction(
            name=message.text(1),
            opcode=opcode,
            shape=shape_of(message.data(3)),
            operands=tuple([self._name(n) for n in message.numbers(36)]),
            calls=tuple([self._computation_names.get(n, f"#{n}") for n in called]),
            is_root=is_root,
            read=partial(self._attributes, message, source, opcode),
        )

    def _name(self, number: int) -> str:
        return self._names.get(number) or f"#{number}"

    def _wrapped_by(self, message: Message) -> Message | None:
        """Return the only operation of the computation that an asynchronous instruction runs."""
        while not (called := message.numbers(38)) and (operands := message.numbers(36)):
            # An update or a done continues its first operand.
            message = self._by_id[operands[0]]
        return self._wrapped.get(called[0]) if called else None

    @cached_property
    def _wrapped(self) -> dict[int, Message]:
        """The only operation, on all parameters in order, of each computation that is started."""
        wrapped = {}
        starts = (m for m in self._by_id.values() if m.data(2) == b"async-start")
        started = {number for start in starts for number in start.numbers(38)}
        for computation, instructions in zip(self._computations, self._instructions, strict=True):
            if computation.number(5) not in started:
                continue
            others = [i for i in instructions if i.text(2) != "parameter"]
            if len(others) != 1:
                continue
            places = {i.number(35): i.number(9) for i in instructions if i is not others[0]}
            operands = [places.get(n) for n in others[0].numbers(36)]
            if operands == list(range(len(places))):
                wrapped[computation.number(5)] = others[0]
        return wrapped

    def _attributes(self, own: Message, message: Message, opcode: str) -> Attributes:
        """Return the attributes of an instruction.

        Args:
            own: The instruction, which has the metadata.
            message: The operation that it stands for, where it starts or ends one.
            opcode: The opcode.
        """
        metadata = own.message(7)
        strange: list[str] = []
        # The end of an operation has the groups of its start no second time, as in text.
        ends = own is not message and opcode.endswith("-done")
        groups = None if ends else groups_or_strange(lambda: self._groups(message, opcode), strange)
        return Attributes(
            # OpMetadata: op_name = 2, and the frames.
            op_name=metadata.text(2),
            frames=self._frames_of(metadata),
            parameter_number=message.number(9),
            tuple_index=message.number(13) if opcode == "get-tuple-element" else None,
            integers=_integers(message) if opcode == "constant" else (),
            direction=message.text(63),
            call_target=message.text(28),
            channel=None if ends else message.number(26) or None,
            groups=groups,
            # SourceTarget: source = 1, target = 2.
            pairs=SourceTargetPairs(
                tuple((pair.number(1), pair.number(2)) for pair in message.messages(52))
            )
            if has_pairs(opcode)
            else None,
            global_ids=not ends and bool(message.number(71)),
            # DotDimensionNumbers: lhs_contracting_dimensions = 1.
            contracting_dims=message.message(30).numbers(1),
            dim_labels="" if 16 not in message else _dim_labels(message.message(16)),
            # Window: dimensions = 1.
            window=tuple(map(_window_dimension, message.message(15).messages(1))),
            fft_length=message.numbers(32),
            slice_sizes=message.numbers(34),
            # ScatterDimensionNumbers: update_window_dims = 1, inserted_window_dims = 2.
            window_dims=message.message(48).numbers(1),
            inserted_dims=message.message(48).numbers(2),
            precision=_precision(message.message(51)),
            backend_config=own.text(43),
            # FrontendAttributes: a map = 1.
            frontend={e.text(1): e.text(2) for e in own.message(68).messages(1)},
            sharding=op_sharding_text(own.data(40)) if 40 in own else "",
            control_predecessors=tuple(map(self._name, own.numbers(37))),
            strange=tuple(strange),
        )

    def _groups(self, message: Message, opcode: str) -> ReplicaGroups | None:
        # replica_groups = 49 in older modules, collective_device_list = 87,
        # iota_collective_device_list = 92, mesh_axes_replica_group_list = 93.
        if 93 in message:
            return _mesh_groups(message.message(93))
        listed = message.message(87)
        iota = message.data(92) or listed.data(2)
        if iota:
            # IotaReplicaGroupListProto: num_replica_groups = 1, num_devices_per_group = 2,
            # iota_reshape_dims = 3, iota_transpose_perm = 4.
            m = Message(iota)
            return ReplicaGroups.iota(m.number(1), m.number(2), m.numbers(3), m.numbers(4))
        if not has_groups(opcode):
            return None
        # ReplicaGroup: replica_ids = 1.
        groups = [m.numbers(1) for m in (*message.messages(49), *listed.messages(1))]
        if not any(groups):
            return ReplicaGroups.everyone(self._replicas * self._partitions)
        return ReplicaGroups.of_list(groups)

    def _frames_of(self, metadata: Message) -> tuple[Frame, ...]:
        # OpMetadata: source_file = 3, source_line = 4, stack_frame_id = 15.
        if number := metadata.number(15):
            if number not in self._frames:
                self._frames[number] = self._stack(number)
            return self._frames[number]
        file, line = metadata.text(3), metadata.number(4)
        return (Frame(file, line),) if file and line else ()

    def _stack(self, number: int) -> tuple[Frame, ...]:
        names, functions, locations, frames = self._tables
        stack: list[Frame] = []
        while 0 < number <= len(frames) and len(stack) <= len(frames):
            # FileLocation: file_name_id = 1, function_name_id = 2, line = 3. Ids count from 1.
            place = _item(locations, frames[number - 1].number(1)) or Message(b"")
            file = _item(names, place.number(1)) or b""
            function = _item(functions, place.number(2)) or b""
            stack.append(Frame(file.decode(), place.number(3), function.decode()))
            number = frames[number - 1].number(2)
        return tuple(stack)

    @cached_property
    def _tables(self) -> tuple[list[bytes], list[bytes], list[Message], list[Message]]:
        # StackFrameIndexProto: file_names = 1, function_names = 2, file_locations = 3,
        # stack_frames = 4 with file_location_id = 1 and parent_frame_id = 2.
        index = self._module.message(17)
        return index.every(1), index.every(2), index.messages(3), index.messages(4)

    def _aliases(self) -> dict[int, int]:
        # HloInputOutputAliasProto: entries = 1 with output_shape_index = 1, parameter_number = 2,
        # parameter_shape_index = 3, whose first number counts where arguments are one tuple.
        aliases = {}
        for entry in self._module.message(8).messages(1):
            result, part = entry.numbers(1), entry.numbers(3)
            aliases[result[0] if result else 0] = part[0] if part else entry.number(2)
        return aliases

    def _shardings(self) -> tuple[tuple[str, ...], str] | None:
        if 12 not in self._module:
            return None
        arguments = tuple(map(op_sharding_text, self._module.every(14)))
        return arguments, op_sharding_text(self._module.data(12))


def _item[T](table: list[T], number: int) -> T | None:
    return table[number - 1] if 0 < number <= len(table) else None


_MOST_INTEGERS = 1 << 20
"""Elements up to which the values of a constant are read."""


def _integers(constant: Message) -> tuple[int, ...]:
    """Return the values of a constant of integers, row by row; nothing for others."""
    # LiteralProto: u8s = 3, s32s = 4, s64s = 5, u32s = 6, u64s = 7, s8s = 15, u16s = 16, s16s = 17;
    # those of less than 32 bits are bytes.
    shape, literal = shape_of(constant.data(3)), constant.message(8)
    if shape.dtype[0] not in "su" or shape.size > _MOST_INTEGERS:
        return ()
    small = {"u8": 3, "s8": 15, "u16": 16, "s16": 17}.get(shape.dtype)
    if small is not None:
        width = {"u8": "u1", "s8": "i1", "u16": "<u2", "s16": "<i2"}[shape.dtype]
        return tuple(np.frombuffer(literal.data(small), width).tolist())
    return literal.numbers({"s32": 4, "s64": 5, "u32": 6, "u64": 7}.get(shape.dtype, 0))


def _mesh_groups(groups: Message) -> ReplicaGroups:
    """Return the replica groups along axes of a mesh.

    Raises:
        GroupTextError: The mesh lacks an axis or a part of one.
    """
    # MeshAxesReplicaGroupListProto: mesh = 1, axes = 2. MeshProto: axes = 1 with name = 1 and
    # size = 2, device_ids = 2, iota_device_ids = 3 with reshape_dims = 1 and
    # transpose_perm = 2. AxisRefProto: mesh_axis_index = 1, sub_axis_info = 2 with pre_size = 1 and
    # size = 2.
    mesh = groups.message(1)
    sizes = {axis.text(1): axis.number(2) for axis in mesh.messages(1)}
    names = list(sizes)
    devices = mesh.numbers(2) or None
    if 3 in mesh:
        devices = iota_order(mesh.message(3).numbers(1), mesh.message(3).numbers(2))
    parts = []
    for axis in groups.messages(2):
        if axis.number(1) >= len(names):
            # no-catalogue: no compiler writes it
            raise GroupTextError(f"a mesh of {len(names)} axes has no axis {axis.number(1)}")
        part = axis.message(2)
        parts.append((names[axis.number(1)], part.number(1, 1), part.number(2)))
    return mesh_groups(sizes, parts, devices)


def _dim_labels(dims: Message) -> str:
    """Return the dimensions of a convolution in the notation of HLO text."""

    # ConvolutionDimensionNumbers: kernel_input_feature = 3, kernel_output_feature = 4,
    # kernel_spatial = 6, input_batch = 7, input_feature = 8, output_batch = 9, output_feature = 10,
    # input_spatial = 11, output_spatial = 12.
    def labels(first: str, at: int, second: str, other: int, spatial: int) -> str:
        places = {dims.number(at): first, dims.number(other): second}
        places |= {place: str(i) for i, place in enumerate(dims.numbers(spatial))}
        return "".join(places[i] for i in sorted(places))

    operand, kernel = labels("b", 7, "f", 8, 11), labels("i", 3, "o", 4, 6)
    return f"{operand}_{kernel}->{labels('b', 9, 'f', 10, 12)}"


def _window_dimension(dimension: Message) -> WindowDimension:
    """Return the window along one dimension."""
    # WindowDimension: size = 1, stride = 2, padding_low = 3, window_dilation = 5,
    # base_dilation = 6.
    return WindowDimension(
        size=dimension.number(1),
        stride=dimension.number(2),
        before=dimension.number(3),
        base_dilation=dimension.number(6),
        window_dilation=dimension.number(5),
    )


def _precision(config: Message) -> tuple[str, ...]:
    """Return the precision of each operand; empty for the default."""
    # PrecisionConfig: operand_precision = 1.
    numbers = config.numbers(1)
    if not any(numbers):
        return ()
    names = ("default", "high", "highest", "packed_nibble")
    return tuple(names[n] if n < len(names) else str(n) for n in numbers)
