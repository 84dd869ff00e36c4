"""Values of instructions in XLA's protos: types, literals, replica groups, dimensions of products.

The numbers of the fields are those of xla/xla_data.proto in https://github.com/openxla/xla.
"""

import math
from functools import lru_cache

import numpy as np

from xlashard._jax.wire import Message
from xlashard.errors import GroupTextError
from xlashard.geometry.groups import ReplicaGroups, mesh_groups
from xlashard.hlo.module import WindowDimension
from xlashard.hlo.shapes import Shape, dtype_of_number


@lru_cache(maxsize=4096)
def shape_of(data: bytes) -> Shape:
    """Return the type of a serialized ShapeProto."""
    # ShapeProto: element_type = 2, dimensions = 3, tuple_shapes = 4, layout = 5. LayoutProto:
    # minor_to_major = 1, tiles = 6 with dimensions = 1, element_size_in_bits = 7,
    # memory_space = 8.
    shape = Message(data)
    layout = shape.message(5)
    return Shape(
        dtype=dtype_of_number(shape.number(2)),
        dims=shape.numbers(3),
        minor_to_major=layout.numbers(1),
        # A dimension that is combined with the next one has the least number.
        tiles=tuple(tuple(max(n, -1) for n in t.numbers(1)) for t in layout.messages(6)),
        memory_space=layout.number(8),
        element_bits=layout.number(7),
        elements=tuple(map(shape_of, shape.every(4))),
    )


MOST_INTEGERS = 1 << 20
"""Elements up to which the values of a constant are read."""


def integers_of(constant: Message) -> tuple[int, ...]:
    """Return the values of a constant of integers, row by row; nothing for others."""
    # LiteralProto: u8s = 3, s32s = 4, s64s = 5, u32s = 6, u64s = 7, s8s = 15, u16s = 16, s16s = 17;
    # those of less than 32 bits are bytes.
    shape, literal = shape_of(constant.data(3)), constant.message(8)
    if shape.dtype[0] not in "su" or shape.size > MOST_INTEGERS:
        return ()
    small = {"u8": 3, "s8": 15, "u16": 16, "s16": 17}.get(shape.dtype)
    if small is not None:
        width = {"u8": "u1", "s8": "i1", "u16": "<u2", "s16": "<i2"}[shape.dtype]
        return tuple(np.frombuffer(literal.data(small), width).tolist())
    return literal.numbers({"s32": 4, "s64": 5, "u32": 6, "u64": 7}.get(shape.dtype, 0))


def mesh_groups_of(groups: Message) -> ReplicaGroups:
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
        dims = mesh.message(3).numbers(1)
        order = ReplicaGroups.iota(1, math.prod(dims), dims, mesh.message(3).numbers(2))
        devices = order.devices()[0]
    parts = []
    for axis in groups.messages(2):
        if axis.number(1) >= len(names):
            # no-catalogue: no compiler writes it
            raise GroupTextError(f"a mesh of {len(names)} axes has no axis {axis.number(1)}")
        part = axis.message(2)
        parts.append((names[axis.number(1)], part.number(1, 1), part.number(2)))
    return mesh_groups(sizes, parts, devices)


def dim_labels_of(dims: Message) -> str:
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


def window_dimension(dimension: Message) -> WindowDimension:
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


def precision_of(config: Message) -> tuple[str, ...]:
    """Return the precision of each operand; empty for the default."""
    # PrecisionConfig: operand_precision = 1.
    numbers = config.numbers(1)
    if not any(numbers):
        return ()
    names = ("default", "high", "highest", "packed_nibble")
    return tuple(names[n] if n < len(names) else str(n) for n in numbers)
