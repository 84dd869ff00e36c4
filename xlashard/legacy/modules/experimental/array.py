"""`jax.experimental.array`, the first module of `jax.Array`."""

from collections.abc import Sequence
from typing import Any

import jax

from xlashard._jax.trace.tracing import Tracer
from xlashard.legacy.arrays.shards import Device, Index, Shape
from xlashard.legacy.modules.entry import Entry, members
from xlashard.sharding import Sharding

Shard = jax.Shard
make_array_from_callback = jax.make_array_from_callback
make_array_from_single_device_arrays = jax.make_array_from_single_device_arrays


class _ArrayType(type):
    """Metaclass that counts concrete arrays of JAX and of this package as instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, jax.Array) and not isinstance(instance, Tracer)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, jax.Array)


class Array(metaclass=_ArrayType):
    """Array class: every concrete `jax.Array` is an instance, and calling it makes one.

    Example:
        >>> one = jax.numpy.ones(3)
        >>> made = Array(one.aval, one.sharding, [one], committed=True)
        >>> isinstance(made, Array), made.shape
        (True, (3,))
    """

    def __new__(
        cls,
        aval: Any,
        sharding: Any,
        arrays: Sequence[jax.Array],
        committed: bool = True,
        _skip_checks: bool = False,
    ) -> Any:
        """Make an array of single-device arrays.

        Args:
            aval: Its type, or its shape.
            sharding: Its sharding.
            arrays: An array on each of this process's devices.
            committed: Not used: an array over given devices is committed to them.
            _skip_checks: Not used.
        """
        return make_array_from_single_device_arrays(
            tuple(getattr(aval, "shape", aval)), sharding, arrays
        )


_ARRAY = "jax.experimental.array"

ENTRIES: tuple[Entry, ...] = (
    Entry(_ARRAY, "0.4.4", "works", __name__, "jax.Array"),
    Entry(
        f"{_ARRAY}.Array",
        "0.4.4",
        "works",
        f"{__name__}:Array",
        "jax.Array",
        "`isinstance` holds for every concrete `jax.Array`.",
    ),
    *members(
        _ARRAY,
        "0.4.4",
        __name__,
        {
            "make_array_from_callback": "jax.make_array_from_callback",
            "make_array_from_single_device_arrays": "jax.make_array_from_single_device_arrays",
        },
    ),
)
