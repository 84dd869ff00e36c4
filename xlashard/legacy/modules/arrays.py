"""Arrays before `jax.Array`, the first module of `jax.Array`, and their checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xlashard._jax import originals
from xlashard._jax.trace.tracing import Tracer
from xlashard.core.sharding import Sharding
from xlashard.legacy.arrays.device_arrays import DeviceArray
from xlashard.legacy.arrays.shards import Device, Index, Shape
from xlashard.legacy.shardings.partition_spec import PartitionSpec

ArrayLike = np.ndarray | DeviceArray
Buffer = DeviceArray
Shard = jax.Shard
device_array_types: list[Any] = [DeviceArray]


def hashed_index(x: Index) -> int:
    """Return a hash of an index, by the bounds of its slices."""
    return hash(tuple((entry.start, entry.stop) for entry in x))


class _GdaFastPathArgs(NamedTuple):
    """Precomputed arguments of the constructor, which ignores them."""

    global_indices_replica_ids: Mapping[Device, tuple[Index, int]]
    local_devices: Sequence[Device]


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
        return originals.make_array_from_single_device_arrays(
            tuple(getattr(aval, "shape", aval)), sharding, arrays
        )
