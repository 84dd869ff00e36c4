"""`device_put` in several processes: check that every process puts the same value.

A host value or an uncommitted array exists once in each process, and each process puts its part on
its devices, so all must be equal. A committed array is one value of all processes. If all its
devices belong to one process, that process cannot see whether the others have arrays of their own
too; the processes exchange the types of their arrays to find out.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import jax
import numpy as np

from xlashard._jax.runtime import coordination
from xlashard._jax.runtime.global_state import BoundedCache
from xlashard._jax.runtime.tracebacks import calling_line
from xlashard._jax.runtime.transfer import Tracer, aval_of
from xlashard._jax.trace.tracing import is_token
from xlashard._jax.tree_definitions import leaf_paths
from xlashard.config import CheckName, read_flags
from xlashard.core.array.array_class.array import Array
from xlashard.core.array.array_class.base import ArrayBase, type_text
from xlashard.core.array.array_class.handles import is_key_array, key_handle
from xlashard.core.array.placement.put import as_host_value
from xlashard.core.array.placement.read import read_value
from xlashard.core.array.placement.target import Placement, resolve_sharding
from xlashard.core.sharding import Sharding, XLACompatibleSharding
from xlashard.errors import ArgumentError, DeadlockError, ProcessesError, UnequalError
from xlashard.support.formatting import format_by_process
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard.core import processes
else:
    processes = deferred("xlashard.core.processes")

Check = CheckName

# Seconds: a process may be busy with its data or a compilation that others skip.
_TIMEOUT = 600.0
# Number of array types that an error lists.
_SHOWN = 5

_DEFAULT = read_flags(os.environ).check_device_put


class _Leaf(NamedTuple):
    """A leaf that several processes use.

    Attributes:
        number: Number of the leaf.
        paths: Returns the paths of all leaves of its tree.
        x: The leaf.
        target: Its sharding.
        processes: The processes that use it.
    """

    number: int
    paths: Callable[[], list[str]]
    x: Any
    target: Sharding
    processes: tuple[int, ...]

    @property
    def path(self) -> str:
        """Path of the leaf: `x['w']`."""
        return self.paths()[self.number]


def spans_processes(placements: Sequence[Placement], leaves: Sequence[Any]) -> bool:
    """Return True if any leaf comes from or goes to devices of other processes."""
    if coordination.process_count() < 2:
        return False
    return any(
        placement.sharding is not None
        and not (placement.sharding.is_fully_addressable and _is_here(leaf))
        for placement, leaf in zip(placements, leaves, strict=True)
    )


def _is_here(x: Any) -> bool:
    return not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.is_fully_addressable


def compare_across_processes(
    x: Any,
    leaves: Sequence[Any],
    placements: Sequence[Placement],
    check: Check | None,
    sends: Callable[[int], bool],
) -> set[int]:
    """Compare the leaves of which every process has a copy; return their numbers.

    Args:
        x: The tree, for the paths of its leaves.
        leaves: The leaves.
        placements: Targets of the leaves.
        check: When to compare values; None for the default.
        sends: Returns whether processes send each other pieces of the array at a position.

    Raises:
        DeadlockError: The processes put an array to different targets.
        UnequalError: A value differs between processes.
        ProcessesError: A process did not take part before the timeout.
    """
    own: list[_Leaf] = []
    unclear: list[_Leaf] = []
    moving: list[_Leaf] = []
    check = _DEFAULT if check is None else check
    paths = cache(partial(leaf_paths, x, "x"))
    for number, (leaf, placement) in enumerate(zip(leaves, placements, strict=True)):
        if placement.sharding is None or isinstance(leaf, Tracer):
            continue
        if isinstance(leaf, np.ndarray) and leaf.dtype == jax.dtypes.float0:
            continue
        target = placement.sharding
        takers = _processes(target)
        givers = _source_processes(leaf)
        if givers is None:
            if len(takers) > 1 or not target.is_fully_addressable:
                own.append(_Leaf(number, paths, leaf, target, takers))
        else:
            everybody = tuple(sorted(givers.union(takers)))
            if len(everybody) < 2 or coordination.process_index() not in everybody:
                continue
            one = _Leaf(number, paths, leaf, target, everybody)
            if len(givers) == 1:
                unclear.append(one)
            elif sends(number):
                moving.append(one)
    own += _find_process_copies(unclear)
    _compare(sorted(own, key=lambda leaf: leaf.number), check)
    _compare_targets(moving, check)
    return {leaf.number for leaf in own}


def parse_check(value: Any) -> Check | None:
    """Parse the argument `check`.

    Raises:
        ArgumentError: The value is invalid.
    """
    if value is None or value in get_args(Check.__value__):
        return value
    raise ArgumentError(
        "check must be 'always' (compare at each call), 'once' (at the first call from a line), "
        f"'never', or None (XLASHARD_CHECK_DEVICE_PUT, otherwise 'once'), not {value!r}"
    )


def _source_processes(x: Any) -> set[int] | None:
    """Return the processes of a committed array; None if every process has its own copy."""
    if not isinstance(x, jax.Array):
        return None
    handle = _data(x)
    if not handle.committed:
        return None
    return {device.process_index for device in handle.sharding.device_set}


def _data(x: Any) -> Any:
    """Return the data of a key array; other arrays as they are."""
    return key_handle(x) if is_key_array(x) else x


def _processes(sharding: Sharding) -> tuple[int, ...]:
    """Return the processes that have devices of a sharding."""
    if isinstance(sharding, XLACompatibleSharding):
        return _known_processes(sharding)
    return processes.processes_of(sharding.devices)


@lru_cache(maxsize=512)
def _known_processes(sharding: Sharding) -> tuple[int, ...]:
    return processes.processes_of(sharding.devices)


def _by_processes(leaves: Sequence[_Leaf]) -> list[tuple[tuple[int, ...], list[_Leaf]]]:
    """Return the leaves by the processes that use them, in an order that all processes share."""
    processes_of = attrgetter("processes")
    groups = groupby(sorted(leaves, key=processes_of), key=processes_of)
    return [(group, list(members)) for group, members in groups]


def _find_process_copies(unclear: Sequence[_Leaf]) -> list[_Leaf]:
    """Return the arrays of which every process has a copy, after an exchange of types."""
    own = []
    for group, leaves in _by_processes(unclear):
        reported = _exchange_places(group, leaves)
        for number, leaf in enumerate(leaves):
            if len({tuple(listed[number][1]) for listed in reported.values()}) > 1:
                own.append(leaf._replace(processes=_processes(leaf.target)))
            else:
                _refuse_other_targets(leaf, {p: listed[number] for p, listed in reported.items()})
    return own


type _Place = tuple[str, list[int], str, str]
"""Type of an array, ids of its devices, its target, and the tiles of that."""


def _exchange_places(group: tuple[int, ...], leaves: Sequence[_Leaf]) -> dict[int, list[_Place]]:
    """Return type, devices, target and its tiles of each leaf in all processes of a group.

    Raises:
        ProcessesError: The processes put different arrays, or some did not take part.
    """
    local = [
        (
            type_text(leaf.x),
            sorted(device.id for device in _data(leaf.x).sharding.device_set),
            str(leaf.target),
            _tiles_text(leaf),
        )
        for leaf in leaves
    ]
    try:
        texts = processes.RENDEZVOUS.exchange(_barrier(group), json.dumps(local))
    except processes.BarrierTimeoutError as error:
        # no-catalogue: needs several processes
        raise _timeout_error(error, leaves, group) from None
    reported = {process: json.loads(text) for process, text in texts.items()}
    types = {p: [kind for kind, *_ in listed] for p, listed in reported.items()}
    if any(listed != types[group[0]] for listed in types.values()):
        raise ProcessesError(  # no-catalogue: needs several processes
            f"device_put was called with different arrays: {_listed(types)}; let all "
            "processes put the same arrays in the same order",
            processes=group,
        )
    return reported


def _tiles_text(leaf: _Leaf) -> str:
    """Return devices and tiles of a target; a user's sharding may print as its address."""
    tiling = resolve_sharding(np.shape(leaf.x), leaf.target).tiling
    return f"{[device.id for device in leaf.target.devices]} {tiling}"


