"""Corrections of layouts whose programs have what the search did not foresee.

Where the partitioner adds collectives, a layout near the first one is searched, in which the
choices on their lines have got their costs. It is proven in its turn. A program may need more
memory than predicted: near its layout, one with less memory is searched.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from xlashard._jax.trace.origins import source_line
from xlashard.auto.foreseen import axes_along, link_seconds
from xlashard.auto.problem import ConstraintSite, site_value
from xlashard.auto.proof import ProvenLayout, Prover
from xlashard.auto.search import Search
from xlashard.hlo.collectives import Collective

_ROUNDS = 2
"""Rounds of corrections, each of those before."""
_LEAST_SHARE = 0.02
"""Share of a step that unforeseen collectives take in layouts that are corrected."""
_MOST = 2
"""Number of layouts that are corrected in a round."""
_LITTLE = 0.05
"""Share of the memory that a layout may exceed it by, if one near it is searched."""
_SPARE = 0.002
"""Share of the memory that such a layout saves beyond the excess."""


def corrected(
    proven: Sequence[ProvenLayout], prover: Prover, search: Search, seconds: float = math.inf
) -> list[ProvenLayout]:
    """Correct the layouts that would be the fastest without their unforeseen collectives.

    Args:
        proven: Proven layouts of a search.
        prover: Compiles corrections.
        search: The search.
        seconds: Time of the fastest layout of others.

    Returns:
        The corrected layouts, proven.
    """
    compiled: list[ProvenLayout] = []
    done: set[str] = set()
    for _ in range(_ROUNDS):
        promising = _promising([*proven, *compiled], seconds)
        for each in [p for p in promising if p.layout.name not in done][:_MOST]:
            done.add(each.layout.name)
            layouts = search.dearer(each.layout, _unforeseen_seconds(each, search))
            compiled += prover.prove(layouts, len(layouts))
    return compiled


def lightened(
    proven: Sequence[ProvenLayout], prover: Prover, search: Search, seconds: float = math.inf
) -> list[ProvenLayout]:
    """Prove layouts with less memory, near those that would be the fastest if they fitted.

    Args:
        proven: Proven layouts of a search.
        prover: Compiles layouts.
        search: The search.
        seconds: Time of the fastest layout of others.

    Returns:
        The layouts with less memory, proven.
    """
    compiled: list[ProvenLayout] = []
    done: set[str] = set()
    for _ in range(_ROUNDS):
        every = [*proven, *compiled]
        fastest = min([seconds, *(p.seconds for p in every if p.fits)])
        over = {
            p: p.memory_bytes - (1 - _SPARE) * prover.memory_bytes
            for p in every
            if p.compilation is not None and not p.fits and p.seconds < fastest
        }
        near = [
            p
            for p, excess in over.items()
            if 0 < excess < _LITTLE * prover.memory_bytes and p.layout.name not in done
        ]
        for each in sorted(near, key=lambda p: p.seconds)[:_MOST]:
            done.add(each.layout.name)
            layouts = search.lighter(each.layout, over[each])
            compiled += prover.prove(layouts, len(layouts))
    return compiled


def _promising(proven: Sequence[ProvenLayout], seconds: float) -> list[ProvenLayout]:
    """Return the layouts that may become the fastest, the most promising first."""
    fitting = [p for p in proven if p.fits]
    fastest = min([seconds, *(p.seconds for p in fitting)])
    saved = {p: sum(_saved(p)) for p in fitting}
    promising = [
        p for p in fitting if saved[p] > _LEAST_SHARE * p.seconds and p.seconds - saved[p] < fastest
    ]
    return sorted(promising, key=lambda p: p.seconds - saved[p])


def _saved(proven: ProvenLayout) -> Iterator[float]:
    """Yield the seconds that a step may save on each network without unforeseen collectives."""
    shares = dict(proven.shares)
    seconds: dict[str, float] = defaultdict(float)
    for collective, cost in proven.unforeseen:
        seconds[cost.resource] += link_seconds(collective, cost)
    for resource, spent in seconds.items():
        # The cores wait for no more than for all links of a network together.
        yield min(spent, shares.get(resource, 0.0))


def _unforeseen_seconds(proven: ProvenLayout, search: Search) -> dict[tuple[str, int], float]:
    """Return the time of unforeseen collectives by mesh axis and operation.

    The operations on the lines of a collective share its time.
    """
    operations_by_line: dict[tuple[str, int] | None, list[int]] = defaultdict(list)
    for number, op in enumerate(search.graph.operations):
        if op.path and op.results:
            eqn, _ = site_value(search.problem.jaxpr, ConstraintSite(op.path, "result", 0))
            operations_by_line[source_line(eqn)].append(number)
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    for collective, cost in proven.unforeseen:
        lines = _lines(collective)
        numbers = [number for line in lines for number in operations_by_line.get(line, ())]
        for axis, number in product(axes_along(collective, search.problem.machine.grid), numbers):
            seconds[axis, number] += link_seconds(collective, cost) / len(numbers)
    return seconds


def _lines(collective: Collective) -> set[tuple[str, int]]:
    """Return the lines of a collective, and of what needs its result."""
    every = (collective.frames, collective.needed_by_frames)
    return {(frame.file, frame.line) for frames in every for frame in frames[:1]}
