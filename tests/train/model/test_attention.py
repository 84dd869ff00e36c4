import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard import Mesh
from xlashard._jax.trace.target_chip import assume_chip
from xlashard.gpu import topology
from xlashard.train.config.settings import KernelSettings, ModelSettings, Rules
from xlashard.train.model import splash
from xlashard.train.model.attention import attend, kernel_attention, with_kernel_of
from xlashard.train.model.blockwise import blockwise_attention
from xlashard.train.model.layout import Layout, unplaced
from xlashard.train.model.transformer import kept_residuals

BATCH, LENGTH, SIZE = 2, 24, 8
KERNELS = {
    "splash": KernelSettings(attention="splash", block_q_dq=128, block_kv_dq=128),
    "splash with one backward pass": KernelSettings(attention="splash", fused_backward=True),
    "flash": KernelSettings(attention="flash", block_kv=256, block_kv_compute=128),
}


def whole(q: jax.Array, k: jax.Array, v: jax.Array, window: int = 0) -> jax.Array:
    """Return causal attention with all scores at once."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    seen = jnp.triu(seen, 1 - window) if window else seen
    scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores, axis=-1), v)


def drawn(
    heads: int, kv_heads: int, scale: float = 1.0, length: int = LENGTH, size: int = SIZE
) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(BATCH, length, count, size) for count in (heads, kv_heads, kv_heads)]
    return [scale * jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True)]


def weighed(attend, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    mixed = attend(*inputs)
    return jnp.sum(jnp.sin(mixed)), mixed


gradients = jax.jit(jax.grad(weighed, (1, 2, 3), has_aux=True), static_argnums=0)


@functools.cache
def reference(heads: int, kv_heads: int) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return gradients and values of attention with all scores at once."""
    return gradients(whole, *drawn(heads, kv_heads))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("block", [4, 12, 24])
def test_blockwise_attention_equals_full_attention(heads: int, kv_heads: int, block: int) -> None:
    q, k, v = drawn(heads, kv_heads)

    def blocks(*inputs: jax.Array) -> jax.Array:
        return blockwise_attention(*inputs, block)

    expected, values = reference(heads, kv_heads)
    # Without differentiation `custom_vjp` runs the function itself.
    np.testing.assert_allclose(jax.jit(blocks)(q, k, v), values, rtol=1e-5, atol=1e-6)
    actual, mixed = gradients(blocks, q, k, v)
    np.testing.assert_allclose(mixed, values, rtol=1e-5, atol=1e-6)
    for ours, exact in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_scores_may_be_stored_in_bfloat16() -> None:
    """The rounded weights are off by 2^-9 at most, and no float32 of every pair is in memory."""
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def stored(*inputs: jax.Array) -> jax.Array:
        return attend(*inputs, seen, jnp.dtype("bfloat16"))

    inputs = drawn(4, 4)
    expected, values = reference(4, 4)
    actual, mixed = gradients(stored, *inputs)
    np.testing.assert_allclose(mixed, values, atol=0.02)
    for ours, exact in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, exact, atol=0.05)
    narrow = [x.astype(jnp.bfloat16) for x in inputs]
    _, pullback = jax.vjp(stored, *narrow)
    kept = [x for x in jax.tree.leaves(pullback) if x.shape[-2:] == (LENGTH, LENGTH)]
    assert {x.dtype for x in kept} <= {jnp.dtype("bfloat16"), jnp.dtype("bool")}


