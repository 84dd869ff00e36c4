"""Parameters of the transformer: shape, logical axes and initial spread of each array.

Letters in shapes: W width, H query heads, K key and value heads, D features of one head, M hidden
features of the feed-forward part, E experts, N layers, V tokens of the vocabulary.
"""

from typing import Any

from xlashard.train.config.settings import ModelSettings
from xlashard.train.model.layout import Axes, Declaration

HEAD = ("embed", "vocab")


def declare(model: ModelSettings) -> dict[str, Any]:
    """Return the tree of `Declaration` in the structure of the parameters.

    Args:
        model: The shape of the model.

    Returns:
        ``embedding`` [V, W], ``layers`` (dicts of arrays stacked over N), ``norm`` [W] and
        ``head`` [W, V], unless the embedding is tied to it.
    """
    width, size, inward = model.width, model.head_size, model.width**-0.5
    heads, kv_heads = model.heads, model.kv_heads
    many, named = ((model.experts,), ("experts",)) if model.experts else ((), ())
    # Compensates the growth of the residual stream with the depth.
    quiet = (2 * model.layers) ** -0.5

    def stacked(shape: tuple[int, ...], axes: Axes, spread: float | None) -> Declaration:
        return Declaration((model.layers, *shape), ("layers", *axes), spread)

    attention = {
        "norm": stacked((width,), (None,), None),
        "query": stacked((width, heads, size), ("embed", "heads", None), inward),
        "key": stacked((width, kv_heads, size), ("embed", "kv_heads", None), inward),
        "value": stacked((width, kv_heads, size), ("embed", "kv_heads", None), inward),
        "out": stacked((heads, size, width), ("heads", None, "embed"), quiet * inward),
    }
    into, out_of = (*many, width, model.mlp), (*many, model.mlp, width)
    mlp = {
        "norm": stacked((width,), (None,), None),
        "gate": stacked(into, (*named, "embed", "mlp"), inward),
        "up": stacked(into, (*named, "embed", "mlp"), inward),
        "down": stacked(out_of, (*named, "mlp", "embed"), quiet * model.mlp**-0.5),
    }
    if not model.gated:
        del mlp["gate"]
    if model.parallel:
        del mlp["norm"]
    if model.experts:
        mlp["router"] = stacked((width, model.experts), ("embed", None), inward)
    if model.experts and model.shared_mlp:
        for name, (axes, spread) in {
            "gate": (("embed", "mlp"), inward),
            "up": (("embed", "mlp"), inward),
            "down": (("mlp", "embed"), quiet * model.shared_mlp**-0.5),
        }.items():
            sides = {"embed": width, "mlp": model.shared_mlp}
            mlp[f"shared_{name}"] = stacked(tuple(sides[x] for x in axes), axes, spread)
    head = {} if model.tied else {"head": Declaration((width, model.vocab), HEAD, inward)}
    return {
        "embedding": Declaration((model.vocab, width), ("vocab", "embed"), 1.0),
        "layers": {"attention": attention, "mlp": mlp},
        "norm": Declaration((width,), (None,), None),
        **head,
    }
