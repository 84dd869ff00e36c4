"""Branch on the process id, in which one process never reaches the program.

It is run in each of two processes, and stops with an error where a result is wrong.
"""

import time

import jax
import numpy as np

from tests.core.processes import expect
from xlashard import Mesh, NamedSharding, P, make_array_from_callback, multihost, pjit
from xlashard.errors import DeadlockError

multihost.initialize()

ME = jax.process_index()
ROWS = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
X = make_array_from_callback((8,), ROWS, lambda index: np.ones(8, np.float32)[index])


def evaluate(x):
    return x.sum()


def report(x):
    return x.max()


assert float(pjit(lambda x: x.sum())(X)) == 8
began = time.monotonic()
if ME == 0:
    error = expect(DeadlockError, "evaluate", lambda: pjit(evaluate)(X))
else:
    error = expect(DeadlockError, "evaluate", lambda: multihost.barrier("epoch"))
assert time.monotonic() - began < 60
assert "process 0 waits at the first run of evaluate" in str(error), error
assert "process 1 waits at barrier 'epoch'" in str(error), error

# Both processes are in step again.
assert float(pjit(evaluate)(X)) == 8

# Process 1 ends.
began = time.monotonic()
if ME == 0:
    error = expect(DeadlockError, "report", lambda: pjit(report)(X))
    assert "process 1 has ended" in str(error), error
    assert time.monotonic() - began < 60
    print("all found out")
