"""One of several processes that save, exchange failures, and restore; also gathered arrays.

    pod_serialization.py FOLDER

FOLDER has `alone`, written by one process. The script stops with an error where a result is
wrong.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManagerBase

from tests.core.processes import expect, join_the_others
from tests.legacy.modules.multihost_checks import check_multihost_utils
from xlashard import Mesh, NamedSharding, P, device_put
from xlashard._jax.runtime.transfer import HandleType
from xlashard.errors import PlacementError, ProcessesError, SerializationError
from xlashard.legacy import jax_array
from xlashard.legacy import serialization as saving
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.multihost import barrier, process_allgather

join_the_others()

FOLDER = Path(sys.argv[1])
ME, COUNT = jax.process_index(), jax.process_count()
ROWS = Mesh(np.array(jax.devices()), ("data",))
GRID = Mesh(np.array(jax.devices()).reshape(2, -1).T, ("x", "y"))
V = np.arange(64, dtype=np.float32).reshape(8, 8)


def specs(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [saving.get_tensorstore_spec(str(folder / name)) for name in names]


def whole(x: jax.Array) -> np.ndarray:
    return process_allgather(x, tiled=True) if not x.is_fully_addressable else np.asarray(x)


def check_saved_together() -> None:
    arrays = [
        device_put(V, NamedSharding(ROWS, P("data"))),
        device_put(V, NamedSharding(GRID, P(None, "y"))),
        GlobalDeviceArray.from_array(device_put(V, NamedSharding(ROWS, P()))),
        np.full(3, ME),  # differs between processes, and the first one's is written
    ]
    manager = saving.GlobalAsyncCheckpointManager(timeout_secs=60)
    assert isinstance(manager, GlobalAsyncCheckpointManagerBase)
    temporary, final = FOLDER / "temporary", FOLDER / "together"
    names = ("rows", "columns", "copies", "host")

    def commit() -> None:
        assert ME == 0, "the first process commits"
        os.rename(temporary, final)

    manager.serialize(arrays, specs(temporary, *names), on_commit_callback=commit)
    manager.check_for_errors()
    manager.wait_until_finished()
    assert final.exists() and not temporary.exists()
    files = {path.name for path in (final / "copies").iterdir()}
    assert files == {".zarray", "0.0"}
    there = [NamedSharding(GRID, P("y", "x")), NamedSharding(ROWS, P(None, "data"))]
    there += [NamedSharding(GRID, P("x")), NamedSharding(ROWS, P())]
    back = manager.deserialize(there, specs(final, *names))
    for x in back[:3]:
        assert np.array_equal(whole(x), V)
    assert np.asarray(back[3]).tolist() == [0, 0, 0]


def check_two_managers_at_once() -> None:
    x = device_put(V, NamedSharding(ROWS, P("data")))
    managers = [saving.GlobalAsyncCheckpointManager() for _ in range(2)]
    for number, manager in enumerate(managers):
        temporary, final = FOLDER / f"temporary_{number}", FOLDER / f"early_{number}"
        manager.serialize(
            [x],
            specs(temporary, "w"),
            temp_checkpoint_dir=str(temporary),
            final_checkpoint_dir=str(final),
        )
    for number, manager in enumerate(managers):
        manager.wait_until_finished()
        assert (FOLDER / f"early_{number}" / "w" / ".zarray").exists()


def check_read_in_each_world() -> None:
    (spec,) = specs(FOLDER, "alone")
    x = asyncio.run(saving.async_deserialize(NamedSharding(GRID, P("x", "y")), spec))
    assert type(x) is HandleType and np.array_equal(whole(x), V)
    with jax_array(False):
        (gda,) = saving.run_deserialization([GRID], [P("y")], [spec], [(16, 8)])
    assert type(gda) is GlobalDeviceArray and gda.mesh == GRID and gda.shape == (16, 8)
    value = whole(gda)
    assert np.array_equal(value[:8], V) and not value[8:].any()


def check_arrays_of_one_process_are_refused() -> None:
    mine = device_put(V, jax.local_devices()[0])
    expect(
        PlacementError,
        "float32.8,8.*host-local.*host_local_array_to_global_array",
        lambda: saving.run_serialization([mine], specs(FOLDER, "local")),
    )


def check_failures_are_heard_of() -> None:
    x = device_put(V, NamedSharding(ROWS, P("data")))
    manager = saving.GlobalAsyncCheckpointManager(timeout_secs=60)
    called: list[int] = []

    def save(name: str) -> None:
        manager.serialize([x], specs(FOLDER, name), on_commit_callback=lambda: called.append(1))
        manager.wait_until_finished()

    # The second process finds a file in the place of a folder.
    (FOLDER / f"file_{ME}").write_text("")
    if ME == 1:
        expect(SerializationError, "file_1.w", lambda: save("file_1/w"))
    else:
        expect(
            ProcessesError, "writing a checkpoint failed: process 1: .*file_1", lambda: save("w")
        )
    assert not called
    # The first process can't commit.
    manager.serialize([x], specs(FOLDER, "v"), on_commit_callback=lambda: 1 / 0)
    kind, text = (ZeroDivisionError, "") if ME == 0 else (ProcessesError, "process 0: ZeroDivision")
    expect(kind, text, manager.wait_until_finished)
    manager.check_for_errors()  # the error was raised before


def check_who_does_not_come_is_named() -> None:
    x = device_put(V, NamedSharding(ROWS, P("data")))
    manager = saving.GlobalAsyncCheckpointManager(timeout_secs=1)
    if ME == 0:
        manager.serialize([x], specs(FOLDER, "u"))
        expect(
            ProcessesError, "waited 1 s, and process 1 did not come", manager.wait_until_finished
        )
    barrier("the second process stays until it has been missed")


check_saved_together()
check_two_managers_at_once()
check_read_in_each_world()
check_arrays_of_one_process_are_refused()
check_failures_are_heard_of()
check_multihost_utils()
check_who_does_not_come_is_named()
print("saved and read")
