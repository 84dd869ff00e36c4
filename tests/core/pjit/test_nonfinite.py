"""`jax_debug_nans` and `jax_debug_infs`: their findings, their errors, and their cost."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.array.cases import named, same
from xlashard import device_put, pjit, with_sharding_constraint
from xlashard.errors import NonFiniteError

ROWS = named(("x", "y"))


def rows(number: float, dtype: Any = np.float32) -> Any:
    return device_put(np.full(8, number, dtype), ROWS)


def model(state: Any, scale: Any) -> Any:
    hidden = jnp.log(state["w"])
    return {"loss": (hidden * scale).sum(), "hidden": hidden}


def found(call: Any, *flags: str) -> str:
    """Return the error of a call under flags, nans by default."""
    flags = flags or ("nans",)
    with pytest.raises(NonFiniteError) as caught:
        _under(flags, call)
    return str(caught.value)


def _under(flags: tuple[str, ...], call: Any) -> Any:
    if not flags:
        return jax.block_until_ready(call())
    with getattr(jax, f"debug_{flags[0]}")(True):
        return _under(flags[1:], call)


def test_the_function_the_result_and_the_operation_are_named() -> None:
    f = pjit(model)
    text = found(lambda: f({"w": rows(-1)}, 2.0))
    assert text.startswith("result['hidden'] of model holds nan, which jax_debug_nans forbids: ")
    assert "`log` makes nan at " in text and "test_nonfinite.py:" in text and "(model)" in text
    assert text.endswith("`with jax.debug_nans(False):` lets it pass")


@pytest.mark.parametrize(("flag", "number", "kind"), [("nans", -1, "nan"), ("infs", 0, "inf")])
def test_cached_calls_are_checked(flag: str, number: int, kind: str) -> None:
    f = pjit(model)
    for _ in range(3):
        f({"w": rows(number)}, 2.0)
    for _ in range(2):
        assert f"of model holds {kind}, which jax_debug_{flag}" in found(
            lambda: f({"w": rows(number)}, 2.0), flag
        )
        assert same(_under((flag,), lambda: f({"w": rows(1)}, 2.0))["loss"], np.float32(0))
    assert not np.isfinite(f({"w": rows(number)}, 2.0)["hidden"]).any()


@pytest.mark.slow
def test_global_flag_applies_after_a_context_manager() -> None:
    """JAX drops the global flag at the end of the context manager."""
    f = pjit(model)
    bad = {"w": rows(-1)}
    f(bad, 2.0)
    jax.config.update("jax_debug_nans", True)
    try:
        with jax.debug_nans(False):
            assert np.isnan(f(bad, 2.0)["loss"])
        with pytest.raises(NonFiniteError):
            f(bad, 2.0)
        for x in (bad["w"], bad["w"].to_jax()):
            for _ in range(2):
                with pytest.raises(FloatingPointError, match="nan"):
                    jnp.log(x)
        with jax.debug_nans(True), jax.debug_infs(True):
            pass
        with jax.debug_infs(True), pytest.raises(NonFiniteError):
            f(bad, 2.0)
        with pytest.raises(FloatingPointError):
            bad["w"] ** 0.5
    finally:
        jax.config.update("jax_debug_nans", False)
    assert np.isnan(f(bad, 2.0)["loss"])


@pytest.mark.slow
def test_operators_and_methods_are_checked() -> None:
    x = rows(0)
    assert np.isnan(np.asarray(x / x)).all()
    for use in (lambda: x / x, lambda: (x / x).sum(), lambda: jnp.log(x - 1), lambda: x % x):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            use()
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        1 / x


def test_transfers_are_not_checked_for_nan() -> None:
    bad = np.full(8, np.nan, np.float32)
    with jax.debug_nans(True):
        x = device_put(bad, ROWS)
        y = device_put(x, named())
        assert np.isnan(np.asarray(with_sharding_constraint(y, ROWS))).all()
        assert "nan" in repr(x)


def test_donated_arguments_survive_a_nan_error() -> None:
    f = pjit(model, donate_argnums=0)
    f({"w": rows(1)}, 2.0)
    state = {"w": rows(-1)}
    assert "`log` makes nan" in found(lambda: f(state, 2.0))
    assert not state["w"].is_deleted() and same(state["w"], np.full(8, -1, np.float32))
    good = {"w": rows(1)}
    _under(("nans",), lambda: f(good, 2.0))
    assert good["w"].is_deleted()


@pytest.mark.slow
def test_compiled_programs_and_bound_steps() -> None:
    def update(state: Any, x: Any) -> Any:
        return state + 1, jnp.sqrt(x)

    program = pjit(update, donate_argnums=0).lower(rows(1), 1.0).compile()
    assert "result[1] of update holds nan" in found(lambda: program(rows(1), -1.0))
    step = program.bind(rows(1))
    step(4.0)
    text = found(lambda: step(-1.0))
    assert "result[1] of update holds nan" in text and "`sqrt` makes nan at " in text
    assert same(step.state, np.full(8, 2, np.float32))
    assert float(step(9.0)) == 3
    assert same(step.state, np.full(8, 3, np.float32))


def test_argument_that_already_holds_nan_is_named() -> None:
    f = pjit(model)
    assert "state['w'] holds nan already" in found(lambda: f({"w": rows(np.nan)}, 2.0))
    assert "scale holds nan already" in found(lambda: f({"w": rows(1)}, np.float32(np.nan)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (lambda x: jax.jit(jnp.log)(x), "`log` makes nan"),
        (lambda x: pjit(jnp.sqrt)(x), "`sqrt` makes nan"),
        (lambda x: jax.checkpoint(lambda x: jnp.log(x))(x), "`log` makes nan"),
        (lambda x: jax.lax.cond(x.sum() < 0, jnp.log, jnp.exp, x), "`log` makes nan"),
        (
            lambda x: jax.lax.scan(lambda c, y: (jnp.log(c - y), c), -x, jnp.arange(3.0))[0],
            "round 1 of a scan",
        ),
        (
            lambda x: jax.lax.scan(
                lambda c, y: (jnp.sqrt(y) + c, y), x, jnp.array([-1.0, 4, 4]), reverse=True
            )[0],
            "`sqrt` makes nan at ",
        ),
        (
            lambda x: jax.lax.while_loop(lambda c: c.sum() > -99, lambda c: jnp.log(c) - c, -x),
            "round 1 of a while",
        ),
        (
            lambda x: jax.lax.map(
                lambda y: jax.lax.scan(lambda c, _: (jnp.log(c), c), y, length=4), x + 3
            ),
            "of a scan, in round",
        ),
    ],
)
def test_nan_in_nested_operations_is_located(fun: Any, text: str) -> None:
    assert text in found(lambda: pjit(fun)(rows(-1)))


@pytest.mark.slow
def test_transformed_calls() -> None:
    f = pjit(lambda x: jnp.sqrt(x).sum())
    assert "`sqrt` makes nan" in found(lambda: jax.grad(f)(rows(-1)))
    assert "`div` makes inf" in found(lambda: jax.grad(f)(rows(0)), "infs")
    assert "`log` makes nan" in found(lambda: jax.vmap(pjit(jnp.log))(rows(-1)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.jit(lambda x: pjit(jnp.log)(x))(rows(-1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.complex64, jnp.float8_e4m3fn])
def test_every_inexact_dtype(dtype: Any) -> None:
    f = pjit(lambda x: {"good": x, "bad": (x - x) / (x - x)})
    assert "result['bad']" in found(lambda: f(rows(1, dtype)))


def test_nan_in_one_element_on_one_device_is_found() -> None:
    x = np.ones((8, 4), np.float32)
    x[5, 2] = -1
    assert "holds nan" in found(lambda: pjit(jnp.log)(device_put(x, named("x", "y"))))


@pytest.mark.slow
def test_keys_and_integers_are_accepted() -> None:
    f = pjit(lambda key, n: (jax.random.split(key), n + 1, jax.random.normal(key)))
    keys, n, _ = _under(("nans", "infs"), lambda: f(jax.random.key(0), 1))
    assert keys.shape == (2,) and int(n) == 2


def test_effects_run_once_if_nan_is_found() -> None:
    seen: list[float] = []

    def fun(x: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return jnp.log(x)

    text = found(lambda: pjit(fun)(rows(-1)))
    jax.effects_barrier()
    assert "jax.disable_jit()" in text and seen == [-8.0]


def test_nan_from_a_constant_is_attributed() -> None:
    text = found(lambda: pjit(lambda x: x * 0 + np.float32(np.nan))(rows(1)))
    assert "`add` makes nan" in text or "or of a constant" in text


def test_debug_nans_causes_no_retrace(capsys: pytest.CaptureFixture[str]) -> None:
    traces = []

    def fun(x: Any) -> Any:
        traces.append(1)
        return x + 1

    f = pjit(fun)
    x = rows(1)
    f(x)
    _under(("nans",), lambda: f(x))
    f(x)
    assert len(traces) == 1
    assert capsys.readouterr().out == ""


def test_debug_nans_does_not_affect_other_threads() -> None:
    f = pjit(jnp.log)
    out: list[Any] = []
    with jax.debug_nans(True):
        thread = threading.Thread(target=lambda: out.append(f(rows(-1))))
        thread.start()
        thread.join()
        with pytest.raises(NonFiniteError):
            f(rows(-1))
    assert np.isnan(np.asarray(out[0])).all()
