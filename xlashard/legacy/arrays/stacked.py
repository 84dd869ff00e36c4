"""Values stacked along a new dimension with one device per index, as for `pmap`; their shards."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, overload

import jax
import numpy as np
from jax.typing import ArrayLike

from xlashard._jax.runtime.global_state import (
    Transfer,
    TransferGuards,
    active_guards,
    allow_transfers,
    check_transfer,
)
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.topologies import check_can_hold_arrays
from xlashard._jax.runtime.transfer import Handle, Tracer, host_view, put, split
from xlashard._jax.tree_definitions import leaf_paths
from xlashard.core.array.array_class.array import Array, wrap
from xlashard.core.array.array_class.base import check_alive
from xlashard.core.array.array_class.handles import (
    PieceInput,
    as_piece_input,
    keys_over,
    resolve_key_data,
)
from xlashard.core.array.array_class.shard import Shard
from xlashard.core.array.placement.copying import private_copy
from xlashard.core.array.placement.put import put_on
from xlashard.core.array.placement.reshape import reshape_buffer
from xlashard.core.array.placement.target import ResolvedSharding, leaf_path, resolve_sharding
from xlashard.core.sharding.base import checked_devices
from xlashard.errors import ArgumentError, PlacementError, counted
from xlashard.legacy.shardings.pmap import PmapSharding
from xlashard.legacy.shardings.sharding_spec import (
    ShardIndex,
    ShardingSpec,
    at_numbers,
    spec_over_one_dim,
    without_dims,
)
from xlashard.support.tracebacks import short_tracebacks


@overload
def device_put_sharded(shards: Sequence[ArrayLike], devices: Sequence[Device]) -> Array: ...
@overload
def device_put_sharded[K, V: ArrayLike](
    shards: Sequence[dict[K, V]], devices: Sequence[Device]
) -> dict[K, Array]: ...
@overload
def device_put_sharded[T](shards: Sequence[T], devices: Sequence[Device]) -> T: ...
def device_put_sharded(shards: Sequence[Any], devices: Sequence[Device]) -> Any:
    """Put one value on each device, and stack them along a new leading dimension.

    Nothing is stacked on the host: every value is sent to its device directly.

    Args:
        shards: One value or pytree per device, of one structure. Values may be NumPy arrays,
            numbers, Arrays, arrays and keys of JAX, all of one shape and dtype.
        devices: Devices of this process, in the order of the shards.

    Returns:
        An `Array` of shape `[devices, ...]` with a `PmapSharding` (for keys: a key array of JAX),
        or a pytree of them. `NamedSharding(Mesh(devices, ("data",)), P("data"))` is equivalent.

    Raises:
        PlacementError: The numbers of shards and devices differ, or shapes or dtypes do; with the
            path of the value.
        ArgumentError: The structures differ, `shards` is no sequence, or no device can hold a
            value.
        DeletedError: An array is deleted.
        TransferGuardError: A transfer guard of JAX forbids it, such as `"disallow_explicit"`.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import device_put_sharded
        >>> device_put_sharded([np.arange(3, dtype=np.int32)], jax.devices()[:1])
        Array([[0, 1, 2]], dtype=int32)
    """
    with short_tracebacks:
        local_devices = _local_devices(devices, "device_put_sharded")
        guards = active_guards()
        trees = _one_per_device(shards, local_devices)
        leaves, treedef = jax.tree.flatten(trees[0])
        columns = [leaves]
        for number, tree in enumerate(trees[1:], 1):
            others, other_def = jax.tree.flatten(tree)
            if other_def != treedef:
                raise ArgumentError(
                    f"{_first_difference(trees[0], tree, number)}: give every device a pytree of "
                    "one structure"
                )
            columns.append(others)
        out = []
        for number, values in enumerate(zip(*columns, strict=True)):
            # Names of values are only computed for errors.
            name = partial(_name_in_shards, trees[0], number)
            out.append(_stacked(name, values, local_devices, guards))
        return treedef.unflatten(out)


def _name_in_shards(tree: Any, leaf: int, device: int) -> str:
    return leaf_path(tree, leaf, f"shards[{device}]")


@overload
def device_put_replicated(x: ArrayLike, devices: Sequence[Device]) -> Array: ...
@overload
def device_put_replicated[K, V: ArrayLike](
    x: dict[K, V], devices: Sequence[Device]
) -> dict[K, Array]: ...
@overload
def device_put_replicated[T](x: T, devices: Sequence[Device]) -> T: ...
def device_put_replicated(x: Any, devices: Sequence[Device]) -> Any:
    """Put a copy of a value on each device, and stack them along a new leading dimension.

    Args:
        x: A value or a pytree of them: NumPy arrays, numbers, Arrays, arrays and keys of JAX.
        devices: Devices of this process.

    Returns:
        `x` with an `Array` of shape `[devices, ...]` with a `PmapSharding` for every value (for
        keys: a key array of JAX). For an array without that dimension write `device_put(x,
        NamedSharding(mesh, P()))`.

    Raises:
        ArgumentError: No device can hold a value; with its path.
        DeletedError: An array is deleted.
        TransferGuardError: A transfer guard of JAX forbids it, such as `"disallow_explicit"`.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import device_put_replicated
        >>> device_put_replicated({"w": np.ones(2, np.float32)}, jax.devices()[:1])
        {'w': Array([[1., 1.]], dtype=float32)}
    """
    with short_tracebacks:
        local_devices = _local_devices(devices, "device_put_replicated")
        guards = active_guards()
        leaves, treedef = jax.tree.flatten(x)
        out = []
        for number, leaf in enumerate(leaves):
            name = partial(leaf_path, x, number, "x")
            if guards is not None:
                _ask(guards, leaf, name)
            with allow_transfers():
                piece = as_piece_input(leaf, name, _OUTSIDE)
                out.append(_over([piece] * len(local_devices), local_devices))
        return treedef.unflatten(out)


def _first_difference(first: Any, other: Any, number: int) -> str:
    """Return the first path at which the structures of two devices' values differ."""
    own_paths, other_paths = leaf_paths(first, ""), leaf_paths(other, "")
    for path in other_paths:
        if path not in own_paths:
            return f"shards[{number}]{path} has no counterpart in shards[0]"
    for path in own_paths:
        if path not in other_paths:
            return f"shards[0]{path} has no counterpart in shards[{number}]"
    structures = jax.tree.structure(other), jax.tree.structure(first)
    return f"shards[{number}] is a {structures[0]}, but shards[0] a {structures[1]}"


