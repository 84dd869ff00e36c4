"""The three array modes: the type of a function's results in each, and switching between them."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from xlashard import P, legacy
from xlashard._jax.runtime.transfer import HandleType
from xlashard.legacy.arrays.device_arrays import DeviceArray, ShardedDeviceArray
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.modes.pjit import LegacyFunction

pytestmark = pytest.mark.partitioner

ON = legacy.ArrayMode()
PARTS = legacy.ArrayMode(jax_array=False)
GDAS = legacy.ArrayMode(jax_array=False, output_gda=True)
KINDS = {ON: HandleType, PARTS: ShardedDeviceArray, GDAS: GlobalDeviceArray}

X = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)


@contextmanager
def in_mode(mode: legacy.ArrayMode) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(legacy.jax_array(mode.jax_array))
        stack.enter_context(legacy.parallel_functions_output_gda(mode.output_gda))
        yield


@pytest.fixture
def misses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[legacy.ArrayMode]]:
    """Array modes of all calls of the era's functions that reached Python."""
    came: list[legacy.ArrayMode] = []
    before = LegacyFunction.in_force

    def in_force(self: LegacyFunction) -> Any:
        came.append(legacy.current_array_mode())
        return before(self)

    monkeypatch.setattr(LegacyFunction, "in_force", in_force)
    yield came


def doubling() -> Callable[..., Any]:
    return legacy.pjit(lambda x: x * 2, P("x"), P("x", "y"))


@pytest.mark.parametrize("mode", KINDS, ids=["on", "parts", "gdas"])
def test_properties_of_array_modes(mode: legacy.ArrayMode) -> None:
    with in_mode(mode):
        assert legacy.current_array_mode() == mode
    assert (mode.returns_gda, mode.returns_host_local) == (mode == GDAS, mode == PARTS)


def test_each_mode_returns_its_array_class(mesh: Any, partitioner: str, misses: list[Any]) -> None:
    f = doubling()
    with mesh:
        for _ in range(3):
            for mode, kind in KINDS.items():
                with in_mode(mode):
                    out = f(X)
                assert type(out) is kind
                np.testing.assert_array_equal(np.asarray(out), X * 2)
                assert out.sharding == xlashard.NamedSharding(mesh, P("x", "y"))
    assert misses == list(KINDS), "repeat calls stay with the dispatcher"


def test_jax_array_has_precedence_over_output_gda(mesh: Any) -> None:
    with mesh, in_mode(legacy.ArrayMode(jax_array=True, output_gda=True)):
        assert type(doubling()(X)) is HandleType


@pytest.mark.slow
def test_jax_array_mode_has_one_array_class(mesh: Any, tmp_path: Path) -> None:
    """Results of `jax.numpy` and of `pjit`, of JAX's constructors and of the era's."""
    sharding = xlashard.NamedSharding(mesh, P("x"))
    with legacy.installed(), mesh:
        from jax.experimental import array, multihost_utils
        from jax.experimental.gda_serialization import serialization
        from jax.experimental.pjit import pjit, with_sharding_constraint
        from jax.interpreters import pxla, xla

        f = pjit(lambda x: x * 2, P("x"), P("x"))
        spec = serialization.get_tensorstore_spec(f"{tmp_path}/x")
        made = [
            *(f(X), f(X), f.lower(X).compile()(X), pjit(lambda x: {"x": x}, None, None)(X)["x"]),
            with_sharding_constraint(jnp.asarray(X), P("x")),
            jax.make_array_from_callback(X.shape, sharding, X.__getitem__),
            array.make_array_from_callback(X.shape, sharding, X.__getitem__),
            multihost_utils.host_local_array_to_global_array(X, mesh, P("x")),
            pxla.device_put(X, jax.devices()[:1], replicate=True)[0],
            xla.device_put(X)[0],
            xla.make_device_array(jnp.asarray(X).aval, None, jnp.asarray(X)),
            f(X).device_buffers[0],
        ]
        serialization.run_serialization([f(X)], [spec])
        made += serialization.run_deserialization([sharding], [spec])
        assert {type(x) for x in made} == {type(jnp.ones(3))}
        assert all(isinstance(x, array.Array) and isinstance(x, jax.Array) for x in made)
        donating = pjit(lambda x: x + 1, P("x"), P("x"), donate_argnums=0)
        donated = jax.device_put(X, sharding)
        donating(donated)
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(donated)


