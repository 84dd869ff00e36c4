"""What the classes check of what they are made of."""

from collections.abc import Sequence

import jax

from xlashard._jax.shardings import Device, memory_kinds
from xlashard.errors import ShardingError


def checked_devices(devices: Sequence[Device], maker: str) -> tuple[Device, ...]:
    """A list of devices as a tuple.

    Raises:
        ShardingError: If it is empty, holds something else, or one device twice.
    """
    try:
        found = tuple(devices)
    except TypeError:
        found = ()
    if not found or not all(isinstance(d, jax.Device) for d in found):
        raise ShardingError(
            f"the devices of a {maker} must be a list such as jax.devices(), not {devices!r}"
        )
    if len(set(found)) != len(found):
        twice = next(d for i, d in enumerate(found) if d in found[:i])
        raise ShardingError(
            f"the devices of a {maker} have {twice} more than once: list each device once"
        )
    return found


def check_memory_kind(device: Device, kind: str | None, maker: str) -> None:
    """Checks that a device has a memory of that kind.

    Raises:
        ShardingError: With the kinds that it has.
    """
    if kind is None:
        return
    known = memory_kinds(device)
    # A plugin without memories says nothing; it takes what JAX gives it.
    if known and kind not in known:
        raise ShardingError(
            f"{maker} was given memory_kind={kind!r}, but {device} has "
            f"{', '.join(map(repr, known))}"
        )
