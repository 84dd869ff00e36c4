"""Thousands of random bad calls: each is refused by one of our errors, with the place.

Python's own error for a call that does not fit a function's signature (too many arguments, an
unknown keyword) stays Python's TypeError: the function never ran.
"""

import random
import zlib

import jax
import numpy as np
import pytest

from tests.core.pjit.bad import functions, programs
from tests.core.pjit.bad.bench import make_bench, run
from tests.grouped_cases import sweep
from xlashard import pjit
from xlashard.errors import XlashardError

MAKERS = (*functions.MAKERS, *programs.MAKERS)
SEVERAL = (functions.not_divisible, functions.other_place, programs.shard_shapes)
CALLS = 100


@pytest.fixture(scope="module")
def bench():
    return make_bench()


def test_at_least_two_thousand_bad_calls_are_made():
    assert len(MAKERS) * CALLS >= 2000


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", sweep(MAKERS, quick=MAKERS[::3], several=SEVERAL), ids=lambda make: make.__name__
)
def test_every_bad_call_is_refused(bench, make):
    seed = zlib.crc32(make.__name__.encode())
    for i in range(CALLS):
        call, needles = make(bench, random.Random(seed + i))
        where = f"{make.__name__}, seed {seed + i}"
        try:
            call()
        except XlashardError as error:
            assert any(n in str(error) for n in needles), f"{where}: {needles} not in: {error}"
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__} instead of ours") from error
        else:
            pytest.fail(f"{where}: it was taken")


def test_refused_calls_leave_programs_usable(bench):
    """Refused calls leave no trace."""
    state = {"w": np.ones((8, 4), np.float32)}
    out, _ = bench.compiled(state, np.ones(8, np.float32))
    np.testing.assert_array_equal(out["w"], state["w"] * 2)
    bench.step(np.ones(8, np.float32))
    assert jax.tree.leaves(bench.step.state)[0].shape == (8, 4)
    assert jax.tree.leaves(bench.step.state)[0].sharding.mesh == bench.mesh


@pytest.mark.parametrize(
    "call",
    [
        lambda: pjit(run)(),
        lambda: pjit(run)(1.0),
        lambda: pjit(run)(1.0, 2.0, 3, 4.0),
        lambda: pjit(run)(1.0, 2.0, speed=3.0),
        lambda: pjit(run)(1.0, 2.0, batch=3.0),
    ],
)
def test_signature_errors_stay_python_type_errors(call):
    with pytest.raises(TypeError, match=r"run\(\)") as caught:
        call()
    assert not isinstance(caught.value, XlashardError)
