"""One of two processes with two devices each: values that every process has on its own.

They are put on devices of both processes where they are equal; where they differ, or a process
is missing, all processes raise.
"""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices

from tests.core.processes import expect, join_the_others

join_the_others()

from tests.core.array.across_processes import (  # noqa: E402
    DEVICES,
    FIRST,
    ME,
    MESH,
    ROWS,
    SECOND,
    WHOLE,
    V,
)
from xlashard import (  # noqa: E402
    Array,
    Mesh,
    NamedSharding,
    P,
    SingleDeviceSharding,
    device_put,
    make_array_from_callback,
)
from xlashard.core import processes  # noqa: E402
from xlashard.core.array import cross_process_check  # noqa: E402
from xlashard.core.array.placement.target import ResolvedSharding  # noqa: E402
from xlashard.errors import ArgumentError, ProcessesError, UnequalError  # noqa: E402

SOMETIMES: Any = "sometimes"
PLACES: Any = ResolvedSharding


def check(x: Array, v: np.ndarray) -> None:
    for shard in x.addressable_shards:
        assert shard.device.process_index == ME
        assert np.array_equal(shard.data, v[shard.index])


def meetings_of(use: Any) -> int:
    """Return the number of comparisons between the processes."""
    counted = []
    whole, processes.differences = (
        processes.differences,
        lambda *args: (
            counted.append(args),
            whole(*args),
        )[1],
    )
    try:
        use()
    finally:
        processes.differences = whole
    return len(counted)


def same_values() -> None:
    tree = {"w": V, "b": 3, "k": jax.random.key(1), "f": V.astype(ml_dtypes.bfloat16)}
    places = {"w": ROWS, "b": WHOLE, "k": WHOLE, "f": ROWS}
    for checked in ("always", "once", "never", None):
        out = device_put(tree, places, check=checked)
        check(out["w"], V)
        assert int(out["b"]) == 3 and out["b"].weak_type
        assert not out["w"].is_fully_addressable
        check(out["f"], tree["f"])


def how_often() -> None:
    def thrice(checked: Any) -> None:
        for _ in range(3):
            device_put(V, ROWS, check=checked)

    assert meetings_of(lambda: thrice("once")) == 1
    assert meetings_of(lambda: thrice("once")) == 0
    assert meetings_of(lambda: thrice("always")) == 3
    assert meetings_of(lambda: thrice("never")) == 0

    def other_shapes() -> None:
        for rows in (4, 8, 4):
            device_put(V[:rows], ROWS)

    assert meetings_of(other_shapes) == 2
    assert meetings_of(lambda: device_put(V, SingleDeviceSharding(jax.local_devices()[0]))) == 0


def other_values() -> None:
    theirs = V.copy()
    theirs[5, 2] += ME
    tree = {"same": V, "layers": [V, theirs]}
    for checked in ("always", "once"):
        error = expect(
            UnequalError,
            r"x\['layers'\]\[1\] differs in process 1: at \[5, 2\] it is 22.0 in process 0, 23.0 "
            r"in process 1.*broadcast_one_to_all.*make_array_from_process_local_data",
            lambda checked=checked: device_put(tree, ROWS, check=checked),
        )
        assert error.processes == (1,) and error.paths == ("x['layers'][1]",)
    for _ in range(2):  # a failed comparison is not cached
        expect(UnequalError, "differs", lambda: device_put(theirs, ROWS))
    device_put(tree, ROWS, check="never")
    expect(
        UnequalError,
        r"it is float32\[8,4\].* in process 0, float32\[4,4\].* in process 1",
        lambda: device_put(V[: 8 - 4 * ME], ROWS, check="always"),
    )
    expect(
        UnequalError,
        r"leaf 1 is nothing in process 0, x\['b'\] in process 1",
        lambda: device_put({"a": V} | ({"b": V} if ME else {}), ROWS, check="always"),
    )
    expect(
        UnequalError,
        r"P\(.*in process 0.*in process 1",
        lambda: device_put(V, WHOLE if ME else ROWS, check="always"),
    )
    expect(UnequalError, "1.0", lambda: device_put(float(ME), WHOLE, check="always"))
    expect(AssertionError, "x differs", lambda: device_put(jnp.ones(4) + ME, WHOLE, check="always"))
    expect(ArgumentError, "'always'.*'sometimes'", lambda: device_put(V, ROWS, check=SOMETIMES))


