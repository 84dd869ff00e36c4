"""Setting of the comparison of programs between processes before their first run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError
from xlashard.program.consistency import CONSISTENCY, Policy


def check_programs(enabled: bool, *, timeout: float | None = None) -> None:
    """Set whether processes compare their programs, and how long they wait for each other.

    All processes must use the same setting. Its default comes from the environment:
    `XLASHARD_CHECK_PROGRAMS=0`, `XLASHARD_PROGRAMS_TIMEOUT=600`.

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
    """Context manager that applies `check_programs` within a block, for all threads.

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
    policy = replace(CONSISTENCY.policy, enabled=bool(enabled))
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ArgumentError(
                f"timeout must be a positive number of seconds, not {timeout!r}: write "
                "check_programs(True, timeout=3600)"
            )
        policy = replace(policy, timeout=float(timeout))
    return CONSISTENCY.use(policy)