def _compare_targets(moving: Sequence[_Leaf], check: Check) -> None:
    """Check that all processes put arrays of several processes to the same other devices.

    The transfers are programs of pairs of processes, which would wait for each other.

    Raises:
        DeadlockError: The targets differ.
    """
    if check == "never":
        return
    for group, leaves in _by_processes(moving):
        key = "targets", *_key(leaves)
        if _compared.get(key):
            continue
        reported = _exchange_places(group, leaves)
        for number, leaf in enumerate(leaves):
            _refuse_other_targets(leaf, {p: listed[number] for p, listed in reported.items()})
        _compared.add(key)


def _refuse_other_targets(leaf: _Leaf, places: dict[int, _Place]) -> None:
    """Raise an error if processes put a leaf to different targets."""
    targets = {p: f"{kind} to {text}" for p, (kind, _, text, _) in places.items()}
    if len({(kind, tiles) for kind, *_, tiles in places.values()}) > 1:
        raise DeadlockError(  # no-catalogue: needs several processes
            f"device_put cannot complete: the processes put {leaf.path} to different places, "
            f"{format_by_process(targets)}, and would wait for each other; give the same target in "
            "all processes, or bring the value to each by multihost.process_allgather(x, "
            "tiled=True)",
            processes=tuple(places),
        )


