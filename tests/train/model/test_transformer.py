import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.examples import settings
from xlashard.train.config.settings import ModelSettings
from xlashard.train.formulas import parameters as count_parameters
from xlashard.train.model.attention import rotary_angles, rotate
from xlashard.train.model.layout import declare, initial_parameters, name_stacks
from xlashard.train.model.products import product
from xlashard.train.model.transformer import (
    choose,
    decode,
    empty_cache,
    generate,
    readable,
)
from xlashard.train.model.transformer import forward as eager_forward
from xlashard.train.model.transformer import loss as eager_loss

MODEL = settings().model
# Operation by operation they would compile some fifty programs.
forward, loss = (jax.jit(f, static_argnums=2) for f in (eager_forward, eager_loss))
write = jax.jit(generate, static_argnums=(4, 5))
TOKENS = np.random.default_rng(0).integers(0, 256, (3, 17)).astype(np.uint8)


@pytest.fixture(scope="module")
def parameters() -> dict:
    return drawn(MODEL)


def drawn(model: ModelSettings) -> dict:
    """Return the initial parameters of a model."""
    return jax.jit(lambda: initial_parameters(declare(model), jax.random.key(0)))()


def numpy_forward(parameters: dict, tokens: np.ndarray, model: ModelSettings) -> np.ndarray:
    """Return the logits of the transformer, in loops over layers, heads and positions."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters)
    taken = Counter[str]()

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def turn(vector: np.ndarray, position: int) -> np.ndarray:
        count = model.rope_size if model.latent else len(vector)
        fixed, first, second = np.split(vector, [-count, -count // 2])
        speeds = model.rope_base ** (-np.arange(count // 2) * 2 / count)
        turned = (first + 1j * second) * np.exp(1j * position * speeds)
        return np.concatenate([fixed, turned.real, turned.imag])

    x = p["embedding"][tokens]
    for number in range(model.layers):
        kind = model.derive_layer(number)
        group = kind.heads // kind.kv_heads
        attention, mlp = (
            jax.tree.map(lambda a, i=taken[name]: a[i], p["layers"][name])
            for name in name_stacks(model, kind)
        )
        taken.update(name_stacks(model, kind))
        y = norm(x, attention["norm"])
        added = np.zeros_like(x)
        for head in range(model.heads):
            if model.latent:
                low = norm(y @ attention["query_down"], attention["query_norm"])
                latent, shared = np.split(y @ attention["latent"], [model.latent], axis=-1)
                latent = norm(latent, attention["latent_norm"])
                q = low @ attention["query"][:, head]
                k = np.concatenate([latent @ attention["key"][:, head], shared], axis=-1)
                v = latent @ attention["value"][:, head]
            else:
                q = y @ attention["query"][:, head]
                k = y @ attention["key"][:, head // group]
                v = y @ attention["value"][:, head // group]
            q = np.stack([turn(row, i) for i, row in enumerate(q)])
            k = np.stack([turn(row, i) for i, row in enumerate(k)])
            is_wide = number % model.window_cycle == model.window_cycle - 1
            for i in range(len(tokens)):
                seen = slice(0 if is_wide else max(i + 1 - model.window, 0), i + 1)
                scores = np.exp(k[seen] @ q[i] / np.sqrt(len(q[i])))
                added[i] += scores @ v[seen] / scores.sum() @ attention["out"][head]
        y = y if model.parallel else norm(x + added, mlp["norm"])
        x = x + added + (numpy_mixture if kind.experts else numpy_mlp)(y, mlp, model)
    head = p["embedding"].T / np.sqrt(model.width) if model.tied else p["head"]
    return norm(x, p["norm"]) @ head


def numpy_mlp(y: np.ndarray, mlp: dict, model: ModelSettings) -> np.ndarray:
    """Return the output of a dense feed-forward layer."""
    hidden = y @ mlp["up"]
    if not model.gated:
        return np.maximum(hidden, 0) @ mlp["down"]
    gate = y @ mlp["gate"]
    return (hidden * gate / (1 + np.exp(-gate))) @ mlp["down"]


def numpy_mixture(y: np.ndarray, mlp: dict, model: ModelSettings) -> np.ndarray:
    """Return the output of the best experts of each position, weighted by their probabilities."""
    chances = np.exp(y @ mlp["router"])
    mixed = np.zeros_like(y)
    for row, token in enumerate(y):
        best = np.argsort(chances[row])[-model.active_experts :]
        for expert in best:
            own = {name: mlp[name][expert] for name in ("gate", "up", "down")}
            share = chances[row, expert] / chances[row, best].sum()
            mixed[row] += share * numpy_mlp(token, own, model)
    return mixed


MIXED = {
    **{"layers": 6, "window": 5, "window_cycle": 2, "wide_head_dim": 10, "wide_kv_heads": 4},
    **{"experts": 4, "dropless": True, "dense_layers": 1, "expert_cycle": 2, "dense_mlp": 24},
}
"""Six layers of five kinds: one dense layer, then every second one with experts, then one more."""

OTHERS = {
    "kinds of layers": MIXED,
    "plain feed-forward layer": {"gated": False, "activation": "relu"},
    "windows, one-hot": {"layers": 4, "window": 5, "window_cycle": 2, "one_hot": True},
    "latent": {"kv_heads": 8, "latent": 12, "query_rank": 20, "rope_size": 6},
    "parallel, wide heads, tied": {"parallel": True, "head_dim": 10, "tied": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, *OTHERS.values()], ids=["usual", *OTHERS])
def test_forward_equals_a_numpy_transformer(changes: dict) -> None:
    model, tokens = replace(MODEL, **changes), TOKENS[0].astype(np.int32)
    parameters = drawn(model)
    expected = numpy_forward(parameters, tokens, model)
    scores = forward(parameters, jnp.asarray(tokens)[None], model)[0]
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
    assert count_parameters(model) == sum(x.size for x in jax.tree.leaves(parameters))


SPECS = {
    "blw,wm->blm": ((2, 8, 32), (32, 16)),
    "blhd,hdw->blw": ((2, 8, 4, 8), (4, 8, 16)),
    "becw,ewm->becm": ((2, 3, 8, 32), (3, 32, 16)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "error"), [("int8", 0.015), ("fp8", 0.08)])
@pytest.mark.parametrize("spec", SPECS)
def test_8_bit_matmuls_approximate_exact_matmuls(spec: str, kind, error: float) -> None:
    keys = jax.random.split(jax.random.key(3), 2)
    factors = [jax.random.normal(key, s) for key, s in zip(keys, SPECS[spec], strict=True)]

    def weighed(x: jax.Array, weight: jax.Array, quantized) -> tuple[jax.Array, jax.Array]:
        value = product(spec, x, weight, replace(MODEL, quantized=quantized))
        return jnp.sum(value * jnp.cos(jnp.arange(value.size)).reshape(value.shape)), value

    step = jax.jit(jax.grad(weighed, (0, 1), has_aux=True), static_argnums=2)
    ours, exact = (jax.tree.leaves(step(*factors, x)) for x in (kind, "none"))
    for actual, expected in zip(ours, exact, strict=True):
        assert actual.dtype == expected.dtype
        assert np.linalg.norm(actual - expected) < error * np.linalg.norm(expected)
    # Both factors of the product and of each gradient.
    program = str(step.trace(*factors, kind).jaxpr)
    assert len(re.findall(r"(i8|f8_e\w+)\[[0-9,]*\] = convert", program)) == 6


@pytest.mark.slow
def test_loss_is_the_mean_negative_log_likelihood(parameters: dict) -> None:
    scores = np.asarray(forward(parameters, jnp.asarray(TOKENS[:, :-1], jnp.int32), MODEL))
    chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    taken = np.take_along_axis(chances, TOKENS[:, 1:, None].astype(int), -1)
    np.testing.assert_allclose(
        loss(parameters, jnp.asarray(TOKENS), MODEL), -np.log(taken).mean(), rtol=1e-5
    )


@pytest.mark.slow
def test_attention_is_causal(parameters: dict) -> None:
    changed = TOKENS.copy()
    changed[:, 9] ^= 1
    before, after = (
        np.asarray(forward(parameters, jnp.asarray(t, jnp.int32), MODEL)) for t in (TOKENS, changed)
    )
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (np.abs(before[:, 9:] - after[:, 9:]).max(axis=(0, 2)) > 1e-6).all()


@pytest.mark.slow
def test_rotary_embedding_keeps_norms_and_depends_only_on_distance() -> None:
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, MODEL.head_size)).astype(np.float32)

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        return np.asarray(rotate(jnp.asarray(x), rotary_angles(jnp.asarray([position]), MODEL)))

    np.testing.assert_allclose(np.linalg.norm(turned(q, 13)), np.linalg.norm(q), rtol=1e-5)
    near, far = ((turned(q, 5 + s) * turned(k, 2 + s)).sum() for s in (0, 20))
    np.testing.assert_allclose(near, far, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["model.kv_heads=1"],
        ["model.kv_heads=8", "model.latent=12", "model.rope_size=6"],
        ["model.window=4", "model.window_cycle=2"],
        [f"model.{name}={str(value).lower()}" for name, value in MIXED.items()],
    ],
)
def test_incremental_decoding_equals_the_forward_pass(words: list[str]) -> None:
    model = settings(*words).model
    parameters = drawn(model)
    cache = empty_cache(len(TOKENS), TOKENS.shape[1], model)
    step = jax.jit(decode, static_argnums=4)
    scores = []
    for position, token in enumerate(TOKENS.T):
        actual, cache = step(parameters, cache, jnp.asarray(token), jnp.asarray(position), model)
        scores.append(actual)
    expected = forward(parameters, jnp.asarray(TOKENS, jnp.int32), model)
    np.testing.assert_allclose(np.stack(scores, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_full_cache_drops_the_oldest_byte() -> None:
    model = settings("model.layers=1").model
    parameters = drawn(model)
    room = 6
    cache = empty_cache(1, room, model)
    step = jax.jit(decode, static_argnums=4)
    for position, token in enumerate(TOKENS[0]):
        scores, cache = step(parameters, cache, jnp.asarray([token]), jnp.asarray(position), model)
    # In a model of one layer nothing older than the cache can have left a trace.
    expected = forward(parameters, jnp.asarray(TOKENS[:1, -room:], jnp.int32), model)[:, -1]
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_rematerialization_does_not_change_gradients(parameters: dict) -> None:
    tokens = jnp.asarray(TOKENS)
    plain, saved = (
        jax.jit(jax.grad(eager_loss), static_argnums=2)(parameters, tokens, model)
        for model in (MODEL, settings("model.remat=true").model)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, saved)


@pytest.mark.slow
def test_bfloat16_keeps_parameters_gradients_and_loss_in_float32(parameters: dict) -> None:
    model = settings("model.compute=bfloat16").model
    step = jax.jit(jax.value_and_grad(eager_loss), static_argnums=2)
    actual, gradients = step(parameters, jnp.asarray(TOKENS), model)
    assert actual.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(actual, loss(parameters, jnp.asarray(TOKENS), MODEL), rtol=2e-2)
    text = loss.lower(parameters, jnp.asarray(TOKENS), model).as_text()
    assert "bf16" in text


@pytest.mark.slow
def test_added_parameter_does_not_change_other_initial_values() -> None:
    declared = declare(MODEL)
    more = declared | {"another": declared["head"]}
    first, second = (initial_parameters(x, jax.random.key(3)) for x in (declared, more))
    np.testing.assert_array_equal(first["head"], second["head"])
    assert not np.array_equal(second["head"], second["another"])


def greedy(parameters: dict, prompt: bytes, count: int) -> bytes:
    """Generate without a cache: read the whole text again for every byte."""
    # Later positions have no influence on earlier ones, so one size serves all.
    text = np.zeros(len(prompt) + count, np.uint8)
    text[: len(prompt)] = list(prompt)
    for place in range(len(prompt), len(text)):
        scores = forward(parameters, text[None].astype(np.int32), MODEL)[0]
        text[place] = np.argmax(scores[place - 1])
    return text[len(prompt) :].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [b"T", b"The model "])
def test_generation_at_temperature_0_is_greedy(parameters: dict, prompt: bytes) -> None:
    written = write(parameters, np.frombuffer(prompt, np.uint8), 0, jnp.float32(0), 6, MODEL)
    assert np.asarray(written).tobytes() == greedy(parameters, prompt, 6)


@pytest.mark.slow
def test_equal_seeds_generate_equal_texts(parameters: dict) -> None:
    def written(seed: int) -> bytes:
        prompt = np.frombuffer(b"The ", np.uint8)
        return np.asarray(write(parameters, prompt, seed, jnp.float32(1), 40, MODEL)).tobytes()

    assert written(1) == written(1)
    assert written(1) != written(2)


@pytest.mark.slow
def test_bytes_are_sampled_by_probability() -> None:
    scores = jnp.full(256, -jnp.inf).at[65].set(jnp.log(3.0)).at[66].set(0.0)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = np.asarray(jax.vmap(lambda key: choose(scores, key, jnp.float32(1)))(keys))
    assert set(drawn.tolist()) == {65, 66}
    assert abs((drawn == 65).mean() - 0.75) < 0.03


@pytest.mark.slow
def test_generated_control_codes_do_not_reach_the_terminal() -> None:
    assert readable(b"a\x1b[31mb\n\xff\x00caf\xc3\xa9") == "a·[31mb\n··café"
