"""Compile a program for a topology and collect the compiler's dumps.

libtpu returns no executable for a program that exceeds the HBM, and an estimate stops before code
generation, which takes 95 % of the compile time. The dump folder has the same contents in all
cases: the scheduled module, buffer assignment and live ranges.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from xlashard._jax.runtime import executables
from xlashard._jax.runtime.offline import BEGUN, CompileInput, PhaseInput, RefusalError
from xlashard.analysis.programs.program import Compilation, LoweredModule
from xlashard.analysis.programs.propagation import dump_options, read_watched
from xlashard.core.program.remote_compile import crash_text, run_job
from xlashard.errors import (
    CompileError,
    IncompleteDumpError,
    ProgramTooLargeError,
    XlashardError,
)
from xlashard.hlo.hlo_program import HloProgram, read, read_executable
from xlashard.hlo.proto_reader import buffers_of
from xlashard.workers.dump_folder import temporary_dump_folder
from xlashard.workers.job_pool import FAILED, TIMED_OUT, JobPool, WorkerJob

# LLVM's passes take half of a compilation for CPUs, after all that a report reads; nothing runs
# the executable.
_WITHOUT_LLVM_PASSES = {"xla_backend_optimization_level": 0}


def compile_for_report(
    lowered: LoweredModule,
    options: Mapping[str, Any] | None = None,
    *,
    estimate: bool = False,
    values: str = "",
) -> Compilation:
    """Compile a program and read the compiler's dump.

    Args:
        lowered: Program lowered for the devices of a topology.
        options: Compiler options.
        estimate: Stop before code generation. Module, buffer assignment and collectives are those
            of the whole compilation; code size and cycle estimates are missing. The compiler for
            GPUs has no such phase and compiles the whole program.
        values: Pattern of the values inside whose shardings the report shows; empty for none.

    Raises:
        CompileError: If compilation fails for a reason other than memory.
        IncompleteDumpError: If temporary files can't be written.
        ProgramTooLargeError: If the program exceeds a memory other than HBM.
        TopologyError: If the installed libtpu can't stop before code generation.
    """
    if estimate and lowered.plan.devices[0].platform != "gpu":
        with Estimate.saved(lowered, options, values) as started:
            return started.result(run_job(started.runner, started.request))
    compiled, error, degraded = None, None, ""
    requested = dict(options or {})
    name = lowered.program.name
    with _full_disk_errors(name), temporary_dump_folder() as folder:
        began = time.perf_counter()
        try:
            quick = _WITHOUT_LLVM_PASSES if lowered.plan.devices[0].platform == "cpu" else {}
            compiled = lowered.compile({**quick, **requested, **dump_options(folder, values)})
        except ProgramTooLargeError as raised:
            error = raised
        seconds = time.perf_counter() - began
        if compiled is None:
            module = _read_dump(folder, name, error)
        else:
            module, degraded = _read_compiled(folder, compiled.executable)
        result = lowered.read_dump(module) if compiled is None else compiled
        result = read_watched(result, folder, values) if values else result
    return replace(
        result,
        read_modules=lambda _: (module,),
        seconds=seconds,
        options=tuple(requested.items()),
        too_large=error is not None,
        degraded=degraded,
    )


class Estimate:
    """Compilation of a program that leaves its dumps, by this process or by a worker process.

    For TPUs it stops before code generation; the compiler for GPUs has no such phase.

    A context manager, which removes its folder.

    Args:
        lowered: Program lowered for the devices of a topology.
        options: Compiler options.
        values: Pattern of the values inside whose shardings the report shows; empty for none.

    Attributes:
        cpu_seconds: CPU time of the compiler, once it has run; the time of a worker that failed.
        runner: Name of the worker's function, of a saved compilation.
        request: Its argument.
    """

    def __init__(
        self, lowered: LoweredModule, options: Mapping[str, Any] | None = None, values: str = ""
    ) -> None:
        self._lowered, self._options, self._values = lowered, dict(options or {}), values
        self.cpu_seconds = 0.0
        self.runner, self.request = "", {}
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(temporary_dump_folder())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> Compilation:
        """Compile the program in this process.

        Raises:
            CompileError: If compilation fails for a reason other than memory.
            ProgramTooLargeError: If the program exceeds a memory other than HBM.
            TopologyError: If the installed libtpu can't stop before code generation.
        """
        began, error = time.perf_counter(), None
        # Other work of the machine has no say in the CPU time.
        cpu_began = time.process_time()
        try:
            with self._passes() as passes:
                passes.run()
        except ProgramTooLargeError as raised:
            error = raised
        self.cpu_seconds = time.process_time() - cpu_began
        return self._compilation(time.perf_counter() - began, error)

    @classmethod
    def saved(
        cls, lowered: LoweredModule, options: Mapping[str, Any] | None = None, values: str = ""
    ) -> Self:
        """Return the compilation of a program that is written to its folder, for a worker process.

        Args:
            lowered: The program.
            options: Compiler options.
            values: As for the class.

        Raises:
            DonationError: If a donated argument can't be reused, under `donation="strict"`.
        """
        with ExitStack() as stack:
            estimate = stack.enter_context(cls(lowered, options, values))
            stack.enter_context(_full_disk_errors(lowered.program.name))
            with estimate._passes() as passes:
                estimate.runner, estimate.request = passes.runner, passes.save(estimate._folder)
            stack.pop_all()
        return estimate

    def job(self, key: str) -> WorkerJob:
        """Return the job of a worker process for the saved program, with a key."""
        return WorkerJob(key, self.runner, self.request)

    def result(self, answer: Mapping[str, Any] | None) -> Compilation:
        """Return the program that a worker process compiled; if it couldn't, compile it here.

        Args:
            answer: Answer of the process; None without one.

        Raises:
            CompileError: If the compiler refused the program, crashed, or took too long.
            ProgramTooLargeError: If the program exceeds a memory other than HBM.
        """
        if answer is None:
            return self.run()
        if answer.get("outcome") == FAILED:
            timed_out = answer["reason"].startswith(TIMED_OUT)
            if not timed_out and not (self._folder / BEGUN).exists():
                return self.run()
            self.cpu_seconds = answer["seconds"]
            # no-catalogue: needs a crash of the compiler
            reason = crash_text(answer["reason"])
            raise CompileError(f"compiling {self._lowered.program.name} failed: {reason}")
        self.cpu_seconds, error = answer["cpu_seconds"], None
        if answer["error"]:
            try:
                with self._passes():
                    # no-catalogue: an error of XLA
                    raise RefusalError(answer["error"], answer["code"])
            except ProgramTooLargeError as raised:
                error = raised
        return self._compilation(answer["seconds"], error, answer.get("log", ""))

    def _passes(self) -> AbstractContextManager[PhaseInput | CompileInput]:
        dumps = dump_options(self._folder, self._values)
        return self._lowered.compiler_input(self._options | dumps)

    def _compilation(
        self, seconds: float, error: ProgramTooLargeError | None, log: str = ""
    ) -> Compilation:
        lowered = self._lowered
        module = _read_dump(self._folder, lowered.program.name, error)
        compiled = lowered.read_dump(module)
        if self._values:
            compiled = read_watched(compiled, self._folder, self._values)
        return replace(
            compiled,
            seconds=seconds,
            options=tuple(self._options.items()),
            too_large=error is not None,
            is_estimate=lowered.plan.devices[0].platform != "gpu",
            log=log,
        )


def compile_estimates(
    estimates: Iterable[Estimate], pool: JobPool
) -> Iterator[tuple[Estimate, Compilation | Exception]]:
    """Compile saved programs in worker processes; yield each as soon as it is done.

    A crash of the compiler is an error of its program. Where no process can be started, this
    process compiles.

    Args:
        estimates: The compilations, which are closed when they are done. Each is taken from the
            iterable when a process is idle.
        pool: The worker processes.
    """
    waiting: dict[str, Estimate] = {}

    def jobs() -> Iterator[WorkerJob]:
        for number, estimate in enumerate(estimates):
            waiting[str(number)] = estimate
            yield estimate.job(str(number))

    def done(key: str, run: Callable[[], Compilation]) -> Compilation | Exception:
        with waiting.pop(key):
            try:
                return run()
            except COMPILER_ERRORS as error:
                return error

    series = jobs()
    try:
        try:
            for job, answer in pool.run(series):
                estimate = waiting[job.key]
                yield estimate, done(job.key, partial(estimate.result, answer))
        except OSError:
            for key, estimate in list(waiting.items()):
                yield estimate, done(key, estimate.run)
            for job in series:
                estimate = waiting[job.key]
                yield estimate, done(job.key, estimate.run)
    finally:
        for estimate in waiting.values():
            estimate.__exit__()


COMPILER_ERRORS = (XlashardError, ValueError, RuntimeError, NotImplementedError)
"""Errors of a program that can't be lowered or compiled."""


