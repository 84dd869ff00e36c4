"""The suite over every constructor, kind of sharding and dtype."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from tests.core.array import cases
from tests.core.array.suite import ArraySuite
from tests.grouped_cases import at_once, sweep
from xlashard import Array, device_put

QUICK = ("callback", "single-device arrays", "device_put")

type Subjects = Mapping[str, Callable[[], Mapping[str, Any]]]


def _subject(constructor: str, kind: str, expected: np.ndarray) -> Callable[[], Mapping[str, Any]]:
    def make() -> Mapping[str, Any]:
        sharding = cases.SHARDINGS[kind]
        array = cases.CONSTRUCTORS[constructor](expected, sharding)
        return {"array": array, "expected": expected, "sharding": sharding}

    return make


@pytest.mark.parametrize("constructor", sweep(cases.CONSTRUCTORS, quick=QUICK))
class TestEveryConstructor(at_once(ArraySuite)):
    @pytest.fixture
    def subjects(self, constructor: str) -> Subjects:
        """Every kind of sharding, each with two of the dtypes: others for every constructor."""
        dtypes, step = list(cases.DTYPES), list(cases.CONSTRUCTORS).index(constructor)
        chosen = [
            (kind, dtypes[(number * 3 + step + turn) % len(dtypes)])
            for number, kind in enumerate(cases.SHARDINGS)
            for turn in (0, 4)
        ]
        return {
            f"{kind}, {dtype}": _subject(constructor, kind, cases.value(cases.DTYPES[dtype]))
            for kind, dtype in chosen
        }


class ArrayWithoutElements(ArraySuite):
    def test_repr_shows_the_shape(self, array: Array) -> None:
        assert repr(array) == f"Array([], shape={array.shape}, dtype=float32)"


@pytest.mark.parametrize("constructor", sweep(cases.CONSTRUCTORS, quick=QUICK))
class TestNoElements(at_once(ArrayWithoutElements)):
    @pytest.fixture
    def subjects(self, constructor: str) -> Subjects:
        return {
            f"{kind}, {shape}": _subject(constructor, kind, np.zeros(shape, np.float32))
            for kind in ("columns", "replicated", "single", "bare tiles", "listed tiles")
            if kind in cases.SHARDINGS
            for shape in ((0, 4), (8, 0))
        }


class TestNoDimensions(at_once(ArraySuite)):
    @pytest.fixture
    def subjects(self) -> Subjects:
        return {
            f"{constructor}, {kind}": _subject(constructor, kind, np.array(7, np.int32))
            for constructor in list(cases.CONSTRUCTORS)[:4]
            for kind in ("replicated", "single")
        }


class TestUncommitted(at_once(ArraySuite)):
    @pytest.fixture
    def subjects(self) -> Subjects:
        def make(dtype: Any) -> Mapping[str, Any]:
            expected = cases.value(dtype)
            return {"array": device_put(expected), "expected": expected, "sharding": None}

        return {name: partial(make, dtype) for name, dtype in cases.DTYPES.items()}


class TestFromAProgram(ArraySuite):
    @pytest.fixture
    def expected(self) -> np.ndarray:
        return cases.value(np.float32) * 2

    @pytest.fixture
    def sharding(self) -> Any:
        return cases.named("x", "y")

    @pytest.fixture
    def array(self, sharding: Any) -> Array:
        x = device_put(cases.value(np.float32), sharding)
        return Array.from_jax(jax.jit(lambda x: x * 2, out_shardings=sharding.jax_sharding())(x))
