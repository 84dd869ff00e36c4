"""Errors for places and values that the catalogue of mistakes (tests/errors) lacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import NamedSharding, P, device_put, pjit
from xlashard.errors import ArgumentError, DeletedError, ResourceError


def step(state, batch):
    return jax.tree.map(lambda x: x * 1, (state, batch))


STATE = {"params": {"w": f32(8, 4), "b": f32(4)}}


def refusal(mesh, error, *args, **resources):
    with mesh, pytest.raises(error) as caught:
        pjit(step, **resources)(*args)
    return str(caught.value)


def in_spec(spec):
    return {"in_shardings": ({"params": {"w": spec, "b": None}}, None)}


def test_spec_longer_than_the_rank_is_refused(mesh):
    text = refusal(mesh, ResourceError, STATE, f32(8), **in_spec(P(None, None, "x")))
    assert "in_shardings of state['params']['w'] (float32[8,4])" in text
    assert "give at most 2 entries" in text
    text = refusal(mesh, ResourceError, STATE, 1.0, in_shardings=(None, P("x")))
    assert "in_shardings of batch (float32[])" in text and "P()" in text


@pytest.mark.devices(8)
def test_indivisible_dimension_is_refused(mesh):
    text = refusal(mesh, ResourceError, STATE, f32(6, 2), in_shardings=(None, P("x", "y")))
    assert "in_shardings of batch (float32[6,2])" in text
    for fact in ("dimension 0", "size 6", "4 tiles", "'x'=4", "multiple of 4", "(None, 'y')"):
        assert fact in text
    text = refusal(mesh, ResourceError, STATE, f32(4), in_shardings=(None, P(("x", "y"))))
    assert "'x'=4" in text and "'y'=2" in text and "8 tiles" in text


@pytest.mark.devices(8)
def test_errors_of_results_name_their_path(mesh):
    with mesh, pytest.raises(ResourceError) as caught:
        pjit(step, out_shardings=(None, P("x")))(STATE, f32(6))
    assert "out_shardings of result[1] (float32[6])" in str(caught.value)
    with (
        mesh,
        pytest.raises(ResourceError, match=r"out_shardings of result\[0\]\['params'\]\['w'\]"),
    ):
        pjit(step, out_shardings=({"params": {"w": P("z"), "b": None}}, None))(STATE, f32(6))


def test_spec_entry_that_is_not_an_axis_name_is_refused(mesh):
    text = refusal(mesh, ResourceError, STATE, f32(8), in_shardings=P(3.5))
    assert "in_shardings of state['params']['b']" in text and "3.5" in text


@pytest.mark.parametrize(
    "value",
    ["text", object(), {1, 2}, lambda: 0, b"bytes", range(3), slice(1), ..., int, np.float32],
)
def test_argument_that_is_not_an_array_is_refused(value):
    with pytest.raises(ArgumentError) as caught:
        pjit(step)({"params": {"w": value}}, f32(2))
    text = str(caught.value)
    assert "state['params']['w']" in text
    assert type(value).__name__ in text and "static_argnames=('state',)" in text


@pytest.mark.parametrize(
    "value",
    [
        np.array([{}, 1], dtype=object),
        np.array(["a", "bc"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array([3], dtype="timedelta64[s]"),
        np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
        np.str_("a"),
        np.datetime64("2020-01-01"),
        np.ma.masked_array([1.0, 2.0], [True, False]),
    ],
    ids=lambda v: str(getattr(v, "dtype", type(v))),
)
def test_numpy_values_of_unsupported_dtype_are_refused(value):
    with pytest.raises(ArgumentError, match=r"state\['w'\]"):
        pjit(step)({"w": value}, f32(2))


def test_dtypes_of_ml_dtypes_are_accepted():
    import ml_dtypes

    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4):
        assert pjit(lambda x: x)(np.zeros(2, dtype)).dtype == dtype


def test_type_with_jax_array_method_is_refused(mesh):
    class Own:
        def __jax_array__(self):
            return jnp.ones(3)

    with pytest.raises(ArgumentError, match="batch is .*Own"):
        pjit(step)(f32(1), Own())


@pytest.mark.parametrize("make", [device_put, jnp.asarray])
def test_a_deleted_argument(make, mesh):
    x = make(f32(8))
    x.delete()
    with pytest.raises(DeletedError, match=r"state\['w'\] \(float32\[8\]\).*delete\(\)"):
        pjit(step)({"w": x}, 1.0)
    pjit(step).lower({"w": x}, 1.0)  # needs its type only
    f = pjit(step)
    f({"w": f32(8)}, 1.0)
    f({"w": make(f32(8))}, 1.0)
    with pytest.raises(DeletedError, match=r"state\['w'\]"):
        f({"w": x}, 1.0)


def test_a_deleted_key():
    key = jax.random.key(0)
    key.delete()
    with pytest.raises(DeletedError, match=r"rng \(key<fry>\[\]\)"):
        pjit(lambda rng: rng)(key)


def test_use_after_donation_names_the_donating_function():
    def train(state):
        return state * 2

    f = pjit(train, donate_argnums=0)
    x = device_put(f32(8))
    f(x)
    with pytest.raises(DeletedError, match=naming("state (float32[8])", "donated", "train")):
        f(x)
    with pytest.raises(DeletedError, match=naming("donated", "train")):
        np.asarray(x)


def test_errors_of_the_user_function_propagate():
    class OwnError(Exception):
        pass

    def fails(x):
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine"):
        pjit(fails)(1.0)
    with pytest.raises(TypeError, match="incompatible shapes"):
        pjit(lambda x, y: x + y)(f32(3), f32(4))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        pjit(lambda x: 1 if x > 0 else 2)(1.0)


def test_result_that_is_not_an_array_raises():
    with pytest.raises(TypeError, match="str"):
        pjit(lambda x: "text")(1.0)


def test_unknown_compiler_options_are_named():
    with pytest.raises(xlashard.errors.CompileError, match="step.*xla_no_such_option"):
        pjit(step, compiler_options={"xla_no_such_option": True})(f32(1), 1.0)
    with pytest.raises(xlashard.errors.CompileError, match="xla_no_such_option"):
        pjit(step).lower(f32(1), 1.0).compile({"xla_no_such_option": True})


def test_leaked_tracer_raises_and_names_its_argument():
    leaked = []

    @jax.jit
    def leak(x):
        leaked.append(x)
        return x

    leak(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        pjit(lambda x: x + 1)(leaked[0])
    assert caught.value.__notes__ == ["It was passed as x."]
    with pytest.raises(jax.errors.UnexpectedTracerError):
        pjit(lambda x: x + leaked[0])(1.0)


@pytest.mark.devices(8)
def test_pjit_is_usable_after_an_error(mesh):
    f = pjit(step, in_shardings=(None, P("x")))
    with mesh:
        with pytest.raises(ResourceError):
            f(STATE, f32(6))
        out = f(STATE, f32(8))
    assert out[1].sharding == NamedSharding(mesh, P("x"))
