"""One of 2 or 4 processes: gathering, broadcasting and comparing values of all processes.

It stops with an error where a result is wrong.
"""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils

from tests.core.processes import expect, join_the_others
from xlashard import Array, Mesh, NamedSharding, P, device_put, make_array_from_callback
from xlashard._jax.runtime import coordination
from xlashard.errors import (
    ArgumentError,
    DeadlockError,
    PlacementError,
    ProcessesError,
    UnequalError,
)
from xlashard.multihost import (
    assert_equal,
    barrier,
    broadcast_one_to_all,
    host_local_array_to_global_array,
    process_allgather,
)
from xlashard.pods.multihost.host_collectives import STORED_BYTES

join_the_others()

N, ME = jax.process_count(), jax.process_index()
LAST = N - 1
MESH = Mesh(np.array(jax.devices()).reshape(N, -1), ("process", "device"))
DTYPES = (
    *(bool, np.int8, np.uint16, np.int64, np.float16, np.float64, np.complex64),
    *(ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.float8_e4m3fn),
)


def of(process: int, dtype: Any, shape: tuple[int, ...] = (3, 2)) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) + process).astype(dtype)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def check_gathering() -> None:
    # Both ways: with the barrier, and by the devices.
    for rows in (3, STORED_BYTES):
        for dtype in DTYPES if rows == 3 else (np.float64, ml_dtypes.int4):
            shape = (rows, 2)
            stacked = process_allgather(of(ME, dtype, shape))
            assert same(stacked, np.stack([of(p, dtype, shape) for p in range(N)])), dtype
            tiled = process_allgather({"a": [of(ME, dtype, shape)]}, tiled=True)["a"][0]
            assert same(tiled, np.concatenate([of(p, dtype, shape) for p in range(N)])), dtype


def check_kinds_of_leaves() -> None:
    keys = jax.random.split(jax.random.key(ME), 2)
    tree = {
        "number": ME,
        "flag": ME == 1,
        "ours": device_put(of(ME, np.float32), jax.local_devices()[-1]),
        "spread": device_put(
            of(ME, np.float32, (4, 2)),
            NamedSharding(Mesh(np.array(jax.local_devices()), ("d",)), P("d")),
        ),
        "jax": jnp.full((), ME, jnp.bfloat16),
        "keys": keys,
        "empty": np.zeros((0, 3), np.int8),
        "none": None,
    }
    out = process_allgather(tree)
    assert out["number"].tolist() == list(range(N)) and out["none"] is None
    assert out["flag"].tolist() == [p == 1 for p in range(N)]
    assert same(out["ours"], np.stack([of(p, np.float32) for p in range(N)]))
    assert out["spread"].shape == (N, 4, 2) and out["spread"][LAST, 0, 0] == LAST
    assert out["jax"].dtype == jnp.bfloat16 and out["jax"].tolist() == list(range(N))
    assert out["empty"].shape == (N, 0, 3)
    expected = jnp.stack([jax.random.split(jax.random.key(p), 2) for p in range(N)])
    assert (jax.random.key_data(out["keys"]) == jax.random.key_data(expected)).all()
    tiled = process_allgather(tree, tiled=True)
    assert tiled["number"].tolist() == list(range(N)), "numbers are stacked"
    assert tiled["keys"].shape == (2 * N,) and tiled["empty"].shape == (0, 3)
    one = process_allgather(keys[0], tiled=True)
    assert (jax.random.key_data(one) == jax.random.key_data(expected[:, 0])).all()
    assert process_allgather({}) == {}


def whole_of(*spec: Any) -> Array:
    v = of(0, np.float32, (8, 4))
    return make_array_from_callback(v.shape, NamedSharding(MESH, P(*spec)), lambda i: v[i])


