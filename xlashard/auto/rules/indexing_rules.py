"""Sharding rules of operations that read or write at indices."""

from xlashard.auto.rules.factors import Factors, Operation, remaining


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
    for d, taken in enumerate(op.params["slice_sizes"]):
        if taken == op.operands[0][d]:
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
    """Yield the dimensions that a slice takes whole, or every so many values of."""
    strides = op.params["strides"] or (1,) * len(op.results[0])
    for d, (whole, part) in enumerate(zip(op.operands[0], op.results[0], strict=True)):
        if whole == part * strides[d]:
            yield from op.factor({0: d}, {0: d})


def pad(op: Operation) -> Factors:
    """Yield the dimensions that are padded nowhere, or alike behind every value."""
    for d, (low, high, interior) in enumerate(op.params["padding_config"]):
        if low >= 0 and high >= 0 and low + high == interior:
            yield from op.factor({0: d}, {0: d})
