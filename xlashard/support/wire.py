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
    at, end, key = 0, len(data), 0
    try:
        while at < end or key:
            # A key, or the number or the size behind it; `shift` is the bit that continues it.
            value, shift = data[at], 7
            at += 1
            while value >> shift:
                if shift == 70:
                    # no-catalogue: `read` reports it with the source
                    raise ValueError(f"invalid number at byte {at}")
                value += (data[at] - 1) << shift
                at += 1
                shift += 7
            if not key:
                key = value
                if key > 7 and key & 7 in (0, 2):
                    continue
                # Of a fixed size; anything else is invalid.
                value = {1: 8, 5: 4}.get(key & 7, end)
            number, is_bytes, key = key >> 3, key & 7 or key < 8, 0
            start = at
            if is_bytes:
                at += value
                if at > end:
                    raise ValueError(f"invalid field {number} at byte {start}")
            if number in numbers:
                pieces.append((number, data[start:at] if is_bytes else value))
    except IndexError:
        # no-catalogue: `read` reports it with the source
        raise ValueError(f"the message is cut off after {end} bytes") from None
    return pieces


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
