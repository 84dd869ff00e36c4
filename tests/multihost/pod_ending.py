"""Run in each process of a pod: one of them ends, by itself or not, and the others notice."""

import logging
import os
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlashard import multihost
from xlashard.multihost.lifecycle import shutdown

logging.basicConfig(format="%(message)s")
how, victim = sys.argv[1], int(sys.argv[2])
pod = multihost.initialize(heartbeat=20)
mesh = Mesh(np.array(jax.devices()), ("x",))
x = jax.make_array_from_callback(
    (pod.count,), NamedSharding(mesh, PartitionSpec("x")), lambda index: np.ones(1, np.float32)
)
step = jax.jit(lambda x: x.sum())
float(step(x))
multihost.barrier("all have begun")

if how == "killed":
    if pod.process == victim:
        print(f"at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    float(step(x))  # in a collective for ever
if how == "failed":
    if pod.process == victim:
        raise KeyError("missing")
    float(step(x))
if how == "over":
    if pod.process == victim:
        sys.exit("no data left")
    shutdown._REPORT_AFTER = 2.0
    threading.Timer(10, os._exit, (9,)).start()
    float(step(x))
if how == "raised":
    if pod.process == victim:
        raise ValueError("no such file")
    multihost.barrier("end of the epoch")
if how == "left":
    if pod.process == victim:
        sys.exit(0)
    multihost.barrier("end of the epoch")
if how == "crash":
    with multihost.Watchdog(timeout=1.0, crash=True):
        if pod.process == victim:
            time.sleep(60)
        float(step(x))
print("not reached by all", flush=True)