def own_arrays() -> None:
    for x in (
        jnp.asarray(V),
        device_put(V),
        device_put(V, jax.local_devices()[1]),
        device_put(V, NamedSharding(Mesh(jax.local_devices(), ("d",)), P(None, "d"))),
    ):
        for target in (ROWS, WHOLE, NamedSharding(MESH, P("device", "process"))):
            y = device_put(x, target)
            assert y.sharding == target and not y.is_fully_addressable
            check(y, V)
            assert not x.is_deleted()


def arrays_of_ones_own() -> None:
    """Put uncommitted arrays, and committed ones on devices of their own process."""
    own_arrays()
    by_host, PLACES.on_host = PLACES.on_host, property(lambda places: False)
    own_arrays()  # as with devices that have their own memory
    PLACES.on_host = by_host
    y = device_put(jnp.asarray(V), SECOND)
    assert len(y.addressable_shards) == 2 * ME
    check(y, V)
    used = device_put(V)
    check(device_put(used, ROWS, donate=True), V)
    assert used.is_deleted()
    keys = jax.random.split(jax.random.key(7), 8)
    out = device_put(keys, ROWS)
    assert np.array_equal(
        jax.random.key_data(out.addressable_shards[0].data),
        jax.random.key_data(keys)[4 * ME : 4 * ME + 2],
    )


def bound_to_one_process() -> None:
    """Put an array that one process holds: only that process has the value."""
    for source in (FIRST, SECOND, SingleDeviceSharding(DEVICES[3])):
        x = make_array_from_callback(V.shape, source, lambda index: V[index], dtype=np.float32)
        for target in (ROWS, WHOLE, FIRST, SECOND, SingleDeviceSharding(DEVICES[0])):
            check(device_put(x, target), V)
    x = make_array_from_callback(V.shape, FIRST, lambda index: V[index], dtype=np.float32)
    if ME == 0:
        y = device_put(V, NamedSharding(Mesh(jax.local_devices(), ("d",)), P("d")))
        x = device_put(y[:4], FIRST)
    expect(
        ProcessesError,
        r"different arrays.*process 0: float32\[4,4\]; process 1: float32\[8,4\]",
        lambda: device_put(x, WHOLE),
    )


def one_that_does_not_come() -> None:
    whole, cross_process_check._TIMEOUT = cross_process_check._TIMEOUT, 0.5
    x = device_put(V, jax.local_devices()[0])
    if ME == 0:
        error = expect(
            ProcessesError,
            r"waited 0.5 s, and process 1 of 2 did not call it.*: x\['v'\].*check='never'",
            lambda: device_put({"v": V}, ROWS, check="always"),
        )
        assert error.processes == (1,)
        expect(ProcessesError, r"np.asarray\(x\)", lambda: device_put(x, ROWS))
        check(device_put(V, ROWS, check="never"), V)
    sync_global_devices("process 0 gave up")
    cross_process_check._TIMEOUT = whole
    check(device_put(V, ROWS, check="always"), V)
    check(device_put(x, ROWS), V)


def in_threads() -> None:
    """A thread that loads the next batch meets its peer thread, whatever the main thread does."""
    out = []
    thread = threading.Thread(target=lambda: out.append(device_put(V + 1, ROWS)))
    if ME == 0:
        thread.start()
        thread.join(0.5)
    check(device_put(V, ROWS, check="always"), V)
    if ME == 1:
        thread.start()
    thread.join()
    check(out[0], V + 1)


for step in (
    same_values,
    how_often,
    other_values,
    arrays_of_ones_own,
    bound_to_one_process,
    one_that_does_not_come,
    in_threads,
):
    step()
    sync_global_devices(step.__name__)
print("all agree")
