"""Transfer guards, checked once where a transfer begins, in terms of the caller's arguments.

The transfer itself then runs unguarded: its implementation (through host memory, by a program, by
copies between devices) is internal.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax

from xlashard._jax.runtime.global_state import (
    Transfer,
    TransferGuards,
    active_guards,
    inside_device_get,
)
from xlashard.errors import TransferGuardError

__all__ = [
    "Transfer",
    "TransferGuards",
    "active_guards",
    "allow_transfers",
    "check_transfer",
    "guarded",
    "inside_device_get",
]

_log = logging.getLogger("xlashard.transfer")


def _direction_text(way: Transfer) -> str:
    return way.value.replace("_", "-")


def check_transfer(guards: TransferGuards, way: Transfer, what: str, asked_by: str = "") -> None:
    """Check that the guards allow a transfer, and log it if they request that.

    Args:
        guards: The guards.
        way: Direction of the transfer.
        what: Description of the value in errors.
        asked_by: Code that would make the transfer explicit, if it is implicit.

    Raises:
        TransferGuardError: A guard forbids it.
    """
    explicit = not asked_by
    if guards.refuse(way, explicit=explicit):
        setting = f"jax.transfer_guard_{way.value}"
        instead = f"{asked_by}, or " if asked_by else ""
        raise TransferGuardError(
            f"disallowed {_direction_text(way)} transfer of {what}, by "
            f"{setting}({guards.level(way)!r}): write {instead}`with {setting}('allow'):` around it"
        )
    if guards.log(way, explicit=explicit):
        kind = "as asked for" if explicit else "without being asked for"
        _log.warning("%s transfer of %s, %s", _direction_text(way), what, kind)


@contextmanager
def guarded(guards: TransferGuards, way: Transfer, what: str, asked_by: str = "") -> Iterator[None]:
    """Return a context in which a transfer runs, if `check_transfer` allows it."""
    check_transfer(guards, way, what, asked_by)
    with jax.transfer_guard("allow"):
        yield


def allow_transfers() -> AbstractContextManager[Any]:
    """Return a context for internal transfers, which guards let pass."""
    return _NOTHING if active_guards() is None else jax.transfer_guard("allow")


# Making a context costs as much as some of the operations that need one.
_NOTHING = nullcontext()
