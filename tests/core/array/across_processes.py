"""Imports and values of scripts for two processes with two devices each, after JAX has joined."""

import jax
import numpy as np

from xlashard import Mesh, NamedSharding, P

ME = jax.process_index()
DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(2, 2), ("process", "device"))
ROWS = NamedSharding(MESH, P(("process", "device")))
WHOLE = NamedSharding(MESH, P())
FIRST, SECOND = (NamedSharding(Mesh(MESH.devices[n], ("d",)), P("d")) for n in range(2))
V = np.arange(32, dtype=np.float32).reshape(8, 4)
