"""Parameters of the transformer: shape, logical axes and initial spread of each array.

Letters in shapes: W width, H query heads, K key and value heads, D features of one head, M hidden
features of the feed-forward part, E experts, N layers, V tokens of the vocabulary.
"""

from typing import Any

from xlashard.train.config.settings import ModelSettings
from xlashard.train.model.layout import Axes, Declaration

HEAD = ("embed", "vocab")

type _Array = tuple[tuple[int, ...], Axes, float | None]
"""Shape, axes and spread of an array of one layer."""


def declare(model: ModelSettings) -> dict[str, Any]:
    """Return the tree of `Declaration` in the structure of the parameters.

    Args:
        model: The shape of the model.

    Returns:
        ``embedding`` [V, W], ``layers`` (dicts of arrays stacked over N), ``norm`` [W] and
        ``head`` [W, V], unless the embedding is tied to it.
    """
    width = model.width

    def stacked(arrays: dict[str, _Array]) -> dict[str, Declaration]:
        return {
            name: Declaration((model.layers, *shape), ("layers", *axes), spread)
            for name, (shape, axes, spread) in arrays.items()
        }

    head = {} if model.tied else {"head": Declaration((width, model.vocab), HEAD, width**-0.5)}
    return {
        "embedding": Declaration((model.vocab, width), ("vocab", "embed"), 1.0),
        "layers": {"attention": stacked(_attention(model)), "mlp": stacked(_feed_forward(model))},
        "norm": Declaration((width,), (None,), None),
        **head,
    }


def _attention(model: ModelSettings) -> dict[str, _Array]:
    width, heads, kv_heads, size = model.width, model.heads, model.kv_heads, model.head_size
    inward = width**-0.5
    arrays: dict[str, _Array] = {
        "norm": ((width,), (None,), None),
        "query": ((width, heads, size), ("embed", "heads", None), inward),
        "key": ((width, kv_heads, size), ("embed", "kv_heads", None), inward),
        "value": ((width, kv_heads, size), ("embed", "kv_heads", None), inward),
        "out": ((heads, size, width), ("heads", None, "embed"), _quiet(model) * inward),
    }
    if model.latent:
        rank, turned = model.query_rank or width, model.rope_size
        outward = model.latent**-0.5
        arrays |= {
            "query": ((rank, heads, size + turned), ("embed", "heads", None), rank**-0.5),
            "latent": ((width, model.latent + turned), ("embed", None), inward),
            "latent_norm": ((model.latent,), (None,), None),
            "key": ((model.latent, heads, size), ("embed", "heads", None), outward),
            "value": ((model.latent, heads, size), ("embed", "heads", None), outward),
        }
    if model.latent and model.query_rank:
        arrays |= {
            "query_down": ((width, model.query_rank), ("embed", None), inward),
            "query_norm": ((model.query_rank,), (None,), None),
        }
    return arrays


def _feed_forward(model: ModelSettings) -> dict[str, _Array]:
    width, inward = model.width, model.width**-0.5
    many, named = ((model.experts,), ("experts",)) if model.experts else ((), ())

    def layer(prefix: str, hidden: int, many: tuple[int, ...], named: Axes) -> dict[str, _Array]:
        into = ((*many, width, hidden), (*named, "embed", "mlp"), inward)
        spread = _quiet(model) * hidden**-0.5
        down = ((*many, hidden, width), (*named, "mlp", "embed"), spread)
        arrays = {"gate": into, "up": into, "down": down}
        return {prefix + name: array for name, array in arrays.items()}

    arrays: dict[str, _Array] = {"norm": ((width,), (None,), None)}
    arrays |= layer("", model.mlp, many, named)
    if not model.gated:
        del arrays["gate"]
    if model.parallel:
        del arrays["norm"]
    if model.experts:
        arrays["router"] = ((width, model.experts), ("embed", None), inward)
    if model.experts and model.shared_mlp:
        arrays |= layer("shared_", model.shared_mlp, (), ())
    return arrays


def _quiet(model: ModelSettings) -> float:
    """Return the factor that compensates the growth of the residual stream with the depth."""
    return (2 * model.layers) ** -0.5
