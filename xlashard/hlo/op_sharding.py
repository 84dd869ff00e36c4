"""Text of a serialized `OpSharding`, as HLO text has it.

`xla/xla_data.proto` of https://github.com/openxla/xla defines the numbers of fields and kinds.
"""

from typing import TYPE_CHECKING

from xlashard.support.lazily import deferred
from xlashard.support.wire import Message

if TYPE_CHECKING:
    from xlashard._jax.runtime import shardings
else:
    # For shardings by the names of mesh axes, whose proto still changes.
    shardings = deferred("xlashard._jax.runtime.shardings")

_KINDS = ("replicated", "maximal", "tuple", "devices", "manual", "unknown", "unreduced")
_MAXIMAL, _TUPLE, _TILED = 1, 2, 3
_NAMED = 14
"""Field of a sharding by the names of mesh axes."""


def op_sharding_text(data: bytes) -> str:
    """Return a sharding in the HLO syntax.

    Args:
        data: The serialized message.

    Raises:
        ValueError: The bytes are no such message.

    Example:
        >>> op_sharding_text(bytes([8, 3, 26, 2, 2, 1, 74, 1, 2, 82, 1, 0]))
        '{devices=[2,1]<=[2]}'
    """
    message = Message(data)
    elements = message.every(5)
    if _NAMED in message or any(_NAMED in Message(element) for element in elements):
        return shardings.op_sharding_text(data)
    kind = message.number(1)
    if kind == _TUPLE:
        return f"{{{', '.join(map(op_sharding_text, elements))}}}"
    if kind == _MAXIMAL:
        return f"{{maximal device={message.numbers(4)[0]}}}"
    text = f"devices={_tiles_text(message)}" if kind == _TILED else _KINDS[kind]
    return f"{{{text}{_group_text(message)}}}"


def _tiles_text(message: Message) -> str:
    dims, order = message.numbers(9), message.numbers(10)
    devices = _listed(message.numbers(4))
    if dims:
        turned = "" if order == tuple(range(len(order))) else f"T({_listed(order)})"
        devices = f"<=[{_listed(dims)}]{turned}"
    last = ""
    if message.number(6):
        last = " last_tile_dim_replicate"
    elif kinds := message.numbers(8):
        last = f" last_tile_dims={{{', '.join(_KINDS[kind] for kind in kinds)}}}"
    return f"[{_listed(message.numbers(3))}]{devices}{last}"


def _group_text(message: Message) -> str:
    """Return the group of instructions that share one sharding, or have similar ones."""
    if not message.number(11):
        return ""
    return f" {'shard_like' if message.number(13) else 'shard_as'} {message.number(12)}"


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
