"""Detection of a thread in a call without a Python frame that waits for devices."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from xlashard.core.processes.awaited_calls import awaited_program, waits_for_device

SEEN: list[bool] = []


class Spy:
    """Probe that inspects the frame of its caller, from below a call, as another thread would."""

    __module__ = "elsewhere"

    def __call__(self, *args: Any) -> Any:
        SEEN.append(waits_for_device(sys._getframe(1)))
        return args[0] if args else self


spy = Spy()


def inside(run: Callable[[], Any]) -> bool:
    """Return the probe's finding while `run` runs."""
    SEEN.clear()
    run()
    return SEEN[-1]


def test_reading_an_array_waits_for_the_device() -> None:
    x = jnp.ones(3)
    assert inside(lambda: spy(x))
    assert not inside(lambda: spy(3))
    assert not inside(lambda: spy(np.ones(3)))
    assert not inside(lambda: spy(spy(1)))


@pytest.mark.parametrize("jit", [jax.jit, xlashard.pjit])
def test_a_compiled_function_waits_for_the_device(jit: Any) -> None:
    @jit
    def step(x: Any) -> Any:
        SEEN.append(waits_for_device(_frame_of("caller")))
        return x

    def caller() -> None:
        step(
            1.0,
        )

    assert inside(caller)


def _frame_of(function: str) -> FrameType:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    assert frame is not None
    return frame


def test_locks_properties_and_code_without_source_are_no_device_wait() -> None:
    class Trap:
        @property
        def fires(self) -> Any:
            raise AssertionError("a property was asked")

    trap = Trap()

    def caller() -> None:
        look(trap)

    def look(trap: Any) -> None:
        SEEN.append(waits_for_device(_frame_of("caller")))

    assert not inside(caller)
    names: dict[str, Any] = {"spy": spy, "x": jnp.ones(2)}
    assert not inside(lambda: exec("spy(x)", names))


def test_an_awaited_result_names_the_compiled_function_and_its_line() -> None:
    @jax.jit
    def train_step(x: Any) -> Any:
        return {"loss": x}

    names: list[str] = []

    def awaited(*_: Any) -> None:
        names.append(awaited_program(sys._getframe(1)))

    def loop() -> int:
        x, metrics = 1.0, {}
        for number in range(2):
            if number:
                awaited(metrics["loss"])
            metrics = train_step(x)
            awaited(metrics["loss"].sum())
            awaited(train_step(x)["loss"])
            awaited(number, x)
        return sys._getframe().f_lineno - 4

    line = loop()
    name = "train_step (test_stack_dump.py:{})".format
    first, nested, nothing, again = names[:4]
    assert (first, nested, nothing) == (name(line), name(line + 2), "")
    # Of the iteration before.
    assert again == name(line)
