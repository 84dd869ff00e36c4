"""One of two processes with two devices each, started by `run_many`.

It reads arrays that span both processes by every policy of `to_host`, also without the other.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tests.core.processes import expect, join_the_others
from xlashard import Array, Mesh, NamedSharding, P, make_array_from_callback, pjit
from xlashard.errors import NotAddressableError, ProcessesError

join_the_others()

ME = jax.process_index()
DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(2, 2), ("process", "device"))
CROSSED = Mesh(np.array(DEVICES)[[0, 2, 1, 3]], ("d",))
V = np.arange(32, dtype=np.float32).reshape(8, 4)


def on(mesh: Mesh, *spec: Any, v: np.ndarray = V) -> Array:
    return make_array_from_callback(v.shape, NamedSharding(mesh, P(*spec)), lambda index: v[index])


def check_local() -> None:
    mine = V[4 * ME : 4 * ME + 4]
    for x in (on(MESH, ("process", "device")), on(MESH, "process", "device"), on(MESH, "process")):
        assert np.array_equal(x.to_host("local"), mine)
        assert not x.to_host("local").flags.writeable
    assert np.array_equal(on(MESH, None, "process").to_host("local"), V[:, 2 * ME : 2 * ME + 2])
    assert np.array_equal(on(MESH, None, "device").to_host("local"), V)
    rows = ("0:2", "4:6") if ME == 0 else ("2:4", "6:8")
    expect(
        NotAddressableError,
        rf"no one block of it: .*{rows[0]}.*{rows[1]}.*addressable_shards.*to_host\('gather'\)",
        lambda: on(CROSSED, "d").to_host("local"),
    )
    other = make_array_from_callback(
        V.shape,
        NamedSharding(Mesh(np.array(DEVICES[:2]), ("d",)), P("d")),
        lambda index: V[index],
        dtype=np.float32,
    )
    if ME == 1:
        expect(NotAddressableError, "holds no piece", lambda: other.to_host("local"))
        expect(NotAddressableError, "has no device of an Array", lambda: other.to_host("gather"))
    else:
        assert np.array_equal(other.to_host("gather"), V)


def check_replicated() -> None:
    for x in (on(MESH), on(MESH, "device")):
        assert np.array_equal(x.to_host("replicated"), V)
        assert np.array_equal(x.to_host("gather"), V)
    expect(
        NotAddressableError,
        r"2 of its 4 pieces.*to_host\('local'\).*to_host\('gather'\).*process_allgather",
        lambda: on(MESH, ("process", "device")).to_host(),
    )


def check_gather() -> None:
    for x in (on(MESH, ("process", "device")), on(CROSSED, "d"), on(MESH, None, "process")):
        whole = x.to_host("gather")
        assert np.array_equal(whole, V) and not whole.flags.writeable
        assert np.array_equal(np.asarray(x), V), "what was gathered is kept"
    empty = on(MESH, "process", v=np.zeros((0, 4), np.float32))
    assert empty.to_host("gather").shape == (0, 4)


def check_one_that_does_not_come() -> None:
    x = on(MESH, "process")
    if ME == 0:
        error = expect(
            ProcessesError,
            r"float32\[8,4\] waited 0.5 s, and process 1 of 2 did not call it.*'local'",
            lambda: x.to_host("gather", timeout=0.5),
        )
        assert error.processes == (1,)  # pyright: ignore[reportAttributeAccessIssue]
    multihost_utils.sync_global_devices("process 0 gave up")
    assert np.array_equal(x.to_host("gather"), V), "the next time both come"
    y = on(MESH, "process", v=V + 1)
    if ME == 1:
        expect(
            ProcessesError,
            "process 0 of 2 did not call it",
            lambda: y.to_host("gather", timeout=0.5),
        )
    multihost_utils.sync_global_devices("process 1 gave up")
    assert np.array_equal(y.to_host("gather"), V + 1)


def check_other_arrays() -> None:
    x = on(MESH, "process") if ME == 0 else on(MESH, None, "process")
    expect(ProcessesError, r"process 0: .*process 1: ", lambda: x.to_host("gather"))
    assert np.array_equal(on(MESH, "process").to_host("gather"), V)


def check_closed_over() -> None:
    weights = on(MESH, "process")
    text = r"weights, an array that <lambda> closes over, float32\[8,4\], cannot become .*argument"
    expect(NotAddressableError, text, lambda: jax.jit(lambda x: x + weights.to_jax())(1.0))
    both = pjit(lambda x: x + weights)(on(MESH, "process"))
    assert np.array_equal(both.to_host("gather"), V + V)


for check in (
    check_closed_over,
    check_local,
    check_replicated,
    check_gather,
    check_one_that_does_not_come,
    check_other_arrays,
):
    check()
    multihost_utils.sync_global_devices(check.__name__)
print("both agree")
