"""Comparison between processes: replicated parts of arrays, and programs before their first run."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, get_args

import jax
import numpy as np

from xlashard._jax.lowering import uses_shardy
from xlashard._jax.runtime.compiler import CompileRequest
from xlashard._jax.runtime.first_runs import JitExecution, watch_first_runs
from xlashard._jax.runtime.global_state import BoundedCache
from xlashard._jax.runtime.tracebacks import calling_line
from xlashard._jax.runtime.transfer import Tracer, host_view, split
from xlashard.config import CheckName
from xlashard.core.array import Array
from xlashard.core.array.array_class.shard import index_text
from xlashard.core.array.cross_process_check import process_copies
from xlashard.core.array.placement.read import distinct_here, reading_allowed
from xlashard.core.pjit.lower import ClosedValues
from xlashard.core.processes import NamedValue, ValueDifference, digest, minority
from xlashard.core.program.consistency import CONSISTENCY, Policy
from xlashard.core.program.consistency.fingerprint import ProgramFingerprint
from xlashard.core.program.plan import Partitioner, ProgramPlan, ValuePlan
from xlashard.core.sharding import PartitionSpec, XLACompatibleSharding, from_jax, spec_of
from xlashard.errors import (
    ArgumentError,
    GeometryError,
    PlacementError,
    ProcessesError,
    ShardingError,
    UnequalError,
)
from xlashard.pods.multihost.collective_call import (
    CollectiveCall,
    HostLeaf,
    can_meet,
    read_named,
)
from xlashard.pods.multihost.host_mesh import HostMesh
from xlashard.support.formatting import format_processes, typed
from xlashard.support.tracebacks import short_tracebacks

type PieceDigests = dict[str, dict[str, str]]
"""Digests of the pieces that a process holds, by path of the value and name of the piece."""


def _unequal_pieces(by_process: Mapping[int, PieceDigests], path: str) -> list[ValueDifference]:
    """Return the pieces of one value that differ between the processes that hold them.

    Args:
        by_process: Pieces of each process.
        path: Path of the value.

    Returns:
        The differences, each with the name of a piece as its path.
    """
    holders: dict[str, dict[int, str]] = {}
    for process, held in by_process.items():
        for name, piece in held.get(path, {}).items():
            holders.setdefault(name, {})[process] = piece
    return [
        ValueDifference(name, minority(held), f"differs between {format_processes(tuple(held))}")
        for name, held in holders.items()
        if len(set(held.values())) > 1
    ]


def tile_digests(leaves: Sequence[HostLeaf]) -> PieceDigests:
    """Return digests of the tiles of arrays that were not read and may be replicated elsewhere."""
    return {
        leaf.path: _digests_of(leaf.array)
        for leaf in leaves
        if leaf.value is None and leaf.array is not None and leaf.array.shape
    }


def _digests_of(array: Array) -> dict[str, str]:
    handle = array._handle
    tiling, distinct = distinct_here(handle)
    if tiling.num_replicas == 1:
        return {}
    tiles = tiling.tile_ids(distinct.positions).tolist()
    with reading_allowed(handle, explicit=True):
        buffers = split(handle)
        return {
            str(tile): digest(host_view(buffers[number])[0]).hex()[:32]
            for tile, number in zip(tiles, distinct.buffers, strict=True)
        }


def unequal_tiles(
    by_process: Mapping[int, PieceDigests], leaves: Sequence[HostLeaf]
) -> list[ValueDifference]:
    """Return the first differing tile of each array whose copies differ between processes."""
    unequal = []
    for leaf in leaves:
        unlike = _unequal_pieces(by_process, leaf.path)
        if unlike and leaf.array is not None:
            first = min(unlike, key=lambda piece: int(piece.path))
            text = f"its piece {_index_of(leaf.array, int(first.path))} {first.text}"
            unequal.append(ValueDifference(leaf.path, first.processes, text))
    return unequal


def _index_of(array: Array, tile: int) -> str:
    tiling, _ = distinct_here(array._handle)
    position = tiling.tile_ids().tolist().index(tile)
    return index_text(tiling.indices(array.shape, [position])[0])


_compared = BoundedCache(4096)


def read_check(check: Any) -> CheckName:
    """Validate the `check` argument.

    Raises:
        ArgumentError: The value is not 'never', 'once' or 'always'.
    """
    if check not in get_args(CheckName.__value__):
        raise ArgumentError(
            "check must be 'never', 'once' (at the first call from a line with these shapes) or "
            f"'always', not {check!r}"
        )
    return check


def compare_parts(
    call: CollectiveCall,
    host: HostMesh,
    named: Sequence[tuple[tuple[str, Any], PartitionSpec]],
    *,
    once: bool,
) -> None:
    """Check that the host-local inputs of all processes have equal types and replicated values.

    Args:
        call: The user's call.
        host: The mesh.
        named: Leaves with path and spec. Global arrays and traced values are skipped.
        once: Whether to check only the first call from a source line with these types.

    Raises:
        ProcessesError: Types differ, or some processes did not arrive.
        UnequalError: Processes provide different values for the same part of an array.
    """
    if not can_meet():
        raise ProcessesError(  # no-catalogue: needs several processes
            f"{call.name}(..., check=...) compares values between processes, which requires JAX's "
            "coordination service: call xlashard.multihost.initialize() first, or omit check",
            processes=host.processes,
        )
    local = [((path, x), spec) for (path, x), spec in named if _is_local(x)]
    key = *calling_line(), host.whole, *(_key(*x, spec) for x, spec in local)
    if once and _compared.get(key):
        return
    with call.abort_together():
        leaves = read_named([x for x, _ in local], call.name)
        pairs = [(leaf, spec) for leaf, (_, spec) in zip(leaves, local, strict=True)]
        types = [(leaf.path, _global_type(leaf, host, spec)) for leaf, spec in pairs]
        held: PieceDigests = {
            leaf.path: {host.block(spec_of(spec)): digest(_value(leaf)).hex()[:32]}
            for leaf, spec in pairs
            if host.is_shared(spec_of(spec))
        }
    contributions = call.exchange_typed(types, json.dumps(held))
    if len({they.note for they in contributions.values()}) > 1:
        _check_values(call, {p: json.loads(they.note) for p, they in contributions.items()}, pairs)
    _compared.add(key)


def _is_local(x: Any) -> bool:
    return not isinstance(x, Tracer) and not (
        isinstance(x, jax.Array) and not x.is_fully_addressable
    )


def _key(path: str, x: Any, spec: PartitionSpec) -> Hashable:
    return path, np.shape(x), str(getattr(x, "dtype", type(x))), spec


def _value(leaf: HostLeaf) -> np.ndarray:
    assert leaf.value is not None
    return leaf.value


def _global_type(leaf: HostLeaf, host: HostMesh, spec: PartitionSpec) -> str:
    try:
        shape = host.global_shape(spec, _value(leaf).shape)
    except GeometryError as error:
        # no-catalogue: needs several processes
        raise PlacementError(f"{leaf.path}: {error}") from None
    return f"{typed(_value(leaf).dtype.name, shape)} under {spec_of(spec).describe()}"


def _check_values(
    call: CollectiveCall,
    held: Mapping[int, PieceDigests],
    pairs: Sequence[tuple[HostLeaf, PartitionSpec]],
) -> None:
    """Raise an error for the first leaf whose replicated values differ between processes."""
    for leaf, pspec in pairs:
        unlike, spec = _unequal_pieces(held, leaf.path), spec_of(pspec)
        if not unlike:
            continue
        where = unlike[0].text
        if not spec.axes:
            unequal = call.differences([NamedValue(leaf.path, _value(leaf))])
            where = unequal[0].text if unequal else where
        raise UnequalError(  # no-catalogue: needs several processes
            f"{leaf.path} under {spec.describe()}, by which several processes provide the same "
            f"part of the array: {where}; pass equal values, such as broadcast_one_to_all(x), or "
            "name an axis that shards it",
            processes=unlike[0].processes,
            paths=(leaf.path,),
        )


def check_programs(enabled: bool = True, *, timeout: float | None = None) -> None:
    """Set whether processes compare their programs, and how long they wait for each other.

    The first run of a program also compares host values and uncommitted arrays that each process
    passes, such as a seed or a learning rate, which must be equal in all.

    Programs of `pjit` are compared unless this turns it off. Programs of `jax.jit` are compared
    from the first `check_programs(True)` on: write it before the first of them is compiled. Repeat
    calls cost the same with and without. Python functions that `jax.pure_callback` and its kind
    call are not compared for `jax.jit`.

    All processes must use the same setting. Its default comes from the environment:
    `XLASHARD_CHECK_PROGRAMS=0` compares no programs, `1` those of `jax.jit` too;
    `XLASHARD_PROGRAMS_TIMEOUT=600` sets the timeout. Both are read when xlashard is imported.

    Args:
        enabled: Whether programs over several processes are compared before their first run.
        timeout: How long a process waits for its peers, in seconds; unchanged if None. Peers may
            still be compiling, so a short timeout ends valid programs.

    Raises:
        ArgumentError: The timeout is not a positive number.

    Example:
        >>> from xlashard import multihost
        >>> multihost.check_programs(True, timeout=600)
    """
    with short_tracebacks:
        _use(enabled, timeout)


@contextmanager
def checked_programs(enabled: bool, *, timeout: float | None = None) -> Iterator[None]:
    """Apply `check_programs` within a block, for all threads.

    Args:
        enabled: Whether programs over several processes are compared before their first run.
        timeout: How long a process waits for its peers, in seconds; unchanged if None.

    Raises:
        ArgumentError: The timeout is not a positive number.

    Example:
        >>> from xlashard import multihost
        >>> with multihost.checked_programs(False):
        ...     pass
    """
    before = _use(enabled, timeout)
    try:
        yield
    finally:
        CONSISTENCY.use(before)


def _use(enabled: bool, timeout: float | None) -> Policy:
    if enabled:
        watch_jit_programs()
    policy = replace(CONSISTENCY.policy, enabled=bool(enabled), includes_jit=bool(enabled))
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ArgumentError(
                f"timeout must be a positive number of seconds, not {timeout!r}: write "
                "check_programs(True, timeout=3600)"
            )
        policy = replace(policy, timeout=float(timeout))
    return CONSISTENCY.use(policy)


@lru_cache(maxsize=1)
def watch_jit_programs() -> None:
    """Compare programs of `jax.jit` as long as the policy of this process includes them."""
    watch_first_runs(_admit)


def _admit(program: JitExecution, values: Sequence[Any]) -> None:
    if CONSISTENCY.policy.includes_jit:
        copies = partial(process_copies, values, program.paths)
        CONSISTENCY.admit(_fingerprint(program), copies=copies)


def _fingerprint(program: JitExecution) -> ProgramFingerprint:
    devices = program.devices
    args = _values(program.arguments, program.in_shardings, devices, program.paths)
    names = [f"result[{i}]" for i in range(len(program.results))]
    results = _values(program.results, program.out_shardings, devices, names)
    shardy = uses_shardy()
    plan = ProgramPlan(
        name=program.name,
        devices=devices,
        args=args,
        results=results,
        donated=program.donated,
        partitioner=Partitioner.SHARDY if shardy else Partitioner.GSPMD,
        options=program.options,
    )
    tokens = (False,) * program.ordered_effects
    request = CompileRequest(
        devices,
        shardy,
        (*tokens, *(value.is_free for value in args)),
        (*tokens, *(value.is_free for value in results)),
        program.options,
    )
    closed = ClosedValues(program.closed_over, program.closed_over)
    return ProgramFingerprint(plan, program.module, request, closed=closed)


def _values(
    avals: Sequence[Any], shardings: Sequence[Any], devices: tuple[Any, ...], paths: Sequence[str]
) -> tuple[ValuePlan, ...]:
    return tuple(
        ValuePlan(
            shape=tuple(getattr(aval, "shape", ())),
            dtype=str(getattr(aval, "dtype", aval)),
            sharding=_sharding_on(sharding, devices),
            name=path,
        )
        for aval, sharding, path in zip(avals, shardings, paths, strict=True)
    )


def _sharding_on(sharding: Any, devices: tuple[Any, ...]) -> XLACompatibleSharding | None:
    """Return a sharding over the devices of a program; None for one that the module alone has."""
    if sharding is None:
        return None
    with suppress(ShardingError):  # for instance on an abstract mesh
        known = from_jax(sharding)
        if isinstance(known, XLACompatibleSharding) and tuple(known.devices) == devices:
            return known
    return None
