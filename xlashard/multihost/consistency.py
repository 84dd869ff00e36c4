"""Whether the parts that processes give for global arrays fit together."""

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np

from xlashard._jax.frames import calling_line
from xlashard._jax.transfer import Tracer
from xlashard.array.together import Compared
from xlashard.config import CheckName
from xlashard.errors import (
    ArgumentError,
    GeometryError,
    PlacementError,
    ProcessesError,
    UnequalError,
)
from xlashard.lazily import dataclass
from xlashard.multihost.collective_call import CollectiveCall, Contribution, can_meet, digest_of
from xlashard.multihost.host_local.host_mesh import HostMesh
from xlashard.multihost.leaves import HostLeaf, read_named
from xlashard.processes import NamedValue, digest, format_processes, minority
from xlashard.sharding import PartitionSpec, spec_of
from xlashard.wording import typed

type PieceDigests = dict[str, dict[str, str]]
"""By path of a value, the digests of the pieces of it that a process holds, by any name."""


@dataclass(frozen=True)
class MismatchedPiece:
    """A piece that the processes which hold it do not hold alike.

    Attributes:
        name: The piece's.
        holders: The processes that hold it.
        odd: Those of them that hold something else than most.
    """

    name: str
    holders: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def text(self) -> str:
        """Whom it concerns, in words."""
        return f"is not the same in {format_processes(self.holders)}"


def mismatched_pieces(by_process: Mapping[int, PieceDigests], path: str) -> list[MismatchedPiece]:
    """The pieces of one value that are not the same everywhere.

    Args:
        by_process: What each process holds.
        path: The path of the value.
    """
    holders: dict[str, dict[int, str]] = {}
    for process, held in by_process.items():
        for name, piece in held.get(path, {}).items():
            holders.setdefault(name, {})[process] = piece
    return [
        MismatchedPiece(name, tuple(held), minority(held))
        for name, held in holders.items()
        if len(set(held.values())) > 1
    ]


_compared = Compared()


def read_check(check: Any) -> CheckName:
    """Reads how often to check.

    Raises:
        ArgumentError: It is another one.
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
    """Checks that what the processes give fits together: types, and values that several give.

    Args:
        call: For what.
        host: The mesh.
        named: The leaves, each with its path and its spec. Those that are global already, or of
            which nothing is known yet, are left out.
        once: Whether to do so only at the first call from a line of the caller with these types.

    Raises:
        ProcessesError: Other types, or processes that did not come.
        UnequalError: Processes give different values for the same part of an array.
    """
    if not can_meet():
        raise ProcessesError(  # no-catalogue: needs several processes
            f"{call.name}(..., check=...) compares values between processes, which have no store "
            "to meet in: call xlashard.multihost.initialize() first, or leave check out",
            processes=host.processes,
        )
    local = [((path, x), spec) for (path, x), spec in named if _is_local(x)]
    key = *calling_line(), host.whole, *(_key(*x, spec) for x, spec in local)
    if once and key in _compared:
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
    came = call.exchange(Contribution(digest_of(types), json.dumps(held)))
    call.check_same_types(came, types)
    if len({they.note for they in came.values()}) > 1:
        _check_values(call, {p: json.loads(they.note) for p, they in came.items()}, pairs)
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
    """Says of the first leaf that several processes give, and not alike, where it differs."""
    for leaf, pspec in pairs:
        unlike, spec = mismatched_pieces(held, leaf.path), spec_of(pspec)
        if not unlike:
            continue
        where = unlike[0].text
        if not spec.axes:
            found = call.differences([NamedValue(leaf.path, _value(leaf))])
            where = found[0].text if found else where
        raise UnequalError(  # no-catalogue: needs several processes
            f"{leaf.path} under {spec.describe()}, by which these processes give the same part of "
            f"the array: {where}; give the same in all of them, such as broadcast_one_to_all(x), "
            "or name an axis that cuts it",
            processes=unlike[0].odd,
            paths=(leaf.path,),
        )
