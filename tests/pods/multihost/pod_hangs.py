"""Run in each process of a pod of four: one is stuck in Python, one in a collective, one is killed,
and one, at a barrier, has other code.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.core.processes import ROOT, listening_addresses
from xlashard import multihost
from xlashard.core.processes import store

logging.basicConfig(format="%(message)s")
POD = multihost.initialize(heartbeat=60)
ME = POD.process
FOLDER = Path(os.environ["XLASHARD_TEST_FOLDER"])
SOURCE = FOLDER / str(ME)
SOURCE.mkdir()
(SOURCE / "network.py").write_text(f"LAYERS = {4 if ME == 3 else 2}\n")
sys.path.insert(0, str(SOURCE))
import network  # noqa: E402, F401  # pyright: ignore[reportMissingImports]

MESH = Mesh(np.array(jax.devices()[:2]), ("x",))


@jax.jit
def train_step(x: jax.Array) -> jax.Array:
    return x.sum()


def main(watchdog: multihost.Watchdog) -> None:
    x = np.float32(1)
    if ME < 2:
        sharding = NamedSharding(MESH, PartitionSpec("x"))
        x = jax.make_array_from_callback((2,), sharding, lambda _: np.ones(1, np.float32))
        float(train_step(x))
    for number in range(3):
        watchdog.step(number)
    store.write(f"pid/{ME}", str(os.getpid()).encode())
    multihost.barrier("all have begun")
    threading.Thread(target=look if ME == 0 else leave_later, daemon=True).start()
    if ME == 0:
        loss = train_step(x)
        float(loss)
    if ME == 1:
        time.sleep(300)
    if ME == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    multihost.barrier("epoch", processes=(1, 3))


def look() -> None:
    """Look at the hung job as its user would: by the signal, then by the command."""
    state = Path("/proc") / (store.read("pid/2", 60) or b"").decode() / "stat"
    while state.exists() and ") Z " not in state.read_text():
        time.sleep(0.05)
    # The main thread blocks below Python.
    os.kill(os.getpid(), signal.SIGQUIT)
    while "Frames below" not in "".join(map(Path.read_text, FOLDER.glob("watchdog-0-1.txt"))):
        time.sleep(0.05)
    print(f"--- listens at {sorted(listening_addresses())}")
    for words in (["--json"], []):
        command = [sys.executable, "-m", "xlashard", "hosts", "--pid", str(os.getpid()), *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
        print(f"--- {done.returncode}\n{done.stdout}{done.stderr}", flush=True)
    store.write("over", b"")
    time.sleep(0.5)
    os._exit(0)


def leave_later() -> None:
    store.read("over", 200)
    os._exit(0)


if __name__ == "__main__":
    with multihost.Watchdog(timeout=600, folder=FOLDER, report_signal=signal.SIGQUIT) as watchdog:
        main(watchdog)
