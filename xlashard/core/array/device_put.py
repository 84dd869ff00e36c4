"""`device_put` and `device_get`: transfers of pytrees."""

from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, TypedDict, Unpack, overload

import jax
from jax.typing import ArrayLike

from xlashard._jax import originals
from xlashard._jax.runtime.global_state import (
    Transfer,
    TransferGuards,
    active_guards,
    check_transfer,
)
from xlashard._jax.runtime.transfer import HandleType
from xlashard.core.array.array_class.array import Array, wrap
from xlashard.core.array.array_class.base import type_text
from xlashard.core.array.cross_process_check import (
    Check,
    compare_across_processes,
    parse_check,
    spans_processes,
)
from xlashard.core.array.placement.read import read_value, start_read
from xlashard.core.array.placement.target import (
    Placement,
    at_path,
    is_target,
    leaf_path,
    parse_placement,
)
from xlashard.core.array.placement.tree_prefix import broadcast_prefix
from xlashard.core.array.transfer_plan import (
    ArrayTransfer,
    HostTransfer,
    TransferPlan,
    execute,
    plan_transfer,
)
from xlashard.errors import XlashardError
from xlashard.support.tracebacks import shorten


class _DevicePutOptions(TypedDict, total=False):
    """Keywords of `device_put`, for type checkers."""

    src: Any
    donate: Any
    may_alias: Any
    check: Check | None


class _NamedTuple(Protocol):
    @property
    def _fields(self) -> tuple[str, ...]: ...


@overload
def device_put(x: ArrayLike, device: Any = ..., **options: Unpack[_DevicePutOptions]) -> Array: ...
@overload
def device_put[K, V: ArrayLike](
    x: dict[K, V], device: Any = ..., **options: Unpack[_DevicePutOptions]
) -> dict[K, Array]: ...
@overload
def device_put[V: ArrayLike](
    x: list[V], device: Any = ..., **options: Unpack[_DevicePutOptions]
) -> list[Array]: ...
@overload
def device_put[T: _NamedTuple](
    x: T, device: Any = ..., **options: Unpack[_DevicePutOptions]
) -> T: ...
@overload
def device_put[V: ArrayLike](
    x: tuple[V, ...], device: Any = ..., **options: Unpack[_DevicePutOptions]
) -> tuple[Array, ...]: ...
@overload
def device_put(
    x: dict[Any, Any] | list[Any] | tuple[Any, ...],
    device: Any = ...,
    **options: Unpack[_DevicePutOptions],
) -> Any: ...
@overload
def device_put[T](x: T, device: Any = ..., **options: Unpack[_DevicePutOptions]) -> T: ...
def device_put(
    x: Any,
    device: Any = None,
    *,
    src: Any = None,
    donate: Any = False,
    may_alias: Any = None,
    check: Check | None = None,
) -> Any:
    """Put values on devices.

    A NumPy array or number is sliced and sent in one transfer. An array is resharded on the
    devices; if its sharding is equivalent already, no byte moves.

    Args:
        x: A value or a pytree of them: NumPy arrays, numbers, Arrays, arrays and keys of JAX.
        device: A device, a sharding of this package, of JAX or of a class of your own, or a
            `Format`, for all of `x` or as a pytree prefix of it. A memory space
            (`jax.memory.Space.Host`) keeps the devices of arrays. `None` leaves arrays on their
            devices and puts other values, uncommitted, on the default device.
        src: Source device or sharding; only used inside a traced function, by JAX.
        donate: Whether the arrays of `x` are donated, and so deleted. A bool or a pytree prefix of
            bools.
        may_alias: False always copies. True also lets buffers alias the memory of a NumPy array,
            which must not change afterwards. A bool, `None`, or a pytree prefix.
        check: When processes compare a host value that they put on shared devices and that must be
            equal in all of them: `"always"`, at each call; `"once"`, at the first call from a line
            of the program with the same shapes and targets; `"never"`. By default
            `XLASHARD_CHECK_DEVICE_PUT`, otherwise `"once"`.

    Returns:
        `x` with an `Array` for every value (for keys: a key array of JAX). Tracers stay tracers.

    Raises:
        ArgumentError: No device can hold a value, or a target is invalid; with its path.
        PlacementError: A sharding does not fit a shape; with its path.
        DeletedError: An array is deleted.
        UnequalError: A value differs between processes; with its path, the processes, and the first
            element that differs.
        ProcessesError: A process did not take part in the comparison before the timeout.
        DeadlockError: Processes put an array of several processes to different targets.
        TransferGuardError: A transfer guard of JAX forbids it, such as `"disallow_explicit"`.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, device_put
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> batch = {"x": np.zeros((8, 4), np.float32), "y": np.zeros(8, np.int32)}
        >>> device_put(batch, NamedSharding(mesh, P("data")))["y"].shape
        (8,)
    """
    # short_tracebacks would cost time without an error.
    try:
        return _put_tree(x, device, src, (donate, may_alias), parse_check(check))
    except Exception as error:
        shorten(error)
        raise


