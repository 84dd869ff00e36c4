"""Closed forms of the bytes that a device sends in a training step; see `formulas`."""

import math
from collections.abc import Iterable, Iterator

from xlashard.train.config.settings import Settings
from xlashard.train.formulas import ITEM_BYTES, matrices, ways
from xlashard.train.model.experts import places


def gather_bytes(settings: Settings) -> float:
    """Return the bytes that a device sends per step to gather parameters over the `embed` axes.

    Under remat each matrix is gathered in the forward pass and again in the backward pass: over n
    devices a device sends (n - 1) / n of the matrix each time, in the type of the arithmetic, for
    each part of the batch.
    """
    count = ways(settings, ("embed",))
    return 2 * (count - 1) / count * _spread_bytes(settings) * settings.training.accumulate


def scatter_bytes(settings: Settings, looped: bool = False) -> float:
    """Return the bytes that a device sends per step to reduce-scatter gradients over `embed`.

    Args:
        settings: Settings of a run with remat.
        looped: Windowed einsum: the compiler overlaps the reduce-scatter with the product (Wang et
            al. 2023, doi:10.1145/3567955.3567959). A device then sends a shard in both directions
            per step, and two more for alignment: (n + 1) / n of each matrix, not (n - 1) / n.
    """
    count = ways(settings, ("embed",))
    part = (count + 1) / count if looped and count > 1 else (count - 1) / count
    return part * _spread_bytes(settings) * settings.training.accumulate


def lookup_bytes(settings: Settings) -> float:
    """Return the bytes that a device sends per step for the embedding, forward and backward.

    Each device looks up the tokens of all n devices in its slice of the width; the tokens are
    gathered (int32, once more for the gradient), and (n - 1) / n of the features are sent on.
    """
    count = ways(settings, ("embed",))
    model = settings.model
    own = settings.training.batch * model.length / ways(settings, ("batch", "length"))
    features = own * model.width * ITEM_BYTES[model.compute]
    return 2 * (features * (count - 1) / count + 4 * own * (count - 1))


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

    Args:
        settings: Settings of a run.

    Returns:
        Bytes of all collectives along exactly these axes, by set of axes.

    Example:
        >>> from xlashard.train.config.settings import load_settings
        >>> sent_bytes(load_settings("configs/tiny_dp.toml")).keys()
        dict_keys([('data',)])
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
    for matrix in matrices(model):
        others = [axis for axis in matrix.axes if axis != "embed"]
        spread = {name for axis in matrix.axes if axis for name in getattr(rules, axis)}
        whole = times * matrix.elements / ways(settings, others)
        own = times * matrix.elements / ways(settings, matrix.axes)
        alone = matrix.name == "head" and model.vocab_parts <= 1
        summed = 4 if alone or matrix.name == "mlp.router" else one
        rest = tuple(name for name in rules.batch if name not in spread)
        yield rest, 2 * _part_of(settings, rest) * own * summed
        if "embed" in matrix.axes and matrix.name != "embedding":
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
    if model.experts:
        rows = sequences * model.experts * places(model, model.length)
        yield rules.mlp, 2 * mlp * layers * rows * (2 * model.width + 1) * one
    else:
        yield rules.mlp, 2 * mlp * layers * stream * one * 2
    yield rules.vocab, 2 * vocab * (stream * (one + 4) + tokens * 4 * (2 * model.vocab_parts + 1))
    # Looked-up features and their gradients; the tokens (int32) are gathered for the lookup.
    yield rules.embed, 2 * embed * stream * one
    yield rules.embed, embed * 4 * tokens * ways(settings, ("embed",))


def _spread_bytes(settings: Settings) -> float:
    """Return the bytes of the gathered matrices on one device, in the type of the arithmetic."""
    spread = [x for x in matrices(settings.model) if "embed" in x.axes and x.name != "embedding"]
    others = [[axis for axis in x.axes if axis != "embed"] for x in spread]
    whole = (x.elements / ways(settings, o) for x, o in zip(spread, others, strict=True))
    return sum(whole) * ITEM_BYTES[settings.model.compute]
