"""Functions that `test_pods.py` runs in the processes of pods."""

import os
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from tests.core.processes import listening_addresses


def place() -> tuple[int, int, int]:
    """Return the process index, and the numbers of local and of all devices."""
    return jax.process_index(), jax.local_device_count(), jax.device_count()


def gathered(number: int, *, times: int = 1) -> int:
    """Return a sum over all processes."""
    return int(process_allgather(np.array(times * number)).sum())


def keep(value: object) -> object:
    """Keep a value, and return the one that the call before kept."""
    before = getattr(sys, "kept", None)
    sys.kept = value  # pyright: ignore[reportAttributeAccessIssue]
    return before


def fail_in(process: int) -> None:
    """Raise in one process, while its peers wait."""
    print("working", flush=True)
    if jax.process_index() == process:
        raise KeyError("a key")
    gathered(1)


class Unreadable(Exception):
    """Error that can be pickled, but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail_unreadably() -> None:
    """Raise an error that no other process can unpickle."""
    raise Unreadable(1, 2)


def die() -> None:
    """Kill one process."""
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gathered(1)


def leave() -> None:
    """End the process as a program does."""
    sys.exit(3)


def stop() -> None:
    """Stop one process, for which the others wait, with periodic output."""
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Thread(target=_talk, daemon=True).start()
    gathered(1)


def _talk() -> None:
    while True:
        print("waiting", flush=True)
        time.sleep(0.1)


def give_a_function() -> object:
    """Return an unpicklable value."""
    return lambda: 3


def give_a_global_array() -> object:
    """Return an array of which this process has a part."""
    from xlashard import Mesh, NamedSharding, P, make_array_from_callback

    mesh = Mesh(np.array(jax.devices()), ("all",))
    return make_array_from_callback((4,), NamedSharding(mesh, P("all")), np.ones(4).__getitem__)


def listening() -> set[str]:
    """Return the addresses where this process listens after a collective."""
    gathered(1)
    return listening_addresses()
