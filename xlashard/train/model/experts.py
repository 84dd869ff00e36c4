"""Mixture-of-experts feed-forward layer with top-k routing.

`mix_experts` gives each expert a fixed number of slots, `mix_dropless` as many rows as its tokens.

A router assigns each token to its k best experts, with normalised weights, as Mixtral does (Jiang
et al. 2024, arXiv:2401.04088). The capacity of an expert is `capacity` times its equal share of a
sequence's tokens; tokens beyond it skip the expert on the residual stream. All shapes are static.
Tokens are dispatched and collected by index, forward and backward, so the only traffic is tokens.

Letters in shapes: B batch, S tokens of a sequence, W width, M hidden features, E experts, k of them
per token, C slots of an expert.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from xlashard.train.config.settings import KernelSettings, ModelSettings
from xlashard.train.model.layout import Layout, placed
from xlashard.train.model.products import product, round_to_fp8

_INSIDE = ("batch", "experts", None, None)
_OUTSIDE = ("batch", None, None, None)


def places(model: ModelSettings, tokens: int) -> int:
    """Return the capacity C of an expert for the tokens of one sequence."""
    share = model.active_experts * tokens / model.experts
    return min(max(math.ceil(model.capacity * share), 1), tokens)


def mix_experts(
    x: jax.Array, weights: dict[str, Any], model: ModelSettings, place: Layout
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the output of the experts for normed features.

    Args:
        x: Features [B, S, W].
        weights: ``router`` [W, E], ``gate`` and ``up`` [E, W, M], ``down`` [E, M, W].
        model: Number of experts, in all and per token.
        place: Constrains activations on a mesh.

    Returns:
        The mixture [B, S, W], and two metrics: ``balance``, E · Σ (share of the tokens · mean
        probability), which is 1 for a uniform load (Fedus et al. 2021, arXiv:2101.03961,
        equation 4), and ``dropped``, the fraction of assignments beyond the capacity.
    """
    batch, tokens, width = x.shape
    count, room = model.experts, places(model, tokens)
    shares, chosen, probabilities = _route(x, weights["router"], model.active_experts)
    slots, sources = _assign(place(chosen, ("batch", None, None)), count, room)
    # Otherwise the partitioner gathers all sequences before the lookup.
    slots, sources = place(slots, ("batch", None, None)), place(sources, ("batch", None))
    inside = place(_dispatch(x, sources, slots).reshape(batch, count, room, width), _OUTSIDE)
    # The gradient is summed on the expert's devices before it is sent back.
    inside = place(placed(inside, place, _INSIDE, _OUTSIDE), _INSIDE)
    gate = checkpoint_name(product("becw,ewm->becm", inside, weights["gate"], model), "gate")
    up = checkpoint_name(product("becw,ewm->becm", inside, weights["up"], model), "up")
    # Applied before the last product, so that their gradient does not need its result.
    flat, slots_of_choices = shares.reshape(batch, -1, 1), slots.reshape(batch, -1)
    share = _permute(flat, sources, slots_of_choices).reshape(batch, count, room, 1)
    hidden = jax.nn.silu(gate) * up * placed(share, place, _INSIDE, _OUTSIDE).astype(x.dtype)
    hidden = place(hidden, ("batch", "experts", None, "mlp"))
    done = place(product("becm,emw->becw", hidden, weights["down"], model), _INSIDE)
    done = placed(done, place, _OUTSIDE, _INSIDE).reshape(batch, count * room, width)
    mixed = _collect(done, sources, slots)
    busy = jax.nn.one_hot(chosen, count, dtype=jnp.float32).mean((0, 1, 2))
    return mixed, {
        "balance": count * jnp.sum(busy * probabilities.mean((0, 1))),
        "dropped": jnp.mean((slots == count * room).astype(jnp.float32)),
    }


