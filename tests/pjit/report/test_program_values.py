"""Arguments and results in a report: who decided, what is moved, what is reused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.pjit.helpers import f32
from xlashard import UNSPECIFIED, NamedSharding, P, explain, pjit

pytestmark = pytest.mark.usefixtures("partitioner")


def named(mesh, *spec, kind=None):
    return NamedSharding(mesh, P(*spec), memory_kind=kind)


def put(mesh, value, *spec):
    return xlashard.device_put(value, named(mesh, *spec))


def test_the_origin_of_each_sharding_is_reported(mesh):
    def mix(requested, lies, free, scalar):
        return requested + scalar, lies * 2, free[:4]

    fun = pjit(
        mix,
        in_shardings=(named(mesh, "x"), UNSPECIFIED, UNSPECIFIED, UNSPECIFIED),
        out_shardings=(named(mesh, "y"), UNSPECIFIED, UNSPECIFIED),
    )
    report = explain(fun, f32(8), put(mesh, f32(8), "y"), f32(8), np.float32(2))
    decided = {v.path: v.decided_by for v in (*report.inputs, *report.outputs)}
    assert decided == {
        "requested": "caller",
        "lies": "argument",
        "free": "partitioner",
        "scalar": "default",
        "result[0]": "caller",
        "result[1]": "partitioner",
        "result[2]": "partitioner",
    }


def test_specs_are_short_and_paths_are_those_of_the_call(mesh):
    def pick(state, *rest):
        return {"out": state["layers"][0]["w"] + rest[0]}

    fun = pjit(pick)
    w = put(mesh, f32(8, 8), ("x", "y"), None)
    report = explain(fun, {"layers": [{"w": w}]}, put(mesh, f32(8, 8), None, "x"))
    assert {v.path: v.spec for v in report.inputs} == {
        "state['layers'][0]['w']": "P(('x', 'y'))",
        "rest[0]": "P(None, 'x')",
    }
    assert [v.path for v in report.outputs] == ["result['out']"]


def test_bytes_of_moved_arguments(mesh):
    first = jax.devices()[0]
    fun = pjit(lambda a, b, c, d: (a, b, c, d), in_shardings=named(mesh, "x"))
    at_home = put(mesh, f32(16), "x")
    report = explain(fun, f32(32), jax.device_put(f32(16)), at_home, np.float32(1).repeat(4))
    moves = {m.path: (m.source, m.target, m.device_bytes_moved, m.host_bytes) for m in report.moves}
    assert moves == {
        # Four tiles, each on two devices.
        "a": ("host", "P('x')", 0, 2 * 32 * 4),
        # One of the eight devices holds its tile already.
        "b": (f"device {first.id}", "P('x')", 7 * 16, 0),
        "d": ("host", "P('x')", 0, 2 * 4 * 4),
    }
    assert [m.path for m in report.moves] == ["a", "b", "d"]


def test_uncommitted_arrays_are_moved_too(mesh):
    fun = pjit(lambda x: x * 2, in_shardings=named(mesh))
    report = explain(fun, jnp.ones(4))
    assert [(m.path, m.device_bytes_moved) for m in report.moves] == [("x", 7 * 16)]


def test_donated_buffers_count_as_reused_only_if_the_compiler_does_so(mesh):
    def f(a, b, c):
        return a + 1, b[:4]

    fun = pjit(
        f, in_shardings=named(mesh, "x"), out_shardings=named(mesh, "x"), donate_argnums=(0, 1)
    )
    report = explain(fun, f32(16), f32(8), f32(4))
    assert [(d.path, d.donated, d.result, d.device_bytes) for d in report.donations] == [
        ("a", True, "result[0]", 16),
        ("b", True, "", 8),
    ]
    assert [d.is_reused for d in report.donations] == [True, False]
    assert "no result has its shape [8]" in report.donations[1].reason
    assert report.donations[0].reason == ""


def test_explaining_an_unusable_donation_neither_warns_nor_raises(mesh, recwarn):
    fun = pjit(lambda x: x.sum(), donate_argnums=0, donation="strict")
    report = explain(fun, put(mesh, f32(16), "x"))
    assert [(d.path, d.is_reused) for d in report.donations] == [("x", False)]
    assert not recwarn.list
    with pytest.raises(xlashard.errors.DonationError):
        fun(put(mesh, f32(16), "x"))


def test_an_argument_with_a_result_like_it_could_be_donated(mesh):
    def f(params, moments, batch):
        return params + batch.sum(), moments * 2

    ins = named(mesh, "x"), named(mesh, "y"), named(mesh)
    outs = named(mesh, "x"), named(mesh, "x")
    report = explain(pjit(f, in_shardings=ins, out_shardings=outs), f32(8), f32(8), f32(3))
    # The moments' result lies otherwise.
    found = [(d.path, d.donated, d.result, d.is_reused) for d in report.donations]
    assert found == [("params", False, "result[0]", False)]


def test_memory_kinds_are_reported(mesh):
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    other = sorted(kinds - {jax.devices()[0].default_memory().kind})
    if not other:
        pytest.fail(f"CPU devices have no second memory: {kinds}")
    held = NamedSharding(mesh, P("x"), memory_kind=other[0])
    report = explain(pjit(lambda x: x, in_shardings=held, out_shardings=held), f32(8))
    assert [(v.spec, v.memory_kind) for v in report.inputs] == [(f"P('x') in {other[0]}", other[0])]
