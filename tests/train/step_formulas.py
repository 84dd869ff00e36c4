"""Closed forms of the work of a training step, as compiled: FLOP with recomputation, traffic.

They use no compiler: the tests compare compiled programs and preflights with them. A matrix
product of [m, k] and [k, n] takes 2 m k n FLOP; norms, rotations, softmax and the optimiser are
omitted, well below 1 % together for models of more than some thousand features.

Letters: B sequences of L tokens, W width, D features of a head, n devices along an axis, b
positions of a block.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from xlashard.predict.targets.gpu.gpu_names import is_gpu_name
from xlashard.train.config.settings import ModelSettings, Settings
from xlashard.train.formulas import ITEM_BYTES, split_layers, ways
from xlashard.train.model.attention import with_kernel_of
from xlashard.train.model.experts import places
from xlashard.train.model.layout import declared_arrays


@dataclass(frozen=True)
class Flops:
    """FLOP of the matrix products of one step, over all devices.

    Attributes:
        forward: FLOP of the forward pass.
        backward: FLOP of the backward pass without recomputation.
        recomputed: FLOP that the backward pass recomputes.
    """

    forward: float
    backward: float
    recomputed: float

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.forward + self.backward + self.recomputed


def step_flops(settings: Settings) -> Flops:
    """Return the FLOP of the matrix products that the program executes, over all devices.

    The backward pass has two products per product of the forward pass. Blockwise attention visits
    the pairs of blocks on and below the diagonal, n (n + 1) / 2 of n² with n = L / b, with five
    products each in the backward pass, which recomputes the scores (Dao 2023, arXiv:2307.08691,
    section 3.1); else all L² scores are computed. Kernels of attention visit the blocks that the
    mask leaves, cuDNN's of 128 positions: with one kernel of the backward pass five products, with
    two three and four. Experts process empty slots, too. Without a topology, the fused kernel is
    that of TPUs.
    """
    if settings.model.kernel.attention == "fused":
        platform = "gpu" if is_gpu_name(settings.devices.topology) else "tpu"
        settings = replace(settings, model=with_kernel_of(platform, settings.model))
    model, training = settings.model, settings.training
    outside = 2 * training.batch * model.length * model.width * model.vocab
    # The gradient of one-hot rows is not computed.
    looked_up = outside * model.one_hot
    forward, backward = outside + looked_up, 2 * outside + looked_up
    recomputed = outside if model.vocab_parts > 1 else 0.0
    for kind in split_layers(model):
        parts = _products(kind, training.batch)
        attention = parts["scores"] + parts["mixing"]
        products = sum(parts.values()) - attention
        forward += products + attention
        backward += 2 * products
        if kind.kernel.attention == "none":
            backward += (2.5 if _in_blocks(kind) else 2) * attention
        else:
            backward += 2 * training.batch * _kernel_gradients(kind)
        recomputed += _recomputed(parts, kind)
    return Flops(forward, backward, recomputed)


_CUDNN_BLOCK = 128
"""Queries and keys of a block of cuDNN's attention."""


def _in_blocks(model: ModelSettings) -> bool:
    return 0 < model.attention_block < model.length


def _pairs(model: ModelSettings) -> float:
    """Return the scores that the forward pass computes per sequence and head, in equal layers."""
    if model.kernel.attention == "cudnn":
        return _kernel_pairs(model, _CUDNN_BLOCK, _CUDNN_BLOCK)
    if model.kernel.attention != "none":
        return _kernel_pairs(model, model.kernel.block_q, model.kernel.block_kv)
    if not _in_blocks(model):
        return model.layers * model.length**2
    count = model.length // model.attention_block
    return model.layers * model.attention_block**2 * count * (count + 1) // 2


