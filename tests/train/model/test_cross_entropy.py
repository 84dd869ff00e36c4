import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.examples import devices
from xlashard import Mesh
from xlashard.train.config.settings import Rules
from xlashard.train.model.blockwise import cross_entropy
from xlashard.train.model.layout import Layout, unplaced

VOCAB = 48


def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    one, two, three = jax.random.split(jax.random.key(0), 3)
    targets = jax.random.randint(three, (8, 6), 0, VOCAB)
    return jax.random.normal(one, (8, 6, 16)), 3 * jax.random.normal(two, (16, VOCAB)), targets


def plain(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    chances = jax.nn.log_softmax(x @ head)
    return -jnp.mean(jnp.take_along_axis(chances, targets[..., None], axis=-1))


def spread(**rules: tuple[str, ...]) -> Layout:
    mesh = Mesh(np.array(devices(8)).reshape(4, 2), ("fsdp", "tensor"))
    return Layout(mesh, Rules(batch=("fsdp",), embed=("fsdp",), **rules))


def whole(x: jax.Array, head: jax.Array) -> jax.Array:
    return 2 * plain(x, head, inputs()[2])


@pytest.fixture(scope="module")
def reference() -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return value and gradients with all scores at once."""
    return jax.jit(jax.value_and_grad(whole, (0, 1)))(*inputs()[:2])


# Three tokens of each of 16 parts have no equal pieces for two devices.
@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 6, 16])
@pytest.mark.parametrize("rules", [None, {"length": ("tensor",)}, {"vocab": ("tensor",)}])
def test_chunked_cross_entropy_equals_unchunked_with_gradients(
    parts: int,
    rules: dict[str, tuple[str, ...]] | None,
    reference: tuple[jax.Array, tuple[jax.Array, ...]],
) -> None:
    x, head, targets = inputs()
    place = unplaced if rules is None else spread(**rules)

    def parted(x: jax.Array, head: jax.Array) -> jax.Array:
        return 2 * cross_entropy(x, head, targets, parts, place)

    value, actual = jax.jit(jax.value_and_grad(parted, (0, 1)))(x, head)
    expected, gradients = reference
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(parted)(x, head), expected, rtol=1e-5)
    for ours, exact in zip(actual, gradients, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-6)
