"""From the start of a process to the end of its first step: xlashard beside JAX.

A process imports its library, puts the state on eight devices, traces, lowers and compiles a
step of AdamW over unrolled layers, and waits for the loss. With a cold cache it compiles, with a
warm one it reads JAX's persistent cache. CPU times are those of the process with all its threads.

    python -m benchmarks.startup [--rounds N] [--json PATH] [--strict]
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks._devices import cpu_of_children, emulated
from benchmarks._measure import Report, read_options

os.environ.update(emulated(8))

from benchmarks._sides import Call, Lines, Side

LAYERS = (2, 24)
ROOT = Path(__file__).resolve().parent.parent
_STEP = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
library, layers = sys.argv[1], int(sys.argv[2])
api = jax
if library == "xlashard":
    import xlashard as api
mesh = Mesh(np.array(jax.devices()), ("data",))
whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

def loss(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w) / (1 + jnp.abs(x).mean(-1, keepdims=True))
    return (x * x).mean()

def step(state, x):
    weights, first, second = state
    value, gradients = jax.value_and_grad(loss)(weights, x)
    first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients)]
    second = [0.99 * v + 0.01 * g * g for v, g in zip(second, gradients)]
    weights = [w - 1e-3 * m / (jnp.sqrt(v) + 1e-8) for w, m, v in zip(weights, first, second)]
    return (weights, first, second), value

state = api.device_put([[np.full((32, 32), 0.1, np.float32)] * layers] * 3, whole)
batch = api.device_put(np.ones((16, 32), np.float32), rows)
state, value = api.jit(step, donate_argnums=0)(state, batch)
float(value)
sys.stdout.flush()
import os
os._exit(0)
"""


def start(cache: str, layers: int, side: Side) -> Call:
    """Return a call that runs a process to the end of its first step.

    Args:
        cache: Folder of JAX's persistent cache; empty for a new one in each call.
        layers: Number of layers.
        side: JAX or xlashard.
    """
    words = [sys.executable, "-c", _STEP, side.name, str(layers)]
    variables = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables |= {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def call() -> None:
        with tempfile.TemporaryDirectory() as new:
            own = f"{cache}/{side.name}" if cache else new
            environment = variables | {"JAX_COMPILATION_CACHE_DIR": own}
            # Ctrl-C reaches this process alone, which ends the other one.
            subprocess.run(words, cwd=ROOT, env=environment, check=True, process_group=0)

    return call


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("The start of a process to its first step, beside JAX", rounds=3)
    report = Report("startup")
    lines = Lines(options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        for cache, row, warmup in (("", "cold cache", 0), (folder, "warm cache", 1)):
            for layers in LAYERS:
                lines.measure(
                    f"first step of a process, {row}",
                    partial(start, cache, layers),
                    size=(layers, "layers"),
                    inner=1,
                    warmup=warmup,
                    clock=cpu_of_children,
                    seconds=60,
                )
    report.add_growth("CPU time from the start of a process to the end of its first step", lines)
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
