"""The suite over every constructor, kind of sharding and dtype."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.array import cases
from tests.array.suite import ArraySuite
from xlashard import Array, device_put


def _pick(step: int) -> list[Any]:
    """Every kind of sharding, each with a few of the dtypes: other ones for every constructor."""
    dtypes = list(cases.DTYPES)
    return [
        pytest.param(kind, dtypes[(number * 3 + step + turn) % len(dtypes)])
        for number, kind in enumerate(cases.SHARDINGS)
        for turn in (0, 4)
    ]


ALL = [
    pytest.param(constructor, *params.values)
    for step, constructor in enumerate(cases.CONSTRUCTORS)
    for params in _pick(step)
]


@pytest.fixture
def array(expected: np.ndarray, sharding: Any, constructor: str) -> Array:
    return cases.CONSTRUCTORS[constructor](expected, sharding)


@pytest.fixture
def sharding(kind: str) -> Any:
    return cases.SHARDINGS[kind]


@pytest.fixture
def expected(dtype: str) -> np.ndarray:
    return cases.value(cases.DTYPES[dtype])


@pytest.mark.parametrize(("constructor", "kind", "dtype"), ALL)
class TestEveryConstructor(ArraySuite):
    pass


@pytest.mark.parametrize("constructor", list(cases.CONSTRUCTORS))
@pytest.mark.parametrize("kind", ["columns", "replicated", "single", "bare tiles", "listed tiles"])
@pytest.mark.parametrize("shape", [(0, 4), (8, 0)])
class TestNoElements(ArraySuite):
    @pytest.fixture
    def expected(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def test_its_text_shows_its_shape(self, array: Array) -> None:
        assert repr(array) == f"Array([], shape={array.shape}, dtype=float32)"


@pytest.mark.parametrize("constructor", list(cases.CONSTRUCTORS)[:4])
@pytest.mark.parametrize("kind", ["replicated", "single"])
class TestNoDimensions(ArraySuite):
    @pytest.fixture
    def expected(self) -> np.ndarray:
        return np.array(7, np.int32)


@pytest.mark.parametrize("dtype", list(cases.DTYPES))
class TestUncommitted(ArraySuite):
    @pytest.fixture
    def sharding(self) -> None:
        return None

    @pytest.fixture
    def array(self, expected: np.ndarray) -> Array:
        return device_put(expected)


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
        return Array.from_jax(jax.jit(lambda x: x * 2, out_shardings=sharding.twin())(x))
