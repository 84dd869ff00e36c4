"""Programs of one function with equal modules share one executable."""

import dataclasses
import gc

import jax
import numpy as np
import pytest

from tests.core.program.helpers import identity, lower, mesh, named, plan, traced, value
from xlashard.core.program.compile import compile_program
from xlashard.core.program.executables import EXECUTABLES, LoadedExecutable
from xlashard.core.program.lowered import lower_program
from xlashard.errors import CompileError

SOURCE = identity("tensor<8xf32>")


@pytest.fixture(autouse=True)
def nothing_shared_yet():
    EXECUTABLES.cache_clear()
    yield
    EXECUTABLES.cache_clear()


def asked(partitioner, order=range(8), **rest):
    given = value((8,), named("x", on=mesh(order=order)))
    devices = [jax.devices()[i] for i in order]
    return plan([given], [given], partitioner, on=devices, **rest)


def program(partitioner, source="f at file.py:1", module=SOURCE, options=(), **rest):
    wanted = asked(partitioner, **rest)
    lowered = dataclasses.replace(lower(module, wanted), source=source)
    return compile_program(lowered, options)


def test_equal_modules_of_one_function_share_an_executable(partitioner):
    one, other = program(partitioner), program(partitioner)
    assert one.executable is other.executable
    assert len(EXECUTABLES) == 1
    np.testing.assert_array_equal(other([np.ones(8, np.float32)])[0], np.ones(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"source": "g at file.py:9"},
        {"name": "another"},
        {"donated": (True,)},
        {"options": (("xla_cpu_enable_fast_math", True),)},
        {"order": range(7, -1, -1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_part_of_the_key_separates_executables(partitioner, change):
    one, other = program(partitioner), program(partitioner, **change)
    assert one.executable is not other.executable


def test_value_names_are_not_part_of_the_key(partitioner):
    one = program(partitioner)
    other = program(partitioner, module=SOURCE.replace("%arg0", "%x"))
    assert one.executable is other.executable


def test_programs_without_a_source_share_no_executable(partitioner):
    one, other = program(partitioner, source=None), program(partitioner, source=None)
    assert one.executable is not other.executable
    assert len(EXECUTABLES) == 0


def test_programs_with_callbacks_share_no_executable(jax_partitioner):
    def step(x):
        jax.debug.callback(lambda v: None, x.sum())
        return x

    body, avals = traced(step, np.ones(8, np.float32))
    lowered = lower_program(asked(jax_partitioner), body, avals, "step at file.py:1")
    compile_program(lowered)
    assert len(EXECUTABLES) == 0


def test_executable_is_freed_with_its_last_program(partitioner):
    one, other = program(partitioner), program(partitioner)
    del one
    gc.collect()
    assert len(EXECUTABLES) == 1
    del other
    gc.collect()
    assert len(EXECUTABLES) == 0


@pytest.mark.slow
def test_clear_caches_and_forget_drop_executables(partitioner):
    one = program(partitioner)
    jax.clear_caches()
    other = program(partitioner)
    assert one.executable is not other.executable
    EXECUTABLES.forget(other.loaded)
    assert program(partitioner).executable is not other.executable


def test_failed_compilation_can_be_retried(partitioner):
    with pytest.raises(CompileError):
        program(partitioner, options=(("xla_no_such_option", True),))
    loaded = LoadedExecutable()
    with pytest.raises(ZeroDivisionError):
        loaded.load(lambda: 1 // 0)
    assert loaded.load(lambda: "an executable")
    assert not loaded.load(lambda: "another")
    assert loaded.executable == "an executable"
