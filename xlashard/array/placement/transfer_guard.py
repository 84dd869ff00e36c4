"""Transfer guards, checked once where a transfer begins, in terms of the caller's arguments.

The transfer itself then runs unguarded: its implementation (through host memory, by a program, by
copies between devices) is internal.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from xlashard._jax.runtime.global_state import (
    Transfer,
    TransferGuards,
    active_guards,
)
from xlashard._jax.runtime.global_state import inside_device_get as inside_device_get
from xlashard.errors import TransferGuardError

_log = logging.getLogger("xlashard.transfer")


def _direction_text(direction: Transfer) -> str:
    return direction.value.replace("_", "-")


def check_transfer(
    guards: TransferGuards, direction: Transfer, what: str, explicit_form: str = ""
) -> None:
    """Check that the guards allow a transfer, and log it if they request that.

    Args:
        guards: The guards.
        direction: Direction of the transfer.
        what: Description of the value in errors.
        explicit_form: Code that would make the transfer explicit, if it is implicit.

    Raises:
        TransferGuardError: A guard forbids it.
    """
    explicit = not explicit_form
    if guards.refuse(direction, explicit=explicit):
        setting = f"jax.transfer_guard_{direction.value}"
        instead = f"{explicit_form}, or " if explicit_form else ""
        raise TransferGuardError(
            f"disallowed {_direction_text(direction)} transfer of {what}, by "
            f"{setting}({guards.level(direction)!r}): write {instead}"
            f"`with {setting}('allow'):` around it"
        )
    if guards.log(direction, explicit=explicit):
        kind = "explicit" if explicit else "implicit"
        _log.warning("%s transfer of %s, %s", _direction_text(direction), what, kind)


def guarded(
    guards: TransferGuards | None, direction: Transfer, what: str, explicit_form: str = ""
) -> AbstractContextManager[Any]:
    """Return a context in which a transfer runs, if there are no guards or they allow it."""
    if guards is None:
        return _NOTHING
    check_transfer(guards, direction, what, explicit_form)
    return jax.transfer_guard("allow")


def allow_transfers() -> AbstractContextManager[Any]:
    """Return a context for internal transfers, which guards let pass."""
    return _NOTHING if active_guards() is None else jax.transfer_guard("allow")


# Making a context costs as much as some of the operations that need one.
_NOTHING = nullcontext()
