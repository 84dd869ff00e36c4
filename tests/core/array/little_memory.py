"""Process with a limit little above its memory use: placements that exceed the limit.

It prints "all well" if each placement is refused with a clear error and leaves nothing behind,
and other arrays and placements still work. The sources take no memory: they are one number,
broadcast.
"""

import gc
import re
import resource
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xlashard import Mesh, NamedSharding, P, device_put, make_array_from_callback
from xlashard.errors import OutOfMemoryError

ROOM = 384 << 20
MESH = Mesh(np.array(jax.devices()), ("d",))
ROWS, COLUMNS, EVERYWHERE = (NamedSharding(MESH, P(*s)) for s in (("d",), (None, "d"), ()))


def huge(rows: int = 1 << 20) -> np.ndarray:
    """Return float32 rows of 4 KiB each."""
    return np.broadcast_to(np.float32(3), (rows, 1024))


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def live() -> int:
    return len(jax.live_arrays())


def refused(text: str, place: Callable[[], Any], per_device: int) -> None:
    gc.collect()
    arrays, memory = live(), resident()
    try:
        place()
    except OutOfMemoryError as error:
        assert re.search(text, str(error), re.S), error
        assert error.bytes_per_device == per_device, error.bytes_per_device
        assert isinstance(error, MemoryError)
        # Also while the error is still referenced.
        assert live() == arrays, (live(), arrays)
        assert resident() - memory < ROOM // 4, (resident(), memory)
    else:
        raise AssertionError("it fitted")


def main() -> None:
    """Try each way of placing too much."""
    kept = device_put(np.arange(64.0, dtype=np.float32), ROWS)
    small = device_put(huge(1 << 14), ROWS)  # 64 MiB
    device_put(small, EVERYWHERE).delete()
    big = device_put(huge(1 << 16), ROWS)  # 256 MiB
    with open("/proc/self/statm") as file:
        virtual = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + ROOM, virtual + ROOM))

    refused(
        r"x: not enough memory to place an Array float32\[1048576,1024\] on 8 devices, which share "
        r".* 512.0 MiB \(536,870,912 bytes\) on each; nothing was placed: .*delete\(\)",
        lambda: device_put(huge(), ROWS),
        512 << 20,
    )
    refused(
        r"on 8 devices.* 4.0 GiB \(4,294,967,296 bytes\) on each",
        lambda: device_put(huge(), EVERYWHERE),
        4 << 30,
    )
    refused(
        r"x: not enough memory to place 3 Arrays, float32\[1048576,1024\] the largest, on 8",
        lambda: device_put({"a": kept, "b": [huge(1 << 14), huge(), huge(1 << 14)]}, ROWS),
        (512 << 20) + 2 * (8 << 20),
    )
    refused(
        r"not enough memory to place an Array float32\[1048576,1024\] on 8 devices.* 512.0 MiB",
        lambda: make_array_from_callback((1 << 20, 1024), ROWS, lambda index: huge()[index]),
        512 << 20,
    )
    once = device_put(big, COLUMNS)
    refused(
        r"x\['w'\]: not enough memory to place an Array float32\[65536,1024\] on 8 .* 32.0 MiB",
        lambda: device_put({"w": big}, COLUMNS),
        32 << 20,
    )
    assert np.asarray(once.addressable_data(7))[9, 9] == 3 and not big.is_deleted()
    del once

    assert np.array_equal(np.asarray(kept), np.arange(64.0, dtype=np.float32))
    assert np.asarray(small)[-1, -1] == 3
    again = device_put(huge(1 << 14), ROWS)
    assert np.asarray(again)[5, 5] == 3
    assert float(jax.jit(lambda x: x.sum())(kept)) == 64 * 63 / 2
    print("all well")


if __name__ == "__main__":
    main()
