"""Messages in the wire format of protocol buffers, without their descriptors.

Few fields of XLA's protos are needed here, and neither JAX nor xlashard depends on
`google.protobuf`. A module of 13,500 instructions takes 0.2 s.
https://protobuf.dev/programming-guides/encoding/ specifies the format.
"""

from typing import TYPE_CHECKING, Any, ClassVar


class SerializedFields(bytes):
    """Kind of a repeated field that is not read: its value is a message of this field alone."""


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
        # One pass, with no call for a number of one or two bytes: a module has some hundred
        # thousand fields, and nearly all of their keys and sizes are as short.
        fields, values = self._fields, self.__dict__
        values["data"] = data
        at, end = 0, len(data)
        try:
            while at < end:
                begin, key = at, data[at]
                at += 1
                if key > 127:
                    key += (data[at] - 1) << 7
                    at += 1
                    if key >> 14:
                        key, at = _read_rest(data, key, at)
                number, wire_type = key >> 3, key & 7
                if key & 5 or key < 8:
                    # Anything but a number of a fixed size ends behind the message.
                    value = {1: 8, 5: 4}.get(wire_type, end) if number else end
                else:
                    value = data[at]
                    at += 1
                    if value > 127:
                        value += (data[at] - 1) << 7
                        at += 1
                        if value >> 14:
                            value, at = _read_rest(data, value, at)
                if wire_type or not number:
                    start, at = at, at + value
                    if at > end:
                        # no-catalogue: `read` reports it with the source
                        raise ValueError(f"invalid field {number} at byte {start}")
                    if number not in fields:
                        continue
                    name, kind, is_repeated = fields[number]
                    value = data[start:at]
                    if kind is str:
                        value = value.decode(errors="replace")
                    elif kind is int:
                        value = _unpack(value, number, is_repeated)
                        values[name] = [*values.get(name, ()), *value]
                        continue
                    elif kind is SerializedFields:
                        # The fields behind it are not read: their ends alone are found.
                        key = data[begin : start - 1]
                        if data[start - 1] == at - start:
                            while data.startswith(key, at) and data[at + len(key)] < 128:
                                at += len(key) + 1 + data[at + len(key)]
                        if at > end:
                            # no-catalogue: `read` reports it with the source
                            raise ValueError(f"invalid field {number} at byte {start}")
                        value = values.get(name, b"") + data[begin:at]
                    elif kind is not bytes:
                        value = kind(value)
                elif number in fields:
                    name, kind, is_repeated = fields[number]
                    if kind is not int:
                        # no-catalogue: `read` reports it with the source
                        raise ValueError(f"field {number} is not a message or a text")
                    if value >> 63:
                        value -= 1 << 64
                else:
                    continue
                if not is_repeated:
                    values[name] = value
                elif name in values:
                    values[name].append(value)
                else:
                    values[name] = [value]
        except IndexError:
            # no-catalogue: `read` reports it with the source
            raise ValueError(f"the message is cut off after {end} bytes") from None


def message_type(**fields: tuple[int, Any]) -> type[Message]:
    r"""Return the type of messages with some fields; others are skipped.

    A field that is not set is 0, an empty text, an empty message, or an empty tuple.

    Args:
        fields: Number of each field and its kind: `int`, `str`, `bytes` or another type of
            messages, in a list where the field is repeated; `SerializedFields` for a repeated one
            that is not read.

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


def _read_rest(data: bytes, value: int, at: int) -> tuple[int, int]:
    """Return a number whose first two bytes have been read, and where it ends."""
    shift = 14
    while value >> shift:
        if shift == 70:
            # no-catalogue: `read` reports it with the source
            raise ValueError(f"invalid number at byte {at}")
        value += (data[at] - 1) << shift
        at += 1
        shift += 7
    return value, at


def _unpack(data: bytes, field: int, is_repeated: bool) -> list[int]:
    """Return the packed integers of a field."""
    if not is_repeated:
        # no-catalogue: `read` reports it with the source
        raise ValueError(f"field {field} is not a number")
    if data.isascii():
        return list(data)
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