def mix_dropless(
    x: jax.Array, weights: dict[str, Any], model: ModelSettings, place: Layout
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the output of the experts, which take all tokens of a device sorted by expert.

    No expert has a capacity: the products are ragged, with as many rows for each expert as it has
    tokens. Each device gathers all experts; the rules may shard their width and hidden features.

    Args:
        x: Features [B, S, W].
        weights: As of `mix_experts`, sharded as they are stored.
        model: Number of experts, in all and per token; the kernel of the products.
        place: Constrains activations on a mesh.

    Returns:
        The mixture [B, S, W], and the metrics of `mix_experts`; ``dropped`` is 0.
    """
    if place.mesh is None:
        return _mix_sorted(x, weights, model, place)
    stream = place.spec(("batch", None, None))
    specs = {name: place.spec(axes) for name, axes in _AXES.items()}
    axes = tuple(place.mesh.axis_names)

    def local(x: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        for name, named in _AXES.items():
            if place.rules.embed and "embed" in named:
                side, over = named.index("embed"), place.rules.embed
                whole = jax.lax.all_gather(weights[name], over, axis=side, tiled=True)
                weights = {**weights, name: whole}
        mixed, measured = _mix_sorted(x, weights, model, place)
        if place.rules.mlp:
            mixed = jax.lax.psum(mixed, place.rules.mlp)
        return mixed, jax.lax.pmean(measured, axes)

    return jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(stream, specs),
        out_specs=(stream, jax.sharding.PartitionSpec()),
        check_vma=False,  # Pallas declares no varying axes.
    )(x, {name: weights[name] for name in _AXES})


_AXES = {
    "router": (None, None),
    "gate": (None, "embed", "mlp"),
    "up": (None, "embed", "mlp"),
    "down": (None, "mlp", "embed"),
}


def _mix_sorted(
    x: jax.Array, weights: dict[str, Any], model: ModelSettings, place: Layout
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the output of the experts for the tokens of one device, and metrics."""
    batch, tokens, width = x.shape
    shares, chosen, probabilities = _route(x, weights["router"], model.active_experts)
    # Choices of one token are neighbours: [B, S, k] → [B · S · k].
    flat = chosen.transpose(0, 2, 1).reshape(-1)
    order = jnp.argsort(flat)
    back = jnp.argsort(order)
    sizes = jnp.sum(jax.nn.one_hot(flat, model.experts, dtype=jnp.int32), axis=0)
    rows = _sorted_rows(x.reshape(-1, width), order, back)
    times = functools.partial(_ragged, sizes=sizes, model=model, place=place)
    gate = checkpoint_name(times(rows, weights["gate"]), "gate")
    up = checkpoint_name(times(rows, weights["up"]), "up")
    last = replace(model, kernel=model.kernel.down_kernel)
    done = times(jax.nn.silu(gate) * up, weights["down"], model=last)
    done = checkpoint_name(done, "down")
    # The order back to the tokens is the inverse of the order to the experts.
    done = _sorted_rows(done, back, order).reshape(batch, tokens, -1, width)
    mixed = jnp.einsum("bskw,bks->bsw", done, shares.astype(done.dtype))
    busy = sizes / flat.size
    return mixed, {
        "balance": model.experts * jnp.sum(busy * probabilities.mean((0, 1))),
        "dropped": jnp.zeros((), jnp.float32),
    }


def _ragged(
    rows: jax.Array, weight: jax.Array, sizes: jax.Array, model: ModelSettings, place: Layout
) -> jax.Array:
    """Return the products of consecutive groups of rows with the weight of each group.

    Megablox takes no operands of eight bits, but XLA has kernels for floats of eight bits. Integers
    would need a scale for each row of a group: products in int8 keep the type of the rows.
    """
    if model.quantized == "fp8":
        return _fp8_ragged(rows, weight, sizes)
    if model.kernel.experts == "none" or place.platform != "tpu":
        return jax.lax.ragged_dot(rows, weight, sizes)
    return _kernel_product(rows, weight, sizes, model.kernel)


@jax.custom_vjp
def _fp8_ragged(rows: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return ragged products whose operands are rounded as those of `product` in fp8."""
    return _fp8_forward(rows, weight, sizes)[0]


def _fp8_forward(rows: jax.Array, weight: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    values, factors = (round_to_fp8(x, (), "value")[0] for x in (rows, weight))
    product = jax.lax.ragged_dot(values, factors, sizes, preferred_element_type=jnp.float32)
    # Empty arrays have the types of the gradients.
    return product.astype(rows.dtype), (values, factors, sizes, rows[:0], weight[:0])


def _fp8_backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, weight, sizes, *like = kept
    slope, scale = round_to_fp8(gradient, (), "gradient")

    def times(x: jax.Array, y: jax.Array, dims: Any, dtype: Any) -> jax.Array:
        result = jax.lax.ragged_dot_general(x, y, sizes, dims, preferred_element_type=jnp.float32)
        return (result * scale.reshape(())).astype(dtype)

    dx = times(slope, weight, _OF_ROWS, like[0].dtype)
    return dx, times(rows, slope, _OF_WEIGHTS, like[1].dtype), None


_fp8_ragged.defvjp(_fp8_forward, _fp8_backward)
_OF_ROWS = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_OF_WEIGHTS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _kernel_product(
    rows: jax.Array, weight: jax.Array, sizes: jax.Array, kernel: KernelSettings
) -> jax.Array:
    return _in_tiles(rows, weight, sizes, kernel)


def _in_tiles(
    rows: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    kernel: KernelSettings,
    *,
    transposed: bool = False,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiles = kernel.tile_rows, kernel.tile_inner, kernel.tile_columns
    inner, columns = weight.shape[:0:-1] if transposed else weight.shape[1:]
    sides = tuple(map(min, tiles, (len(rows), inner, columns)))
    return gmm(rows, weight, sizes, rows.dtype, sides, transpose_rhs=transposed)


def _kernel_gradients(
    kernel: KernelSettings,
    kept: tuple[jax.Array, jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows, weight, sizes = kept
    tiles = kernel.tile_rows_dw, kernel.tile_inner_dw, kernel.tile_columns_dw
    sides = tuple(map(min, tiles, (len(rows), *weight.shape[1:])))
    change = tgmm(rows.swapaxes(0, 1), gradient, sizes, weight.dtype, sides)
    return _in_tiles(gradient, weight, sizes, kernel, transposed=True), change, None


_kernel_product.defvjp(
    lambda rows, weight, sizes, kernel: (
        _in_tiles(rows, weight, sizes, kernel),
        (rows, weight, sizes),
    ),
    _kernel_gradients,
)


def _route(x: jax.Array, router: jax.Array, active: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return weights and indices [B, k, S] of each token's experts, and probabilities [B, S, E]."""
    scores = jnp.einsum("bsw,we->bse", x, router, preferred_element_type=jnp.float32)
    chances = jax.nn.softmax(scores, axis=-1)
    best, chosen = jax.lax.top_k(chances, active)
    shares = best / best.sum(-1, keepdims=True)
    return shares.transpose(0, 2, 1), chosen.transpose(0, 2, 1), chances


def _assign(chosen: jax.Array, count: int, room: int) -> tuple[jax.Array, jax.Array]:
    """Assign a slot to each choice, first choices first.

    Returns:
        The slot of each choice [B, k, S], E · C if the expert is full; and the choice in each slot
        [B, E · C], k · S for an empty slot.
    """
    batch, active, tokens = chosen.shape
    flat = chosen.reshape(batch, active * tokens)
    wants = jax.nn.one_hot(flat, count, dtype=jnp.int32)
    rank = jnp.sum((jnp.cumsum(wants, axis=1) - 1) * wants, axis=-1)
    slots = jnp.where(rank < room, flat * room + rank, count * room)
    empty = jnp.full((count * room,), active * tokens, jnp.int32)
    numbers = jnp.arange(active * tokens, dtype=jnp.int32)
    sources = jax.vmap(lambda into: empty.at[into].set(numbers, mode="drop"))(slots)
    return slots.reshape(batch, active, tokens), sources


def _rows(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Gather rows of each x[b], zeros for an index out of range."""
    take = jax.vmap(lambda rows, at: jnp.take(rows, at, axis=0, mode="fill", fill_value=0))
    return take(x, numbers)


def _from_tokens(x: jax.Array, sources: jax.Array, slots: jax.Array) -> jax.Array:
    """Gather the rows of tokens [B, S, W] into their slots [B, E · C, W]."""
    choices, tokens = slots.shape[1] * slots.shape[2], x.shape[1]
    return _rows(x, jnp.where(sources == choices, tokens, sources % tokens))


def _to_tokens(x: jax.Array, slots: jax.Array) -> jax.Array:
    """Sum the slots [B, E · C, W] of each token to [B, S, W]."""
    batch, choices, tokens = slots.shape
    rows = _rows(x, slots.reshape(batch, -1)).reshape(batch, choices, tokens, x.shape[-1])
    return rows.astype(jnp.float32).sum(1).astype(x.dtype)


# Each is the other's transpose. JAX's own transpose of a gather scatters row by row.


@jax.custom_vjp
def _dispatch(x: jax.Array, sources: jax.Array, slots: jax.Array) -> jax.Array:
    return _from_tokens(x, sources, slots)


@jax.custom_vjp
def _collect(x: jax.Array, sources: jax.Array, slots: jax.Array) -> jax.Array:
    del sources
    return _to_tokens(x, slots)


@jax.custom_vjp
def _permute(x: jax.Array, numbers: jax.Array, back: jax.Array) -> jax.Array:
    """Gather rows by index; `back` has the destination of each row of x."""
    del back
    return _rows(x, numbers)


_dispatch.defvjp(
    lambda x, sources, slots: (_from_tokens(x, sources, slots), slots),
    lambda slots, gradient: (_to_tokens(gradient, slots), None, None),
)
_collect.defvjp(
    lambda x, sources, slots: (_to_tokens(x, slots), (sources, slots)),
    lambda kept, gradient: (_from_tokens(gradient, *kept), None, None),
)


@jax.custom_vjp
def _sorted_rows(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """Gather rows of x, each as often as `order` is longer than x; `back` inverts `order`."""
    del back
    return x[order // (len(order) // len(x))]


def _unsorted(kept: tuple[int, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    count, back = kept
    rows = gradient[back].reshape(count, -1, gradient.shape[-1])
    return rows.astype(jnp.float32).sum(1).astype(gradient.dtype), None, None


_sorted_rows.defvjp(
    lambda x, order, back: (_sorted_rows(x, order, back), (len(x), back)), _unsorted
)
_permute.defvjp(
    lambda x, numbers, back: (_rows(x, numbers), back),
    lambda back, gradient: (_rows(gradient, back), None, None),
)
