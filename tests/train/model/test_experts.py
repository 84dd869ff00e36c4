import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from tests.train.examples import settings
from xlashard import Mesh
from xlashard.train.config.settings import KernelSettings, ModelSettings, Rules
from xlashard.train.model.experts import _ragged, mix_dropless, mix_experts, places
from xlashard.train.model.layout import Layout, unplaced
from xlashard.train.model.products import product

TOKENS = 16
TILES = [
    f"model.kernel.{name}={size}"
    for name, size in {
        "experts": "gmm",
        **{"tile_rows": 64, "tile_inner": 20, "tile_columns": 20},
        **{"tile_rows_dw": 128, "tile_inner_dw": 20, "tile_columns_dw": 18},
    }.items()
]
mix = jax.jit(mix_experts, static_argnums=(2, 3))


class _OnTpu(Layout):
    platform = "tpu"


def model(*words: str) -> ModelSettings:
    return settings("model.experts=4", "model.mlp=24", *words).model


def weights(shape: ModelSettings) -> dict[str, jax.Array]:
    sizes = {
        "router": (shape.width, shape.experts),
        "gate": (shape.experts, shape.width, shape.mlp),
        "up": (shape.experts, shape.width, shape.mlp),
        "down": (shape.experts, shape.mlp, shape.width),
    }
    keys = jax.random.split(jax.random.key(1), len(sizes))
    pairs = zip(sizes.items(), keys, strict=True)
    return {name: 0.3 * jax.random.normal(key, size) for (name, size), key in pairs}


def tokens(shape: ModelSettings) -> jax.Array:
    return jax.random.normal(jax.random.key(2), (3, TOKENS, shape.width))


def densely(x: jax.Array, arrays: dict[str, jax.Array], active: int) -> jax.Array:
    """Run every expert on every token; unselected experts have weight 0."""
    chances = jax.nn.softmax(x @ arrays["router"])
    least = jnp.sort(chances, axis=-1)[..., -active][..., None]
    chosen = jnp.where(chances >= least, chances, 0.0)
    shares = chosen / chosen.sum(-1, keepdims=True)
    gate, up = (jnp.einsum("bsw,ewm->bsem", x, arrays[name]) for name in ("gate", "up"))
    each = jnp.einsum("bsem,emw->bsew", jax.nn.silu(gate) * up, arrays["down"])
    return jnp.einsum("bsew,bse->bsw", each, shares)


