"""Transfer guards, asked once where a transfer begins, in the words of whoever asked for it.

The transfer itself then runs free: how it is done (through the host's memory, by a program, by
copies between devices) is none of the guards' business.
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
    """Asks the guards for a transfer, and writes it down where they want that.

    Args:
        guards: The guards.
        way: Which way it goes.
        what: What is moved, as its owner would call it.
        asked_by: What one writes to ask for it by name, if this was not written: then the transfer
            is an implicit one.

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
    """A block in which something is moved, if it may be; as `check_transfer`."""
    check_transfer(guards, way, what, asked_by)
    with jax.transfer_guard("allow"):
        yield


def allow_transfers() -> AbstractContextManager[Any]:
    """A block that computes, whatever it has to move for that."""
    return _NOTHING if active_guards() is None else jax.transfer_guard("allow")


# Of the operations that come here some take no longer than making a context of their own would.
_NOTHING = nullcontext()
