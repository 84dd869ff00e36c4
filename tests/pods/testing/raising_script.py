"""One process ends with an exception, while its peers wait in a collective."""

import atexit

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

import xlashard  # noqa: F401

jax.distributed.initialize()
atexit.register(print, "at the end")
process_allgather(np.arange(2))
if jax.process_index() == 1:
    raise ValueError("no more")
process_allgather(np.arange(2))
