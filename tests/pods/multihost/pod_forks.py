"""One of two processes with two devices each: children that are forked leave the pod as it is.

A child that runs exit handlers must neither publish that its parent has ended, nor disconnect it.
"""

import os
import sys
import warnings

import jax
import numpy as np

from xlashard import NamedSharding, P, device_put, multihost, pjit
from xlashard.core.processes import RENDEZVOUS, Barrier
from xlashard.core.processes.wait_graph import read_status

multihost.initialize()
warnings.filterwarnings("ignore", "os.fork|This process", category=Warning)
ME = jax.process_index()
MESH = jax.make_mesh((jax.device_count(),), ("x",))
ROWS = NamedSharding(MESH, P("x"))
VALUE = np.arange(16, dtype=np.float32).reshape(8, 2)


class ChildError(Exception):
    """The error that ends a child."""


def fail() -> None:
    raise ChildError


def fork_children() -> None:
    for end in (lambda: sys.exit(0), lambda: os._exit(0), fail):
        child = os.fork()
        if not child:
            end()
        os.waitpid(child, 0)


def use(number: int) -> None:
    x = device_put(VALUE + number, ROWS)
    f = pjit(lambda x: x.sum() * (number + 1))
    assert float(f(x)) == (VALUE + number).sum() * (number + 1)
    assert multihost.process_allgather(np.array(ME)).tolist() == [0, 1]
    multihost.sync_global_devices(f"round {number}")
    RENDEZVOUS.exchange(Barrier((0, 1), "forks", 60), "")


with multihost.Watchdog(timeout=60) as watchdog:
    for number in range(3):
        use(number)
        if number != 2 and number != ME:
            # Its peer waits for it meanwhile.
            fork_children()
        watchdog.step(number)
        assert not any(read_status(process).ended for process in (0, 1))
    # Neither ends before both have looked.
    multihost.sync_global_devices("the end")
print("as before", flush=True)