def test_arrays_of_each_mode_are_accepted_in_every_mode(mesh: Any, misses: list[Any]) -> None:
    f = legacy.pjit(lambda x: x + 1, P("x"), P("x"))
    made = {}
    with mesh:
        for mode in KINDS:
            with in_mode(mode):
                made[mode] = f(X)
        for _ in range(2):
            for mode, kind in KINDS.items():
                for donated in made.values():
                    with in_mode(mode):
                        out = f(donated)
                    assert type(out) is kind
                    np.testing.assert_array_equal(np.asarray(out), X + 2)
    assert len(misses) == 3 + 9


def test_single_device_mesh_returns_a_sharded_device_array() -> None:
    alone = xlashard.Mesh(np.array(jax.devices()[:1]), ("x",))
    with alone, in_mode(PARTS):
        out = legacy.pjit(lambda x: x * 2, P("x"), P("x"))(X)
    assert type(out) is ShardedDeviceArray and isinstance(out, ShardedDeviceArray)
    assert isinstance(out, jnp.ndarray) and type(out[0]) is DeviceArray


def test_config_update_switches_the_mode_of_all_threads(mesh: Any) -> None:
    f = doubling()
    try:
        with mesh:
            for value, kind in ((False, ShardedDeviceArray), (True, HandleType)) * 2:
                legacy.config.update("jax_array", value)
                assert type(f(X)) is kind
    finally:
        legacy.config.update("jax_array", True)


@pytest.mark.slow
def test_threads_use_different_array_modes_concurrently(mesh: Any) -> None:
    f = doubling()
    wrong: list[Any] = []
    start = threading.Barrier(6)

    def work(mode: legacy.ArrayMode, kind: type) -> None:
        start.wait()
        for i in range(30):
            with mesh, in_mode(mode):
                out = f(X + i)
            if type(out) is not kind or not np.array_equal(np.asarray(out), (X + i) * 2):
                wrong.append((mode, type(out)))

    threads = [threading.Thread(target=work, args=item) for item in [*KINDS.items()] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_function_that_reads_the_mode_is_traced_per_mode(mesh: Any) -> None:
    f = legacy.pjit(lambda x: x * (1 if legacy.config.jax_array else 10), None, None)
    with mesh:
        for _ in range(2):
            assert f(np.float32(2)) == 2
            with in_mode(PARTS):
                assert f(np.float32(2)) == 20


@pytest.mark.slow
def test_pmap_returns_sharded_device_arrays_without_jax_array() -> None:
    x = jnp.ones((8, 3))
    with in_mode(PARTS):
        out = jax.pmap(lambda v: v + 1)(x)
        assert isinstance(out, ShardedDeviceArray) and not isinstance(out, GlobalDeviceArray)
        assert isinstance(jax.jit(lambda v: v + 1)(jnp.ones(3)), DeviceArray)


def test_dropped_functions_are_freed_in_every_mode(mesh: Any) -> None:
    def used() -> weakref.ref[Any]:
        def fun(x: Any) -> Any:
            return x * 2

        f = legacy.pjit(fun, P("x"), P("x"))
        for mode in KINDS:
            with mesh, in_mode(mode):
                f(X)
        return weakref.ref(fun)

    used_ref = used()
    gc.collect()
    assert used_ref() is None


@pytest.mark.slow
def test_keys_and_none_stay_unchanged_in_every_mode(mesh: Any) -> None:
    f = legacy.pjit(lambda key, x: (jax.random.fold_in(key, 1), {"x": x}, None), None, None)
    for mode in KINDS:
        with mesh, in_mode(mode):
            key, out, nothing = f(jax.random.key(0), X)
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        assert nothing is None and type(out["x"]) is KINDS[mode]
