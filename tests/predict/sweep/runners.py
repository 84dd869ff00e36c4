"""Runners of the sweep tests: working, failing and hanging ones."""

import os
import signal
import sys
import time
from pathlib import Path


def square(request):
    print("what a job prints is no answer")
    return {"outcome": "fits", "reason": "", "number": request["number"] ** 2, "pid": os.getpid()}


def behave(request):
    """Act as the request specifies."""
    return _WAYS[request["how"]](request)


def _wait(request):
    if "mark" in request:
        Path(request["mark"], str(os.getpid())).touch()
    time.sleep(600)


def _grow(request):
    held = bytearray(request["bytes"])
    held[::4096] = b"x" * len(held[::4096])
    time.sleep(600)


def _raise(request):
    raise ValueError("no such thing")


def _die(request):
    sys.stderr.write("a line\nthe last words\n")
    sys.stderr.flush()
    os.kill(os.getpid(), request.get("signal", signal.SIGKILL))


def _leave(request):
    os._exit(3)


_WAYS = {
    "well": lambda request: {"outcome": "fits", "reason": ""},
    "wait": _wait,
    "grow": _grow,
    "raise": _raise,
    "die": _die,
    "leave": _leave,
    "stop": lambda request: os.kill(os.getpid(), signal.SIGSTOP),
}
