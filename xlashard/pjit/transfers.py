"""What a call would move for its arguments, before the transfer guards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from xlashard._jax.trace.tracing import abstractify
from xlashard.array.core.base import type_text
from xlashard.array.placement.transfer_guard import Transfer, TransferGuards, check_transfer
from xlashard.pjit.arguments import bare


@contextmanager
def arguments_may_move(
    guards: TransferGuards, values: Sequence[Any], paths: Sequence[str], twins: Sequence[Any]
) -> Iterator[None]:
    """A block in which a program's arguments are placed, if all of them may be.

    Args:
        guards: The guards.
        values: The arguments.
        paths: As a person would write them.
        twins: Where the program takes each.

    Raises:
        TransferGuardError: One may not go there, with its path.
    """
    for value, path, twin in zip(values, paths, twins, strict=True):
        handle = bare(value)
        asked_by = f"device_put({path}, sharding) before"
        if not isinstance(handle, jax.Array):
            what = f"{path} ({type(value).__name__} {type_text(abstractify(value))})"
            check_transfer(guards, Transfer.HOST_TO_DEVICE, what, asked_by)
        elif not handle.sharding.is_equivalent_to(twin, handle.ndim):
            what = f"{path} ({type_text(handle)})"
            check_transfer(guards, Transfer.DEVICE_TO_DEVICE, what, asked_by)
    with jax.transfer_guard("allow"):
        yield
