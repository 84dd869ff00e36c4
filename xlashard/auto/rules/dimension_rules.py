"""Sharding rules of operations that move, reduce or repeat dimensions, or take indices."""

import math
from collections.abc import Callable
from typing import Any, SupportsIndex

from xlashard.auto.rules.factors import (
    Factors,
    Operation,
    is_near_size,
    remaining,
    wide_pieces,
)
from xlashard.predict.costs.rates import LANES

_MOST_EDGES = 4
"""Least times of a part that a dimension has, if devices receive the part rather than gather it."""
_PERMUTED = 0.625
"""Halo of a permutation of devices: 2.5 all-to-alls, as of other changes of a sharding."""
_FFT_SUMS = 9 / 4
"""Halo of a transformed dimension, on TPUs.

Before it partitions a transform, the compiler makes it three real products with a short index of
about four values, and sums their partial results over the devices.
"""


def broadcast_in_dim(op: Operation) -> Factors:
    """Yield the dimensions of the operand, and those that the result has beside them."""
    source = {result: d for d, result in enumerate(op.params["broadcast_dimensions"])}
    for result, size in enumerate(op.results[0]):
        d = source.get(result)
        used = d is not None and op.operands[0][d] == size
        sides = {0: d} if used and d is not None else {}
        yield from op.factor(sides, {0: result}, most_padded=size)


def reshape(op: Operation) -> Factors:
    """Yield the leading dimensions of the smallest groups that hold the same values."""
    order = op.params["dimensions"] or range(len(op.operands[0]))
    left = [d for d in order if op.operands[0][d] != 1]
    right = [d for d, size in enumerate(op.results[0]) if size != 1]
    sizes = (op.operands[0], op.results[0])
    while left and right:
        yield from op.factor({0: left[0]}, {0: right[0]})
        held = [sizes[0][left.pop(0)], sizes[1][right.pop(0)]]
        while held[0] != held[1] and (left or right):
            side = 0 if held[0] < held[1] else 1
            dims = (left, right)[side]
            if not dims:
                return
            held[side] *= sizes[side][dims.pop(0)]


def transpose(op: Operation) -> Factors:
    """Yield all dimensions."""
    for result, d in enumerate(op.params["permutation"]):
        yield from op.factor({0: d}, {0: result})


def squeeze(op: Operation) -> Factors:
    """Yield the dimensions that stay."""
    for result, d in enumerate(remaining(len(op.operands[0]), op.params["dimensions"])):
        yield from op.factor({0: d}, {0: result})


def beside(key: str) -> Callable[[Operation], Factors]:
    """Return the rule of operations that are independent along all dimensions but some.

    Args:
        key: Name of the parameter that holds those dimensions.
    """

    def rule(op: Operation) -> Factors:
        dims = op.params[key]
        listed = (int(dims),) if isinstance(dims, SupportsIndex) else dims
        operands, results = range(len(op.operands)), range(len(op.results))
        rank = len(op.operands[0])
        # `approx_top_k` counts its dimension from the last one.
        for d in remaining(rank, [d % rank for d in listed]):
            yield from op.factor(dict.fromkeys(operands, d), dict.fromkeys(results, d))

    return rule


def top_k(op: Operation) -> Factors:
    """Yield the other dimensions, and that of the candidates where the best of each part suffice.

    The compiler of TPUs gathers the best of the devices for float32 matrices, as of logits by
    vocabulary, and whole parts otherwise.
    """
    yield from beside("axis")(op)
    k, d, shape = op.params["k"], op.params["axis"], op.operands[0]
    if (
        len(shape) == 2
        and d == 1
        and op.eqn.invars[0].aval.dtype == "float32"
        and k * LANES <= shape[d]
    ):
        yield from op.factor({0: d}, {}, reduced=True)