def _kernel_pairs(model: ModelSettings, queries: int, keys: int) -> float:
    """Return the scores in the blocks that a kernel visits, per sequence and head."""
    length, window = model.length, model.window
    queries, keys = min(queries, length), min(keys, length)
    total = 0
    for first in range(0, length, queries):
        end = (first + queries - 1) // keys + 1
        # The first query of the block sees this position and those after it.
        start = max(first - window + 1, 0) // keys if window else 0
        total += end - start
    return model.layers * total * queries * keys


def _kernel_gradients(model: ModelSettings) -> float:
    """Return the multiplications of the kernels of the backward pass, per sequence."""
    kernel, value = model.kernel, model.heads * model.head_size
    key = value + model.heads * model.rope_size * bool(model.latent)
    if kernel.attention == "cudnn":
        return _pairs(model) * (3 * key + 2 * value)
    of_keys = _kernel_pairs(model, kernel.block_q_dkv, kernel.block_kv_dkv)
    if kernel.attention == "splash" and kernel.fused_backward:
        return of_keys * (3 * key + 2 * value)
    of_queries = _kernel_pairs(model, kernel.block_q_dq, kernel.block_kv_dq)
    return of_keys * (2 * key + 2 * value) + of_queries * (2 * key + value)


def _products(model: ModelSettings, sequences: int) -> dict[str, float]:
    """Return the FLOP of each product of the forward pass of equal layers, over all of them."""
    tokens, width = sequences * model.length, model.width
    layers, heads = model.layers, model.heads * model.head_size
    arrays = declared_arrays(model).items()
    sizes = {name.removeprefix("layers.attention."): x.size for name, x in arrays}
    turned = model.heads * model.rope_size if model.latent else 0
    rows = tokens
    shared = 2 * layers * tokens * width * model.shared_mlp if model.experts else 0
    if model.experts:
        rows = sequences * model.experts * places(model, model.length)
    if model.experts and model.dropless:
        rows = tokens * model.active_experts
    pairs = 2 * sequences * _pairs(model)
    return {
        **{name: 2 * tokens * sizes[name] for name in ("query", "key", "value", "out")},
        "latent": 2 * tokens * sizes.get("latent", 0),
        "query_down": 2 * tokens * sizes.get("query_down", 0),
        "gate": 2 * layers * rows * width * model.mlp * model.gated,
        "up": 2 * layers * rows * width * model.mlp,
        "down": 2 * layers * rows * width * model.mlp,
        "shared_gate": shared,
        "shared_up": shared,
        "shared_down": shared,
        "router": 2 * layers * tokens * width * model.experts,
        "scores": (heads + turned) * pairs,
        "mixing": heads * pairs,
    }


def _recomputed(parts: dict[str, float], model: ModelSettings) -> float:
    """Return the FLOP of recomputation of values that remat drops."""
    if not model.remat:
        return 0.0
    kept = {name for names in model.residuals for name in names}
    names = {"query", "key", "value", "gate", "up"} - kept
    # The products before a norm are made again even if its results are kept.
    names |= {"latent", "query_down"} | {f"shared_{x}" for x in ("gate", "up") if x in names}
    # The gradient of the experts' weights in the mixture is a product with their results.
    names |= {"down"} - kept if model.experts and model.dropless else set()
    names |= {"router"} | ({"out"} - {"out" if kept & {"stream", "out"} else ""})
    if "attention" not in kept:
        names |= {"scores", "mixing"}
    elif model.kernel.attention == "none" and not _in_blocks(model):
        names |= {"scores"}
    return sum(parts[name] for name in names)