def check_global_arrays() -> None:
    v = of(0, np.float32, (8, 4))
    rows, copied = whole_of(("process", "device")), whole_of()
    out = process_allgather({"rows": rows, "copied": copied, "own": np.float32(ME)}, tiled=True)
    assert same(out["rows"], v) and same(out["copied"], v) and len(out["own"]) == N
    expect(
        PlacementError,
        r"in_tree\['rows'\] is a global array float32\[8,4\].*cannot be stacked.*tiled=True",
        lambda: process_allgather({"rows": rows}),
    )
    assert same(broadcast_one_to_all(copied), v)
    expect(
        PlacementError,
        r"in_tree\[0\] is a global array .*lacks a part.*process_allgather\(x, tiled=True\)",
        lambda: broadcast_one_to_all([rows]),
    )


def check_broadcasting() -> None:
    for rows in (3, STORED_BYTES):
        shape = (rows, 2)
        tree = {"w": of(ME + 1, np.float64, shape), "b": of(ME + 1, ml_dtypes.int4, shape)}
        for source in {0, LAST}:
            out = broadcast_one_to_all(tree, None if source == 0 else source == ME)
            assert same(out["w"], of(source + 1, np.float64, shape))
            assert same(out["b"], of(source + 1, ml_dtypes.int4, shape))
    key = broadcast_one_to_all(jax.random.key(ME + 5))
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(5))).all()
    assert broadcast_one_to_all({"step": 3 if ME == 0 else 0})["step"] == 3
    expect(
        ProcessesError,
        r"but processes 0, 1(, 2, 3)? are the source.*is_source=jax.process_index\(\) == 0",
        lambda: broadcast_one_to_all(np.zeros(2), is_source=True),
    )
    expect(ProcessesError, "no process is", lambda: broadcast_one_to_all(1, is_source=False))


def on_the_last(odd: Any, others: Any) -> Any:
    return odd if ME == LAST else others


def check_other_trees() -> None:
    """All processes report differing trees with one text, at once."""
    f4, f3 = np.zeros(4, np.float32), np.zeros(3, np.float32)
    last = rf"{LAST}"
    for use in (process_allgather, broadcast_one_to_all):
        error = expect(
            ProcessesError,
            rf"{use.__name__}.* in_tree\['w'\]: .*float32\[\d\] in process(es)? 0.*"
            rf"float32\[3\] in process {last}.*pad",
            lambda use=use: use({"w": on_the_last(f3, f4), "b": f4}),
        )
        assert error.processes == (LAST,)
        expect(
            ProcessesError,
            rf"in_tree\['w'\].*int32\[4\] in process {last}",
            lambda use=use: use({"w": on_the_last(f4.astype(np.int32), f4)}),
        )
        expect(
            ProcessesError,
            rf"in_tree\['v'\].*in_tree\['u'\] in process {last}"
            if N > 2
            else r"in_tree\['v'\] in process 0, in_tree\['u'\] in process 1",
            lambda use=use: use(on_the_last({"u": f4}, {"v": f4})),
        )
    text = r"in_tree\['w'\]: it is of str"
    if ME == LAST:
        expect(ArgumentError, text, lambda: process_allgather({"w": "a"}))
    else:
        expect(
            ProcessesError,
            rf"failed in process {LAST}; error of process {LAST}: {text}",
            lambda: process_allgather({"w": f4}),
        )
    expect(
        ProcessesError,
        rf"different functions .* 0.*: assert_equal; process {LAST}: broadcast_one_to_all",
        lambda: on_the_last(broadcast_one_to_all, assert_equal)(f4),
    )
    assert_equal(1, "after an error all go on")


def check_one_that_does_not_come() -> None:
    if ME != LAST:
        for use, extra in ((process_allgather, r"\(..., tiled=False\)"), (assert_equal, "")):
            error = expect(
                ProcessesError,
                rf"{use.__name__}{extra} waited 0.3 s, and process {LAST} of {N} did not call it",
                lambda use=use: use(np.zeros(2), timeout=0.3),
            )
            assert error.processes == (LAST,)
    multihost_utils.sync_global_devices("gave up")
    assert process_allgather(ME).tolist() == list(range(N))


