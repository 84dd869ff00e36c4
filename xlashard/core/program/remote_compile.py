"""Compilation in another process: in a worker that may crash, or in one process for all.

XLA ends its process when a check of its own fails. A worker process therefore compiles for devices
that are not here: the worker that dies is replaced, and the program that crashed it gets an error.

A program of several processes may be compiled in one of them, and loaded in the others. The
executable is machine code from the shared key-value store: a process that writes there can run code
in every process. Sharing is therefore opt-in.
"""

import json
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from xlashard._jax.lowering import LoweredBody
from xlashard._jax.runtime import compiler, coordination, executables, offline
from xlashard.core.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, store
from xlashard.core.program.consistency import CONSISTENCY, is_shared
from xlashard.core.program.consistency.fingerprint import ProgramFingerprint
from xlashard.core.program.environment import Environment
from xlashard.core.program.executables import LoadedExecutable, Source
from xlashard.errors import ProcessesError, SharedBinaryWarning
from xlashard.support.formatting import format_processes
from xlashard.workers import job_pool
from xlashard.workers.dump_folder import temporary_dump_folder

_OWN_FILES = str(Path(__file__).parents[2])

_KEPT: list[job_pool.JobPool] = []
"""The pool whose worker is kept from one compilation to the next."""


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
        # Without room for its files, as without a process.
        with suppress(OSError), temporary_dump_folder() as folder:
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
        with borrow_pool() as pool:
            ((_, answer),) = pool.run([job_pool.WorkerJob("0", runner, request)])
    except OSError:
        return None
    return answer


def _is_final(answer: Mapping[str, Any], folder: Path) -> bool:
    """Return True unless the process failed for a reason that this one may not have."""
    if answer.get("outcome") == job_pool.FAILED:
        return (folder / offline.BEGUN).exists()
    return not re.search(_UNREGISTERED, answer["error"])


def _result(answer: Mapping[str, Any], folder: Path) -> tuple[executables.OfflineExecutable, bytes]:
    """Return the executable that a worker process compiled, and its machine code.

    Raises:
        RuntimeError: With the compiler's message.
    """
    if answer.get("outcome") == job_pool.FAILED:
        # no-catalogue: needs a crash of the compiler
        raise offline.RefusalError(crash_text(answer["reason"]), "")
    if answer["error"]:
        raise offline.RefusalError(answer["error"], answer["code"])
    executable, code = offline.read_result(folder)
    return replace(executable, log=answer.get("log", "")), code


_UNREGISTERED = r"No (?:FFI handler registered|registered implementation)|custom_partitioner: Tr"
"""Refusal of custom calls, whose implementation or rules of partitioning this process may have."""


@contextmanager
def borrow_pool() -> Iterator[job_pool.JobPool]:
    """Yield a pool of one process.

    That of the main thread is kept: the kernel ends a worker with the thread that started it.
    """
    limits = job_pool.default_limits(1)
    if threading.current_thread() is not threading.main_thread():
        with job_pool.JobPool(limits) as pool:
            yield pool
        return
    if not _KEPT:
        _KEPT.append(job_pool.JobPool(limits))
    yield _KEPT[0]


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
    match = re.search(r", in the pass ([\w-]+)$", reason)
    without = "change shapes or shardings"
    if match is not None and not re.search(_NEEDED, match[1]):
        option = f"xla_disable_hlo_passes={match[1]}"
        without = f"leave the pass out by the compiler option {option}, or {without}"
    return f"{reason}. It is a fault of XLA: {without}"


class _Status(NamedTuple):
    """Status of a process in the exchange.

    Attributes:
        machine: Digest of the machine of its code.
        refusal: Reason why the program can't be shared; empty if it can.
        error: The compiler's error, if any.
    """

    machine: str = ""
    refusal: str = ""
    error: str = ""


_SHARED: set[str] = set()
"""Digests of the programs that this process has shared with its peers.

Each is shared once: a process that compiles a program again does so alone, since its peers may have
no reason to.
"""
_LOCK = threading.Lock()


def compile_shared(
    fingerprint: ProgramFingerprint,
    body: LoweredBody,
    loaded: LoadedExecutable,
    compile_here: Callable[[], Source],
) -> Source:
    """Compile in one process and load in the others; all of the program's must take part.

    Args:
        fingerprint: The program; its processes compare it first.
        body: Its module, and objects that live as long as the program.
        loaded: Receives the executable.
        compile_here: Compiles in this process.

    Returns:
        Source of this process's executable.

    Raises:
        ProgramsDifferError: A process has another program.
        ProcessesError: A process did not arrive.
        RuntimeError: The compiler rejects it; raised in all processes.
    """
    if not is_shared(fingerprint):
        return compile_here()
    CONSISTENCY.compare(fingerprint)
    with _LOCK:
        is_first_time = fingerprint.digest not in _SHARED
        _SHARED.add(fingerprint.digest)
    if not is_first_time:
        return compile_here()
    if not body.is_self_contained:
        _warn(fingerprint, "it calls Python functions, or has effects, which stay in their process")
        return compile_here()
    return _Sharing(fingerprint, loaded, compile_here).source()


