"""A sweep that is stopped in the middle.

    python -m tests.predict.sweep.stopped FOLDER

Its two processes leave a file named by their number in the folder, and wait.
"""

import signal
import sys

from xlashard.workers.job_pool import JobPool, WorkerJob, WorkerLimits

if __name__ == "__main__":
    request = {"how": "wait", "mark": sys.argv[1]}
    runner = "tests.predict.sweep.runners:behave"
    # A background process of a shell ignores Ctrl-C, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with JobPool(WorkerLimits(workers=2)) as pool:
        list(pool.run([WorkerJob(key, runner, request) for key in "abc"]))
