"""Run in each process of a pod: one process ends, in any way, and its peers detect it."""

import logging
import os
import signal
import sys
import threading
import time
from functools import partial

import jax
import numpy as np
from jax._src.lib import _jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlashard import multihost
from xlashard.pods.multihost import shutdown

logging.basicConfig(format="%(message)s")
how, victim = sys.argv[1], int(sys.argv[2])
if how == "early":
    # JAX's own timeouts of shutdown are 300 s.
    make_client = _jax.get_distributed_runtime_client
    make_service = _jax.get_distributed_runtime_service

    def impatient_service(*args, shutdown_timeout, **keywords):
        timeout = 1 if shutdown_timeout == 300 else shutdown_timeout
        return make_service(*args, shutdown_timeout=timeout, **keywords)

    _jax.get_distributed_runtime_client = partial(make_client, shutdown_timeout=1)
    _jax.get_distributed_runtime_service = impatient_service
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
    float(step(x))  # in a collective forever
if how == "early":
    if pod.process != victim:
        sys.exit(0)
    time.sleep(4)
if how == "failed":
    if pod.process == victim:
        raise KeyError("missing")
    float(step(x))
if how == "over":
    if pod.process == victim:
        sys.exit("no data left")
    shutdown._REPORT_AFTER = 1.0
    report = shutdown._report

    def report_and_end(*args, **keywords):
        report(*args, **keywords)
        # Time for another report, which would be one too many.
        threading.Timer(2, os._exit, (9,)).start()

    shutdown._report = report_and_end
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
