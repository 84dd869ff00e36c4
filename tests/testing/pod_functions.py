"""What `test_pods.py` runs in the processes of pods."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

_LISTENING = "0A"


def place() -> tuple[int, int, int]:
    """Which process this is, and how many devices it has and all have."""
    return jax.process_index(), jax.local_device_count(), jax.device_count()


def gathered(number: int, *, times: int = 1) -> int:
    """A sum over all processes."""
    return int(process_allgather(np.array(times * number)).sum())


def keep(value: object) -> object:
    """What was kept by the call before."""
    before = getattr(sys, "kept", None)
    sys.kept = value  # pyright: ignore[reportAttributeAccessIssue]
    return before


def fail_in(process: int) -> None:
    """Raises in one process, while the others wait for it."""
    print("working", flush=True)
    if jax.process_index() == process:
        raise KeyError("a key")
    gathered(1)


class Unreadable(Exception):
    """Can be pickled, and then not be read."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail_unreadably() -> None:
    """Raises what no other process can have."""
    raise Unreadable(1, 2)


def die() -> None:
    """Is killed in one process."""
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gathered(1)


def leave() -> None:
    """Ends its process as a program does."""
    sys.exit(3)


def stop() -> None:
    """Stops one process, for which the others wait, with a word now and then."""
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Thread(target=_talk, daemon=True).start()
    gathered(1)


def _talk() -> None:
    while True:
        print("waiting", flush=True)
        time.sleep(0.1)


def give_a_function() -> object:
    """Returns what can't be sent."""
    return lambda: 3


def give_a_global_array() -> object:
    """Returns an array of which this process has a part."""
    from xlashard import Mesh, NamedSharding, P, make_array_from_callback

    mesh = Mesh(np.array(jax.devices()), ("all",))
    return make_array_from_callback((4,), NamedSharding(mesh, P("all")), np.ones(4).__getitem__)


def listening() -> list[str]:
    """The addresses, as hexadecimal numbers, where this process listens."""
    gathered(1)
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:
            continue  # The one that listed the others.
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in own:
                addresses.append(fields[1].partition(":")[0])
    return addresses
