"""A sweep that is stopped in the middle.

    python -m tests.predict.sweep.stopped FOLDER

Its two processes leave a file named by their number in the folder, and wait.
"""

import signal
import sys

from xlashard.workers.job_pool import WorkerJob, WorkerLimits, run_jobs

if __name__ == "__main__":
    request = {"how": "wait", "mark": sys.argv[1]}
    runner = "tests.predict.sweep.runners:behave"
    # A background process of a shell ignores Ctrl-C, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    list(run_jobs([WorkerJob(key, runner, request) for key in "abc"], WorkerLimits(workers=2)))
