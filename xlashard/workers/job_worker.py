"""Worker process of a pool: reads jobs from standard input, one JSON line each, and answers.

    python -P job_worker.py PARENT

It ends when its input does, and the kernel ends it with its parent, whatever that was doing. It
imports what comes with Python alone: what a job needs is imported by the job.
"""

import ctypes
import json
import os
import pkgutil
import resource
import signal
import sys
from typing import IO, Any

_PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Process jobs until standard input ends.

    Args:
        parent: Process id of the parent.
    """
    _end_with(parent)
    jobs, answers = _own_streams()
    for line in jobs:
        answers.write(f"{json.dumps(_answer(json.loads(line)))}\n")
        answers.flush()
        if "jax" in sys.modules:
            # Release compiled programs.
            sys.modules["jax"].clear_caches()


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the pool is gone")  # no-catalogue: the parent process has ended
    # The parent process handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A crash of the compiler is reported by its job.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _own_streams() -> tuple[IO[str], IO[str]]:
    """Return the streams of jobs and answers; the jobs' own output goes to standard error."""
    jobs = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return jobs, answers


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return pkgutil.resolve_name(job["runner"])(job["request"])
    except Exception as error:
        return {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(int(sys.argv[1]))