def reduction(op: Operation) -> Factors:
    """Yield the dimensions that stay, and those that are reduced."""
    yield from _without_axes(op, op.params["axes"])
    if op.name == "reduce_xor":  # XLA has no all-reduce of it.
        return
    for d in op.params["axes"]:
        yield from op.factor({0: d}, {}, reduced=True, most_padded=op.operands[0][d])


def _without_axes(op: Operation, axes: Any) -> Factors:
    # A reduction by any function has initial values, scalars, behind its operands.
    operands = [i for i, shape in enumerate(op.operands) if shape]
    for result, d in enumerate(remaining(len(op.operands[0]), axes)):
        results = dict.fromkeys(range(len(op.results)), result)
        most = op.operands[0][d]
        yield from op.factor(dict.fromkeys(operands, d), results, most_padded=most)


def reduce(op: Operation) -> Factors:
    """Yield the dimensions that stay in a reduction by any function."""
    yield from _without_axes(op, op.params["dimensions"])


def windows(op: Operation) -> Factors:
    """Yield the dimensions, whose pieces overlap by a halo where windows do."""
    params = op.params
    operands = [i for i, shape in enumerate(op.operands) if shape]
    wide, narrow = op.operands[0], op.results[0]
    if op.name == "select_and_scatter":
        narrow = op.operands[1]
    if op.name == "select_and_scatter_add":
        narrow, wide = op.operands
    ones = (1,) * len(wide)
    for d, window in enumerate(params["window_dimensions"]):
        stride = params["window_strides"][d]
        spread = (window - 1) * params.get("window_dilation", ones)[d] + 1
        dilation = params.get("base_dilation", ones)[d]
        if op.name.startswith("select_and_scatter") and spread >= 2 * stride:
            continue  # XLA loses what windows scatter beyond the next one.
        if wide[d] and wide[d] * dilation == narrow[d] * stride:
            halo = max(0, -((spread - stride) // -dilation))
            size = wide_pieces(math.gcd(wide[d], narrow[d]), wide[d], halo)
            most = min(wide[d], narrow[d]) // max(halo, 1)
            if op.name.startswith("select_and_scatter"):
                halo *= 3  # Of the source, of the operand, and of the result.
            results = dict.fromkeys(range(len(op.results)), d)
            halves = dict.fromkeys(operands, d)
            yield from op.factor(halves, results, size=size, halo=halo / wide[d], most_padded=most)


def cumulative(op: Operation) -> Factors:
    """Yield all dimensions.

    Along that of a cumulative sum, a device sums its part, and takes the sums of the others' blocks
    of 128 values.
    """
    for d in range(len(op.operands[0])):
        halo = 0.0
        if d == op.params["axis"]:
            halo = 1 / 128 + 6 / max(op.operands[0][d], 6)
        yield from op.factor({0: d}, {0: d}, halo=halo)


def leading(core: int) -> Callable[[Operation], Factors]:
    """Return the rule of operations on the last dimensions, independent along all others.

    Args:
        core: Number of the first operand's last dimensions that one operation takes.
    """

    def rule(op: Operation) -> Factors:
        arrays = [i for i, shape in enumerate(op.operands) if shape]
        for d in range(len(op.operands[0]) - core):
            yield from op.factor(dict.fromkeys(arrays, d), dict.fromkeys(range(len(op.results)), d))

    return rule


def fft(op: Operation) -> Factors:
    """Yield all dimensions; along a transformed one, devices sum partial products."""
    lengths = op.params["fft_lengths"]
    yield from leading(len(lengths))(op)
    for d in range(len(op.operands[0]) - len(lengths), len(op.operands[0])):
        if op.operands[0][d] == op.results[0][d]:
            yield from op.factor({0: d}, {0: d}, halo=_FFT_SUMS)


def fft_passes(op: Operation) -> float:
    """Return the times that a transform reads its operand and writes its result on TPUs.

    A dimension longer than the lanes takes two products, with a twiddle and a transpose between.
    """
    return sum(9.0 if n > LANES else 3.0 for n in op.params["fft_lengths"])


def triangular_solve(op: Operation) -> Factors:
    """Yield the batch dimensions, and the independent right-hand sides."""
    yield from leading(2)(op)
    column = len(op.operands[1]) - (1 if op.params["left_side"] else 2)
    yield from op.factor({1: column}, {0: column})


def same_leading(op: Operation) -> Factors:
    """Yield the dimensions that the first operand and all results begin with."""
    shapes = (op.operands[0], *op.results)
    for d in range(min(map(len, shapes))):
        if len({shape[d] for shape in shapes}) == 1:
            yield from op.factor({0: d}, dict.fromkeys(range(len(op.results)), d))


def created(op: Operation) -> Factors:
    """Yield every dimension of results that are made of no operand."""
    for d in range(len(op.results[0])):
        yield from op.factor({}, dict.fromkeys(range(len(op.results)), d))


def random(op: Operation) -> Factors:
    """Yield the dimensions of keys, and those of the bits of each key.

    Threefry counts the bits, so that a device can make its share. Other generators do not, and a
    gamma distribution draws in loops.
    """
    keys = op.operands[0]
    counted = "fry" in str(op.eqn.invars[0].aval.dtype) and op.name != "random_gamma"
    for d in range(len(op.results[0])):
        if d < len(keys):
            yield from op.factor(dict.fromkeys(range(len(op.operands)), d), {0: d})
        elif counted:
            yield from op.factor({}, {0: d})


def stack(op: Operation) -> Factors:
    """Yield the dimensions of the operands."""
    axis = op.params["axis"]
    for d in range(len(op.operands[0])):
        yield from op.factor(dict.fromkeys(range(len(op.operands)), d), {0: d + (d >= axis)})


def unstack(op: Operation) -> Factors:
    """Yield the dimensions of the results."""
    axis = op.params["axis"]
    for result, d in enumerate(remaining(len(op.operands[0]), (axis,))):
        yield from op.factor({0: d}, dict.fromkeys(range(len(op.results)), result))


def tile(op: Operation) -> Factors:
    """Yield the dimensions that are not repeated."""
    for d, (operand, result) in enumerate(zip(op.operands[0], op.results[0], strict=True)):
        if operand == result:
            yield from op.factor({0: d}, {0: d})


def gather(op: Operation) -> Factors:
    """Yield the factors of a gather.

    A dimension that is indexed, as the rows of an embedding table, is a reduced factor: each device
    looks up all indices in its rows, and yields zeros for the others.
    """
    numbers, slices = op.params["dimension_numbers"], op.params["slice_sizes"]
    operand, indices = op.operands[:2]
    index_dims = range(len(indices) - 1)
    result_dims = remaining(len(op.results[0]), numbers.offset_dims)
    result_of = dict(zip(index_dims, result_dims, strict=True))
    batching = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    for d in index_dims:
        both = {0: batching[d], 1: d} if d in batching else {1: d}
        yield from op.factor(both, {0: result_of[d]})
    window = remaining(len(operand), numbers.collapsed_slice_dims, numbers.operand_batching_dims)
    for d, result in zip(window, numbers.offset_dims, strict=True):
        if slices[d] == operand[d]:
            yield from op.factor({0: d}, {0: result})
    for d in numbers.start_index_map:
        if slices[d] == 1:
            yield from op.factor({0: d}, {}, reduced=True, divides_work=False)


_COMBINING = ("scatter-add", "scatter-mul", "scatter-min", "scatter-max")
"""Scatters whose partial results, of a part of the updates each, the compiler combines."""


def scatter(op: Operation) -> Factors:
    """Yield the factors of a scatter.

    Along an indexed dimension each device applies all updates to its part of the operand.
    """
    numbers = op.params["dimension_numbers"]
    operand, indices, updates = op.operands
    update_dims = remaining(len(updates), numbers.update_window_dims)
    batching = dict(
        zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    for d, update in zip(range(len(indices) - 1), update_dims, strict=True):
        if d in batching:
            yield from op.factor({0: batching[d], 1: d, 2: update}, {0: batching[d]})
        elif op.name in _COMBINING:
            yield from op.factor({1: d, 2: update}, {}, reduced=True)
    window = remaining(len(operand), numbers.inserted_window_dims, numbers.operand_batching_dims)
    widths = dict(zip(window, numbers.update_window_dims, strict=True))
    for d in range(len(operand)):
        if d in widths and updates[widths[d]] == operand[d]:
            yield from op.factor({0: d, 2: widths[d]}, {0: d})
        elif d in numbers.scatter_dims_to_operand_dims and (
            d not in widths or updates[widths[d]] == 1
        ):
            yield from op.factor({0: d}, {0: d}, divides_work=False)


def dynamic_slice(op: Operation) -> Factors:
    """Yield the dimensions that a dynamic slice takes whole."""
    for d, size in enumerate(op.params["slice_sizes"]):
        if size == op.operands[0][d]:
            yield from op.factor({0: d}, {0: d})


def dynamic_update_slice(op: Operation) -> Factors:
    """Yield the dimensions that an update covers, and those in which it has size 1.

    In the latter, as in the positions of a KV cache, the one device that holds the place writes the
    update, which all devices have.
    """
    for d, (whole, part) in enumerate(zip(*op.operands[:2], strict=True)):
        if part == whole:
            yield from op.factor({0: d, 1: d}, {0: d})
        elif part == 1:
            yield from op.factor({0: d}, {0: d}, divides_work=False)


def slice_(op: Operation) -> Factors:
    """Yield the dimensions that a slice takes whole, nearly so, or every so many values of.

    Of a small part along a dimension, such as an edge, devices receive what they haven't.
    """
    strides = op.params["strides"] or (1,) * len(op.results[0])
    for d, (whole, part) in enumerate(zip(op.operands[0], op.results[0], strict=True)):
        if whole == part * strides[d]:
            yield from op.factor({0: d}, {0: d})
        elif strides[d] == 1 and is_near_size(part, whole):
            yield from _shift(op, 0, d, whole - part)
        elif strides[d] == 1 and part * _MOST_EDGES <= whole:
            yield from op.factor({0: d}, {}, size=whole, reduced=True, divides_work=False)


def _shift(op: Operation, operand: int, d: int, places: int) -> Factors:
    """Yield a dimension that a result shifts by some places: neighbours exchange them."""
    part = min(op.operands[operand][d], op.results[0][d])
    halo = places / max(op.operands[0][d], 1)
    yield from op.factor({operand: d}, {0: d}, size=1, halo=halo, most_padded=part)


def pad(op: Operation) -> Factors:
    """Yield the dimensions that are padded nowhere, little, or alike behind every value."""
    for d, (low, high, interior) in enumerate(op.params["padding_config"]):
        if low >= 0 and high >= 0 and low + high == interior:
            yield from op.factor({0: d}, {0: d})
        elif not interior and is_near_size(*sorted((op.operands[0][d], op.results[0][d]))):
            yield from _shift(op, 0, d, max(abs(low), abs(high), abs(low + high)))


def concatenate(op: Operation) -> Factors:
    """Yield the other dimensions, and that along which all operands but one are edges.

    The edges are small: every device has them whole.
    """
    yield from beside("dimension")(op)
    d = op.params["dimension"]
    for k, shape in enumerate(op.operands):
        if is_near_size(shape[d], op.results[0][d]):
            yield from _shift(op, k, d, op.results[0][d] - shape[d])


def reverse(op: Operation) -> Factors:
    """Yield all dimensions; along a reversed one, devices exchange their pieces."""
    for d in range(len(op.operands[0])):
        halo = _PERMUTED if d in op.params["dimensions"] else 0.0
        yield from op.factor({0: d}, {0: d}, halo=halo)


def whole(op: Operation) -> Factors:
    """Yield nothing: every device computes all of it."""
    del op
    yield from ()
