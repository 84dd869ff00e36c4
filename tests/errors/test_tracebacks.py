"""What a person sees above a message: their own lines, and none of this package."""

import contextlib
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.errors.catalogue import SETUP, Topic, read_topics
from tests.errors.running import PACKAGE, execute
from xlashard import make_array_from_callback, pjit
from xlashard._jax import tracebacks
from xlashard.errors import ArgumentError

# Topics about methods of arrays and shardings, which cost too little to be guarded.
METHODS = ("shardings", "parsing", "reading", "environment")
# Methods in other topics, and how many frames of ours are above their message.
IN_OTHER_TOPICS = {
    "A value that is read after it was donated": 3,
    "The text of a program in a dialect that it has not": 1,
    "The text of a StableHLO program in a dialect that it has not": 1,
    "The module of a program in a dialect that it has not": 1,
    "An attribute that only the stages of JAX have": 1,
    "A compiled program without its module asked for it": 1,
    "A report of another format": 1,
    "The recompilations of a plain function": 1,
    "An Array of what is no array of JAX": 1,
    "An Array made by its class": 4,
}
TOPICS = [topic for topic in read_topics() if topic.name not in METHODS]


@contextlib.contextmanager
def filtering(mode: str):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def frames_of_ours(error: BaseException) -> list[str]:
    summary = traceback.extract_tb(error.__traceback__)
    return [f"{f.filename}:{f.lineno}" for f in summary if Path(f.filename).is_relative_to(PACKAGE)]


@pytest.mark.filterwarnings("ignore::xlashard.errors.DonationWarning")
@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_no_frame_of_ours_is_in_the_way(topic: Topic) -> None:
    shown = {}
    for mistake in topic.mistakes:
        with filtering("quiet_remove_frames"):
            try:
                execute(SETUP, mistake.setup + mistake.wrong)
            except Exception as error:
                shown[mistake.title] = frames_of_ours(error)
    assert shown
    for title, found in shown.items():
        assert len(found) <= IN_OTHER_TOPICS.get(title, 0), (title, found)


def test_they_can_be_shown() -> None:
    with filtering("off"), pytest.raises(ArgumentError) as caught:
        pjit(lambda x: x, static_argnums=5)
    assert len(frames_of_ours(caught.value)) > 2


def test_frames_of_the_person_stay() -> None:
    def fails(index):
        raise ZeroDivisionError("mine")

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with filtering("quiet_remove_frames"), pytest.raises(ZeroDivisionError) as caught:
        make_array_from_callback((4,), sharding, fails)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_frames_of_the_person_stay", "fails"]


def test_errors_of_a_traced_function_show_its_lines() -> None:
    def fails(x):
        raise ZeroDivisionError("mine")

    with filtering("quiet_remove_frames"), pytest.raises(ZeroDivisionError) as caught:
        pjit(fails, donate_argnums=0)(np.ones(3))
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_errors_of_a_traced_function_show_its_lines", "fails"]


def test_notebooks_are_told_which_frames_to_hide() -> None:
    with filtering("tracebackhide"), pytest.raises(ArgumentError) as caught:
        pjit(lambda x: x, static_argnums=5)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    hidden = {frame.f_code.co_name for frame in frames if "__tracebackhide__" in frame.f_locals}
    assert "pjit" in hidden
    assert "test_notebooks_are_told_which_frames_to_hide" not in hidden


def test_an_error_that_was_never_raised() -> None:
    error = ValueError("no traceback")
    with filtering("quiet_remove_frames"):
        tracebacks.shorten(error)
    assert error.__traceback__ is None
