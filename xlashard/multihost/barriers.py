"""Named barriers for all processes of a program."""

import jax

from xlashard._jax.runtime import coordination
from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError, ProcessesError
from xlashard.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, format_by_process
from xlashard.processes.process_groups import quote_key

_TIMEOUT = 300.0
_ADVICE = "; all processes must call it, in the same order"


def barrier(
    name: str, *, timeout: float = _TIMEOUT, processes: tuple[int, ...] | None = None
) -> None:
    """Wait until all processes have called this function with the same name.

    Devices are not involved. While waiting, it logs the missing processes and the barriers at which
    they wait. Barriers of different names are independent, so several threads can use them;
    barriers of the same name are counted.

    Args:
        name: Name of the barrier, also used in messages.
        timeout: How long to wait, in seconds.
        processes: Participating processes, including this one; all by default.

    Raises:
        ProcessesError: Some processes did not arrive in time.
        DeadlockError: Some processes can no longer arrive.

    Example:
        >>> from xlashard import multihost
        >>> multihost.barrier("the data is there")
    """
    with short_tracebacks:
        _check_name("barrier", name)
        all_processes = tuple(range(coordination.process_count()))
        group = all_processes if processes is None else tuple(sorted(set(processes)))
        me = coordination.process_index()
        if me not in group or not set(group) <= set(all_processes):
            raise ProcessesError(
                f"barrier({name!r}, processes={processes}) of process {me} of "
                f"{len(all_processes)}: name processes from 0 to {all_processes[-1]}, "
                "and call it only in those",
                processes=group,
            )
        what = f"barrier {name!r}"
        invitation = Barrier(group, f"barriers/{quote_key(name)}", timeout, what=what)
        try:
            RENDEZVOUS.exchange(invitation, "")
        except BarrierTimeoutError as error:
            raise ProcessesError(  # no-catalogue: needs several processes
                f"{what} {error.after(timeout, len(group))}{_ADVICE}", processes=error.processes
            ) from None


def sync_global_devices(name: str, *, timeout: float = _TIMEOUT) -> None:
    """Wait until all processes have arrived and all their devices have finished their work.

    Args:
        name: Must be equal in all processes, which detects calls from different places.
        timeout: How long to wait for the other processes, in seconds.

    Raises:
        ProcessesError: Some processes did not arrive in time, or passed another name.
        DeadlockError: Some processes can no longer arrive.

    Example:
        >>> from xlashard import multihost
        >>> multihost.sync_global_devices("before the measurement")
    """
    with short_tracebacks:
        _check_name("sync_global_devices", name)
        for array in jax.live_arrays():
            array.block_until_ready()
        jax.effects_barrier()
        all_processes = tuple(range(coordination.process_count()))
        what = f"sync_global_devices({name!r})"
        try:
            came = RENDEZVOUS.exchange(Barrier(all_processes, "sync", timeout, what=what), name)
        except BarrierTimeoutError as error:
            raise ProcessesError(  # no-catalogue: needs several processes
                f"{what} {error.after(timeout, len(all_processes))}{_ADVICE}",
                processes=error.processes,
            ) from None
        if len(set(came.values())) > 1:
            names = format_by_process({process: repr(name) for process, name in came.items()})
            raise ProcessesError(  # no-catalogue: needs several processes
                f"sync_global_devices was called with different names at the same time: {names}; "
                "call it with the same names in the same order in all processes",
                processes=tuple(came),
            )


def _check_name(function: str, name: object) -> None:
    if not isinstance(name, str):
        raise ArgumentError(
            f"{function}: name must be a text, the same in all processes, not "
            f"{type(name).__name__}: write {function}('the data is there')"
        )
