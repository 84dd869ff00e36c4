"""Closed forms of a training step: parameters, bytes, model FLOP.

They use no compiler, so that tests can compare preflights with them.

Letters: sequences of L tokens, W width, H query heads, K key and value heads, D features of a head,
M hidden features, E experts, k for each token, V tokens of the vocabulary.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from xlashard.predict.preflight.report.pricing import Workload
from xlashard.train.config.settings import ModelSettings, Settings, ShardingSettings
from xlashard.train.model.layout import declared_arrays

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element by dtype."""


def parameters(model: ModelSettings) -> int:
    """Return the number of parameters.

    A layer has W (2 H + 2 K) D elements in its attention (with a latent of rank c, queries of rank
    q and R rotary features W (q + c + R) + H (q (D + R) + 2 c D + D W)), 3 W M in its feed-forward
    layer (2 W M without a gate; with experts E times that, and W E in the router), and its norms;
    outside of the layers the model has one or two tables of V W, and a norm.

    Example:
        >>> parameters(ModelSettings(layers=1, width=8, heads=2, kv_heads=1, mlp=16, vocab=10))
        760
    """
    return sum(declared.size for declared in declared_arrays(model).values())


def active_parameters(model: ModelSettings) -> int:
    """Return the number of active parameters per token: those of k experts instead of E."""
    return parameters(model) - sum(
        3 * kind.layers * (kind.experts - kind.active_experts) * kind.width * kind.mlp
        for kind in split_layers(model)
        if kind.experts
    )


def split_layers(model: ModelSettings) -> Iterator[ModelSettings]:
    """Return a model of the layers of each kind, all of which are equal."""
    for kind, count in model.count_layer_kinds().items():
        yield replace(kind, layers=count)


def ways(settings: Settings, axes: Iterable[str | None]) -> int:
    """Return the number of shards of an array with these logical axes."""
    rules = settings.sharding.rules
    names = {name for axis in axes if axis for name in getattr(rules, axis)}
    return math.prod(settings.mesh[name] for name in names)


def parameter_bytes(settings: Settings) -> int:
    """Return the bytes of the parameters on one device."""
    one = ITEM_BYTES[settings.model.parameters]
    arrays = declared_arrays(settings.model).values()
    return sum(x.size // ways(settings, x.axes) * one for x in arrays)


def state_bytes(settings: Settings) -> int:
    """Return the bytes of parameters and of Adam's two moments on one device."""
    own = ITEM_BYTES[settings.model.parameters]
    optimizer = settings.optimizer
    each = own + ITEM_BYTES[optimizer.moments] + ITEM_BYTES[optimizer.first_moment]
    return parameter_bytes(settings) // own * each


def least_bytes(settings: Settings) -> tuple[int, int]:
    """Return the bytes of the state, and of a batch, that one device holds at least during a step.

    Of a batch these are its tokens, and the residual stream of one part of it. A search may shard
    every array over all devices.
    """
    model, training = settings.model, settings.training
    state, devices = state_bytes(settings), math.prod(settings.mesh.values())
    if settings.sharding.is_auto:
        everywhere = replace(settings, sharding=ShardingSettings())
        state = state_bytes(everywhere) // devices
    tokens = training.batch * model.length
    stream = tokens // training.accumulate * model.width * ITEM_BYTES[model.compute]
    return state, (tokens + stream) // devices


def model_flops(settings: Settings) -> float:
    """Return the model FLOP of one step, the numerator of the utilisation (MFU).

    6 per token and weight that multiplies it (2 forward, 4 backward; the embedding lookup is not a
    product), and 12 H D per layer and pair of visible positions, L (L + 1) / 2 per sequence, or
    w (2 L - w + 1) / 2 in layers with a window of w positions.
    Recomputation, empty slots of experts and masked scores are not counted. Chowdhery et al. 2022
    (PaLM, arXiv:2204.02311, appendix B) count all L² pairs, so their formula gives higher figures.
    """
    model = settings.model
    sequences = settings.training.batch
    norms = sum(x.size for x in declared_arrays(model).values() if x.spread is None)
    looked_up = 0 if model.tied else model.vocab * model.width
    weights = active_parameters(model) - looked_up - norms
    attention = 0.0
    for kind in split_layers(model):
        window = min(kind.window or kind.length, kind.length)
        pairs = kind.layers * window * (2 * kind.length - window + 1) / 2
        size = kind.head_size + kind.rope_size * bool(kind.latent) / 2
        attention += 12 * kind.heads * size * sequences * pairs
    return 6 * weights * sequences * model.length + attention


def workload(settings: Settings) -> Workload:
    """Return the work of one step, for a preflight's report."""
    return Workload(
        tokens=settings.training.batch * settings.model.length,
        model_flops=model_flops(settings),
        parameters=parameters(settings.model),
        active_parameters=active_parameters(settings.model),
    )
