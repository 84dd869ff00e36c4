"""Floors of growth tables: the least that arrays of a class of one's own cost beside JAX's.

JAX's functions make, read and wait for arrays of its own class in C++. An array of any other class
is made by Python once more, around JAX's, and read through a method of Python. `Wrapped` has one
slot, no checks, and the shortest of such methods. A row that is measured beside it can't be faster,
so it has its goal.
"""

from collections.abc import Callable
from typing import Any

import jax

from benchmarks._devices import Loop, add_one
from benchmarks._sides import JAX, Call


class Wrapped:
    """An array of JAX in the only slot of an object."""

    __slots__ = ("__weakref__", "held")

    def __init__(self, held: jax.Array) -> None:
        self.held = held

    def __buffer__(self, flags: int, /) -> memoryview:
        return memoryview(self.held)  # pyright: ignore[reportArgumentType]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.held.aval.shape

    def block_until_ready(self) -> "Wrapped":
        """Wait for the array."""
        self.held.block_until_ready()
        return self


def repeat_wrapped(num_devices: int, leaves: int, **options: Any) -> Call:
    """Return a call of `jax.jit` that adds one to what is in each of its last results."""
    function = jax.jit(add_one, **options)

    def call(state: list[Wrapped]) -> list[Wrapped]:
        return [Wrapped(leaf) for leaf in function([leaf.held for leaf in state])]

    return Loop(call, [Wrapped(leaf) for leaf in JAX.put_rows(num_devices, leaves)])


def call_checked(function: Callable[[list[Any]], Any], num_devices: int, leaves: int) -> Call:
    """Return a call of `jax.jit` after one read of `is_deleted` of each shard of its arguments.

    The runtime reads the first shard only, and a program that lacks another waits for it forever.
    """
    arrays, jitted = JAX.put_rows(num_devices, leaves), jax.jit(function, keep_unused=True)
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    is_deleted = type(shards[0]).is_deleted

    def call() -> None:
        any(map(is_deleted, shards))
        jitted(arrays)

    return call


def read_wrapped(how: Callable[[Any], Any], value: Any) -> Call:
    """Return a function's call of an array of JAX, or of a list of them, wrapped."""
    wrapped = jax.tree.map(Wrapped, value)
    return lambda: how(wrapped)
