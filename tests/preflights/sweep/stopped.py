"""A sweep that is stopped in the middle.

    python -m tests.preflights.sweep.stopped FOLDER

Its two processes leave a file named by their number in the folder, and wait.
"""

import signal
import sys

from xlashard.processes.job_pool import WorkerJob, WorkerLimits, run_jobs

if __name__ == "__main__":
    request = {"how": "wait", "mark": sys.argv[1]}
    runner = "tests.preflights.sweep.runners:behave"
    # What runs in the background of a shell has Ctrl-C ignored, and so has what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    list(run_jobs([WorkerJob(key, runner, request) for key in "abc"], WorkerLimits(workers=2)))
