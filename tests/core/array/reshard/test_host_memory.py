"""Peak host memory of a reshard besides source and target: at most one shard."""

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.core.array.cases import DEVICES, named, same
from xlashard import GSPMDSharding, Mesh, NamedSharding, P, Sharding, device_put
from xlashard._jax.runtime.compiler import extra_bytes
from xlashard.core.array.reshard import compiled, p2p, plan
from xlashard.core.array.reshard.compiled import split_into_chunks
from xlashard.geometry import Tiling

SHAPE = (64, 64, 32)
V = np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


def on(devices: Any, *spec: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("d",)), P(*spec))


PAIRS: dict[str, tuple[Any, Any]] = {
    "rows to columns": (named(("x", "y")), named(None, ("x", "y"))),
    "columns to rows": (named(None, ("x", "y")), named(("x", "y"))),
    "axes change places": (named("x", "y"), named("y", "x")),
    "to copies": (named(None, ("x", "y")), named()),
    "from copies": (named(), named(None, "y")),
    # Without chunks both partitioners gather the whole array on every device for these.
    "eight to two by four": (named(None, ("x", "y")), named("x", None, "y")),
    "listed tiles": (
        named(None, None, ("x", "y")),
        GSPMDSharding(DEVICES, "{devices=[4,2,1]7,2,4,3,0,6,5,1}"),
    ),
}


@pytest.fixture
def small_programs_too(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reshard arrays of a few KB by the path of arrays of many GB."""
    monkeypatch.setattr(plan, "in_one_memory", lambda *shardings: False)
    monkeypatch.setattr(compiled, "_NEGLIGIBLE_BYTES", 0)
    programs = compiled.compiled_reshard_for
    programs.cache_clear()
    yield
    programs.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("small_programs_too")
@pytest.mark.parametrize(("source", "target"), PAIRS.values(), ids=PAIRS)
def test_compiled_reshard_needs_at_most_one_shard(
    source: Sharding, target: Sharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    move_for = compiled.compiled_reshard_for
    monkeypatch.setattr(
        compiled,
        "compiled_reshard_for",
        lambda request: (ran.append((request, move_for(request))), ran[-1][1])[1],
    )
    x = device_put(V, source)
    assert same(device_put(x, target), V)
    ((request, move),) = ran
    assert 0 <= move.extra_bytes <= max(request.shard_bytes)
    extra = extra_bytes(move.program.executable)
    assert extra is not None
    assert extra <= max(request.shard_bytes)


def test_slabs_are_parts_of_every_shard() -> None:
    rows, columns = (Tiling.from_indices((12, 8), i) for i in (ROWS, COLUMNS))
    chunks = split_into_chunks((12, 8), rows, columns, 2)
    assert chunks is not None
    # Twelve rows in four tiles of three, eight columns in four tiles of two.
    assert chunks.shape == (4, 3, 4, 2)
    assert (chunks.dim, chunks.count, chunks.extent) == (1, 2, 2)
    finest = split_into_chunks((12, 8), rows, columns, 100)
    assert finest is not None
    assert (finest.count, finest.extent) == (3, 1)
    assert split_into_chunks((4, 4), rows, columns, 2) is None
    assert split_into_chunks((), Tiling.replicated(4, 0), Tiling.replicated(4, 0), 2) is None


ROWS = [(slice(3 * i, 3 * i + 3), slice(None)) for i in range(4)]
COLUMNS = [(slice(None), slice(2 * i, 2 * i + 2)) for i in range(4)]

OTHERS: dict[str, tuple[Any, Any]] = {
    "fewer devices": (on(DEVICES, "d"), on(DEVICES[3:7], None, "d")),
    "more devices": (on(DEVICES[3:7], "d"), on(DEVICES, None, "d")),
    "one to many": (DEVICES[2], on(DEVICES[1:5], "d")),
    "many to one": (on(DEVICES[1:5], None, "d"), DEVICES[2]),
    "overlapping": (on(DEVICES[:4], "d"), on(DEVICES[2:6], None, "d")),
    "to copies": (on(DEVICES[:4], None, None, "d"), on(DEVICES[2:8])),
}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), OTHERS.values(), ids=OTHERS)
def test_pieces_in_flight_occupy_at_most_one_shard(
    source: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the bytes that are sliced and transferred between two waits."""
    monkeypatch.setattr(plan, "in_one_memory", lambda *shardings: False)
    x = device_put(V, source)
    largest = max(shard.data.nbytes for shard in x.addressable_shards)
    under_way: Counter[Any] = Counter()
    most: Counter[Any] = Counter()
    taken, waited = p2p._moved_piece, jax.block_until_ready

    def counted(buffer: Any, piece: Any, whole: Any, device: Any) -> Any:
        block = taken(buffer, piece, whole, device)
        (giver,) = buffer.devices()
        made = Counter({giver: 0 if whole.source else piece.nbytes})
        if giver != device and not whole.target:
            made[device] += piece.nbytes
        for place, nbytes in made.items():
            under_way[place] += nbytes
            most[place] = max(most[place], under_way[place])
        return block

    monkeypatch.setattr(p2p, "_moved_piece", counted)
    monkeypatch.setattr(
        p2p.jax, "block_until_ready", lambda tree: (waited(tree), under_way.clear())[0]
    )
    y = device_put(x, target)
    monkeypatch.undo()
    assert same(y, V)
    largest = max(largest, *(shard.data.nbytes for shard in y.addressable_shards))
    assert max(most.values()) <= largest


# MB of source and target on emulated devices, which share blocks, for an array of 128 MB in shards
# of 16. A program and its pieces may take one more shard on each device.
PEAKS = {
    "rows to columns": 256,
    "rows to columns, donated": 128 + 16,
    "columns to rows": 256,
    "columns to rows, donated": 256,
    "rows to copies": 256,
    "rows to copies, donated": 128 + 16,
    "copies to rows": 8 * 128,
    "copies to rows, donated": 8 * 128,
    "rows to one": 256,
    "rows to one, donated": 128 + 16,
    "one to rows": 128,
    "one to rows, donated": 128,
    "another order": 128,
    "another order, donated": 128,
    "half the devices": 256,
    "half the devices, donated": 128 + 16,
    "listed tiles": 256,
    "listed tiles, donated": 256,
    "rows to columns, between devices": 256 + 128,
    "rows to one, between devices": 256 + 128,
    "half the devices, between devices": 256 + 4 * 32,
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the peak")
def test_the_peak_of_resident_memory() -> None:
    # Freed memory is returned to the system at once.
    settings = {"MALLOC_MMAP_THRESHOLD_": "131072", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.array.reshard.peak_memory"],
        cwd=Path(__file__).parents[4],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split(": ") for line in done.stdout.splitlines())
    assert found.keys() == PEAKS.keys()
    over = {name: mb for name, mb in found.items() if int(mb) > PEAKS[name] + 24}
    assert not over
