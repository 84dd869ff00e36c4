"""Compile modules for GPU topologies in a worker process.

XLA ends its process when a check of its own fails. The worker that dies is replaced, and the
program that crashed it gets an error.
"""

import atexit
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xlashard._jax.runtime import compiler, offline
from xlashard.processes import job_pool

_KEPT: list[tuple[int, job_pool.JobPool]] = []
"""The process id of the owner, and the worker that it keeps from one compilation to the next."""


def compile_module(module: Any, request: compiler.CompileRequest) -> tuple[Any, bytes | None]:
    """Compile a module; return its executable, and its machine code if a worker compiled it.

    A worker process compiles for GPUs without a GPU, a process that is one itself compiles in
    place, as does one that can start none.

    Args:
        module: The module.
        request: Devices and options.

    Raises:
        RuntimeError: With the compiler's message, if it refuses the module or an option, or
            crashes.
    """
    if offline.compiles_elsewhere(request) and not job_pool.is_worker():
        with tempfile.TemporaryDirectory(prefix="xlashard-compile-") as folder:
            try:
                return _compiled(module, request, Path(folder))
            except _NotElsewhereError:
                pass
    return compiler.compile_module(module, request), None


class _NotElsewhereError(Exception):
    """The worker process could not compile for a reason that this process may not have."""


def _compiled(
    module: Any, request: compiler.CompileRequest, folder: Path
) -> tuple[offline.OfflineExecutable, bytes]:
    """Compile a module in a worker process.

    Raises:
        _NotElsewhereError: If no process can be started, or it lacks something.
        RuntimeError: With the compiler's message.
    """
    saved = offline.CompileInput.of(module, request)
    job = job_pool.WorkerJob("0", saved.runner, saved.save(folder) | {"keep": True})
    try:
        with _pool() as pool:
            ((_, answer),) = pool.run([job])
    except OSError as error:
        raise _NotElsewhereError from error  # no-catalogue: caught
    if answer.get("outcome") == job_pool.FAILED:
        if not (folder / offline.BEGUN).exists():
            raise _NotElsewhereError  # no-catalogue: caught
        # no-catalogue: needs a crash of the compiler
        raise offline.RefusalError(crash_text(answer["reason"]), "")
    if re.search(_UNREGISTERED, answer["error"]):
        raise _NotElsewhereError  # no-catalogue: caught
    if answer["error"]:
        # no-catalogue: an error of XLA
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
