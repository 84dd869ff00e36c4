"""optax: states of every structure, made and updated outside and inside of pjit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.core.array.cases import named
from tests.grouped_cases import sweep
from xlashard import Array, device_put, pjit

SHARDINGS = {"w": named("x", "y"), "b": named("y")}
VALUES = {
    "w": np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8),
    "b": np.ones(8, np.float32),
}
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "chain with a schedule": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)),
    ),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "labelled": lambda: optax.multi_transform(
        {"fast": optax.adam(0.1), "still": optax.set_to_zero()}, {"w": "fast", "b": "still"}
    ),
    "hyperparameters in the state": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "unless it is not finite": lambda: optax.apply_if_finite(optax.adam(0.1), 2),
    "every second step": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=8),
    "moving average": lambda: optax.chain(optax.lion(0.1), optax.ema(0.9)),
}


def params() -> dict[str, Array]:
    return device_put(VALUES, SHARDINGS)


def gradient(p: Any) -> Any:
    return jax.grad(lambda p: ((p["w"] @ p["b"] - 1) ** 2).mean())(p)


def run(optimizer: Any, start: Any, compiled: Callable[..., Any], steps: int = 3) -> Any:
    """Return the parameters and the state after some steps."""

    def step(p: Any, state: Any) -> Any:
        updates, state = optimizer.update(gradient(p), state, p)
        return optax.apply_updates(p, updates), state

    state, step = optimizer.init(start), compiled(step)
    for _ in range(steps):
        start, state = step(start, state)
    return start, state


# Some states have parts that a step does not use.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::xlashard.errors.DonationWarning")
@pytest.mark.parametrize("name", sweep(OPTIMIZERS, quick=["sgd with momentum", "adam"]))
def test_optimizer_steps_equal_steps_on_jax_arrays(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    right = run(optimizer, jax.tree.map(jnp.asarray, VALUES), jax.jit)

    def donating(step: Callable[..., Any]) -> Callable[..., Any]:
        return pjit(step, donate_argnums=(0, 1))

    got = run(optimizer, params(), donating)
    assert jax.tree.structure(got) == jax.tree.structure(right)
    for ours, theirs in zip(*map(jax.tree.leaves, (got, right)), strict=True):
        assert type(ours) is Array and ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "masked", "hyperparameters in the state"])
def test_op_by_op(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    right = run(optimizer, jax.tree.map(jnp.asarray, VALUES), jax.jit, steps=1)
    got = run(optimizer, params(), lambda step: step, steps=1)
    for ours, theirs in zip(*map(jax.tree.leaves, (got, right)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    for key, x in got[0].items():
        assert x.sharding.is_equivalent_to(SHARDINGS[key], x.ndim)


def test_states_are_sharded_as_their_parameters() -> None:
    optimizer = OPTIMIZERS["chain with a schedule"]()
    state = optimizer.init(params())
    for moment in (optax.tree_utils.tree_get(state, "mu"), optax.tree_utils.tree_get(state, "nu")):
        for key, x in moment.items():
            assert x.sharding.is_equivalent_to(SHARDINGS[key], x.ndim)
    placed = optax.tree_utils.tree_map_params(
        optimizer,
        lambda x, sharding: device_put(x, sharding),
        optimizer.init(jax.tree.map(jnp.asarray, VALUES)),
        SHARDINGS,
        transform_non_params=lambda x: device_put(x, named()),
    )
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    assert all(type(x) is Array and x.committed for x in jax.tree.leaves(placed))
    mu = optax.tree_utils.tree_get(placed, "mu")
    assert {key: x.sharding for key, x in mu.items()} == SHARDINGS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_functions_of_trees() -> None:
    p = params()
    norm = np.sqrt(sum((v**2).sum() for v in VALUES.values()))
    np.testing.assert_allclose(optax.global_norm(p), norm, rtol=1e-6)
    np.testing.assert_allclose(optax.incremental_update(p, p, 0.5)["w"], VALUES["w"], rtol=1e-6)
    logits, labels = p["w"], device_put(np.arange(16, dtype=np.int32) % 8, named("x"))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    wanted = optax.softmax_cross_entropy_with_integer_labels(
        VALUES["w"], np.arange(16, dtype=np.int32) % 8
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)


@pytest.mark.slow
def test_nonfinite_step_changes_no_parameter() -> None:
    optimizer = OPTIMIZERS["unless it is not finite"]()
    p = params()
    state = optimizer.init(p)
    bad = jax.tree.map(lambda x: x * np.float32(np.nan), p)
    updates, state = pjit(optimizer.update)(bad, state, p)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    assert int(state.notfinite_count) == 1
