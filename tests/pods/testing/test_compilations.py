"""`assert_compiles` around functions of `jax.jit`, flax, equinox and `pjit`."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from flax import nnx

import xlashard
from xlashard import pjit
from xlashard.errors import ArgumentError, ExpectationError
from xlashard.testing import assert_compiles

WRAPPERS = [jax.jit, nnx.jit, eqx.filter_jit, pjit]


FACTORS = itertools.count(2)


def make_double(wrap: Any) -> Any:
    factor = next(FACTORS)  # functions of equal modules would share their executables

    def double(x):
        return x * factor

    return wrap(double)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_error_is_the_report_of_the_recompilation(wrap: Any) -> None:
    double = make_double(wrap)
    with assert_compiles(at_most=1):
        double(np.ones(3))
        double(np.ones(3))
    with pytest.raises(ExpectationError) as caught, assert_compiles(at_most=0):
        double(np.ones(4))
    text = str(caught.value)
    assert text.startswith("1 compilation, at most 0 expected:\n\ndouble: 1 compilation")
    assert isinstance(caught.value, AssertionError)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_one_function_counts_alone(wrap: Any) -> None:
    double, other = make_double(wrap), make_double(wrap)
    with assert_compiles(double, at_most=1):
        double(np.ones(3))
        other(np.ones(4))
        other(np.ones(5))
    with (
        pytest.raises(ExpectationError, match=r"x: float32\[7\] → float32\[4\] \(shape\)"),
        assert_compiles(double, at_most=1),
        assert_compiles(other, at_most=0),
    ):
        double(np.ones(7))
        double(np.ones(3))
        double(np.ones(4))


def test_functions_that_are_made_anew_count() -> None:
    with (
        pytest.raises(ExpectationError, match="12 compilations") as caught,
        assert_compiles(at_most=1),
    ):
        for _ in range(12):
            make_double(jax.jit)(np.ones(3))
    text = str(caught.value)
    assert "a new function object, of the same source" in text
    assert text.count("double: 1 compilation") == 8 and text.endswith("and 4 more functions")


def test_operations_outside_of_jit_do_not_count() -> None:
    with assert_compiles(at_most=0):
        jax.numpy.add(np.ones(17), 1)


@pytest.mark.parametrize("wrap", [jax.jit, pjit])
def test_explain_counts_as_the_call_that_reuses_its_program(wrap: Any) -> None:
    double = make_double(wrap)
    with assert_compiles(double, at_most=1):
        xlashard.explain(double, np.ones(5))
        double(np.ones(5))
    with assert_compiles(at_most=0):
        double(np.ones(5))


def test_threads_count() -> None:
    double = make_double(jax.jit)
    with pytest.raises(ExpectationError, match="1 compilation,"), assert_compiles(at_most=0):
        thread = threading.Thread(target=double, args=(np.ones(6),))
        thread.start()
        thread.join()


def test_a_decorator_checks_each_call() -> None:
    double = make_double(jax.jit)

    @assert_compiles(at_most=1)
    def call(size: int, *, deeper: bool = False) -> float:
        if deeper:
            call(size)
        return float(double(np.ones(size)).sum())

    assert call(3) > 0 and call(4) > 0
    assert call(5, deeper=True) > 0
    assert call.__name__ == "call"


def test_another_error_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), assert_compiles(at_most=0):
        make_double(jax.jit)(np.ones(3))
        _ = 1 // 0


def test_watching_ends_with_the_guard() -> None:
    double = make_double(jax.jit)
    with assert_compiles(at_most=1):
        double(np.ones(3))
    double(np.ones(4))
    assert len(xlashard.explain_recompile(double).explanations) == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: assert_compiles(len, at_most=1), "^fun of assert_compiles is of type builtin"),
        (lambda: assert_compiles(at_most=-1), "at_most is -1"),
        (lambda: assert_compiles(at_most=1.5), "at_most is 1.5"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_invalid_arguments_are_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        call()
