"""One of 2 or 4 processes with two devices: values that Python functions in a program receive.

The table of `docs/guides/callbacks.md`, which needs several processes.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from tests.core.processes import join_the_others
from xlashard import Mesh, NamedSharding, P, make_array_from_callback, pjit

join_the_others()

N, ME = jax.device_count(), jax.process_index()
MESH = Mesh(np.array(jax.devices()), ("x",))
ROWS = NamedSharding(MESH, P("x"))
VALUE = np.arange(2 * N, dtype=np.float32)
WHOLE = jax.ShapeDtypeStruct(VALUE.shape, VALUE.dtype)
X = make_array_from_callback(VALUE.shape, ROWS, lambda index: VALUE[index])
SEEN: list[list[float]] = []


def note(value: Any) -> None:
    SEEN.append(np.asarray(value).tolist())


def double(value: Any) -> np.ndarray:
    note(value)
    return np.asarray(value) * 2


def received(f: Callable[[Any], Any], jit: Any = pjit, **options: Any) -> tuple[Any, Any]:
    """Return what this process's functions receive, and the local shards of the result."""
    SEEN.clear()
    out = jit(f, **options)(X)
    jax.block_until_ready(out)
    jax.effects_barrier()
    return sorted(SEEN), [np.asarray(shard.data).tolist() for shard in out.addressable_shards]


def unchanged(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: (call(x), x)[1]


def check_that_process_0_receives_the_whole_value() -> None:
    whole = [VALUE.tolist()] if ME == 0 else []
    calls = {
        "io_callback": unchanged(lambda x: io_callback(note, None, x)),
        "ordered": unchanged(lambda x: io_callback(note, None, x, ordered=True)),
        "debug.callback": unchanged(lambda x: jax.debug.callback(note, x)),
    }
    for name, f in calls.items():
        for jit in (jax.jit, pjit):
            assert received(f, jit)[0] == whole, (name, SEEN)


def check_that_results_of_pure_callbacks_are_everywhere() -> None:
    def called(x: Any) -> Any:
        return jax.pure_callback(double, WHOLE, x)

    doubled = (VALUE * 2).tolist()
    whole = [VALUE.tolist()] if ME == 0 else []
    assert received(called) == (whole, [doubled, doubled])
    rows = [(VALUE * 2)[shard.index].tolist() for shard in X.addressable_shards]
    for jit in (jax.jit, pjit):
        assert received(called, jit, out_shardings=ROWS) == (whole, rows)
        # Within a program the result is whole on each device.
        assert received(lambda x: called(x) + x, jit, out_shardings=ROWS)[0] == whole
    # A result of the program itself: jax.jit leaves it on the first device, and zeros elsewhere.
    zeros = np.zeros_like(VALUE).tolist()
    expected = [doubled if ME == 0 else zeros, zeros]
    assert received(called, jax.jit) == (whole, expected)


def check_that_shard_map_calls_once_per_shard() -> None:
    def each(x: Any) -> Any:
        return jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    shards = [VALUE[shard.index] for shard in X.addressable_shards]
    mapped = jax.shard_map(each, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    for jit in (jax.jit, pjit):
        expected = [s.tolist() for s in shards], [(s * 2).tolist() for s in shards]
        assert received(mapped, jit) == expected


check_that_process_0_receives_the_whole_value()
check_that_results_of_pure_callbacks_are_everywhere()
check_that_shard_map_calls_once_per_shard()
print("all agree")
