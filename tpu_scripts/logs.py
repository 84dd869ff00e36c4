"""Follows the job that run.py started last, from its first line. Ctrl-C leaves it running.

logs.py --name=my-tpu --zone=us-west4-a
"""

from xlashard.cli.cloud.jobs import logs
from xlashard.cli.cloud.session import start

if __name__ == "__main__":
    start(logs, ("tpu", "wait", "run"), __doc__)
