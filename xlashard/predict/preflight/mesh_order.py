"""The order in which mesh axes take the links of a topology, and a better one."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from xlashard.analysis.explain.model import CollectiveReport
from xlashard.core.sharding import Mesh
from xlashard.predict.preflight.report.preflight_model import Suggestion
from xlashard.predict.targets.base_topology import AxisLinks, BaseTopology, axis_links

_MOST_AXES = 5
"""Axes of more than one device up to which every order is compared: 120 orders."""
_LEAST_SHARE = 0.01
"""Share of a step that an order has to save on the links to be tried."""


def lay_out(topology: BaseTopology, mesh: Mesh, order: Sequence[str]) -> Mesh:
    """Return a mesh of the same axes that take the links of a topology in another order.

    Args:
        topology: Topology of the devices.
        mesh: The mesh.
        order: Axis names, the axis with the most communication first.
    """
    devices = topology.mesh(dict(mesh.shape), order=order).devices
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def find_order(
    topology: BaseTopology,
    mesh: Mesh,
    traffic: Sequence[CollectiveReport],
    step_seconds: float,
) -> tuple[Suggestion, float] | None:
    """Return the order by which the links carry the traffic fastest, and the time that it saves.

    The times are those of the bytes at link bandwidth; what a step gains is known once the program
    is compiled for that order.

    Args:
        topology: Topology of the devices.
        mesh: Mesh of the program on it.
        traffic: Collectives of the program, or of several.
        step_seconds: Time of the program.

    Returns:
        The suggestion; None if no order saves enough to be tried.
    """
    names = [name for name, size in mesh.shape.items() if size > 1]
    sent = _sum_bytes(traffic)
    if not sent or not 2 <= len(names) <= _MOST_AXES:
        return None
    now = _seconds(topology, mesh, sent)
    rest = [name for name in mesh.axis_names if name not in names]
    seconds = {
        order: _seconds(topology, lay_out(topology, mesh, (*order, *rest)), sent)
        for order in itertools.permutations(names)
    }
    best = min(seconds, key=lambda order: seconds[order])
    saved = now - seconds[best]
    after = lay_out(topology, mesh, (*best, *rest))
    if saved < _LEAST_SHARE * step_seconds or np.array_equal(after.devices, mesh.devices):
        return None
    reason = "; ".join(_describe_gains(topology, mesh, after, sent))
    return Suggestion("", None, (), (), (), order=(*best, *rest), reason=reason), saved


def _sum_bytes(traffic: Sequence[CollectiveReport]) -> dict[tuple[str, ...], int]:
    """Return the bytes that a device sends, by the axes of their groups."""
    sent: dict[tuple[str, ...], int] = {}
    for row in traffic:
        if row.axes:
            sent[row.axes] = sent.get(row.axes, 0) + row.sent_bytes
    return {axes: nbytes for axes, nbytes in sent.items() if nbytes}


def _seconds(topology: BaseTopology, mesh: Mesh, sent: dict[tuple[str, ...], int]) -> float:
    rates = {axes: axis_links(topology, mesh, axes).bytes_per_second for axes in sent}
    return math.fsum(n / rates[axes] if rates[axes] else math.inf for axes, n in sent.items())


def _describe_gains(
    topology: BaseTopology, before: Mesh, after: Mesh, sent: dict[tuple[str, ...], int]
) -> Iterator[str]:
    """Yield the links of the axes whose rate changes, those with the most traffic first."""
    for axes in sorted(sent, key=lambda axes: -sent[axes]):
        old, new = (axis_links(topology, mesh, axes) for mesh in (before, after))
        if not math.isclose(old.bytes_per_second, new.bytes_per_second):
            yield f"{', '.join(axes)} from {_links_text(old)} to {_links_text(new)}"


def _links_text(links: AxisLinks) -> str:
    return f"{links.bytes_per_second / 1e9:,.0f} GB/s of {links.network.upper()}"
