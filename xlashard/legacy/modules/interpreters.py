"""`jax.interpreters` and `jax.lib`: compilation and its internals."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import numpy as np

from xlashard._jax import legacy_api
from xlashard._jax.legacy_api import mlir
from xlashard._jax.lowering import lowering_entries
from xlashard._jax.runtime.coordination import backend_has_started
from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard.core.array import device_put as put_array
from xlashard.errors import ArgumentError
from xlashard.legacy.entries.entry import RemovedApi, raise_removed
from xlashard.legacy.modes.config_flags import as_jax_arrays
from xlashard.legacy.shardings.partition_spec import AutoAxisResource
from xlashard.legacy.shardings.sharding_spec import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    Unstacked,
)

type AvalDimSharding = Unstacked | Chunked | NoSharding
type MeshDimAssignment = ShardedAxis | Replicated
type MeshAxisName = Any
type ResourceAxisName = Any
type Index = int | slice | tuple[int | slice, ...]

ArrayMappingOrAutoOrUnspecified = OrderedDict | AutoAxisResource | UnspecifiedValue


# Names without an entry.
backends = legacy_api.xla_bridge.backends
core = legacy_api.core
host_count = jax.host_count
host_id = jax.host_id
host_ids = jax.host_ids
register_backend_factory = legacy_api.xla_bridge.register_backend_factory
xla_client = legacy_api.xla_client


class StartedBackends(Mapping[str, Any]):
    """The backends by platform, empty until JAX starts them: `xla_bridge._backends` of 2022.

    Programs look whether it is still time to set the number of CPU devices.
    """

    def _read(self) -> Mapping[str, Any]:
        return backends() if backend_has_started() else {}

    def __getitem__(self, platform: str) -> Any:
        return self._read()[platform]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


STARTED_BACKENDS = StartedBackends()


def get_default_device_assignment(
    client: Any, num_replicas: int, num_partitions: int | None = None
) -> list[Any]:
    """Return the devices of a program that names none, in the order in which `pmap` places shards.

    Args:
        client: The backend.
        num_replicas: The number of replicas.
        num_partitions: The number of partitions of each replica.

    Returns:
        A device for each replica; with `num_partitions` a list of devices.
    """
    devices = np.array(client.devices(), object)
    count = num_replicas * (num_partitions or 1)
    if count > devices.size:
        # no-catalogue: an error of the backend then
        raise ArgumentError(
            f"get_default_device_assignment: {count} devices are required, but the platform "
            f"{client.platform!r} has {devices.size}; write: get_default_device_assignment("
            f"{devices.size})"
        )
    chosen = devices[:count]
    return (chosen if num_partitions is None else chosen.reshape(num_replicas, -1)).tolist()


multi_host_supported_collectives: set[Any] = set()
not_mapped = None
zeros_like_p = RemovedApi("jax.interpreters.ad.zeros_like_p")


@dataclass(frozen=True)
class FunctionTranslation:
    """Translation of a primitive that is a function of JAX.

    Attributes:
        fun: The function of the operands and parameters.
        multiple_results: True if it returns a sequence.
    """

    fun: Callable[..., Any]
    multiple_results: bool


def lower_fun(
    fun: Callable[..., Any], *, multiple_results: bool, backend: Any = None, new_style: bool = False
) -> FunctionTranslation:
    """Return a translation for `register_translation`: `xla.lower_fun` of 2022.

    Args:
        fun: A function of the operands and parameters of a primitive.
        multiple_results: True if it returns a sequence.
        backend: Ignored.
        new_style: Ignored.
    """
    return FunctionTranslation(fun, multiple_results)


def register_translation(prim: Any, rule: Any, *, platform: str | None = None) -> None:
    """Register the translation of a primitive.

    Args:
        prim: The primitive.
        rule: A result of `lower_fun`. Another rule calls XLA's builders, so that programs with the
            primitive are refused, unless it has a lowering to MLIR too.
        platform: The platform; None for all.
    """
    if isinstance(rule, FunctionTranslation):
        lowering = mlir.lower_fun(rule.fun, rule.multiple_results)
        mlir.register_lowering(prim, lowering, platform=platform)
    elif prim not in lowering_entries():
        # A rule for a platform precedes this one, in any order of registration.
        mlir.register_lowering(prim, refuse_lowering)


def refuse_lowering(*args: Any, **parameters: Any) -> NoReturn:
    """Refuse a program with a primitive whose only rule calls XLA's builders.

    Raises:
        RefusedError: Always.
    """
    raise_removed("jax.interpreters.xla.translations")


class PmapFunction:
    """Class of the functions that `jax.pmap` returned, which are plain functions today."""


xe = SimpleNamespace(
    **vars(legacy_api.xla_extension),
    CompiledFunction=legacy_api.xla_extension.PjitFunction,
    PmapFunction=PmapFunction,
)
READERS = {name: (jax, legacy_api.xla_bridge) for name in ("process_index", "process_count")}
"""The modules in which JAX reads a name that tests patch here with `mock.patch`."""


def device_put(x: Any, device: Any = None) -> tuple[jax.Array, ...]:
    """Return the buffers of a value on one device: a tuple of one array.

    Args:
        x: An array, a NumPy array or a number.
        device: The device; the default one if None.
    """
    return (as_jax_arrays(put_array(x, device)),)


def buffers_on(x: Any, devices: Sequence[Any], replicate: bool = False) -> list[Any]:
    """Put an array on each of some devices: `pxla.device_put` of 2022.

    Args:
        x: A sequence with an array for each device, or with `replicate` one array.
        devices: The devices.
        replicate: True if `x` is one array for all devices.
    """
    values: Iterable[Any] = [x] * len(devices) if replicate else x
    pieces = [put_array(v, d) for v, d in zip(values, devices, strict=True)]
    return as_jax_arrays(pieces)


class InputsHandlerMode(Enum):
    """The caller of `shard_args`: `pmap`, or `pjit` and `xmap`. Both place arrays in one way."""

    pmap = 0
    pjit_or_xmap = 1


def shard_arg(x: Any, devices: Sequence[Any], arg_indices: Sequence[Any], mode: Any) -> list[Any]:
    """Put the shard of an array at each index on one device: `pxla._shard_arg` of 2022.

    A shard that is on its device already is not copied.

    Args:
        x: An array, a NumPy array or a number.
        devices: The devices.
        arg_indices: An index of `x` for each device.
        mode: An `InputsHandlerMode`, which has no effect.

    Returns:
        An array on each device.

    Example:
        >>> devices, rows = jax.devices()[:1], [(slice(0, 2),)]
        >>> shard_arg(np.arange(4), devices, rows, InputsHandlerMode.pmap)[0].shape
        (2,)
    """
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        shards = {}
    else:
        shards = {s.device: (_bounds(s.index, x.shape), s.data) for s in x.addressable_shards}
    out = []
    for device, index in zip(devices, arg_indices, strict=True):
        held = shards.get(device)
        if held is not None and held[0] == _bounds(index, x.shape):
            out.append(held[1])
        else:
            out.append(put_array(x[index], device))
    return as_jax_arrays(out)


def shard_args(
    devices: Sequence[Any], indices: Sequence[Sequence[Any]], mode: Any, args: Sequence[Any]
) -> list[list[Any]]:
    """Put the shards of several arrays on devices: `pxla.shard_args` of 2022.

    Args:
        devices: The devices.
        indices: For each array an index for each device.
        mode: An `InputsHandlerMode`, which has no effect.
        args: The arrays.
    """
    return [shard_arg(x, devices, of_x, mode) for x, of_x in zip(args, indices, strict=True)]


def _bounds(index: Any, shape: Sequence[int]) -> Any:
    """Return the bounds of an index of contiguous elements, for comparison."""
    entries = index if isinstance(index, tuple) else (index,)
    if any(entry is Ellipsis or entry is None for entry in entries):
        return None
    full = (*entries, *[slice(None)] * (len(shape) - len(entries)))
    return tuple(
        entry.indices(size) if isinstance(entry, slice) else int(entry)
        for entry, size in zip(full, shape, strict=True)
    )


def show_axes(axes: Iterable[str]) -> str:
    """Return the names of axes as a text for messages."""
    return ", ".join(sorted(f"`{axis}`" for axis in axes))


def hashable_index(idx: Any) -> Any:
    """Return an index with pairs in place of slices, which is hashable.

    Args:
        idx: A slice, a number, or a tuple of those.
    """
    return jax.tree.map(lambda x: (x.start, x.stop) if isinstance(x, slice) else x, idx)


masking_rules: dict[Any, Any] = {}
"""Rules of `jax.mask` by primitive, which programs register."""


def defvectorized(primitive: Any) -> None:
    """Register a primitive of one argument that `jax.mask` applied to padded arrays.

    Args:
        primitive: The primitive.
    """
    masking_rules[primitive] = None


defnaryop = defvectorized
"""Registration of a primitive of several arguments."""