_OUTSIDE = "call it outside of jit, grad and vmap, or use jnp.stack there"

# The conversion of other dtypes depends on JAX's settings.
_TAKEN_AS_THEY_ARE = frozenset(
    np.dtype(name)
    for name in ("?", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32")
)


def _ask(guards: TransferGuards, value: Any, name: Callable[[], str]) -> None:
    """Check that transfer guards allow a value to be put on a device."""
    if not isinstance(value, Tracer):
        on_device = isinstance(value, jax.Array)
        way = Transfer.DEVICE_TO_DEVICE if on_device else Transfer.HOST_TO_DEVICE
        check_transfer(guards, way, name())


def _stacked(
    name: Callable[[int], str],
    values: Sequence[Any],
    devices: tuple[Device, ...],
    guards: TransferGuards | None,
) -> Any:
    """Stack one leaf of `device_put_sharded`, after a check that the values are alike.

    Args:
        name: Returns the name of a device's value in errors.
        values: One per device.
        devices: The devices.
        guards: Transfer guards in force, or None.
    """
    if guards is not None:
        for number, value in enumerate(values):
            _ask(guards, value, partial(name, number))
    elif _are_plain(values):
        return _put_plain(values, devices)
    with allow_transfers():
        pieces = [
            as_piece_input(x, partial(name, number), _OUTSIDE) for number, x in enumerate(values)
        ]
        shape, dtype = pieces[0].shape, pieces[0].dtype
        for number, piece in enumerate(pieces):
            if (piece.shape, piece.dtype) != (shape, dtype):
                raise PlacementError(
                    f"{name(number)} has shape {piece.shape} and dtype {piece.dtype.name}, but "
                    f"{name(0)} has {shape} and {dtype.name}: give every device a value of one "
                    "shape and dtype, such as np.split(batch, len(devices))"
                )
        return _over(pieces, devices)


def _are_plain(values: Sequence[Any]) -> bool:
    """Return True for NumPy arrays of one shape and of one dtype that needs no conversion."""
    first = values[0]
    if type(first) is not np.ndarray or first.dtype not in _TAKEN_AS_THEY_ARE:
        return False
    shape, dtype = first.shape, first.dtype
    return all(type(v) is np.ndarray and v.shape == shape and v.dtype == dtype for v in values)


def _put_plain(values: Sequence[np.ndarray], devices: tuple[Device, ...]) -> Array:
    """Stack values of `_are_plain`."""
    target = _resolve((len(devices), *values[0].shape), devices)
    aval = target.aval(values[0].dtype)
    alias = not _begin_apart(values)
    rows = [private_copy(value)[None] for value in values] if alias else [v[None] for v in values]
    handle = put(aval, target.jax_sharding, rows, target.devices, alias=alias)
    return wrap(handle, target.sharding)


def _begin_apart(values: Sequence[np.ndarray]) -> bool:
    """Return True if no two values begin at one address, as jaxlib requires without aliasing."""
    if all(value.base is None and value.size for value in values):
        return len(set(map(id, values))) == len(values)
    return len({value.ctypes.data for value in values}) == len(values)


def _over(pieces: list[PieceInput], devices: tuple[Device, ...]) -> Any:
    """Stack one piece per device along a new leading dimension."""
    first = pieces[0]
    keys = first.keys
    shape = first.shape
    target = _resolve((len(devices), *shape), devices)
    if keys is not None:
        target = resolve_key_data(target, first.value.shape[len(shape) :])
    weak_type = all(piece.weak_type for piece in pieces)
    aval = target.aval(first.value.dtype, weak_type)
    values, alias = _in_place(pieces, target)
    handle = put(aval, target.jax_sharding, values, target.devices, alias=alias)
    return wrap(handle, target.sharding) if keys is None else keys_over(handle, keys)


@lru_cache(maxsize=1024)
def _resolve(shape: tuple[int, ...], devices: tuple[Device, ...]) -> ResolvedSharding:
    spec = spec_over_one_dim(len(shape), 0, len(devices))
    return resolve_sharding(shape, PmapSharding(devices, spec))


def _in_place(pieces: list[PieceInput], target: ResolvedSharding) -> tuple[list[Any], bool]:
    """Return the pieces in the shape of their shards, and whether they may be aliased.

    All are NumPy arrays, or all are handles, as jaxlib requires.
    """
    on_host = target.devices[0].platform == "cpu" or all(
        isinstance(piece.value, np.ndarray) for piece in pieces
    )
    ready: dict[int, Any] = {}
    for piece, device in zip(pieces, target.devices, strict=True):
        if id(piece) not in ready:
            ready[id(piece)] = _shaped(piece.value, target, device, on_host)
    alias = on_host and not (len(ready) == len(pieces) and _begin_apart(list(ready.values())))
    if alias:
        # Private copies, which every device may alias.
        ready = {number: private_copy(value) for number, value in ready.items()}
    return [ready[id(piece)] for piece in pieces], alias


def _shaped(value: Any, target: ResolvedSharding, device: Device, on_host: bool) -> Any:
    """Return one piece with its leading dimension, in its current memory."""
    if on_host:
        window = value if isinstance(value, np.ndarray) else host_view(value)[0]
        return window.reshape(target.shard_shape)
    if not isinstance(value, np.ndarray):
        return reshape_buffer(value, target.shard_shape)
    return put_on(device, value.reshape(target.shard_shape))


def _local_devices(devices: Sequence[Device], name: str) -> tuple[Device, ...]:
    local = checked_devices(devices, name)
    check_can_hold_arrays(local)
    process = jax.process_index()
    foreign = [device for device in local if device.process_index != process]
    if foreign:
        raise PlacementError(  # no-catalogue: needs several processes
            f"{name} puts values on this process's devices only, but {foreign[0]} belongs to "
            f"process {foreign[0].process_index}: give jax.local_devices()"
        )
    return local


def _one_per_device(shards: Any, devices: tuple[Device, ...]) -> list[Any]:
    if isinstance(shards, str) or not isinstance(shards, Sequence):
        advice = "[x[0], x[1], ...]" if isinstance(shards, np.ndarray | jax.Array) else "[a, b]"
        raise ArgumentError(
            f"shards must be a list with one value per device, not {type(shards).__name__}: write "
            f"device_put_sharded({advice}, devices)"
        )
    if len(shards) != len(devices):
        raise PlacementError(
            f"{counted(len(shards), 'shard')} for {counted(len(devices), 'device')}: give one per "
            f"device, such as device_put_sharded(shards, jax.local_devices()[:{len(shards)}])"
        )
    return list(shards)


class UnstackedShard(Shard):
    """A shard without the unstacked dimensions of its array, in each of which it has one index.

    Attributes:
        unstacked: The unstacked dimensions.
    """

    unstacked: tuple[int, ...] = ()

    @property
    def index(self) -> ShardIndex:
        """Index of the shard: a slice per dimension, an integer for unstacked ones."""
        return at_numbers(super().index, self.unstacked)


def unstacked_shards(x: Array, sharding_spec: ShardingSpec | None = None) -> list[UnstackedShard]:
    """Return the shards on the devices of this process as early `pmap` showed them.

    Args:
        x: The array.
        sharding_spec: Spec with the `Unstacked` dimensions; by default that of the array's
            `PmapSharding`.

    Returns:
        The shards of `x.addressable_shards`; along unstacked dimensions the index has an integer
        and the data, a copy, has no dimension.

    Raises:
        ArgumentError: `x` is no Array, or has no spec although none is given.
        GeometryError: The spec does not fit the shape.
        DeletedError: The array is deleted.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import PmapSharding, device_put, unstacked_shards
        >>> spread = PmapSharding.default((1, 3), devices=jax.devices()[:1], unstacked=True)
        >>> (shard,) = unstacked_shards(device_put(np.ones((1, 3)), spread))
        >>> shard.index, shard.data.shape
        ((0, slice(None, None, None)), (3,))
    """
    with short_tracebacks:
        if not isinstance(x, Array):
            raise ArgumentError(
                f"unstacked_shards takes an Array of xlashard, not {type(x).__name__}: write "
                "unstacked_shards(device_put(x, sharding))"
            )
        check_alive(x)
        sharding = x.sharding
        if sharding_spec is None:
            if not isinstance(sharding, PmapSharding):
                raise ArgumentError(
                    f"x has a {type(sharding).__name__}, which does not specify unstacked "
                    "dimensions: write unstacked_shards(x, sharding_spec), or [s.data for s in "
                    "x.addressable_shards]"
                )
            sharding_spec = sharding.sharding_spec
        sharding_spec.check_shape(x.shape)
        buffers = unstacked_buffers(x._handle, sharding_spec)
        shards = UnstackedShard.all_of(sharding, x.shape, list(map(wrap, buffers)))
        for shard in shards:
            shard.unstacked = sharding_spec.unstacked_dims
        return shards


def unstacked_buffers(handle: Handle, sharding_spec: ShardingSpec) -> Sequence[Handle]:
    """Return the buffers on the devices of this process, without unstacked dimensions."""
    buffers, dims = split(handle), sharding_spec.unstacked_dims
    return [reshape_buffer(b, without_dims(b.shape, dims)) for b in buffers] if dims else buffers
