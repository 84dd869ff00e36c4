"""Text of a serialized `OpSharding`, as HLO text has it.

`xla/xla_data.proto` of https://github.com/openxla/xla defines the numbers of fields and kinds.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from xlashard.support.lazily import deferred
from xlashard.support.wire import Message, message_type

if TYPE_CHECKING:
    from xlashard._jax.runtime import shardings
else:
    # For shardings by the names of mesh axes, whose proto still changes.
    shardings = deferred("xlashard._jax.runtime.shardings")

_KINDS = ("replicated", "maximal", "tuple", "devices", "manual", "unknown", "unreduced")
_MAXIMAL, _TUPLE, _TILED = 1, 2, 3
_SHARDING = message_type(
    kind=(1, int),
    shape=(3, [int]),
    devices=(4, [int]),
    elements=(5, [bytes]),
    replicates_last=(6, int),
    last_kinds=(8, [int]),
    iota_dims=(9, [int]),
    iota_order=(10, [int]),
    is_grouped=(11, int),
    group=(12, int),
    group_kind=(13, int),
    named=(14, [bytes]),
)
"""OpSharding, where `named` is a sharding by the names of mesh axes."""


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
    message = _SHARDING(data)
    if message.named or any([_SHARDING(element).named for element in message.elements]):
        return shardings.op_sharding_text(data)
    kind = message.kind
    if kind == _TUPLE:
        return f"{{{', '.join(map(op_sharding_text, message.elements))}}}"
    if kind == _MAXIMAL:
        return f"{{maximal device={message.devices[0]}}}"
    text = f"devices={_tiles_text(message)}" if kind == _TILED else _KINDS[kind]
    return f"{{{text}{_group_text(message)}}}"


def _tiles_text(message: Message) -> str:
    order, devices = message.iota_order, _listed(message.devices)
    if message.iota_dims:
        turned = "" if [*order] == [*range(len(order))] else f"T({_listed(order)})"
        devices = f"<=[{_listed(message.iota_dims)}]{turned}"
    last = ""
    if message.replicates_last:
        last = " last_tile_dim_replicate"
    elif message.last_kinds:
        last = f" last_tile_dims={{{', '.join([_KINDS[kind] for kind in message.last_kinds])}}}"
    return f"[{_listed(message.shape)}]{devices}{last}"


def _group_text(message: Message) -> str:
    """Return the group of instructions that share one sharding, or have similar ones."""
    if not message.is_grouped:
        return ""
    return f" {'shard_like' if message.group_kind else 'shard_as'} {message.group}"


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
