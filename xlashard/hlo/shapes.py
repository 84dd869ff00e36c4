"""Types of HLO values: arrays with their layouts, and tuples of them."""

import math
import re
from functools import cached_property, lru_cache

from xlashard.support.lazily import dataclass
from xlashard.support.wire import message_type

HBM, VMEM, HOST = 0, 1, 5
"""Memory spaces of layouts on TPU: the main memory, VMEM, and the memory of the host."""

_NAMES = """
    invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2
    f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn
    f8e8m0fnu buffer f6e3m2fn f6e2m3fn
"""
_DTYPES = _NAMES.split()


def dtype_of_number(number: int) -> str:
    """Return the HLO dtype of a number of XLA's `PrimitiveType` (xla/xla_data.proto).

    Example:
        >>> dtype_of_number(16), dtype_of_number(99)
        ('bf16', 'type99')
    """
    return _DTYPES[number] if 0 < number < len(_DTYPES) else f"type{number}"


KNOWN_DTYPES = frozenset(_DTYPES[1:])
"""Dtypes whose size is known."""


@dataclass(frozen=True)
class Shape:
    """Type of an HLO value on one device.

    Attributes:
        dtype: As HLO writes it: `f32`, `bf16`, `pred`; `tuple`, `token` or `opaque` for other
            values than arrays.
        dims: Dimensions of an array; the largest ones, where they are not fixed.
        minor_to_major: Order of the dimensions in memory; empty if it is not specified.
        tiles: Tiles of the layout, the outermost first.
        memory_space: Memory that holds the array: 0 is the device's main memory.
        element_bits: Bits of an element, where the layout packs elements; else 0.
        elements: Types of the elements of a tuple.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    memory_space: int = HBM
    element_bits: int = 0
    elements: tuple["Shape", ...] = ()

    @cached_property
    def arrays(self) -> tuple["Shape", ...]:
        """Return the arrays of the type, those of tuples in order, without tokens."""
        if self.dtype == "tuple":
            return tuple(array for element in self.elements for array in element.arrays)
        return () if self.dtype in ("token", "opaque") else (self,)

    @property
    def parts(self) -> tuple["Shape", ...]:
        """Return the elements of a tuple; the type itself if it is no tuple."""
        return self.elements if self.dtype == "tuple" else (self,)

    @cached_property
    def size(self) -> int:
        """Return the number of elements of an array."""
        return math.prod(self.dims)

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of an array's elements, without the padding of its layout."""
        bits = dtype_bits(self.dtype)
        return -(-self.size * (bits if bits >= 8 else self.bits) // 8)

    @property
    def major_to_minor(self) -> tuple[int, ...]:
        """Return the order of the dimensions in memory; as they are listed if it is unspecified."""
        rank = len(self.dims)
        if len(self.minor_to_major) == rank:
            return self.minor_to_major[::-1]
        return tuple(range(rank))

    @cached_property
    def padded_bytes(self) -> int:
        """Return the bytes of an array in memory, with the padding of its layout."""
        physical = tuple(self.dims[n] for n in self.major_to_minor)
        if self.tiles and min(self.tiles[0], default=0) > 0 and 0 not in physical:
            physical = padded(physical, self.tiles[0])
        return -(-math.prod(physical) * self.bits // 8)

    @property
    def bits(self) -> int:
        """Return the bits that an element takes in memory."""
        # Small integers take a byte each, unless their layout packs them.
        return self.element_bits or max(dtype_bits(self.dtype), 8)

    def bytes_in(self, memory: int) -> int:
        """Return the bytes of an array in a memory, with padding; 0 if it is in another one."""
        return self.padded_bytes if self.memory_space == memory else 0

    def at(self, index: tuple[int, ...]) -> "Shape":
        """Return the type at an index into nested tuples.

        Raises:
            IndexError: The tuple has no such element.
        """
        shape = self
        for number in index:
            shape = shape.elements[number]
        return shape

    def __str__(self) -> str:
        """Return `bf16[8,4]`, or `(bf16[8,4], s32[])` for a tuple."""
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def padded(physical: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape, major to minor, with its minor dimensions rounded up to whole tiles.

    Args:
        physical: Shape, major to minor.
        tile: Shape of a tile, which may have more dimensions.

    Example:
        >>> padded((3, 100), (8, 128)), padded((100,), (8, 128))
        ((8, 128), (8, 128))
    """
    whole = (1,) * (len(tile) - len(physical)) + physical
    start = len(whole) - len(tile)
    return whole[:start] + tuple(
        -(-size // step) * step for size, step in zip(whole[start:], tile, strict=True)
    )


_LAYOUT = message_type(
    minor_to_major=(1, [int]),
    tiles=(6, [message_type(dims=(1, [int]))]),
    element_bits=(7, int),
    memory_space=(8, int),
)
_SHAPE = message_type(dtype=(2, int), dims=(3, [int]), elements=(4, [bytes]), layout=(5, _LAYOUT))


@lru_cache(maxsize=4096)
def shape_of(data: bytes) -> Shape:
    """Return the type of a serialized ShapeProto (xla/xla_data.proto)."""
    shape = _SHAPE(data)
    layout = shape.layout
    return Shape(
        dtype=dtype_of_number(shape.dtype),
        dims=tuple(shape.dims),
        minor_to_major=tuple(layout.minor_to_major),
        # A dimension that is combined with the next one has the least number.
        tiles=tuple([tuple([max(n, -1) for n in tile.dims]) for tile in layout.tiles]),
        memory_space=layout.memory_space,
        element_bits=layout.element_bits,
        elements=tuple(map(shape_of, shape.elements)),
    )


def dtype_bits(dtype: str) -> int:
    """Return the bits of an element of an HLO dtype; 8 where its name has no number.

    Example:
        >>> dtype_bits("bf16"), dtype_bits("s4"), dtype_bits("pred")
        (16, 4, 8)
    """
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else 8


def is_floating(dtype: str) -> bool:
    """Return True for the HLO dtype of floating-point or complex numbers."""
    return dtype.startswith(("f", "bf", "c"))


_NUMPY_NAMES = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


def dtype_name(dtype: str) -> str:
    """Return the NumPy name of an HLO dtype.

    Example:
        >>> [dtype_name(dtype) for dtype in ("bf16", "s8", "f8e4m3fn", "pred")]
        ['bfloat16', 'int8', 'float8_e4m3fn', 'bool']
    """
    if dtype == "pred":
        return "bool"
    match = re.fullmatch(r"([a-z]+)(\d+)(e\w+)?", dtype)
    if match is None or match[1] not in _NUMPY_NAMES:
        return dtype
    return f"{_NUMPY_NAMES[match[1]]}{match[2]}" + (f"_{match[3]}" if match[3] else "")


DTYPE_NAMES = frozenset(dtype_name(name) for name in _DTYPES if re.search(r"\d", name)) | {"bool"}
"""NumPy names of the dtypes of numbers, some of which NumPy itself has only beside JAX."""
