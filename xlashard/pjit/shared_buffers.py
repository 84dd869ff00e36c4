"""Finds donated arguments that share buffers with another argument, before the program starts.

XLA refuses the call on each device independently. If only some devices hold the shared buffer, as
with an array on one device that is passed twice to a program over eight, the other devices have
started already and wait in a collective forever. XLA refuses a repeat call on a single device as a
whole, and the arguments are compared only for the error.

A result of a program whose handle no code has read since is the only holder of its buffers. A
repeat call therefore compares the ids of its arguments, and inspects the buffers of the remaining
donated arrays only.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from xlashard._jax.runtime.transfer import base_handle, shared_pair
from xlashard.errors import DeletedError, DonationError
from xlashard.pjit.arguments import bare
from xlashard.program import Program

_EXCLUSIVE = attrgetter("_exclusive")


def may_share(donated: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if a donated argument shares buffers with another one, or lacks one.

    Args:
        donated: The leaves of the donated arguments.
        others: The leaves of the other arguments, and arrays that the program closes over.
    """
    try:
        all_exclusive = all(map(_EXCLUSIVE, donated))
    except AttributeError:  # no Array
        all_exclusive = False
    # The same Array can be given twice, whether others hold its buffers or not.
    exclusive = donated if all_exclusive else list(filter(_is_exclusive, donated))
    ids = set(map(id, exclusive))
    if len(ids) < len(exclusive) or not ids.isdisjoint(map(id, others)):
        return True
    if all_exclusive:
        return False
    given = list(_handles(donated))
    if not given:
        return False
    return shared_pair([*given, *_handles(others)], range(len(given))) is not None


def check_unshared(
    program: Program, handles: Sequence[Any], paths: Sequence[str], name: str
) -> None:
    """Refuse a call in which a buffer that the program takes over belongs to another argument too.

    Args:
        program: The program.
        handles: Its placed arguments.
        paths: Each as the user would write it.
        name: The function.

    Raises:
        DonationError: With the paths of the two arguments.
        DeletedError: With the path of an argument that lacks one of its buffers.
    """
    pair = program.shared_pair(handles)
    if pair is not None:
        raise refusal(pair, paths, program.parts.plan.donated, name)


def refusal(
    pair: tuple[int, int], paths: Sequence[str], donated: Sequence[bool], name: str
) -> DonationError | DeletedError:
    """Return the error for two arguments that share a buffer.

    Args:
        pair: Their positions; twice the same for an argument that lacks one of its buffers.
        paths: Each argument as the user would write it.
        donated: For each argument whether it is donated.
        name: The function.
    """
    first, second = (paths[i] for i in pair)
    if pair[0] == pair[1]:
        return DeletedError(
            f"{first} lacks the buffer of one of its devices: that shard was deleted or donated by "
            f"itself; make {first} anew before you call {name}"
        )
    taken = first if donated[pair[0]] else second
    return DonationError(
        f"{name} got the same buffers as {first} and as {second}, and {taken} is donated: "
        f"pass a copy as one of them (jnp.copy(x)), or take {taken} out of donate_argnums"
    )


def _is_exclusive(value: Any) -> bool:
    return bool(getattr(value, "_exclusive", False))


def _handles(values: Iterable[Any]) -> Iterable[Any]:
    """Return the handles of arrays that may share their buffers."""
    handles = (base_handle(bare(value)) for value in values if not _is_exclusive(value))
    return (handle for handle in handles if handle is not None)
