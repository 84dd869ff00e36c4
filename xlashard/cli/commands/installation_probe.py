"""Process in which ``xlashard doctor`` tries JAX: prints one check per line, as JSON.

It may hang or be killed, in a plugin of JAX or in libtpu; the doctor names the step that it was in.
"""

import glob
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import xlashard
from xlashard._jax.runtime.topologies import libtpu_version
from xlashard.cli.commands.doctor import STEPS
from xlashard.cli.commands.doctor_checks import Check
from xlashard.errors import counted
from xlashard.predict.targets.tpu.topologies import topology
from xlashard.support.formatting import error_line, in_bytes

_CHIPS = {
    "TPU": (("/dev/accel*", "/dev/vfio/[0-9]*"), "pip install 'xlashard[tpu]'"),
    "GPU": (("/dev/nvidia[0-9]*",), "pip install 'jax[cuda13]'"),
}


def main() -> None:
    """Print the checks."""
    steps = (check_import, check_devices, check_cache, check_program, check_tpu_program)
    for subject, step in zip(STEPS, steps, strict=True):
        if step is check_tpu_program and libtpu_version() is None:
            break
        print(json.dumps(step(subject)), flush=True)


def check_import(subject: str) -> Check:
    """Name the package that was imported."""
    folder = Path(xlashard.__file__).parent
    return Check(subject, "ok", f"{folder}, with jax {jax.__version__}")


def check_devices(subject: str) -> Check:
    """Compare JAX's devices with the chips of this machine."""
    devices = jax.devices()
    kinds = Counter(f"{device.platform} ({device.device_kind})" for device in devices)
    observed = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    if devices[0].platform != "cpu":
        return Check(subject, "ok", observed)
    for chip, (patterns, install) in _CHIPS.items():
        paths = sorted(path for pattern in patterns for path in glob.glob(pattern))
        if not paths:
            continue
        observed += f"; {paths[0]} exists, but JAX does not use the {chip}"
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if "cpu" in platforms:
            return Check(subject, "note", observed, f"JAX_PLATFORMS is {platforms}: unset it")
        return Check(subject, "fail", observed, f"{install}, and end other processes that use it")
    return Check(subject, "ok", observed)


def check_cache(subject: str) -> Check:
    """Check that JAX can write compiled programs into its cache."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder:
        return Check(subject, "ok", "off; JAX_COMPILATION_CACHE_DIR=FOLDER keeps programs")
    if "://" in folder:
        return Check(subject, "ok", folder)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            sizes = [path.stat().st_size for path in Path(folder).iterdir() if path.is_file()]
    except OSError as error:
        advice = "export JAX_COMPILATION_CACHE_DIR=~/.cache/jax"
        return Check(subject, "fail", f"{folder}: {error.strerror or error}", advice)
    return Check(subject, "ok", f"{folder}: {counted(len(sizes), 'file')}, {in_bytes(sum(sizes))}")


def check_program(subject: str) -> Check:
    """Compile and run a program that sums over all local devices."""
    devices = jax.local_devices()
    mesh = xlashard.Mesh(np.array(devices), ("all",))
    rows = xlashard.NamedSharding(mesh, xlashard.P("all"))
    values = xlashard.device_put(np.arange(8.0 * len(devices), dtype=np.float32), rows)
    started = time.monotonic()
    total = float(xlashard.jit(jnp.sum)(values))
    seconds = time.monotonic() - started
    expected = float(np.arange(8.0 * len(devices)).sum())
    if total != expected:
        over = counted(len(devices), "device")
        observed = f"the sum over {over} is {total:g} instead of {expected:g}"
        return Check(subject, "fail", observed, "pip install --force-reinstall jax jaxlib")
    return Check(subject, "ok", f"a sum over all devices compiled and ran in {seconds:.1f} s")


def check_tpu_program(subject: str) -> Check:
    """Compile a program for a TPU topology."""
    started = time.monotonic()
    try:
        mesh = topology("v5e-4").mesh({"all": 4})
        rows = xlashard.NamedSharding(mesh, xlashard.P("all"))
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows)
        xlashard.jit(lambda x: x @ x.T).lower(x).compile()
    except Exception as error:
        return Check(subject, "fail", error_line(error), "see libtpu above")
    seconds = time.monotonic() - started
    return Check(subject, "ok", f"compiled for v5e-4, without a chip, in {seconds:.1f} s")


if __name__ == "__main__":
    main()
