"""Programs as they were written in 2022 and 2023, which the tests run unchanged."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.core.processes import ROOT, pod_python, run_pod
from tests.fork_server import python_command
from xlashard.pods.testing.launcher import PodSize
from xlashard.pods.testing.supervision import EndingRules

FOLDER = Path(__file__).parent
MODULE_OF_THE_RUNNER = "xlashard.legacy"

ALONE = PodSize(1, 8)
POD = PodSize(2, 4)

_RESULT = "RESULT "


def run_program(name: str, size: PodSize, *args: str, **variables: str) -> list[dict[str, Any]]:
    """Run a program under `python -m xlashard.legacy`.

    Args:
        name: Name of its file, without `.py`.
        size: Number of processes, and of devices in each. In a pod, `--multiprocess` makes the
            program call `jax.distributed.initialize()`.
        args: Its arguments.
        variables: Variables of its environment: `JAX_ARRAY="0"`.

    Returns:
        The report of each process, from a line of JSON.
    """
    joins = ["--multiprocess"] if size.processes > 1 else []
    words = ["-m", MODULE_OF_THE_RUNNER, str(FOLDER / f"{name}.py"), *args, *joins]
    done = run_pod(words, size, EndingRules(240), **variables)
    assert done.verdict.well, done.report()
    return [_result(output) for output in done.outputs]


def run_by_command(name: str, size: PodSize, **variables: str) -> list[dict[str, Any]]:
    """Run a program in a pod, by `xlashard pod ... -- python -m xlashard.legacy ...`.

    The program never calls `jax.distributed.initialize()`, as on the TPU pods of its time.

    Args:
        name: Name of the program's file, without `.py`.
        size: Size of the pod.
        variables: Variables of the environment.
    """
    pod = ["xlashard", "pod", "-n", str(size.processes), "-d", str(size.devices), "--"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    words = ["-m", MODULE_OF_THE_RUNNER, str(FOLDER / f"{name}.py")]
    done = subprocess.run(
        [*python_command(environment), "-m", *pod, *pod_python(size, environment), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert not done.returncode, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    by_process = [f"[{number}] " for number in range(size.processes)]
    return [
        _result("\n".join(line.removeprefix(mark) for line in lines if line.startswith(mark)))
        for mark in by_process
    ]


def _result(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith(_RESULT)]
    assert len(lines) == 1, output
    return json.loads(lines[0].removeprefix(_RESULT))
