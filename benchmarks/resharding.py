"""Changes of an array's sharding as the partitioner makes them, beside the prices of `auto_shard`.

    python -m benchmarks.resharding [--topology v5e-16] [--sizes 4 4] [--json PATH]

All changes between two shardings of an array of three dimensions over two mesh axes are compiled,
the axes of a dimension in the better of both orders. For each kind of change a line has the median
of its compiled times over that of the exchange of one axis, and of the price in the search over the
compiled time.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import permutations, product
from pathlib import Path

import jax

from xlashard import Mesh, P, pjit, preflight, tpu
from xlashard.auto.auto_program import read_program
from xlashard.auto.axis_costs import WHOLE, Assignment
from xlashard.auto.axis_program import Restriction
from xlashard.auto.search import Search

AXES: tuple[str, ...] = ("data", "model")
SHAPE = (512, 512, 128)
EXCHANGE = "one axis moves"

type States = Mapping[str, int]
"""Dimension that each axis shards, or WHOLE."""


def name_change(before: States, after: States) -> str:
    """Return the kind of a change."""
    moved = [a for a in AXES if before[a] != after[a] and WHOLE not in (before[a], after[a])]
    gathered = [a for a in AXES if before[a] != after[a] == WHOLE]
    sliced = [a for a in AXES if before[a] == WHOLE != after[a]]
    if len(moved) == 2:
        (a, b), (c, d) = (before[a] for a in moved), (after[a] for a in moved)
        if (a, b) == (d, c):
            return "two axes swap"
        if a == b and c == d:
            return "two axes move together"
        return "two axes part or meet" if a == b or c == d else "one axis follows another"
    named = [(moved, "moves"), (gathered, "is gathered"), (sliced, "is sliced")]
    return ", ".join(
        f"{'both axes' if len(axes) > 1 else 'one axis'} {what}" for axes, what in named if axes
    ).replace("both axes is", "both axes are")


def changes() -> Iterator[tuple[States, States]]:
    """Yield all changes that move bytes."""
    states: list[States] = [
        dict(zip(AXES, dims, strict=True)) for dims in product((0, 1, 2, WHOLE), repeat=2)
    ]
    for before, after in permutations(states, 2):
        if any(before[axis] not in (WHOLE, after[axis]) for axis in AXES):
            yield before, after


def specs(states: States) -> list[P]:
    """Return the specs of states, one for each order of the axes of a dimension."""
    orders = [AXES, AXES[::-1]] if len(set(states.values())) == 1 else [AXES]
    return [
        P(*(tuple(axis for axis in order if states[axis] == dim) or None for dim in range(3)))
        for order in orders
    ]


def compile_seconds(before: States, after: States, topology: str, mesh: Mesh) -> float:
    """Return the time of a program that changes an array, in the better order of axes."""
    x = jax.ShapeDtypeStruct(SHAPE, "bfloat16")
    return min(
        preflight(
            pjit(lambda x: x, in_shardings=(given,), out_shardings=wanted),
            x,
            topology=topology,
            mesh=mesh,
            estimate=True,
        ).time.seconds
        for given, wanted in product(specs(before), specs(after))
    )


def price(before: States, after: States, topology: str, mesh: Mesh) -> float:
    """Return the time that the search expects of the same change."""
    x = jax.ShapeDtypeStruct(SHAPE, "bfloat16")
    problem = read_program(lambda x: x + 1, (x,), {}, mesh, tpu.topology(topology)).problem(
        0.9, {"^x$": specs(before)[0]}
    )
    search, stored = Search(problem, 1.0), Assignment()
    (value,) = search.graph.arguments
    for axis, dim in after.items():
        if dim != WHOLE:
            inside = search.graph.inside[value]
            stored.labels[axis] = frozenset([search.graph.label(inside, dim)])
    return sum(
        sum(search.transfer_seconds(stored, axis, Restriction())) for axis in problem.machine.axes
    )


def main() -> None:
    """Compile all changes, and print a line for each kind."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--topology", default="v5e-16", help="TPU topology")
    parser.add_argument("--sizes", type=int, nargs=2, default=(4, 4), help="sizes of both axes")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    mesh = tpu.topology(options.topology).mesh(dict(zip(AXES, options.sizes, strict=True)))
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for before, after in changes():
        compiled = compile_seconds(before, after, options.topology, mesh)
        expected = price(before, after, options.topology, mesh)
        seconds[name_change(before, after)].append((compiled, expected))
    one = statistics.median(compiled for compiled, _ in seconds[EXCHANGE])
    rows = {
        kind: {
            "changes": len(pairs),
            "exchanges": statistics.median(compiled / one for compiled, _ in pairs),
            "price over compiled": statistics.median(e / compiled for compiled, e in pairs),
        }
        for kind, pairs in seconds.items()
    }
    print(f"{'change':40} {'number':>6} {'exchanges':>10} {'price over compiled':>20}")
    for kind, row in sorted(rows.items(), key=lambda item: item[1]["exchanges"]):
        print(f"{kind:40} {row['changes']:6} {row['exchanges']:10.2f}", end=" ")
        print(f"{row['price over compiled']:20.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