def with_buffers(compilation: Compilation) -> Compilation:
    """Return a program that was compiled for a topology, with the buffers that its executable has.

    Args:
        compilation: The compiled program.
    """
    executable = compilation.executable
    module = read_executable(executable, executables.buffer_assignment(executable))[0]
    # Findings of a report read this module, which has no lines of another function.
    unknown = f"temporaries at the peak, {compilation.program.unknown}"
    program = replace(compilation.program, unknown=unknown)
    return replace(compilation, program=program, read_modules=lambda _: (module,))


def _with_advice(error: ProgramTooLargeError, name: str, folder: Path) -> ProgramTooLargeError:
    """Return the error with advice, if buffers were assigned in HBM."""
    if not any(folder.glob("*.after_optimizations.hlo.pb")):
        return error
    return ProgramTooLargeError(
        f"{name} fits in HBM, but one of its operations exceeds an on-chip memory, such as VMEM: "
        f"use smaller blocks in the kernel, or raise the compiler option "
        f"xla_tpu_scoped_vmem_limit_kib. {error}"
    )


_DEGRADED = (
    "the compiler's dump is missing or cut off, as on a full disk: memory is known by its sums "
    "alone, and the time lacks what they hold; free room for temporary files, or set TMPDIR to "
    "another folder"
)


