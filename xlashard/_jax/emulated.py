"""Processes of an emulated pod: several on one machine, which need nobody else to reach them."""

import atexit
import logging
import os
import sys
from types import TracebackType

from jax._src import api

from xlashard._jax.coordination import backend_has_started, collect_on_cpu

_LOOPBACK = "127.0.0.1"


def end_at_once_after_errors() -> None:
    """Makes this process end when an exception ends its program.

    JAX would wait then, for minutes, until all the others come to their end too; and they wait in a
    collective for this one. Whoever started the pod must see the end, to end the others.
    """
    hook = sys.excepthook
    codes: list[int] = []

    def note(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        atexit.unregister(api.clean_up)
        codes.append(130 if issubclass(kind, KeyboardInterrupt) else 1)
        hook(kind, error, traceback)

    def leave() -> None:
        if not codes:
            return
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # What comes after this is the end of JAX's own client, which misses its service then, and
        # calls that a fatal error.
        os._exit(codes[0])

    sys.excepthook = note
    # Registered early, so called late: after what the program has to do at its end.
    atexit.register(leave)


def listen_on_loopback() -> None:
    """Makes the CPU backend's collectives listen on the loopback address.

    Gloo listens on the address of this machine's name, if it isn't told another. That is often one
    that other machines reach, and what it listens for it doesn't check. After the backend has
    started it is too late, and nothing happens.
    """
    if not backend_has_started():
        collect_on_cpu(_LOOPBACK)