def sent_bytes(settings: Settings) -> dict[tuple[str, ...], float]:
    """Return the bytes that a device sends per step, by mesh axes of the collectives.

    Covers data parallelism (axes of the `batch` rule), fully sharded data parallelism (those also
    in the `embed` rule), tensor parallelism (one set of axes for `heads` and `kv_heads`, one for
    `mlp`, one for `vocab`), and their combinations; not the traffic of sharded `length`, `experts`
    or `layers`. n devices send (n - 1) / n of the bytes that they gather or reduce-scatter, and
    twice that for an all-reduce.

    - Each matrix is gathered over `embed` for the forward pass and again for the backward pass; its
      gradient is reduce-scattered, and all-reduced over the rest of `batch`. The head is gathered
      once if the vocabulary has one part. Its gradient is then reduced in float32, the type of the
      product; the gradient of the router always is.
    - The stream [B, L, W] is all-reduced after attention and after the feed-forward layer, and its
      gradient before each of them; under remat once more after attention, unless `stream` is kept.
      For experts, their slots are reduced instead, including empty ones, and the gradient of each
      slot's weight.
    - Over `vocab`: the looked-up features; the gradient that leaves the head, in float32; per token
      and part a maximum and a sum; the score of the next token. Parts of the vocabulary take an
      equal slice of each device's shard of the head, so they cause no traffic. (If the number of
      parts does not divide the shards, the head is resharded; that traffic is not counted.)
    """
    sent: dict[tuple[str, ...], float] = {}
    for axes, amount in (*_weight_traffic(settings), *_activation_traffic(settings)):
        sent[axes] = sent.get(axes, 0.0) + amount
    return {axes: amount for axes, amount in sent.items() if amount}


type _Sent = Iterator[tuple[tuple[str, ...], float]]


def _part_of(settings: Settings, axes: Iterable[str]) -> float:
    """Return (n - 1) / n for the n devices along these axes."""
    return 1 - 1 / math.prod(settings.mesh[name] for name in axes)


def _weight_traffic(settings: Settings) -> _Sent:
    """Yield the traffic of parameters and their gradients."""
    rules, model = settings.sharding.rules, settings.model
    one, times = ITEM_BYTES[model.compute], settings.training.accumulate
    for path, matrix in declared_arrays(model).items():
        # A device gathers the layers of the others one by one, so they lessen no traffic.
        axes = [axis for axis in matrix.axes if axis != "layers"]
        others = [axis for axis in axes if axis != "embed"]
        spread = {name for axis in axes if axis for name in getattr(rules, axis)}
        whole = times * matrix.size / ways(settings, others)
        own = times * matrix.size / ways(settings, axes)
        alone = path == "head" and model.vocab_parts <= 1
        summed = 4 if alone or path == "layers.mlp.router" else one
        rest = tuple(name for name in rules.batch if name not in spread)
        yield rest, 2 * _part_of(settings, rest) * own * summed
        if "embed" in matrix.axes and path != "embedding":
            gathered = one if alone else 2 * one
            yield rules.embed, _part_of(settings, rules.embed) * whole * (gathered + summed)


def _activation_traffic(settings: Settings) -> _Sent:
    """Yield the traffic of activations and their gradients, over all layers."""
    rules, model = settings.sharding.rules, settings.model
    one, layers = ITEM_BYTES[model.compute], model.layers
    sequences = settings.training.batch / ways(settings, ("batch",))
    tokens = sequences * model.length
    stream = tokens * model.width
    embed, heads, mlp, vocab = (
        _part_of(settings, axes) for axes in (rules.embed, rules.heads, rules.mlp, rules.vocab)
    )
    again = model.remat and not {"stream", "out"} & {x for part in model.residuals for x in part}
    yield rules.heads, 2 * heads * layers * stream * one * (3 if again else 2)
    for kind in split_layers(model):
        features = 2 * stream
        if kind.experts:
            rows = sequences * kind.experts * places(kind, kind.length)
            features = rows * (2 * kind.width + 1)
        yield rules.mlp, 2 * mlp * kind.layers * features * one
    yield rules.vocab, 2 * vocab * (stream * (one + 4) + tokens * 4 * (2 * model.vocab_parts + 1))
    # Looked-up features and their gradients; the tokens (int32) are gathered for the lookup.
    yield rules.embed, 2 * embed * stream * one
    yield rules.embed, embed * 4 * tokens * ways(settings, ("embed",))
