"""pmap-style programs: this package's constructors with today's helpers of JAX and flax."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xlashard import (
    Array,
    Mesh,
    NamedSharding,
    P,
    device_get,
    device_put,
    device_put_replicated,
    device_put_sharded,
    pjit,
)

DEVICES = jax.local_devices()
COUNT = len(DEVICES)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def first_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}


def batches(steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of two rows for each device, `[devices, 2, features]`."""
    rng = np.random.default_rng(1)
    for _ in range(steps):
        yield {
            "x": rng.normal(size=(COUNT, 2, 3)).astype(np.float32),
            "y": rng.normal(size=(COUNT, 2, 2)).astype(np.float32),
        }


def loss_of(params: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


@partial(jax.pmap, axis_name="batch", donate_argnums=(0, 1))
def step(params: Any, state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    grads = jax.lax.pmean(grads, "batch")
    updates, state = OPTIMIZER.update(grads, state)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "batch")


def on_one_device(steps: int) -> tuple[Any, list[float]]:
    """Return the same training on whole batches."""
    params, losses = first_params(), []
    state = OPTIMIZER.init(params)
    for batch in batches(steps):
        flat = {name: value.reshape(2 * COUNT, -1) for name, value in batch.items()}
        loss, grads = jax.value_and_grad(loss_of)(params, flat)
        updates, state = OPTIMIZER.update(grads, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return params, losses


def unstacked(batch: Any) -> list[Any]:
    return [jax.tree.map(lambda leaf, n=n: leaf[n], batch) for n in range(COUNT)]


@pytest.mark.slow
def test_a_data_parallel_loop() -> None:
    params = first_params()
    state = device_put_replicated(OPTIMIZER.init(params), DEVICES)
    params = device_put_replicated(params, DEVICES)
    given = params
    losses = []
    for batch in batches(3):
        params, state, loss = step(params, state, device_put_sharded(unstacked(batch), DEVICES))
        losses.append(float(loss[0]))
    assert given["w"].is_deleted()
    wanted, wanted_losses = on_one_device(3)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for one in (
        flax.jax_utils.unreplicate(params),
        jax.tree.map(lambda leaf: leaf[0], params),
        jax.tree.map(lambda leaf: Array.from_jax(leaf)[0], params),
    ):
        for name, leaf in device_get(one).items():
            np.testing.assert_allclose(leaf, wanted[name], rtol=1e-5)


@pytest.mark.slow
def test_flax_helpers_accept_stacked_arrays() -> None:
    params = first_params()
    ours = device_put_replicated(params, DEVICES)
    back = flax.jax_utils.unreplicate(ours)
    for name, leaf in back.items():
        assert leaf.devices() == {DEVICES[0]}
        np.testing.assert_array_equal(leaf, params[name])
    again = flax.jax_utils.replicate(back)
    assert again["w"].shape == (COUNT, 3, 2)
    source = (device_put(batch) for batch in batches(3))
    taken = flax.jax_utils.prefetch_to_device(source, 2)
    for got, wanted in itertools.zip_longest(taken, batches(3)):
        np.testing.assert_array_equal(got["x"], wanted["x"])


@pytest.mark.devices(8)
def test_results_of_pmap_are_valid_shards() -> None:
    doubled = jax.pmap(lambda x: x * 2)(device_put_sharded(list(np.arange(8.0)), DEVICES))
    rows = [shard.data[0] for shard in doubled.addressable_shards]
    np.testing.assert_array_equal(device_put_sharded(rows, DEVICES), 2 * np.arange(8.0))
    sums = jax.pmap(lambda x, y: x + y, in_axes=(0, None))(
        doubled, device_put_replicated(1.0, [DEVICES[0]])[0]
    )
    np.testing.assert_array_equal(sums, 2 * np.arange(8.0) + 1)


@pytest.mark.slow
def test_pjit_step_needs_no_leading_dimension() -> None:
    """The replacement in docs/guides/pmap.md."""
    mesh = Mesh(np.array(DEVICES), ("batch",))
    everywhere, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))

    @partial(pjit, donate_argnums=(0, 1), out_shardings=(everywhere, everywhere, everywhere))
    def whole_step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = OPTIMIZER.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    params = device_put(first_params(), everywhere)
    state = device_put(OPTIMIZER.init(first_params()), everywhere)
    losses = []
    for batch in batches(3):
        flat = {name: value.reshape(2 * COUNT, -1) for name, value in batch.items()}
        params, state, loss = whole_step(params, state, device_put(flat, by_rows))
        losses.append(float(loss))
    wanted, wanted_losses = on_one_device(3)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    np.testing.assert_allclose(params["w"], wanted["w"], rtol=1e-5)
