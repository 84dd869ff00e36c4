"""Copies the code to all workers of a TPU and installs it there, with Python 3.12 or newer.

    setup.py --name=my-tpu --zone=us-west4-a [--code=.] [--install="pip install -e '.[tpu]'"]

What git tracks, or would add, is copied. The same once more takes no time.
"""

from xlashard.cloud.preparing import setup
from xlashard.cloud.script import start

if __name__ == "__main__":
    start(lambda session, _: setup(session), ("tpu", "wait", "setup"), __doc__)