@dataclass(frozen=True)
class _Sharing:
    """One program being shared."""

    fingerprint: ProgramFingerprint
    loaded: LoadedExecutable
    compile_here: Callable[[], Source]

    @property
    def _key(self) -> str:
        return f"binaries/{self.fingerprint.digest}"

    def source(self) -> Source:
        """Return the source of the executable once it is loaded."""
        source: Source | None = None
        if coordination.process_index() == self.fingerprint.group[0]:
            status, source = self._compile_and_send()
        else:
            status = _Status(_machine(self.fingerprint))
        statuses = self._meet("compiling", status)
        status_of_source = statuses[self.fingerprint.group[0]]
        if status_of_source.error:
            raise RuntimeError(status_of_source.error)  # no-catalogue: needs several processes
        refusal = status_of_source.refusal
        if not refusal:
            status = _Status(
                refusal=self._receive(status_of_source.machine) if source is None else ""
            )
            statuses = self._meet("loading", status)
            refused = {p: w.refusal for p, w in statuses.items() if w.refusal}
            if refused:
                refusal = f"{format_processes(tuple(refused))}: {next(iter(refused.values()))}"
        if source is not None:
            store.drop(self._key)
            if refusal:
                _warn(self.fingerprint, refusal)
            return source
        return self.compile_here() if refusal else "another process"

    def _compile_and_send(self) -> tuple[_Status, Source | None]:
        """Compile, and write the bytes of the executable into the store."""
        try:
            source = self.compile_here()
        except RuntimeError as error:
            return _Status(error=compiler.error_text(error)), None
        try:
            store.write(self._key, self.loaded.to_bytes())
        except RuntimeError as error:
            return _Status(refusal=f"its bytes are not available: {error}"), source
        return _Status(_machine(self.fingerprint)), source

    def _receive(self, machine: str) -> str:
        """Load the executable of another process; return the reason if this fails."""
        if machine != _machine(self.fingerprint):
            return "another kind of machine"
        code = store.read(self._key)
        if code is None:
            return "its bytes are no longer in the store"
        plan, request = self.fingerprint.plan, self.fingerprint.request
        arguments = len(plan.args if request is None else request.free_args)
        try:
            executable = executables.from_bytes(code, plan.devices, arguments)
        except RuntimeError as error:
            return f"its bytes can't be loaded: {compiler.error_text(error)}"
        self.loaded.take(executable, code)
        return ""

    def _meet(self, what: str, status: _Status) -> dict[int, _Status]:
        name, timeout = self.fingerprint.name, CONSISTENCY.policy.timeout
        barrier = Barrier(
            self.fingerprint.group,
            f"binaries/{what}/{self.fingerprint.digest}",
            timeout,
            what=f"{what} {name}, which share_binary lets one process compile for all,",
        )
        try:
            texts = RENDEZVOUS.exchange(barrier, json.dumps(status))
        except BarrierTimeoutError as error:
            raise ProcessesError(  # no-catalogue: needs several processes
                f"{what} {name} waited {timeout:g} s for {error.missing('to compile it')}: "
                "under share_binary=True one process compiles for all, so all must compile it, in "
                "the same order",
                processes=error.processes,
            ) from None
        return {process: _Status(*json.loads(text)) for process, text in texts.items()}


def _machine(fingerprint: ProgramFingerprint) -> str:
    """Return a digest of the machine that the code must fit."""
    local_devices = fingerprint.plan.local_devices
    environment = Environment.of(local_devices[:1])
    facts: list[Any] = [
        environment.platform,
        environment.runtime,
        environment.machine,
        sorted(environment.features),
    ]
    facts.append(sorted({device.device_kind for device in local_devices}))
    return sha256(json.dumps(facts).encode()).hexdigest()


def _warn(fingerprint: ProgramFingerprint, why: str) -> None:
    """Warn in one process that every process compiles the program."""
    if coordination.process_index() == fingerprint.group[0]:
        warnings.warn(
            f"{fingerprint.name} is compiled by each of its {len(fingerprint.group)} processes, "
            f"in spite of share_binary=True: {why}",
            SharedBinaryWarning,
            skip_file_prefixes=(_OWN_FILES,),
        )
