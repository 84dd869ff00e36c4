import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.examples import settings
from xlashard.train.config.settings import OptimizerSettings
from xlashard.train.data import read_corpus, training_starts
from xlashard.train.model.programs import (
    Recipe,
    global_norm,
    learning_rate,
    make_optimizer,
    make_recipe,
)


@functools.cache
def recipe() -> Recipe:
    return make_recipe(settings())


@functools.cache
def initial_state() -> Any:
    return jax.jit(recipe().initial_state)(0)


@functools.cache
def train_step() -> Any:
    return jax.jit(recipe().train_step)


def batch(parts: int) -> jax.Array:
    text = read_corpus(settings().data, 32).train
    windows = text.windows(training_starts(len(text), 0, 8, 32, 0), 33)
    return jnp.asarray(windows.reshape(parts, -1, 33))


@pytest.mark.slow
def test_gradient_accumulation_equals_one_whole_batch() -> None:
    (whole, measured), (parted, again) = (
        train_step()(initial_state(), batch(parts)) for parts in (1, 4)
    )
    np.testing.assert_allclose(measured["loss"], again["loss"], rtol=1e-5)
    np.testing.assert_allclose(measured["gradient_norm"], again["gradient_norm"], rtol=1e-4)
    moments = [x["optimizer"][1][0].mu for x in (whole, parted)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), *moments)


@pytest.mark.slow
def test_train_step_increments_the_step_and_returns_metrics() -> None:
    state, measured = train_step()(initial_state(), batch(1))
    assert state["step"] == 1
    assert {name: x.dtype.name for name, x in measured.items()} == dict.fromkeys(
        ("loss", "gradient_norm", "learning_rate"), "float32"
    )
    np.testing.assert_allclose(measured["learning_rate"], recipe().schedule(0), rtol=1e-6)


@pytest.mark.slow
def test_evaluation_is_the_mean_over_microbatches() -> None:
    parameters = initial_state()["parameters"]
    evaluate = jax.jit(recipe().evaluate)
    np.testing.assert_allclose(
        evaluate(parameters, batch(4)), evaluate(parameters, batch(1)), rtol=1e-5
    )


@pytest.mark.slow
def test_learning_rate_warms_up_and_decays() -> None:
    optimizer = OptimizerSettings(learning_rate=1.0, warmup=10, final=0.1)
    rates = [float(learning_rate(optimizer, 100)(step)) for step in range(101)]
    assert 0 < rates[0] < rates[5] < rates[10] == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    np.testing.assert_allclose(rates[100], 0.1, rtol=1e-5)
    np.testing.assert_allclose(rates[55], 0.55, rtol=1e-3)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 5), (5, 5), (50, 5), (3, 1)])
def test_learning_rate_of_short_runs_is_positive_and_finite(warmup: int, steps: int) -> None:
    schedule = learning_rate(OptimizerSettings(learning_rate=1.0, warmup=warmup), steps)
    rates = np.asarray([schedule(step) for step in range(steps)])
    assert np.isfinite(rates).all()
    assert (rates > 0).all()
    assert rates.max() <= 1.0


@pytest.mark.slow
def test_weight_decay_applies_only_to_matrices() -> None:
    declarations = recipe().declarations
    optimizer = make_optimizer(OptimizerSettings(weight_decay=0.5), lambda step: 0.1, declarations)
    parameters = jax.tree.map(lambda x: jnp.ones(x.shape), declarations)
    nothing = jax.tree.map(jnp.zeros_like, parameters)
    update = jax.jit(lambda: optimizer.update(nothing, optimizer.init(parameters), parameters))
    updates, _ = update()
    np.testing.assert_allclose(updates["head"], -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates["norm"], 0)
    np.testing.assert_array_equal(updates["layers"]["mlp"]["norm"], 0)


@pytest.mark.slow
def test_the_gradient_is_clipped() -> None:
    declarations = {"x": recipe().declarations["norm"]}
    optimizer = make_optimizer(
        OptimizerSettings(clip=1.0, b1=0.0, weight_decay=0.0), lambda step: 1.0, declarations
    )
    parameters = {"x": jnp.zeros(2)}
    state = optimizer.init(parameters)
    _, state = optimizer.update({"x": jnp.asarray([30.0, 40.0])}, state, parameters)
    np.testing.assert_allclose(state[1][0].mu["x"], [0.6, 0.8], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_moments_are_stored_in_the_configured_dtypes(moments: str) -> None:
    declarations = {"x": recipe().declarations["norm"]}
    changes = OptimizerSettings(moments=moments, mean="bfloat16", weight_decay=0.0, clip=1e9)
    optimizer = make_optimizer(changes, lambda step: 1.0, declarations)
    parameters = {"x": jnp.zeros(2)}
    state = optimizer.init(parameters)
    updates, state = optimizer.update({"x": jnp.asarray([1.0, -2.0])}, state, parameters)
    np.testing.assert_allclose(updates["x"], [-1.0, 1.0], rtol=1e-2)
    means = state[1][0]
    assert (means.mu["x"].dtype, means.nu["x"].dtype) == (jnp.bfloat16, jnp.dtype(moments))


@pytest.mark.slow
def test_global_norm() -> None:
    assert global_norm({"a": jnp.asarray([3.0]), "b": jnp.asarray([[4.0]])}) == 5.0
