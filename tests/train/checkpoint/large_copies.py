"""Copies of a large checkpoint by `xlashard reshard-checkpoint`, compared byte for byte.

    python -m tests.train.checkpoint.large_copies --mebibytes 8192 --memory-limit 1GiB

writes a file of safetensors of random bytes, copies it to orbax, sharded by rows, and that to
orbax, sharded by columns, prints the peaks of memory, and compares SHA-256s, array by array.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

ROOT = Path(__file__).resolve().parents[3]
SHAPE = (1024, 4096)
NBYTES = 16 * 2**20
MESH = ("--mesh", "data=4,model=8", "--rules")
ROWS = (*MESH, "kernel=P('data')")
COLUMNS = (*MESH, "kernel=P(None, ('data', 'model'))")


def list_names(mebibytes: int) -> list[str]:
    return [f"layers.{n:03}.kernel" for n in range(mebibytes * 2**20 // NBYTES)]


def write_large_file(path: Path, mebibytes: int) -> str:
    """Write arrays of random bytes, which no compression makes smaller, and return their digest."""
    names = list_names(mebibytes)
    header = {
        name: {"dtype": "I32", "shape": SHAPE, "data_offsets": [n * NBYTES, (n + 1) * NBYTES]}
        for n, name in enumerate(names)
    }
    text, digest = json.dumps(header).encode(), hashlib.sha256()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for n in range(len(names)):
            data = np.random.default_rng(n).integers(0, 2**31, SHAPE, np.int32).tobytes()
            file.write(data)
            digest.update(data)
    return digest.hexdigest()


def digest_copy(path: Path, mebibytes: int) -> str:
    """Return the digest of the arrays of a copy, which TensorStore alone reads from orbax."""
    digest, names = hashlib.sha256(), list_names(mebibytes)
    if path.is_file():
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            for name in names:
                file.seek(start + header[name]["data_offsets"][0])
                digest.update(file.read(NBYTES))
        return digest.hexdigest()
    for name in names:
        store = {"driver": "ocdbt", "base": f"file://{path}/", "path": name}
        array = tensorstore.open({"driver": "zarr", "kvstore": store}, open=True).result()
        digest.update(array.read().result().tobytes())
    return digest.hexdigest()


def start_copy(*words: object) -> subprocess.Popen[str]:
    """Start a copy, in a process of its own for its memory: a fork has the peak of the server."""
    command = [sys.executable, "-m", "xlashard", "reshard-checkpoint", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish_copy(process: subprocess.Popen[str], timeout: float | None = 240) -> Mapping[str, Any]:
    """Return what a copy printed with `--json`."""
    output, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return json.loads(output)


def main() -> None:
    """Copy a checkpoint twice, and print the peaks; an assertion fails if a byte differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=2048)
    parser.add_argument("--memory-limit", default="1GiB")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        folder = Path(name)
        source = folder / "source.safetensors"
        wanted = write_large_file(source, flags.mebibytes)
        for copy, layout in (("rows", ROWS), ("columns", COLUMNS)):
            words = (*layout, "--memory-limit", flags.memory_limit, "--json")
            facts = finish_copy(start_copy(source, folder / copy, *words), None)
            assert facts["bytes"] == flags.mebibytes * 2**20
            assert facts["peak_bytes"] <= facts["memory_limit_bytes"], facts
            assert digest_copy(folder / copy, flags.mebibytes) == wanted, copy
            print(
                f"{source.name} to {copy}: {facts['bytes'] / 2**30:g} GiB equal by SHA-256, peak "
                f"memory {facts['peak_bytes'] / 2**20:.1f} MiB of {flags.memory_limit}, "
                f"{facts['seconds']:.1f} s",
                flush=True,
            )
            source = folder / copy


if __name__ == "__main__":
    main()
