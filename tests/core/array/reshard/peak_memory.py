"""Print the peak of resident memory for moves between emulated devices: `python peak_memory.py`.

One line per move: its name, then MB at the peak above the baseline without source and target.
"""

import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xlashard
from xlashard import GSPMDSharding, Mesh, NamedSharding, P, SingleDeviceSharding
from xlashard._jax.runtime.transfer import collect_garbage
from xlashard.core.array.reshard import plan

MB = 128
DEVICES = jax.devices()


def on(devices: Any, *spec: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("d",)), P(*spec))


ROWS, COLUMNS, COPIES = on(DEVICES, "d"), on(DEVICES, None, "d"), on(DEVICES)
MOVES: dict[str, tuple[Any, Any]] = {
    "rows to columns": (ROWS, COLUMNS),
    "columns to rows": (COLUMNS, ROWS),
    "rows to copies": (ROWS, COPIES),
    "copies to rows": (COPIES, ROWS),
    "rows to one": (ROWS, SingleDeviceSharding(DEVICES[0])),
    "one to rows": (SingleDeviceSharding(DEVICES[0]), ROWS),
    "another order": (ROWS, on(DEVICES[::-1], "d")),
    "half the devices": (ROWS, on(DEVICES[2:6], "d")),
    "listed tiles": (COLUMNS, GSPMDSharding(DEVICES, "{devices=[4,2]7,2,4,3,0,6,5,1}")),
}


def resident(field: str) -> float:
    """Return a line of the process's status, in MB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def peak(source: Any, target: Any, *, donate: bool) -> float:
    """Return MB at the peak of a move, including source and target."""
    gc.collect()
    collect_garbage()
    before = resident("VmRSS")
    # By a program, so that each shard has its own memory.
    x = jax.block_until_ready(ones(source))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    y = jax.block_until_ready(xlashard.device_put(x, target, donate=donate))
    found = resident("VmHWM") - before
    assert y.addressable_shards[0].data.ravel()[0] == 1
    x.delete()
    y.delete()
    return found


def ones(sharding: Any) -> Any:
    return xlashard.pjit(lambda: jnp.ones((MB * 256, 1024)), out_shardings=sharding)()


def main() -> None:
    jax.block_until_ready(xlashard.device_put(ones(ROWS), COLUMNS))
    for name, (source, target) in MOVES.items():
        print(f"{name}: {peak(source, target, donate=False):.0f}")
        print(f"{name}, donated: {peak(source, target, donate=True):.0f}")
    plan.in_one_memory = lambda *shardings: False
    for name in ("rows to columns", "rows to one", "half the devices"):
        source, target = MOVES[name]
        # Once before, because compiling takes memory, too.
        xlashard.device_put(ones(source), target).block_until_ready()
        print(f"{name}, between devices: {peak(source, target, donate=False):.0f}")


if __name__ == "__main__":
    main()