@pytest.mark.slow
@pytest.mark.parametrize("active", [1, 2])
def test_full_capacity_equals_the_dense_mixture(active: int) -> None:
    shape = model(f"model.active_experts={active}", f"model.capacity={4 / active}")
    x, arrays = tokens(shape), weights(shape)

    def ours(x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
        mixed, measured = mix_experts(x, arrays, shape, unplaced)
        return jnp.sum(jnp.sin(mixed)), (mixed, measured)

    def dense(x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
        mixed = densely(x, arrays, active)
        return jnp.sum(jnp.sin(mixed)), mixed

    actual, (mixed, measured) = jax.jit(jax.grad(ours, (0, 1), has_aux=True))(x, arrays)
    expected, reference = jax.jit(jax.grad(dense, (0, 1), has_aux=True))(x, arrays)
    np.testing.assert_allclose(mixed, reference, rtol=1e-4, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), actual, expected
    )
    assert measured["dropped"] == 0


@pytest.mark.slow
def test_tokens_beyond_expert_capacity_are_dropped() -> None:
    shape = model("model.active_experts=1", "model.capacity=0.5")
    arrays = weights(shape)
    # All tokens select expert 0, which has room for the first two of each sequence.
    arrays["router"] = jnp.zeros_like(arrays["router"]).at[0, 0].set(50.0)
    x = tokens(shape).at[..., 0].set(1.0)
    mixed, measured = mix(x, arrays, shape, unplaced)
    assert places(shape, TOKENS) == 2
    assert (np.abs(mixed[:, :2]).max(-1) > 1e-3).all()
    np.testing.assert_array_equal(mixed[:, 2:], 0)
    np.testing.assert_allclose(measured["dropped"], 14 / 16)
    np.testing.assert_allclose(measured["balance"], 4, rtol=1e-3)


@pytest.mark.slow
def test_equally_loaded_experts_have_a_balance_of_one() -> None:
    shape = model("model.active_experts=1")
    arrays = weights(shape)
    x = jnp.eye(4, shape.width)[jnp.arange(TOKENS) % 4][None]
    arrays["router"] = 0.1 * jnp.eye(shape.width, 4)
    _, measured = mix(x, arrays, shape, unplaced)
    np.testing.assert_allclose(measured["balance"], 1, rtol=1e-5)
    assert measured["dropped"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["alone", "mesh", "kernel"])
def test_dropless_routing_equals_the_dense_mixture(where: str) -> None:
    """The kernel runs in the interpreter of Pallas, with tiles that divide no dimension."""
    shape = model("model.active_experts=2", "model.dropless=true", *TILES)
    x, arrays = tokens(shape), weights(shape)
    x = jnp.concatenate([x, -x[:1]])
    rules = Rules(batch=("fsdp",), embed=("fsdp",), mlp=("tensor",))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    places = {
        "alone": unplaced,
        "mesh": Layout(mesh, rules),
        "kernel": _OnTpu(None, rules, automatic=True),
    }
    place = places[where]

    def ours(x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
        mixed, measured = mix_dropless(x, arrays, shape, place)
        return jnp.sum(jnp.sin(mixed)), (mixed, measured)

    def dense(x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
        mixed = densely(x, arrays, 2)
        return jnp.sum(jnp.sin(mixed)), mixed

    expected, exact = jax.jit(jax.grad(dense, (0, 1), has_aux=True))(x, arrays)
    with force_tpu_interpret_mode():
        actual, (mixed, measured) = jax.jit(jax.grad(ours, (0, 1), has_aux=True))(x, arrays)
    np.testing.assert_allclose(mixed, exact, rtol=1e-4, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), actual, expected
    )
    assert measured["dropped"] == 0
    assert measured["balance"] >= 1 - 1e-6


@pytest.mark.slow
def test_ragged_fp8_products_equal_the_fp8_products_of_each_group() -> None:
    shape = model("model.dropless=true", "model.quantized=fp8")
    sizes = jnp.array([10, 20, 30, 4], jnp.int32)
    ends = [0, 10, 30, 60, 64]
    keys = jax.random.split(jax.random.key(0), 2)
    rows, weight = jax.random.normal(keys[0], (64, 32)), jax.random.normal(keys[1], (4, 32, 24))

    def ragged(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return _ragged(rows, weight, sizes, shape, unplaced)

    def grouped(rows: jax.Array, weight: jax.Array) -> jax.Array:
        groups = enumerate(itertools.pairwise(ends))
        parts = [product("bm,mn->bn", rows[a:b], weight[n], shape) for n, (a, b) in groups]
        return jnp.concatenate(parts)

    def exact(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, weight, sizes)

    def differentiate(times: Any) -> list[jax.Array]:
        def weigh(rows: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
            value = times(rows, weight)
            return jnp.sum(value * jnp.cos(jnp.arange(value.size)).reshape(value.shape)), value

        return jax.tree.leaves(jax.jit(jax.grad(weigh, (0, 1), has_aux=True))(rows, weight))

    results = (differentiate(times) for times in (ragged, grouped, exact))
    for ours, by_group, unrounded in zip(*results, strict=True):
        norm = np.linalg.norm(unrounded)
        assert np.linalg.norm(ours - by_group) < 1e-4 * norm
        assert 0.01 * norm < np.linalg.norm(ours - unrounded) < 0.08 * norm


def test_last_product_of_experts_has_tiles_of_its_own() -> None:
    kernel = KernelSettings(tile_rows=256, down_tile_rows=128, down_tile_columns_dw=64)
    down = kernel.down_kernel
    assert (kernel.tile_rows, down.tile_rows) == (256, 128)
    assert (down.tile_inner, down.tile_columns_dw) == (kernel.tile_inner, 64)
