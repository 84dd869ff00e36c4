"""Messages in the wire format of protocol buffers, without their descriptors.

Few fields of XLA's protos are needed here. A module of 5,600 instructions takes 85 ms; with
`google.protobuf`, on which neither JAX nor xlashard depends, it takes 60 ms.
https://protobuf.dev/programming-guides/encoding/ specifies the format.
"""


class Message:
    """Fields of one message by number, undecoded.

    Args:
        data: The serialized message.

    Raises:
        ValueError: The bytes are no message, or are cut off.
    """

    __slots__ = ("fields",)

    def __init__(self, data: bytes) -> None:
        # One container per message, since a module has some ten thousand messages.
        fields: dict[int, int | bytes | list[int | bytes]] = {}
        at, end = 0, len(data)
        try:
            while at < end:
                key = data[at]
                at += 1
                if key > 127:
                    key, at = _varint(data, at - 1)
                kind = key & 7
                value: int | bytes = data[at]
                if kind == 0:
                    at += 1
                    if value > 127:
                        value, at = _varint(data, at - 1)
                else:
                    size = {1: 8, 5: 4}.get(kind)
                    if kind == 2:
                        size = value
                        at += 1
                        if size > 127:
                            size, at = _varint(data, at - 1)
                    if size is None or at + size > end:
                        raise ValueError(f"invalid field {key >> 3} at byte {at}")
                    value = data[at : at + size]
                    at += size
                number = key >> 3
                if number not in fields:
                    fields[number] = value
                elif isinstance(held := fields[number], list):
                    held.append(value)
                else:
                    fields[number] = [held, value]
        except IndexError:
            # no-catalogue: `read` reports it with the source
            raise ValueError(f"the message is cut off after {end} bytes") from None
        self.fields = fields

    def __contains__(self, number: int) -> bool:
        return number in self.fields

    def number(self, field: int, default: int = 0) -> int:
        """Return an integer, with its sign."""
        value = self.fields.get(field, default)
        if isinstance(value, list):
            value = value[-1]
        if not isinstance(value, int):
            # no-catalogue: `read` reports it with the source
            raise ValueError(f"field {field} is not a number")
        return value if value < 1 << 63 else value - (1 << 64)

    def numbers(self, field: int) -> tuple[int, ...]:
        """Return the integers of a repeated field, packed or not."""
        numbers: list[int] = []
        for value in self._values(field):
            if isinstance(value, int):
                numbers.append(value)
                continue
            at, end = 0, len(value)
            while at < end:
                number = value[at]
                at += 1
                if number > 127:
                    number, at = _varint(value, at - 1)
                numbers.append(number)
        return tuple(n if n < 1 << 63 else n - (1 << 64) for n in numbers)

    def data(self, field: int) -> bytes:
        """Return the bytes of a field; empty where it is not set."""
        value = self.fields.get(field, b"")
        if isinstance(value, list):
            value = value[-1]
        if not isinstance(value, bytes):
            # no-catalogue: `read` reports it with the source
            raise ValueError(f"field {field} is not a message or a text")
        return value

    def text(self, field: int) -> str:
        """Return a text; empty where it is not set."""
        return self.data(field).decode(errors="replace")

    def every(self, field: int) -> list[bytes]:
        """Return the values of a repeated field of messages or texts."""
        return [value for value in self._values(field) if isinstance(value, bytes)]

    def _values(self, field: int) -> "list[int | bytes]":
        value = self.fields.get(field, [])
        return value if isinstance(value, list) else [value]

    def message(self, field: int) -> "Message":
        """Return a message; an empty one where it is not set."""
        return Message(self.data(field))

    def messages(self, field: int) -> "list[Message]":
        """Return the messages of a repeated field."""
        return list(map(Message, self.every(field)))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer of variable length at a place, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            # no-catalogue: `read` reports it with the source
            raise ValueError(f"invalid number at byte {at}")


def field(number: int, value: bytes) -> bytes:
    """Return a serialized field of bytes, text or a message.

    Args:
        number: Number of the field, below 16.
        value: Its value.

    Example:
        >>> Message(field(2, b"text")).data(2)
        b'text'
    """
    size, rest = b"", len(value)
    while rest > 127:
        size, rest = size + bytes([rest & 127 | 128]), rest >> 7
    return bytes([number << 3 | 2]) + size + bytes([rest]) + value
