"""Equal layers of a program, which get one layout.

Labels that operations use alike, in equal places, are joined. Their colors are refined until they
don't change: that of an operation by the colors of its labels, that of a label by those of the
operations that use it.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from xlashard.auto.graph.graph_values import GraphOperation, Labels, Value

_ROUNDS = 12


def join_equal_labels(
    values: Sequence[Value],
    labels: Labels,
    operations: Sequence[GraphOperation],
    state: set[int],
    loops: set[int],
) -> None:
    """Join the labels that all operations use alike.

    Args:
        values: The values of the program.
        labels: Their labels.
        operations: The operations.
        state: Values that are fed back.
        loops: Labels that loops go through.
    """
    colors = _Colors()
    whole = [tuple(map(labels.find, value.labels)) for value in values]
    through = set(map(labels.find, loops))
    facts: dict[int, set[Hashable]] = defaultdict(set)
    for index, (value, found) in enumerate(zip(values, whole, strict=True)):
        for dim, label in enumerate(found):
            facts[label].add((value.shape, value.itemsize, dim, index in state, label in through))
    color = {label: colors.of(frozenset(known)) for label, known in facts.items()}
    places = [
        [(slot, dim, label) for slot, index in op.slots for dim, label in enumerate(whole[index])]
        for op in operations
    ]
    kinds = [colors.of(operation_kind(op, values)) for op in operations]
    for _ in range(_ROUNDS):
        uses: dict[int, Counter[Hashable]] = defaultdict(Counter)
        for kind, found in zip(kinds, places, strict=True):
            used = colors.of((kind, *(color[label] for _, _, label in found)))
            for slot, dim, label in found:
                uses[label][used, slot, dim] += 1
        before = len(set(color.values()))
        color = {k: colors.of((c, frozenset(uses[k].items()))) for k, c in color.items()}
        if len(set(color.values())) == before:
            break
    # The dimensions of one value stay apart.
    apart = set[int]()
    for found in whole:
        counts = Counter(color[label] for label in set(found))
        apart.update(c for c, count in counts.items() if count > 1)
    first: dict[int, int] = {}
    for label, c in color.items():
        if c not in apart:
            labels.join(first.setdefault(c, label), label)


def operation_kind(operation: GraphOperation, values: Sequence[Value]) -> Hashable:
    """Return what operations have in common that cost the same if they are sharded alike.

    Args:
        operation: The operation.
        values: The values of the program.
    """
    types = tuple((slot, values[k].shape, values[k].itemsize) for slot, k in operation.slots)
    return operation.name, operation.rule, operation.fixed, operation.times, types


class _Colors:
    """Numbers for facts."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, fact: Hashable) -> int:
        return self._numbers.setdefault(fact, len(self._numbers))
