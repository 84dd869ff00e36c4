"""Messages in the wire format of protocol buffers, without their descriptors.

Few fields of XLA's protos are needed here, and neither JAX nor xlashard depends on
`google.protobuf`. A module of 13,500 instructions takes 0.2 s.
https://protobuf.dev/programming-guides/encoding/ specifies the format.
"""

from collections.abc import Container
from typing import TYPE_CHECKING, Any, ClassVar


class Message:
    """Message of a type that `message_type` defines, with its fields as attributes.

    Args:
        data: The serialized message; it stays in the attribute `data`.

    Raises:
        ValueError: The bytes are no message of the type, or are cut off.
    """

    _fields: ClassVar[dict[int, tuple[str, type, bool]]] = {}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, data: bytes = b"") -> None:
        # One pass without a call per field, since a module has some hundred thousand fields.
        fields, values = self._fields, self.__dict__
        values["data"] = data
        for number, value in _split(data, fields):
            name, kind, is_repeated = fields[number]
            if isinstance(value, int):
                if kind is not int:
                    # no-catalogue: `read` reports it with the source
                    raise ValueError(f"field {number} is not a message or a text")
                if value >> 63:
                    value -= 1 << 64
            elif kind is str:
                value = value.decode(errors="replace")
            elif kind is int:
                if not is_repeated:
                    # no-catalogue: `read` reports it with the source
                    raise ValueError(f"field {number} is not a number")
                packed = list(value) if value.isascii() else _unpack(value)
                values[name] = [*values.get(name, ()), *packed]
                continue
            elif kind is not bytes:
                value = kind(value)
            if not is_repeated:
                values[name] = value
            elif name in values:
                values[name].append(value)
            else:
                values[name] = [value]


def message_type(**fields: tuple[int, Any]) -> type[Message]:
    r"""Return the type of messages with some fields; others are skipped.

    A field that is not set is 0, an empty text, an empty message, or an empty tuple.

    Args:
        fields: Number of each field and its kind: `int`, `str`, `bytes` or another type of
            messages, in a list where the field is repeated.

    Example:
        >>> message_type(name=(1, str), sizes=(2, [int]))(b"\x12\x02\x05\x06").sizes
        [5, 6]
    """
    table, unset = {}, {}
    for name, (number, kind) in fields.items():
        is_repeated = isinstance(kind, list)
        table[number] = name, kind[0] if is_repeated else kind, is_repeated
        unset[name] = () if is_repeated else kind()
    return type("Message", (Message,), {"_fields": table, **unset})


def _split(data: bytes, numbers: Container[int]) -> list[tuple[int, int | bytes]]:
    """Return the fields with some numbers, in order, undecoded."""
    pieces: list[tuple[int, int | bytes]] = []
    at, end = 0, len(data)
    try:
        while at < end:
            # Most keys, numbers and sizes have one byte or two, for which no call is made.
            key, at = data[at], at + 1
            if key > 127:
                key, at = key + (data[at] - 1 << 7), at + 1
                if key >> 14:
                    key, at = _finish_number(key, data, at)
            number, wire = key >> 3, key & 7
            size = _SIZES.get(wire, end)
            if size is None and not number:
                size = end  # invalid, as is any other wire type
            if size is None:
                size, at = data[at], at + 1
                if size > 127:
                    size, at = size + (data[at] - 1 << 7), at + 1
                    if size >> 14:
                        size, at = _finish_number(size, data, at)
                if not wire:
                    if number in numbers:
                        pieces.append((number, size))
                    continue
            start, at = at, at + size
            if at > end:
                # no-catalogue: `read` reports it with the source
                raise ValueError(f"invalid field {number} at byte {start}")
            if number in numbers:
                pieces.append((number, data[start:at]))
    except IndexError:
        # no-catalogue: `read` reports it with the source
        raise ValueError(f"the message is cut off after {end} bytes") from None
    return pieces


_SIZES = {0: None, 1: 8, 2: None, 5: 4}
"""Size of a field by its wire type; None where it follows the key, or is the number itself."""


def _finish_number(value: int, data: bytes, at: int) -> tuple[int, int]:
    """Return a number whose first two bytes have been read, and the position behind it."""
    shift = 14
    while value >> shift:
        if shift == 70:
            # no-catalogue: `read` reports it with the source
            raise ValueError(f"invalid number at byte {at}")
        value += (data[at] - 1) << shift
        at += 1
        shift += 7
    return value, at


def _unpack(data: bytes) -> list[int]:
    """Return packed integers."""
    numbers, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(value if value < 1 << 63 else value - (1 << 64))
            value = shift = 0
        elif shift == 70:
            break
    if shift:
        # no-catalogue: `read` reports it with the source
        raise ValueError(f"invalid packed numbers of {len(data)} bytes")
    return numbers


def field(number: int, value: bytes) -> bytes:
    """Return a serialized field of bytes, text or a message.

    Args:
        number: Number of the field, below 16.
        value: Its value.

    Example:
        >>> message_type(name=(2, str))(field(2, b"text")).name
        'text'
    """
    size, rest = b"", len(value)
    while rest > 127:
        size, rest = size + bytes([rest & 127 | 128]), rest >> 7
    return bytes([number << 3 | 2]) + size + bytes([rest]) + value
