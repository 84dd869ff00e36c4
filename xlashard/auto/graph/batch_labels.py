"""Labels of the batch of a program, along which data parallelism splits it."""

from collections import defaultdict

from xlashard.auto.graph.graph_values import GraphOperation
from xlashard.auto.graph.program_graph import ProgramGraph
from xlashard.auto.rules.factors import Factor


def factor_labels(graph: ProgramGraph, op: GraphOperation, factor: Factor) -> set[int]:
    """Return the labels of the dimensions that a factor indexes."""
    found = set()
    for values, dims in ((op.operands, factor.operands), (op.results, factor.results)):
        for value, dim in zip(values, dims, strict=True):
            if value is not None and dim is not None:
                found.add(graph.label(value, dim))
    return found


_FAR_MORE = 4.0
"""A second dimension is that of the batch if it splits so many times the work of the first."""


def batch_labels(graph: ProgramGraph) -> tuple[frozenset[int], frozenset[int]]:
    """Return the labels of the batch, and those of its other dimension, such as of sequences.

    These are the labels reached from a dimension of an argument that isn't fed back, by factors of
    operations: from the argument whose labels split most of the work. The dimension is the first,
    unless the second splits far more work, as in a batch whose parts are computed one by one. The
    other one has no labels unless it splits half as much work.
    """
    links: dict[int, set[int]] = defaultdict(set)
    for op in graph.operations:
        for factor in op.rule.factors if op.fixed is None else ():
            labels = factor_labels(graph, op, factor)
            for label in labels:
                links[label] |= labels
    best, along, most = frozenset[int](), frozenset[int](), 0.0
    for index in graph.arguments:
        if index in graph.state:
            continue
        own, least = frozenset[int](), 0.0
        found: list[tuple[float, frozenset[int]]] = []
        for dim in range(min(len(graph.values[index].shape), 2)):
            reached = _closure(graph.label(graph.inside.get(index, index), dim), links)
            work = _split_work(graph, reached)
            found.append((work, frozenset(reached)))
            if work > least * _FAR_MORE:
                own, least = frozenset(reached), work
        if least > most * 1.1:
            best, most = own, least
            others = [each for work, each in found if own.isdisjoint(each) and 2 * work > least]
            along = others[0] if others else frozenset()
    return best, along


def _closure(label: int, links: dict[int, set[int]]) -> set[int]:
    reached, waiting = {label}, [label]
    while waiting:
        for other in links[waiting.pop()] - reached:
            reached.add(other)
            waiting.append(other)
    return reached


def _split_work(graph: ProgramGraph, labels: set[int]) -> float:
    """Return the FLOP and bytes of the operations that some labels split."""
    total = 0.0
    for op in graph.operations:
        if op.fixed is None and any(factor_labels(graph, op, f) & labels for f in op.rule.factors):
            nbytes = sum(graph.values[value].nbytes for _, value in op.slots)
            total += (op.rule.flops + nbytes) * op.times
    return total
