"""Checks of the arguments of sharding classes."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set

import jax
import numpy as np

from xlashard._jax.runtime.shardings import Device, is_symbolic_size, memory_kinds
from xlashard.errors import ArgumentError, ShardingError

# Types of invalid values that an error shows, and the most characters of one.
_SHOWN = int | float | complex | str | bytes | tuple | list | dict | None
_LONGEST = 60


def checked_devices(devices: Sequence[Device], maker: str) -> tuple[Device, ...]:
    """Return a list of devices as a tuple.

    Raises:
        ShardingError: If it is empty, holds something else, or one device twice.
    """
    try:
        checked = tuple(devices)
    except TypeError:
        checked = ()
    if not checked or not all(isinstance(d, jax.Device) for d in checked):
        raise ShardingError(
            f"the devices of a {maker} must be a list such as jax.devices(), not {devices!r}"
        )
    if len(set(checked)) != len(checked):
        twice = next(d for i, d in enumerate(checked) if d in checked[:i])
        raise ShardingError(
            f"the devices of a {maker} have {twice} more than once: list each device once"
        )
    return checked


def checked_shape(shape: object, method: str) -> tuple[int, ...]:
    """Return a shape as a tuple; symbolic sizes of `jax.export` stay as they are.

    Args:
        shape: The caller's argument.
        method: The called method, for the error: ``"NamedSharding.shard_shape"``.

    Raises:
        ArgumentError: The shape is no sequence of integers.
        ShardingError: A size is negative.
    """
    if type(shape) is tuple and all([type(n) is int and n >= 0 for n in shape]):
        return shape
    try:
        if isinstance(shape, str | bytes | Mapping | Set) or not isinstance(shape, Iterable):
            raise TypeError
        checked = tuple(n if is_symbolic_size(n) else operator.index(n) for n in shape)
    except (TypeError, ValueError, jax.errors.JAXTypeError):
        shown = repr(shape) if isinstance(shape, _SHOWN) else type(shape).__name__
        raise ArgumentError(
            f"{method}: the shape must be a tuple of integers such as (8, 128), not "
            f"{shown if len(shown) <= _LONGEST else f'{shown[:_LONGEST]}...'}"
        ) from None
    if any(type(n) is int and n < 0 for n in checked):
        raise ShardingError(
            f"{method}: the shape {checked} has a negative size; write every size as an integer "
            "from 0 on"
        )
    return checked


def is_index(value: object) -> bool:
    """Return whether a value is an integer of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_memory_kind(device: Device | None, kind: str | None, maker: str) -> None:
    """Check that a device has a memory of that kind.

    Args:
        device: The device; None on an abstract mesh.
        kind: The kind.
        maker: The class, for the error: `NamedSharding`.

    Raises:
        ShardingError: With the kinds that it has.
    """
    if kind is None:
        return
    if not isinstance(kind, str):
        # JAX's classes fail with an error of C++.
        raise ShardingError(
            f"{maker}: memory_kind={kind!r} is invalid: expected a string such as 'device' or "
            "'pinned_host'"
        )
    # A plugin without memories has an empty list, and accepts any kind.
    known = () if device is None else memory_kinds(device)
    if known and kind not in known:
        raise ShardingError(
            f"{maker}: memory_kind={kind!r} is not a memory of {device}: write one of "
            f"{', '.join(map(repr, known))}"
        )
