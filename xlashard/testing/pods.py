"""`pod`: functions and scripts that run in all processes of an emulated pod."""

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from xlashard._jax.tracebacks import shortened
from xlashard.errors import ArgumentError, PodError
from xlashard.testing.launch.launcher import Launch, LaunchPlan, PodSize
from xlashard.testing.launch.supervision import EndingRules, PodRun, run_to_end
from xlashard.testing.workers.function_lookup import check_is_no_import, name_of, unwrap_partial
from xlashard.testing.workers.pod_worker import FunctionCall
from xlashard.testing.workers.pool_result import Timeouts, pod_error
from xlashard.testing.workers.worker_pool import WorkerPool


class Pod:
    """An emulated pod: processes on this machine, each with emulated CPU devices, that JAX joins.

    Made by `pod`. Its processes end with the `with` block, and also when this process ends in any
    other way.
    """

    def __init__(
        self,
        size: PodSize,
        *,
        timeout: float,
        grace: float,
        environment: Mapping[str, str],
    ) -> None:
        self._size = size
        self._timeout = timeout
        self._grace = grace
        self._environment = environment
        self._pool: WorkerPool | None = None
        self._entered = False

    @property
    def processes(self) -> int:
        """How many processes it has."""
        return self._size.processes

    @property
    def devices_per_process(self) -> int:
        """How many devices each process has."""
        return self._size.devices

    @shortened
    def run[R](self, function: Callable[..., R], *args: Any, **keywords: Any) -> list[R]:
        """Runs a function in every process, all at once.

        Args:
            function: One that stands in a module: the processes find it by its name.
            args: Its arguments, the same everywhere. They are pickled.
            keywords: Its keyword arguments.

        Returns:
            What it returned, by process.

        Raises:
            PodError: It failed in a process, or took too long. It says for each process what was
                raised, and what it wrote; after a timeout the stacks of all threads.
            ArgumentError: The function can't be found by a name, or its module starts pods when it
                is imported.
        """
        check_is_no_import("pod().run")
        function, args, keywords = unwrap_partial(function, args, keywords)
        name = name_of(function)
        try:
            arguments = pickle.dumps((args, keywords))
        except Exception as error:
            raise ArgumentError(
                f"the arguments for {name.name} can't be sent to the processes of a pod "
                f"({type(error).__name__}: {error}); pass Python values or NumPy arrays, and make "
                "other things in the function"
            ) from None
        result = self._workers().request(
            FunctionCall(name, arguments), Timeouts(self._timeout, self._grace)
        )
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
        """Runs a Python script in every process, in fresh ones.

        `xlashard.multihost.initialize()` and `jax.distributed.initialize()` find in its
        environment which process of the pod it is.

        Args:
            script: Its file.
            args: Its arguments.
            check: Whether a process that fails raises an error here.

        Returns:
            What each process wrote, and how it ended.

        Raises:
            PodError: A process failed, or they took too long.
        """
        check_is_no_import("pod().run_script")
        if not Path(script).is_file():
            raise ArgumentError(
                f"there is no script {os.fspath(script)!r} in this process's folder; pass its "
                "whole path: pod.run_script(Path(__file__).with_name('script.py'))"
            )
        plan = LaunchPlan(
            [sys.executable, os.fspath(script), *map(str, args)],
            self._size,
            environment=self._environment,
            one_stream=True,
        )
        done = run_to_end(Launch(plan), EndingRules(self._timeout, self._grace))
        if check and not done.verdict.well:
            outputs = dict(enumerate(done.outputs))
            name = os.path.basename(script)
            title = f"{name} failed in a pod of {self._described()}"
            # no-catalogue: needs processes that fail
            raise PodError(f"{title}: {done.report()}", outputs=outputs)
        return done

    def _described(self) -> str:
        return f"{self._size.processes} × {self._size.devices} devices"

    def _workers(self) -> WorkerPool:
        if self._pool is None or not self._pool.usable:
            self._pool = WorkerPool(self._size, environment=self._environment)
        return self._pool

    def close(self) -> None:
        """Ends the processes."""
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


def pod(
    processes: int = 2,
    devices_per_process: int = 1,
    *,
    timeout: float = 120.0,
    grace: float = 5.0,
    environment: Mapping[str, str] | None = None,
) -> Pod:
    """An emulated pod, to run functions and scripts in.

    As a context manager it keeps its processes between calls, which saves their start; after a
    failure the next call has fresh ones. Without `with`, each call has its own.

    Args:
        processes: How many processes.
        devices_per_process: How many emulated CPU devices each has.
        timeout: How long a call may take, in seconds. After that every process shows the stacks of
            its threads and is ended.
        grace: How long the others may go on when a process has failed, in seconds.
        environment: Variables for the processes, besides those of this process.

    Raises:
        ArgumentError: There is no such pod.

    Example:
        >>> import jax
        >>> from xlashard.testing import pod
        >>> with pod(processes=2, devices_per_process=2) as p:
        ...     p.run(jax.process_index), p.run(jax.device_count)
        ([0, 1], [4, 4])
    """
    for name, value in (("processes", processes), ("devices_per_process", devices_per_process)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(
                f"{name} is {value!r}; it must be a whole number of 1 or more: "
                "pod(processes=2, devices_per_process=4)"
            )
    for name, value in (("timeout", timeout), ("grace", grace)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ArgumentError(
                f"{name} is {value!r}; it must be a number of seconds above 0: pod({name}=60)"
            )
    return Pod(
        PodSize(processes, devices_per_process),
        timeout=timeout,
        grace=grace,
        environment={**os.environ, **(environment or {})},
    )