def _put_tree(x: Any, device: Any, src: Any, flags: tuple[Any, Any], check: Check | None) -> Any:
    """Plan every leaf, then run the plans: an invalid argument leaves everything as it was."""
    donate, may_alias = flags
    leaves, treedef = jax.tree.flatten(x)
    targets = broadcast_prefix(device, x, is_target, "device", "x")
    donated = broadcast_prefix(donate, x, _is_flag, "donate", "x")
    aliased = broadcast_prefix(may_alias, x, _is_flag, "may_alias", "x")
    forced = [number for number, flag in enumerate(aliased) if flag is False]
    if donate is not False:
        donated, aliased = _donate_last(leaves, donated, aliased)
    guards = active_guards()
    parsed: dict[int, Placement] = {}
    placements: list[Placement] = []
    plans: list[TransferPlan] = []
    for number, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        try:
            placement = parsed.get(id(target))
            if placement is None:
                placement = parsed[id(target)] = parse_placement(target, "device")
            placements.append(placement)
            plan = plan_transfer(leaf, placement, donated[number], aliased[number], src)
            plans.append(plan)
            if guards is not None:
                _check_guards(guards, leaf, plan, number in forced)
        except XlashardError as error:
            raise at_path(error, leaf_path(x, number, "x")) from None
    with nullcontext() if guards is None else jax.transfer_guard("allow"):
        if spans_processes(placements, leaves):
            sends = partial(_sends_pieces, plans)
            for number in compare_across_processes(x, leaves, placements, check, sends):
                plan = plans[number]
                if isinstance(plan, ArrayTransfer):
                    plans[number] = plan._replace(is_process_copy=True)
        return treedef.unflatten(execute(plans, lambda number: leaf_path(x, number, "x")))


def _sends_pieces(plans: list[TransferPlan], number: int) -> bool:
    plan = plans[number]
    return isinstance(plan, ArrayTransfer) and plan.sends_pieces


def _donate_last(
    leaves: list[Any], donated: list[Any], aliased: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return flags by which an array that is several leaves is donated by the last one only.

    The others, as those of tied weights, are copied: shared buffers would be deleted with it.
    """
    donated, aliased = list(donated), list(aliased)
    later: set[int] = set()
    ids = {id(x) for x, flag in zip(leaves, donated, strict=True) if flag is True}
    for number in reversed(range(len(leaves))):
        x = leaves[number]
        if not isinstance(x, jax.Array) or id(x) not in ids:
            continue
        if id(x) in later:
            donated[number], aliased[number] = False, False
        elif donated[number] is False:
            donated[number], aliased[number] = True, None
        later.add(id(x))
    return donated, aliased


def _check_guards(guards: TransferGuards, x: Any, plan: TransferPlan, forced: bool) -> None:
    """Check that the transfer guards allow a leaf to move; `forced` requests a copy."""
    if isinstance(plan, HostTransfer):
        check_transfer(guards, Transfer.HOST_TO_DEVICE, f"the {type(x).__name__}")
    elif isinstance(plan, ArrayTransfer) and (forced or plan.crosses_devices):
        check_transfer(guards, Transfer.DEVICE_TO_DEVICE, f"the array {type_text(x)}")


def _is_flag(x: Any) -> bool:
    return x is None or isinstance(x, bool)


def device_get(x: Any) -> Any:
    """Return the values on the host; all transfers start before the first is awaited.

    Args:
        x: An array or a pytree of them.

    Returns:
        `x` with a read-only NumPy array for every array; other leaves as they are.

    Raises:
        NotAddressableError: A value is not wholly in this process.
        DeletedError: An array is deleted.
        TransferGuardError: A transfer guard of JAX forbids it, such as `"disallow_explicit"`.

    Example:
        >>> import numpy as np
        >>> device_get((device_put(np.ones(2, np.float32)), 7))
        (array([1., 1.], dtype=float32), 7)
    """
    leaves, treedef = jax.tree.flatten(x)
    arrays = [wrap(leaf) if type(leaf) is HandleType else leaf for leaf in leaves]
    for array in arrays:
        if isinstance(array, Array):
            start_read(array, explicit=True)
    return treedef.unflatten(
        read_value(array, explicit=True)
        if isinstance(array, Array)
        else (originals.device_get(array) if isinstance(array, jax.Array) else array)
        for array in arrays
    )
