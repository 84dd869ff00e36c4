"""Pauses of Python's garbage collector."""

import gc

import pytest

from xlashard.support.collector import collector_paused


def test_collector_pauses_and_goes_on_as_before_also_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="built"), collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
        raise ValueError("built")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        collector_paused()(gc.isenabled)()
        assert not gc.isenabled()
    finally:
        gc.enable()
