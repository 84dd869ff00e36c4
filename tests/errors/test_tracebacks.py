"""Tracebacks have the user's own lines, and none of this package."""

import contextlib
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest

import xlashard
from tests.errors.catalogue import SETUP, Topic, read_topics
from tests.errors.running import PACKAGE, execute
from xlashard import P, device_put, explain, make_array_from_callback, pjit, shard_map
from xlashard import numpy as xnp
from xlashard.core.array.array_class import protocols
from xlashard.errors import ArgumentError
from xlashard.support import tracebacks

# Topics about methods of arrays and shardings, which are too cheap to be guarded.
METHODS = ("shardings", "parsing", "reading", "environment")
# A method that checks its own arguments is one frame; these have more.
MORE_THAN_ONE = {
    "A read of a donated array": 3,
    "An Array constructed directly": 4,
    "The local part of a mesh of other processes' devices": 2,
    "A parsed spec that uses an axis twice": 2,
    "The mesh of a GlobalDeviceArray without one": 2,
    "The device_buffer of an array on several devices": 3,
    "A compiled program called by name, while jax_array is off": 2,
}
# Calls on the hot path have no frame at all.
NONE = {
    "A spec with an axis that the mesh lacks",
    "A result with an indivisible dimension",
    "A static position that is out of range",
    "A static argument that can't be hashed",
    "An argument that was donated to an earlier call",
    "Two arguments on different devices",
    "One array as two arguments of which one is donated",
    "A constraint of more dimensions than the value has",
    "A compiled program called with another shape",
    "A compiled program called inside another",
    "A bound step called with another shape",
    "A shape that does not fit the sharding",
    "A callback that returns the whole array for each shard",
    "A shard with the wrong shape",
    "Indivisible local data",
    "A module that can't be read",
    "A call in place of its function",
    "A removed name without a replacement",
    "xmap",
    "A GlobalDeviceArray of NumPy arrays",
    "A GlobalDeviceArray of a shape alone",
    "A batched callback that returns each shard once",
    "Two GlobalDeviceArrays compared",
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


@pytest.mark.devices(8)
@pytest.mark.filterwarnings("ignore::xlashard.errors.DonationWarning")
@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_tracebacks_omit_internal_frames(topic: Topic) -> None:
    shown = {}
    for mistake in topic.mistakes:
        with filtering("quiet_remove_frames"):
            try:
                execute(SETUP, mistake.setup + mistake.wrong)
            except Exception as error:
                shown[mistake.title] = frames_of_ours(error)
    assert shown
    for title, found in shown.items():
        allowed = 0 if title in NONE else MORE_THAN_ONE.get(title, 1)
        assert len(found) <= allowed, (title, found)


def test_titles_with_special_frame_counts_are_in_the_catalogue() -> None:
    titles = {mistake.title for topic in TOPICS for mistake in topic.mistakes}
    assert {*NONE, *MORE_THAN_ONE} <= titles


def test_internal_frames_are_shown_with_filtering_off() -> None:
    with filtering("off"), pytest.raises(ArgumentError) as caught:
        pjit(lambda x: x, static_argnums=5)
    assert len(frames_of_ours(caught.value)) > 2


def test_user_frames_stay_in_tracebacks() -> None:
    def fails(index):
        raise ZeroDivisionError("mine")

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with filtering("quiet_remove_frames"), pytest.raises(ZeroDivisionError) as caught:
        make_array_from_callback((4,), sharding, fails)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_user_frames_stay_in_tracebacks", "fails"]


@pytest.mark.parametrize(
    "read", [bool, int, float, complex, lambda x: x.tolist(), lambda x: x.tobytes()]
)
def test_ctrl_c_during_a_blocking_read_shows_no_internal_frame(read, monkeypatch) -> None:
    def interrupted(_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(protocols, "read_value", lambda x: interrupted(x))
    with filtering("quiet_remove_frames"), pytest.raises(KeyboardInterrupt) as caught:
        read(device_put(np.float32(1)))
    assert frames_of_ours(caught.value) == []


def test_errors_of_a_traced_function_show_its_lines() -> None:
    def fails(x):
        raise ZeroDivisionError("mine")

    with filtering("quiet_remove_frames"), pytest.raises(ZeroDivisionError) as caught:
        pjit(fails, donate_argnums=0)(np.ones(3))
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_errors_of_a_traced_function_show_its_lines", "fails"]


def test_notebooks_hide_internal_frames() -> None:
    with filtering("tracebackhide"), pytest.raises(ArgumentError) as caught:
        pjit(lambda x: x, static_argnums=5)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    hidden = {frame.f_code.co_name for frame in frames if "__tracebackhide__" in frame.f_locals}
    assert "pjit" in hidden
    assert "test_notebooks_hide_internal_frames" not in hidden


def test_error_without_a_traceback_stays_unchanged() -> None:
    error = ValueError("no traceback")
    with filtering("quiet_remove_frames"):
        tracebacks.shorten(error)
    assert error.__traceback__ is None


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + np.ones(3),
        lambda x: x["column"],
        lambda x: x.sum(axis=5),
        lambda x: x.reshape(5, 5),
        lambda x: x.at[0].set(np.ones(7)),
        lambda x: xnp.add(x, np.ones(3)),
        lambda x: xnp.sum(x, axis=5),
        lambda x: xnp.einsum("ij,kl", x),
        lambda x: xnp.zeros(3, dtype="no type"),
        lambda x: xnp.zeros(3, device="cpu"),
    ],
)
def test_errors_of_operations_show_no_internal_frame(operation) -> None:
    with filtering("quiet_remove_frames"), pytest.raises((TypeError, ValueError)) as caught:
        operation(device_put(np.ones((8, 2), np.float32)))
    assert frames_of_ours(caught.value) == []


