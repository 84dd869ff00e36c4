"""Programs as they were written in 2022 and 2023, and how the tests run them: unchanged."""

import json
from pathlib import Path
from typing import Any

from tests.processes import run_pod
from xlashard.testing.launcher import PodSize
from xlashard.testing.supervision import Rules

FOLDER = Path(__file__).parent
MODULE_OF_THE_RUNNER = "xlashard.legacy"

ALONE = PodSize(1, 8)
POD = PodSize(2, 4)

_RESULT = "RESULT "


def run_program(name: str, size: PodSize, *args: str, **variables: str) -> list[dict[str, Any]]:
    """Runs a program under `python -m xlashard.legacy`.

    Args:
        name: Of its file, without `.py`.
        size: In how many processes, with how many devices each. In a pod, the program is told by
            `--multiprocess` to call `jax.distributed.initialize()`.
        args: Its arguments.
        variables: Of its environment: `JAX_ARRAY="0"`.

    Returns:
        What each process reported, in a line of JSON.
    """
    joins = ["--multiprocess"] if size.processes > 1 else []
    words = ["-m", MODULE_OF_THE_RUNNER, str(FOLDER / f"{name}.py"), *args, *joins]
    done = run_pod(words, size, Rules(240), **variables)
    assert done.verdict.well, done.report()
    return [_result(output) for output in done.outputs]


def _result(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith(_RESULT)]
    assert len(lines) == 1, output
    return json.loads(lines[0].removeprefix(_RESULT))
