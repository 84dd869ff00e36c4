"""Axes on a torus: every layout is valid, and none has a better cost."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlashard.predict.targets.mesh_layout import (
    AxisSegment,
    Dimension,
    lay_out_axes,
    part,
    usable_links,
)


def torus(*sizes: int, wraps: bool = True) -> list[Dimension]:
    return [Dimension("xyz"[i], size, wraps) for i, size in enumerate(sizes)]


def placed(parts: tuple[AxisSegment, ...]) -> list[tuple[str, int]]:
    return [(p.dimension, p.size) for p in parts]


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
def test_axis_parts_cover_each_dimension_exactly_once(sizes, wraps, data) -> None:
    dimensions = torus(*sizes, wraps=wraps)
    left, axes = math.prod(sizes), []
    while left > 1:
        axes.append(data.draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0])))
        left //= axes[-1]
    laid = lay_out_axes(dimensions, axes)
    assert [math.prod(p.size for p in parts) for parts in laid] == axes
    for dimension in dimensions:
        own = sorted(
            (p.stride, p.size) for parts in laid for p in parts if p.dimension == dimension.name
        )
        # Strides are the products of the sizes below: every position is reached once.
        below = 1
        for stride, size in own:
            assert stride == below
            below *= size
        assert below == dimension.size


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [((4, 4, 8), (16, 8)), ((16, 16), (4, 64)), ((4, 4, 4), (8, 8)), ((8, 4, 2), (4, 16))],
)
def test_chosen_layout_has_the_lowest_cost(sizes: tuple[int, ...], axes: tuple[int, ...]) -> None:
    dimensions = torus(*sizes)

    def measured(first: tuple[int, ...]) -> tuple[int, float]:
        rest = [size // f for size, f in zip(sizes, first, strict=True)]
        parts = [part(d, f, 1) for d, f in zip(dimensions, first, strict=True)]
        others = [part(d, r, f) for d, r, f in zip(dimensions, rest, first, strict=True)]
        own, later = (
            (1 - 1 / n) / usable_links(each) for n, each in zip(axes, (parts, others), strict=True)
        )
        cuts = sum(1 for f, size in zip(first, sizes, strict=True) if 1 < f < size)
        return cuts, round(own + later / 4, 9)

    divisors = ([n for n in range(1, size + 1) if size % n == 0] for size in sizes)
    every = [f for f in itertools.product(*divisors) if math.prod(f) == axes[0]]
    laid = {p.dimension: p.size for p in lay_out_axes(dimensions, axes)[0]}
    taken = tuple(laid.get(dimension.name, 1) for dimension in dimensions)
    assert measured(taken) == min(map(measured, every))


def test_axes_are_assigned_to_complete_rings() -> None:
    model, data = lay_out_axes(torus(4, 4, 8), (16, 8))
    assert placed(model) == [("x", 4), ("y", 4)]
    assert placed(data) == [("z", 8)]
    model, data = lay_out_axes(torus(16, 16), (16, 16))
    assert placed(model) == [("y", 16)]
    assert placed(data) == [("x", 16)]
    laid = lay_out_axes(torus(16, 20, 28), (20, 28, 16))
    assert [placed(parts) for parts in laid] == [[("y", 20)], [("z", 28)], [("x", 16)]]


def test_axis_smaller_than_a_dimension_gets_adjacent_devices() -> None:
    model, data = lay_out_axes(torus(16, 16), (4, 64))
    assert placed(model) == [("y", 4)]
    assert placed(data) == [("x", 16), ("y", 4)]
    assert [p.stride for p in model] == [1]
    assert [p.stride for p in data] == [1, 4]


def test_number_of_links_of_axis_parts() -> None:
    ring, line = Dimension("x", 8, True), Dimension("x", 8)
    assert part(ring, 8, 1).links == 2
    assert part(line, 8, 1).links == 1
    assert part(ring, 4, 1).links == 1
    assert part(ring, 4, 2).links == 1, "a ring of every other, of which there are two"
    assert part(line, 4, 2).links == 0.5
    assert part(ring, 2, 1).links == 1
    assert part(Dimension("x", 2, True), 2, 1).links == 1
    assert part(ring, 1, 1).links == 0
    assert [part(d, s, t).ring for d, s, t in ((ring, 8, 1), (ring, 4, 2), (line, 8, 1))] == [
        True,
        True,
        False,
    ]
    assert part(line, 2, 1).ring, "two neighbours go to and fro"
    block = [part(Dimension(name, 8), 2, 1) for name in "xyz"]
    assert [usable_links(block[:1]), usable_links(block[:2]), usable_links(block)] == [1, 2, 2]
    assert usable_links([part(ring, 8, 1), part(Dimension("y", 4, True), 4, 1), *block]) == 6
