"""Messages in the wire format of protocol buffers, for tests of its reader."""

from typing import Any


def varint(number: int) -> bytes:
    """Return an integer of variable length."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def message(fields: dict[int, Any]) -> bytes:
    """Return a message of integers, texts, bytes, tuples of packed integers, and lists."""
    out = b""
    for number, given in fields.items():
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, int):
                out += varint(number << 3) + varint(value)
                continue
            if isinstance(value, dict):
                value = message(value)
            elif isinstance(value, str):
                value = value.encode()
            elif isinstance(value, tuple):
                value = b"".join(map(varint, value))
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out
