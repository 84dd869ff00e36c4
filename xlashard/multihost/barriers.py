"""Points that processes leave together."""

import jax

from xlashard._jax import coordination
from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError, ProcessesError
from xlashard.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, format_by_process
from xlashard.processes.process_groups import quote_key

_PATIENCE = 300.0
_ADVICE = "; all processes must call it, in the same order"


def barrier(
    name: str, *, timeout: float = _PATIENCE, processes: tuple[int, ...] | None = None
) -> None:
    """Returns when all processes have called it with this name. Devices take no part in it.

    While it waits, it logs whom it waits for, and where those are who wait elsewhere. Barriers of
    different names don't know of each other, so several threads can use them; those of the same
    name are counted.

    Args:
        name: What the barrier is called, in messages too.
        timeout: How long to wait, in seconds.
        processes: Those that take part, this one among them; all by default.

    Raises:
        ProcessesError: Some did not come in time.
        DeadlockError: Some can't come any more.

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


def sync_global_devices(name: str, *, timeout: float = _PATIENCE) -> None:
    """Returns when all processes are here and all their devices have done what they were given.

    Args:
        name: Must be the same in all processes, which finds out when they call it in different
            places.
        timeout: How long to wait for the others, in seconds.

    Raises:
        ProcessesError: Some did not come in time, or came with another name.
        DeadlockError: Some can't come any more.

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
            names = format_by_process({process: repr(theirs) for process, theirs in came.items()})
            raise ProcessesError(  # no-catalogue: needs several processes
                f"sync_global_devices was called with different names at the same time: {names}; "
                "let all processes come to the same points in the same order",
                processes=tuple(came),
            )


def _check_name(function: str, name: object) -> None:
    if not isinstance(name, str):
        raise ArgumentError(
            f"{function}: name must be a text, the same in all processes, not "
            f"{type(name).__name__}: write {function}('the data is there')"
        )
