"""Compile modules for topologies in a worker process.

XLA ends its process when a check of its own fails. The worker that dies is replaced, and the
program that crashed it gets an error.
"""

import atexit
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xlashard._jax.runtime import compiler, offline
from xlashard.processes import job_pool
from xlashard.processes.dump_folder import temporary_dump_folder

_KEPT: list[tuple[int, job_pool.JobPool]] = []
"""The process id of the owner, and the worker that it keeps from one compilation to the next."""


def compile_module(module: Any, request: compiler.CompileRequest) -> tuple[Any, bytes | None]:
    """Compile a module; return its executable, and its machine code if a worker compiled it.

    A worker process compiles for devices that are not here. A process that is one itself compiles
    in place, as does one that can start none.

    Args:
        module: The module.
        request: Devices and options.

    Raises:
        RuntimeError: With the compiler's message, if it refuses the module or an option, or
            crashes.
    """
    if offline.compiles_elsewhere(request):
        with temporary_dump_folder() as folder:
            saved = offline.CompileInput.of(module, request)
            answer = run_job(saved.runner, saved.save(folder) | {"keep": True})
            if answer is not None and _is_final(answer, folder):
                return _result(answer, folder)
    return compiler.compile_module(module, request), None


def run_job(runner: str, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer of a worker process; None if this process is one, or can start none.

    Args:
        runner: `module:function` that takes the request.
        request: JSON value.
    """
    if job_pool.is_worker():
        return None
    try:
        with _pool() as pool:
            ((_, answer),) = pool.run([job_pool.WorkerJob("0", runner, request)])
    except OSError:
        return None
    return answer


def _is_final(answer: Mapping[str, Any], folder: Path) -> bool:
    """Return True unless the process failed for a reason that this one may not have."""
    if answer.get("outcome") == job_pool.FAILED:
        return (folder / offline.BEGUN).exists()
    return not re.search(_UNREGISTERED, answer["error"])


def _result(answer: Mapping[str, Any], folder: Path) -> tuple[offline.OfflineExecutable, bytes]:
    """Return the executable that a worker process compiled, and its machine code.

    Raises:
        RuntimeError: With the compiler's message.
    """
    if answer.get("outcome") == job_pool.FAILED:
        # no-catalogue: needs a crash of the compiler
        raise offline.RefusalError(crash_text(answer["reason"]), "")
    if answer["error"]:
        raise offline.RefusalError(answer["error"], answer["code"])
    return offline.read_result(folder)


_UNREGISTERED = r"No (?:FFI handler registered|registered implementation)"
"""Refusal of custom calls, which this process may have registered."""


@contextmanager
def _pool() -> Iterator[job_pool.JobPool]:
    """Yield a pool of one process.

    That of the main thread is kept: the kernel ends a worker with the thread that started it.
    """
    limits = job_pool.default_limits(1)
    if threading.current_thread() is not threading.main_thread():
        with job_pool.JobPool(limits) as pool:
            yield pool
        return
    # The child of a fork leaves the worker to its parent.
    if not _KEPT or _KEPT[0][0] != os.getpid():
        pool = job_pool.JobPool(limits)
        atexit.register(pool.close)
        _KEPT[:] = [(os.getpid(), pool)]
    yield _KEPT[0][1]


_CRASHED = "the worker process ended with SIG(?!KILL|TERM)"
_NEEDED = "shard|spmd|partition"
"""Passes without which a program would have other values."""


def crash_text(reason: str) -> str:
    """Return how the worker process failed and, if the compiler crashed, what to do.

    Args:
        reason: How the process ended, with the last lines of the compiler.
    """
    if not re.match(_CRASHED, reason):
        return reason
    found = re.search(r", in the pass ([\w-]+)$", reason)
    without = "change shapes or shardings"
    if found is not None and not re.search(_NEEDED, found[1]):
        option = f"xla_disable_hlo_passes={found[1]}"
        without = f"leave the pass out by the compiler option {option}, or {without}"
    return f"{reason}. It is a fault of XLA: {without}"
