"""The persistent compilation cache of JAX, where it is configured."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.core.program.helpers import compiled, identity, mesh, named, plan, traced, value
from xlashard.core.program.compile import compile_program
from xlashard.core.program.lowered import lower_program

HITS = "/jax/compilation_cache/cache_hits"
SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture
def hits(tmp_path):
    """Return the hits of a new cache in a folder of its own."""
    found = []

    def listen(event, **_):
        if event == HITS:
            found.append(event)

    before = {name: getattr(jax.config, name) for name in (*SETTINGS, "jax_compilation_cache_dir")}
    jax.monitoring.register_event_listener(listen)
    for name, setting in SETTINGS.items():
        jax.config.update(name, setting)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield found
    jax.monitoring.unregister_event_listener(listen)
    for name, setting in before.items():
        jax.config.update(name, setting)
    compilation_cache.reset_cache()


SOURCE = identity("tensor<8x8xf32>", "tensor<8xf32>")


def wanted(partitioner, name="cached", **rest):
    return plan(
        [value((8, 8), named("x", "y")), value((8,))],
        [value((8, 8)), value((8,), named("y"))],
        partitioner,
        mesh=mesh(),
        name=name,
        **rest,
    )


def test_an_equal_program_comes_from_the_cache(partitioner, hits, tmp_path):
    first = compiled(SOURCE, wanted(partitioner))
    assert not hits
    assert any(tmp_path.iterdir())
    second = compiled(SOURCE, wanted(partitioner))
    assert len(hits) == 1
    assert second.in_shardings == first.in_shardings
    assert second.out_shardings == first.out_shardings
    values = [np.arange(64, dtype=np.float32).reshape(8, 8), np.arange(8, dtype=np.float32)]
    for mine, its, sent in zip(second(values), first(values), values, strict=True):
        np.testing.assert_array_equal(mine, sent)
        assert mine.sharding == its.sharding


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"donated": (True, False)},
        pytest.param({"on": jax.devices()[:8][::-1]}, marks=pytest.mark.devices(8)),
        {"options": (("xla_cpu_enable_fast_math", True),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_changed_program_misses_the_cache(partitioner, hits, change):
    compiled(SOURCE, wanted(partitioner))
    if "on" in change:
        turned = mesh(order=range(7, -1, -1))
        other = plan(
            [value((8, 8), named("x", "y", on=turned)), value((8,))],
            [value((8, 8)), value((8,), named("y", on=turned))],
            partitioner,
            name="cached",
            **change,
        )
    else:
        other = wanted(partitioner, **change)
    compiled(SOURCE, other)
    assert not hits


@pytest.mark.slow
def test_cached_program_calls_its_own_callback(jax_partitioner, hits):
    def program(seen):
        def step(x):
            jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
            return x

        body, avals = traced(step, np.ones(8, np.float32))
        asked = plan([value((8,), named("x"))], [value((8,), named("x"))], jax_partitioner)
        return compile_program(lower_program(asked, body, avals))

    first, second = [], []
    programs = [program(first), program(second)]
    for factor, compiled_program in enumerate(programs, start=1):
        compiled_program([np.full(8, factor, np.float32)])
    jax.effects_barrier()
    assert set(first) == {8.0}
    assert set(second) == {16.0}