def _read_compiled(folder: Path, executable: Any) -> tuple[HloProgram, str]:
    """Read the executable's module with the buffer assignment of the dump.

    The executable's module has the compiler's cycle estimates; dumps are written earlier.

    Args:
        folder: Folder of the dump.
        executable: The executable.

    Returns:
        The module, and the reason why its buffers are missing; empty if they aren't.
    """
    dump = _find_whole_dump(folder)
    if dump is not None:
        return read_executable(executable, buffers_of(dump.read_bytes()))[0], ""
    buffers = executables.buffer_assignment(executable)
    return read_executable(executable, buffers)[0], _DEGRADED


def _read_dump(folder: Path, name: str, error: ProgramTooLargeError | None) -> HloProgram:
    """Read the dump of a program without an executable.

    Args:
        folder: Folder of the dump.
        name: Name of the program.
        error: The compiler's error if the program exceeds a memory.

    Raises:
        IncompleteDumpError: If the dump is missing or cut off.
        ProgramTooLargeError: If the program exceeds a memory other than HBM.
    """
    # The dump of a program that exceeds HBM, rather than another memory such as VMEM.
    if error is not None and not any(folder.glob("*.oom_intermediate_module.hlo.pb")):
        # no-catalogue: an error of libtpu
        raise _with_advice(error, name, folder) from None
    dump = _find_whole_dump(folder)
    if dump is None:
        cause = "" if error is None else f" {name} exceeds the memory: {error}"
        raise IncompleteDumpError(  # no-catalogue: needs a full disk
            f"{name} can't be reported: the compiler's dump is missing or cut off, as on a full "
            f"disk; free room for temporary files, or set TMPDIR to another folder.{cause}"
        )
    return read(dump)


def _find_whole_dump(folder: Path) -> Path | None:
    """Return the file of the dump; None if it is missing or cut off."""
    # The name of the CPU compiler's dump is `cpu_after_optimizations`. There are two if a worker
    # process could not hand its executable over.
    for dump in sorted(folder.glob("*after_optimizations.hlo.pb")):
        with suppress(OSError, ValueError):
            buffers_of(dump.read_bytes())
            return dump
    return None


@contextmanager
def _full_disk_errors(name: str) -> Iterator[None]:
    """Raise errors of temporary files within a block as this package's."""
    try:
        yield
    except OSError as error:
        if isinstance(error, XlashardError):
            raise
        raise IncompleteDumpError(  # no-catalogue: needs a full disk
            f"compiling {name} needs temporary files, which can't be written: "
            f"{error.strerror or error}; free room, or set TMPDIR to another folder"
        ) from None