def check_one_that_waits_elsewhere() -> None:
    """A deadlock is reported before the timeout."""
    if N == 2:
        expect(
            DeadlockError,
            r"process 0 waits at process_allgather\(.*process 1 waits at barrier 'elsewhere'",
            lambda: barrier("elsewhere") if ME == LAST else process_allgather(ME),
        )
    assert process_allgather(ME).tolist() == list(range(N))


def check_comparing() -> None:
    values = {"w": of(0, np.float32), "keys": jax.random.key(1), "n": np.nan, "g": whole_of()}
    assert_equal(values)
    assert_equal({"rows": whole_of("process"), "partly": whole_of("device")})
    w = of(0, np.float32, (64, 64))
    other = w.copy()
    other[2, 5] = 3
    others = "processes 0, 1, 2" if N == 4 else "process 0"
    error = expect(
        UnequalError,
        rf"^weights: in_tree\['w'\] differs in process {LAST}: at \[2, 5\] it is 133.0 in "
        rf"{others}, 3.0 in process {LAST}$",
        lambda: assert_equal({"b": 1, "w": on_the_last(other, w)}, "weights"),
    )
    assert isinstance(error, AssertionError) and error.processes == (LAST,)
    assert error.paths == ("in_tree['w']",)
    expect(
        UnequalError,
        r"^in_tree differs in .*float32\[3\].*float32\[2\]",
        lambda: assert_equal(np.zeros(on_the_last(2, 3), np.float32)),
    )
    expect(UnequalError, r"in_tree\[1\]", lambda: assert_equal(on_the_last([1], [1, 2])))
    many = {str(i): np.float32(on_the_last(1, 2)) for i in range(7)}
    expect(
        UnequalError,
        r"in_tree\['4'\] differs in .*; and 2 more leaves$",
        lambda: assert_equal(many),
    )
    zero = np.float32(on_the_last(-0.0, 0.0))
    expect(UnequalError, "it is 0.0 in .*, -0.0 in process", lambda: assert_equal(zero))
    expect(
        UnequalError,
        r"in_tree differs in .*under",
        lambda: assert_equal(on_the_last(whole_of("process"), whole_of(None, "process"))),
    )


def check_copies_that_differ() -> None:
    """A global array with the same pieces in several processes, but different values."""
    v = of(0, np.float32, (8, 4)) + on_the_last(1, 0)
    for spec in ((), ("device",)):
        x = make_array_from_callback(v.shape, NamedSharding(MESH, P(*spec)), lambda i: v[i])
        text = r"at \[0, 0\]" if not spec else r"its piece \[0:\d.*differs between processes 0"
        error = expect(UnequalError, text, lambda x=x: assert_equal({"x": x}))
        assert error.processes == (LAST,) and error.paths == ("in_tree['x']",)


def check_without_a_store() -> None:
    """By the devices alone, as between TPU hosts without a coordination service."""
    with mock.patch.object(coordination, "client", lambda: None):
        assert process_allgather(np.int64(ME)).tolist() == list(range(N))
        assert broadcast_one_to_all({"a": of(ME, np.float64)}, ME == LAST)["a"][0, 0] == LAST
        assert_equal({"a": 1, "b": np.nan})
        pattern = rf"^m: in_tree\['b'\] differs in process {LAST}$"
        expect(UnequalError, pattern, lambda: assert_equal({"a": 1, "b": on_the_last(2, 3)}, "m"))
        expect(UnequalError, "dtypes and shapes", lambda: assert_equal(on_the_last([1], [1, 2])))
        expect(
            ProcessesError,
            r"coordination service: call xlashard.multihost.initialize\(\) first",
            lambda: host_local_array_to_global_array(np.ones(2), MESH, P(), check="always"),
        )


for check in (
    check_gathering,
    check_kinds_of_leaves,
    check_global_arrays,
    check_broadcasting,
    check_other_trees,
    check_one_that_does_not_come,
    check_one_that_waits_elsewhere,
    check_comparing,
    check_copies_that_differ,
    check_without_a_store,
):
    check()
    multihost_utils.sync_global_devices(check.__name__)
print("all agree")
