"""Expected reports of the programs: the same models on one device, in today's JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@functools.cache
def partitioned_trainer(steps: int) -> dict[str, Any]:
    """Return losses, sums of the examples' losses by host of two, and the parameters' norm."""
    vocab, embed, mlp, length, batch = 16, 8, 32, 6, 16
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    params = {
        "embedding": jax.random.normal(keys[0], (vocab, embed)),
        "scale": jnp.ones(embed),
        "wi": jax.random.normal(keys[1], (embed, mlp)) / np.sqrt(embed),
        "wo": jax.random.normal(keys[2], (mlp, embed)) / np.sqrt(mlp),
    }
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def per_example(params, inputs, targets):
        x = params["embedding"][inputs]
        y = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * params["scale"]
        x = x + jax.nn.relu(y @ params["wi"]) @ params["wo"]
        logits = x @ params["embedding"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean(axis=-1)

    @jax.jit
    def step(params, state, inputs, targets):
        loss, grads = jax.value_and_grad(lambda p: per_example(p, inputs, targets).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, loss, per_example(params, inputs, targets)

    state, losses, evals = optimizer.init(params), [], []
    for number in range(steps):
        tokens = np.random.RandomState(number).randint(0, vocab, (batch, length + 1))
        tokens[:, 1::2] = (tokens[:, :-1:2] * 3 + 1) % vocab
        params, state, loss, examples = step(params, state, tokens[:, :-1], tokens[:, 1:])
        losses.append(float(loss))
        evals.append([float(half.sum()) for half in np.split(np.asarray(examples), 2)])
    return {"losses": losses, "halves": evals, "norm": float(optax.global_norm(params))}


@functools.cache
def gda_pipeline(steps: int) -> dict[str, Any]:
    """Return losses, twice the last one after it, and the sums of the last predictions."""
    rows, features, outputs = 16, 8, 4
    w, b = np.zeros((features, outputs)), np.zeros(outputs)
    truth = np.linspace(-1.0, 1.0, features * outputs).reshape(features, outputs)
    losses, x, y = [], np.zeros(0), np.zeros(0)
    for number in range(steps):
        x = np.random.RandomState(number).normal(size=(rows, features)).astype(np.float32)
        y = (x @ truth).astype(np.float32)
        error = x @ w + b - y
        losses.append(float((error**2).mean()))
        w = w - 0.3 * 2 / error.size * (x.T @ error)
        b = b - 0.3 * 2 / error.size * error.sum(axis=0)
    predicted = x @ w + b
    return {
        "losses": losses,
        "eval": float(2 * ((predicted - y) ** 2).mean()),
        "predicted": predicted.sum(axis=1).tolist(),
    }


@functools.cache
def hostlocal_trainer(steps: int) -> dict[str, Any]:
    """Return losses, the sums of the last logits, and how many of the last batch are right."""
    inputs, hidden, classes, batch = 12, 16, 5, 24
    rng = np.random.RandomState(0)
    first = rng.normal(0, 0.3, (inputs, hidden)).astype(np.float32)
    second = rng.normal(0, 0.3, (hidden, classes)).astype(np.float32)
    params = (first, np.zeros(hidden, np.float32), second, np.zeros(classes, np.float32))

    def logits_of(params, x):
        return jnp.tanh(x @ params[0] + params[1]) @ params[2] + params[3]

    @jax.jit
    def step(params, momentum, x, y):
        def loss_of(params):
            log_probs = jax.nn.log_softmax(logits_of(params, x))
            return -log_probs[jnp.arange(batch), y].mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        momentum = [0.9 * m + g for m, g in zip(momentum, grads, strict=True)]
        params = tuple(p - 0.1 * m for p, m in zip(params, momentum, strict=True))
        return params, momentum, loss

    momentum, losses, x, y = [np.zeros_like(p) for p in params], [], np.zeros(0), np.zeros(0)
    for number in range(steps):
        x = np.random.RandomState(1000 + number).normal(size=(batch, inputs)).astype(np.float32)
        y = np.abs(x).argmax(axis=1) % classes
        params, momentum, loss = step(params, momentum, x, y)
        losses.append(float(loss))
    out = np.asarray(logits_of(params, x))
    return {
        "losses": losses,
        "out": out.sum(axis=1).tolist(),
        "correct": int((out.argmax(axis=1) == y).sum()),
    }


@functools.cache
def pmap_trainer(steps: int, devices: int = 8) -> dict[str, Any]:
    """Return losses, and the sums of the last outputs by device."""
    inputs, hidden, per_device = 6, 10, 4
    k1, k2 = jax.random.split(jax.random.PRNGKey(0))
    params = {
        "w1": jax.random.normal(k1, (inputs, hidden)) * 0.3,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(k2, (hidden, 1)) * 0.3,
        "b2": jnp.zeros(1),
    }

    def predict(params, x):
        return (jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"])[..., 0]

    @jax.jit
    def step(params, momentum, x, y):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.05 * m, params, momentum), momentum, loss

    momentum, losses, x = jax.tree.map(jnp.zeros_like, params), [], np.zeros(0)
    for number in range(steps):
        places = [np.random.RandomState(100 * number + place) for place in range(devices)]
        x = np.concatenate([p.normal(size=(per_device, inputs)) for p in places])
        x = x.astype(np.float32)
        y = np.sin(x.sum(axis=1))
        params, momentum, loss = step(params, momentum, x, y)
        losses.append(float(loss))
    outputs = np.asarray(predict(params, x)).reshape(devices, per_device).sum(axis=1)
    return {"losses": losses, "outputs": outputs.tolist()}


@functools.cache
def tokens(temperature: float) -> list[list[int]]:
    """Return the tokens of `model_parallel_inference`'s transformer, computed without a cache."""
    layers, vocab, embed, heads, length = 2, 32, 16, 4, 12
    head = embed // heads
    rng = np.random.RandomState(0)

    def weight(*shape):
        return rng.normal(0, 1 / np.sqrt(shape[0]), shape).astype(np.float32)

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    # As jax.nn has them; one program less for each length of the sequence.
    def gelu(x):
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def softmax(x):
        raised = np.exp(x - x.max(-1, keepdims=True))
        return raised / raised.sum(-1, keepdims=True)

    wte, wpe = weight(vocab, embed), weight(length, embed)
    blocks = [
        (
            weight(embed, 3, heads, head),
            weight(heads, head, embed),
            weight(embed, 4 * embed),
            weight(4 * embed, embed),
        )
        for _ in range(layers)
    ]
    key = jax.random.PRNGKey(7)
    tokens = (np.arange(4 * 3).reshape(4, 3) * 5) % vocab
    for at in range(length - 1):
        key, subkey = jax.random.split(key)
        if at + 1 < tokens.shape[1]:
            continue
        x = wte[tokens] + wpe[: tokens.shape[1]]
        later = np.triu(np.ones((tokens.shape[1],) * 2, bool), 1)
        for qkv, o, wi, wo in blocks:
            q, k, v = np.moveaxis(np.einsum("ble,eshd->blshd", norm(x), qkv), 2, 0)
            scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(head)
            probabilities = softmax(np.where(later, -1e9, scores))
            mixed = np.einsum("bhqk,bkhd->bqhd", probabilities, v)
            x = x + np.einsum("bqhd,hde->bqe", mixed, o)
            x = x + gelu(x @ wi) @ wo
        logits = x[:, -1] @ wte.T
        chosen = logits.argmax(axis=-1)
        if temperature:
            chosen = np.asarray(jax.random.categorical(subkey, logits / temperature))
        tokens = np.concatenate([tokens, chosen[:, None]], axis=1)
    return tokens.tolist()