def raise_mine(x):
    raise ZeroDivisionError("mine")


@jax.custom_vjp
def with_failing_gradient(x):
    return x


with_failing_gradient.defvjp(lambda x: (x, None), lambda _, g: raise_mine(g))


def call_without_jit(f, x):
    with jax.disable_jit():
        f(x)


USES = {
    "call": lambda jit, x: jit(raise_mine)(x),
    "call with donation": lambda jit, x: jit(raise_mine, donate_argnums=0)(x),
    "call of a static function": lambda jit, x: jit(lambda f, x: f(x), static_argnums=0)(
        raise_mine, x
    ),
    "call under disable_jit": lambda jit, x: call_without_jit(jit(raise_mine), x),
    "nested call": lambda jit, x: jit(lambda x: jit(raise_mine)(x))(x),
    "call in jax.jit": lambda jit, x: jax.jit(jit(raise_mine))(x),
    "grad": lambda jit, x: jax.grad(jit(raise_mine))(1.0),
    "grad inside": lambda jit, x: jit(jax.grad(raise_mine))(1.0),
    "failing gradient": lambda jit, x: jax.grad(jit(with_failing_gradient))(1.0),
    "failing gradient inside": lambda jit, x: jit(jax.grad(with_failing_gradient))(1.0),
    "vmap": lambda jit, x: jax.vmap(jit(raise_mine))(x),
    "jvp": lambda jit, x: jax.jvp(jit(raise_mine), (x,), (x,)),
    "linearize": lambda jit, x: jax.linearize(jit(raise_mine), x),
    "remat": lambda jit, x: jax.grad(jax.checkpoint(jit(raise_mine)))(1.0),
    "scan": lambda jit, x: jax.lax.scan(lambda c, y: (jit(raise_mine)(c), y), x, x),
    "scan inside": lambda jit, x: jit(
        lambda x: jax.lax.scan(lambda c, y: (raise_mine(c), y), x, x)
    )(x),
    "cond inside": lambda jit, x: jit(lambda x: jax.lax.cond(True, raise_mine, raise_mine, x))(x),
    "while_loop inside": lambda jit, x: jit(
        lambda x: jax.lax.while_loop(lambda x: True, raise_mine, x)
    )(x),
    "shard_map inside": lambda jit, x: jit(
        shard_map(raise_mine, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    )(x),
    "make_jaxpr": lambda jit, x: jax.make_jaxpr(jit(raise_mine))(x),
    "jax.eval_shape": lambda jit, x: jax.eval_shape(jit(raise_mine), x),
    "eval_shape": lambda jit, x: jit(raise_mine).eval_shape(x),
    "lower": lambda jit, x: jit(raise_mine).lower(x),
    "trace": lambda jit, x: jit(raise_mine).trace(x),
    "explain": lambda jit, x: explain(jit(raise_mine), x),
}
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("x",))


@pytest.mark.parametrize("mode", ["quiet_remove_frames", "remove_frames", "tracebackhide"])
@pytest.mark.parametrize("jit", [pjit, xlashard.jit], ids=["pjit", "jit"])
def test_errors_of_user_functions_show_no_internal_frame(jit, mode) -> None:
    shown = {}
    for use, call in USES.items():
        with filtering(mode), pytest.raises(ZeroDivisionError) as caught:
            call(jit, np.ones(8, np.float32))
        frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        visible = [f.f_code for f in frames if "__tracebackhide__" not in f.f_locals]
        assert visible[-1] is raise_mine.__code__, use
        ours = [c for c in visible if Path(c.co_filename).is_relative_to(PACKAGE)]
        shown[use] = [f"{code.co_filename}:{code.co_name}" for code in ours]
    assert not {use: found for use, found in shown.items() if found}