def _listed(types: dict[int, list[str]]) -> str:
    return format_by_process({p: ", ".join(kinds[:_SHOWN]) for p, kinds in types.items()})


type _Key = tuple[Any, ...]


_compared = BoundedCache(4096)
"""Calls whose values were compared before, by the line that called."""


def _compare(own: Sequence[_Leaf], check: Check) -> None:
    if check == "never":
        return
    me = coordination.process_index()
    shared = [leaf for leaf in own if len(leaf.processes) > 1 and me in leaf.processes]
    for group, leaves in _by_processes(shared):
        key = _key(leaves)
        if check == "once" and _compared.get(key):
            continue
        named = [
            processes.NamedValue(leaf.path, _value(leaf.x), f"under {leaf.target}")
            for leaf in leaves
        ]
        try:
            differences = processes.differences(_barrier(group), named)
        except processes.BarrierTimeoutError as error:
            # no-catalogue: needs several processes
            raise _timeout_error(error, leaves, group) from None
        if differences:
            raise _unequal(differences, group)  # no-catalogue: needs several processes
        _compared.add(key)


def _unequal(
    differences: "Sequence[processes.ValueDifference]", group: tuple[int, ...]
) -> UnequalError:
    return UnequalError(
        f"device_put to devices of {len(group)} processes requires the same value in each, but "
        f"{processes.format_differences(differences)}: give all the same value (from one seed, one "
        "file, or multihost.broadcast_one_to_all), or, if each has a part of its own, write "
        "make_array_from_process_local_data(sharding, part)",
        processes=sorted({p for d in differences for p in d.processes}),
        paths=[d.path for d in differences],
    )


def _key(leaves: Sequence[_Leaf]) -> _Key:
    """Return the key of a call: its line, and the shapes and targets of the leaves."""
    shapes = tuple([np.shape(leaf.x) for leaf in leaves])
    targets = [leaf.target for leaf in leaves]
    # A sharding of a user's class may be unhashable.
    known = [t if isinstance(t, XLACompatibleSharding) else type(t) for t in targets]
    return *calling_line(), shapes, *known


def process_copies(values: Sequence[Any], paths: Sequence[str]) -> "Iterator[processes.NamedValue]":
    """Yield the host values and uncommitted arrays, of which every process has its own copy.

    Args:
        values: Arguments of a program over several processes.
        paths: The path of each.
    """
    for x, path in zip(values, paths, strict=True):
        if _source_processes(x) is None and not _has_no_value(aval_of(x)):
            yield processes.NamedValue(path, _value(x))


def _has_no_value(aval: Any) -> bool:
    return is_token(aval) or aval.dtype == jax.dtypes.float0


def _value(x: Any) -> np.ndarray:
    """Return the value of a leaf on the host."""
    if isinstance(x, jax.Array):
        handle = _data(x)
        array = handle if isinstance(handle, ArrayBase) else Array.from_jax(handle)
        return read_value(array, explicit=True)
    value, dtype, _ = as_host_value(x, lambda: "it")
    return np.asarray(value, dtype)


def _barrier(group: tuple[int, ...]) -> "processes.Barrier":
    """Return the barrier of a group. Threads besides the main one have one per calling line."""
    series = "device_put"
    if threading.current_thread() is not threading.main_thread():
        series += f"/{hashlib.sha256(repr(calling_line()).encode()).hexdigest()[:16]}"
    return processes.Barrier(group, series, _TIMEOUT, what="device_put")


def _timeout_error(
    error: "processes.BarrierTimeoutError", leaves: Sequence[_Leaf], group: tuple[int, ...]
) -> ProcessesError:
    first = leaves[0]
    if isinstance(first.x, jax.Array) and first.x.committed:
        why = "moves between their devices"
        advice = "if each has a value of its own, give np.asarray(x)"
    else:
        why = "is put on devices of all of them, and must be the same"
        advice = "check='never' compares nothing, and needs no other process"
    return ProcessesError(
        f"device_put {error.after(_TIMEOUT, len(group))}: {first.path} {why}; let every process "
        f"call it, in the same order; {advice}",
        processes=error.processes,
    )