@pytest.mark.slow
def test_large_scores_do_not_overflow() -> None:
    q, k, v = drawn(2, 2, scale=40.0)
    actual = blockwise_attention(q, k, v, 4)
    np.testing.assert_allclose(actual, whole(q, k, v), rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_blockwise_attention_does_not_materialize_all_scores() -> None:
    shapes = [jax.ShapeDtypeStruct((1, 4096, 2, SIZE), jnp.float32)] * 3
    step = jax.jit(jax.grad(lambda q, k, v: blockwise_attention(q, k, v, 64).sum(), (0, 1, 2)))
    largest = step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    # All scores would be 2 · 4096² numbers, 128 MiB.
    assert largest < 16 << 20


@pytest.mark.slow
@pytest.mark.parametrize(("name", "window"), [(name, 100 * ("pass" in name)) for name in KERNELS])
def test_kernel_attention_equals_full_attention(name: str, window: int) -> None:
    """On two devices, in the interpreter of Pallas for TPU."""
    rules = Rules(batch=("data",), heads=("tensor",))
    layout = Layout(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor")), rules)

    def kernel(*inputs: jax.Array) -> jax.Array:
        return kernel_attention(*inputs, window, KERNELS[name], layout)

    q, k, v = drawn(4, 2, length=256, size=128)
    expected, values = gradients(functools.partial(whole, window=window), q, k, v)
    with force_tpu_interpret_mode():
        actual, mixed = gradients(kernel, q, k, v)
    np.testing.assert_allclose(mixed, values, rtol=1e-4, atol=1e-5)
    for ours, exact in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("offset", [0, 40, -7])
@pytest.mark.parametrize("window", [None, (0, 0), (40, 0), (5, 17), (None, 3), (None, -5)])
def test_kept_blocks_of_masks_are_those_of_the_kernel(
    window: tuple[int, int] | None, offset: int
) -> None:
    shape = 96, 96
    kept, wanted = (
        module.CausalMask(shape, offset)
        if window is None
        else module.LocalMask(shape, window, offset)
        for module in (splash, splash_attention)
    )
    rng = np.random.default_rng(0)
    for _ in range(200):
        (first, last), (start, end) = np.sort(rng.integers(0, 97, (2, 2)), axis=1)
        index = slice(first, last), slice(start, end if end < 96 else None)
        assert np.array_equal(kept[index], wanted[index]), index


@pytest.mark.parametrize(
    ("requested", "changes", "found"),
    [
        ("fused", {}, {"tpu": "splash", "gpu": "cudnn", "cpu": "none", "": "none"}),
        ("fused", {"head_dim": 320}, {"tpu": "splash", "gpu": "none"}),
        ("fused", {"compute": "float32"}, {"tpu": "splash", "gpu": "none"}),
        ("fused", {"latent": 16, "kv_heads": 4}, {"tpu": "splash", "gpu": "none"}),
        ("cudnn", {}, {"tpu": "none", "gpu": "cudnn"}),
        ("flash", {}, {"tpu": "flash", "gpu": "none"}),
        ("none", {}, {"tpu": "none", "gpu": "none"}),
    ],
)
def test_attention_kernel_is_chosen_by_platform(requested, changes, found) -> None:
    kernel = KernelSettings(attention=requested, block_q=256)
    model = ModelSettings(**{"compute": "bfloat16", "kernel": kernel, **changes})
    for platform, name in found.items():
        chosen = with_kernel_of(platform, model)
        assert chosen.kernel.attention == name
        assert replace(chosen, kernel=kernel) == model


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "passes"), [("minimal", 2), ("minimal_with_context", 1)])
def test_remat_policy_keeps_the_residuals_of_cudnn_attention(policy: str, passes: int) -> None:
    kernel = KernelSettings(attention="cudnn")
    model = ModelSettings(remat=True, remat_policy=policy, kernel=kernel)

    @functools.partial(jax.checkpoint, policy=kept_residuals(model))
    def layer(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return kernel_attention(jnp.cos(q), k, v, 100, kernel, unplaced)

    def loss(*inputs: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(layer(*inputs)), dtype=jnp.float32)

    shapes = [jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]
    with assume_chip(topology("h100-1").devices[0]):
        step = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaSoftmax(") == passes
    assert text.count("__cudnn$fmhaSoftmaxBackward(") == 1
