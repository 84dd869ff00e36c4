"""`pod`: functions and scripts run in all processes of an emulated pod."""

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from xlashard.errors import ArgumentError, PodError, counted
from xlashard.pods.testing.emulated_devices import check_seconds, check_whole
from xlashard.pods.testing.launcher import Launch, LaunchPlan, PodSize
from xlashard.pods.testing.pod_worker import (
    FunctionCall,
    check_is_no_import,
    name_of,
    unwrap_partial,
)
from xlashard.pods.testing.supervision import EndingRules, PodRun, run_to_end
from xlashard.pods.testing.worker_pool import WorkerPool, pod_error
from xlashard.support.lending import repeat_words
from xlashard.support.tracebacks import shortened


class EmulatedPod:
    """An emulated pod: local processes with emulated CPU devices, joined by JAX.

    Created by `pod`. Its processes end with the `with` block, and also when this process ends in
    any other way.
    """

    def __init__(self, size: PodSize, rules: EndingRules, environment: Mapping[str, str]) -> None:
        self._size = size
        self._rules = rules
        self._environment = environment
        self._pool: WorkerPool | None = None
        self._entered = False

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self._size.processes

    @property
    def devices_per_process(self) -> int:
        """Number of devices per process."""
        return self._size.devices

    @shortened
    def run[R](self, function: Callable[..., R], *args: Any, **keywords: Any) -> list[R]:
        """Run a function in every process.

        Args:
            function: A module-level function: the processes import it by name.
            args: Positional arguments, equal in all processes. They are pickled.
            keywords: Keyword arguments.

        Returns:
            The results, by process.

        Raises:
            PodError: The function failed in a process, or timed out. The error contains the
                exception and the output of each process; after a timeout the stacks of all threads.
            ArgumentError: The function cannot be found by name, or its module starts pods when it
                is imported.
        """
        check_is_no_import("pod().run")
        function, args, keywords = unwrap_partial(function, args, keywords)
        name = name_of(function)
        try:
            arguments = pickle.dumps((args, keywords))
        except Exception as error:
            raise ArgumentError(
                f"the arguments for {name.name} cannot be pickled ({type(error).__name__}: "
                f"{error}); pass Python values or NumPy arrays, and create other objects in the "
                "function"
            ) from None
        result = self._workers().request(FunctionCall(name, arguments), self._rules)
        if not self._entered:
            self.close()
        if not result.well:
            error = pod_error(f"{name.name} failed in a pod of {self._described()}", result)
            raise error from next(iter(error.errors.values()), None)
        return [result.replies[number].value for number in range(self.processes)]

    @shortened
    def run_script(
        self, script: str | os.PathLike[str], *args: object, check: bool = True
    ) -> PodRun:
        """Run a Python script in every process, in fresh interpreters.

        `xlashard.multihost.initialize()` and `jax.distributed.initialize()` detect the process from
        its environment.

        Args:
            script: Path of the script.
            args: Arguments of the script.
            check: Whether to raise an error if a process fails.

        Returns:
            Output and exit code of each process.

        Raises:
            PodError: A process failed or timed out.
        """
        check_is_no_import("pod().run_script")
        if not Path(script).is_file():
            raise ArgumentError(
                f"the script {os.fspath(script)!r} was not found in the working directory; pass "
                "its full path: pod.run_script(Path(__file__).with_name('script.py'))"
            )
        plan = LaunchPlan(
            [sys.executable, *repeat_words(), os.fspath(script), *map(str, args)],
            self._size,
            environment=self._environment,
            one_stream=True,
        )
        done = run_to_end(Launch(plan), self._rules)
        if check and not done.verdict.well:
            title = f"{os.path.basename(script)} failed in a pod of {self._described()}"
            # no-catalogue: needs processes that fail
            raise PodError(f"{title}: {done.report()}", outputs=dict(enumerate(done.outputs)))
        return done

    def _described(self) -> str:
        return f"{self._size.processes} × {counted(self._size.devices, 'device')}"

    def _workers(self) -> WorkerPool:
        if self._pool is None or not self._pool.usable:
            self._pool = WorkerPool(self._size, environment=self._environment)
        return self._pool

    def close(self) -> None:
        """Terminate the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        self.close()

    def __repr__(self) -> str:
        return f"pod(processes={self.processes}, devices_per_process={self.devices_per_process})"


@shortened
def pod(
    processes: int = 2,
    devices_per_process: int = 1,
    *,
    timeout: float = 120.0,
    grace: float = 5.0,
    environment: Mapping[str, str] | None = None,
) -> EmulatedPod:
    """Return an emulated pod in which functions and scripts can run.

    As a context manager it keeps its processes between calls, which saves their startup; after a
    failure the next call starts new ones. Without `with`, each call starts its own processes.

    Args:
        processes: Number of processes.
        devices_per_process: Number of emulated CPU devices per process.
        timeout: Time limit of a call, in seconds. After it every process prints the stacks of its
            threads and is terminated.
        grace: Seconds left for the other processes after one has failed.
        environment: Additional environment variables of the processes.

    Raises:
        ArgumentError: An argument is not a positive number.

    Example:
        >>> import jax
        >>> from xlashard.testing import pod
        >>> with pod(processes=2, devices_per_process=2) as p:
        ...     p.run(jax.process_index), p.run(jax.device_count)
        ([0, 1], [4, 4])
    """
    for name, value in (("processes", processes), ("devices_per_process", devices_per_process)):
        check_whole(name, value, 1, "pod(processes=2, devices_per_process=4)")
    for name, value in (("timeout", timeout), ("grace", grace)):
        check_seconds(name, value, f"pod({name}=60)")
    return EmulatedPod(
        PodSize(processes, devices_per_process),
        EndingRules(timeout, grace),
        {**os.environ, **(environment or {})},
    )
