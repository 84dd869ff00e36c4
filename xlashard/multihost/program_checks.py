"""Whether the processes of a program compare it before they run it for the first time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError
from xlashard.program.agreement import AGREEMENTS, Policy


def check_programs(enabled: bool, *, timeout: float | None = None) -> None:
    """Sets whether processes compare their programs, and how long they wait for each other.

    It must be set alike in all processes. The environment sets it first:
    `XLASHARD_CHECK_PROGRAMS=0`, `XLASHARD_PROGRAMS_TIMEOUT=600`.

    Args:
        enabled: Whether programs over several processes are compared before their first run.
        timeout: How long a process waits for the others to come, in seconds; as before if not
            given. They may be compiling, so a short one ends programs that are all right.

    Raises:
        ArgumentError: The timeout is no positive number.

    Example:
        >>> from xlashard import multihost
        >>> multihost.check_programs(True, timeout=600)
    """
    with short_tracebacks:
        _use(enabled, timeout)


@contextmanager
def checked_programs(enabled: bool, *, timeout: float | None = None) -> Iterator[None]:
    """The same within a block, for all threads.

    Args:
        enabled: Whether programs over several processes are compared before their first run.
        timeout: How long a process waits for the others to come, in seconds; as before if not
            given.

    Raises:
        ArgumentError: The timeout is no positive number.

    Example:
        >>> from xlashard import multihost
        >>> with multihost.checked_programs(False):
        ...     pass
    """
    before = _use(enabled, timeout)
    try:
        yield
    finally:
        AGREEMENTS.use(before)


def _use(enabled: bool, timeout: float | None) -> Policy:
    policy = replace(AGREEMENTS.policy, enabled=bool(enabled))
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ArgumentError(
                f"timeout must be a positive number of seconds, not {timeout!r}: write "
                "check_programs(True, timeout=3600)"
            )
        policy = replace(policy, timeout=float(timeout))
    return AGREEMENTS.use(policy)
