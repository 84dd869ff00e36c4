"""Network model: time of collectives on the links of a torus and between slices.

Times are bytes divided by bandwidth; latency (about a microsecond per hop) is left out, so programs
with many tiny collectives take longer. The formulas are those of rings, as in Patarasuk and Yuan,
Bandwidth optimal all-reduce algorithms for clusters of workstations (Journal of Parallel and
Distributed Computing 69(2), 2009), and of parallel rings on a torus, as in the chapter on sharded
matrices of How to Scale Your Model (https://jax-ml.github.io/scaling-book).

For groups of `n` devices that hold `D` bytes in total, links of `w` bytes per second per direction,
and `k` links per device along the dimensions of the group (2 for a ring, 1 for a line, summed over
dimensions, and divided among groups or devices that share the links):

- all-gather and reduce-scatter: `D (n-1)/n / (k w)`; all-reduce: twice that;
- all-to-all: bisection of the longest dimension. Along a dimension of size `m`, half of the
  devices send half of their `d = D/n` bytes: `m d / 4 / (k w)` with the `k` of that dimension;
- collective-permute: each transfer follows x, then y, then z, the shorter way around; the busiest
  link determines the time;
- between slices: with `s` slices per group, the devices of a slice share its traffic. A gather
  sends `D (s-1)/s` per slice, an all-reduce twice that; the rest stays on the links of the slice.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from xlashard.geometry.groups import ReplicaGroups, SourceTargetPairs
from xlashard.hlo.collective_kinds import CollectiveTraits
from xlashard.hlo.collectives import Collective
from xlashard.predict.costs.rates import Rates, rates_of
from xlashard.predict.targets.base_topology import AxisLinks, BaseTopology, mesh_coordinates
from xlashard.predict.targets.mesh_layout import AxisSegment, extents
from xlashard.predict.targets.tpu.topologies import Topology, ici_speed, torus_parts

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True)
class NetworkCost:
    """Network cost of one run of a collective.

    Attributes:
        sent_bytes: Bytes that a device sends within its slice.
        seconds: Time of the transfers within slices.
        dimensions: Dimensions whose links are busy.
        links: Directions of those links, such as `x+` and `x-`, which carry traffic independently.
        dcn_bytes: Bytes that a device sends to other slices.
        dcn_seconds: Time of the transfers between slices.
        expected_seconds: Time within and between slices, in sequence, at the rates that links
            reach, with the latency of the hops.
    """

    sent_bytes: float = 0.0
    seconds: float = 0.0
    dimensions: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    dcn_bytes: float = 0.0
    dcn_seconds: float = 0.0
    expected_seconds: float = 0.0

    @property
    def resource(self) -> Literal["ici", "dcn"]:
        """Name of the slowest network in use: `dcn` between slices or nodes, or `ici`."""
        return "dcn" if self.dcn_bytes else "ici"


@dataclass(frozen=True)
class AxisRates:
    """Rates of collectives along some mesh axes.

    Attributes:
        bytes_per_second: Bytes per second that a device sends in a gather.
        latency: Seconds of a collective besides its bytes.
        reduction_slowdown: Time to reduce and scatter some bytes over the time to gather them.
    """

    bytes_per_second: float
    latency: float
    reduction_slowdown: float


@dataclass(frozen=True)
class _GroupLinks:
    """Links of a collective's replica groups.

    Attributes:
        parts: Extent along each dimension of a slice.
        slices: Number of slices that a group spans.
        members: Devices of a group per slice.
        speed: Bytes per second that a device sends within its slice.
    """

    parts: tuple[AxisSegment, ...]
    slices: int
    members: int
    speed: float


@dataclass(frozen=True)
class _LinkLoad:
    """Load of a permutation on the links.

    Attributes:
        busiest: Transfers over the busiest link of each dimension and direction.
        within_slices: Transfers within slices, per participating device.
        between_slices: Transfers between slices, per participating device.
        hops: Links of the longest route.
    """

    busiest: tuple[tuple[str, int], ...]
    within_slices: float
    between_slices: float
    hops: int


class BaseNetworkModel[T: BaseTopology, G](ABC):
    """Network between the devices of a mesh, of topology `T` with groups of extent `G`."""

    def __init__(self, topology: T, mesh: "Mesh", rates: Rates | None = None) -> None:
        """Model the network of a mesh.

        Args:
            topology: Topology of the devices.
            mesh: Mesh of the program.
            rates: Rates of a device; those of published measurements if None.
        """
        self._topology = topology
        self._rates = rates or self._published_rates()
        apart = self._rates.reductions
        self._reductions = None if apart is None else type(self)(topology, mesh, apart)
        self._coordinates = mesh_coordinates(topology, mesh).reshape(mesh.size, -1)
        self._groups: dict[ReplicaGroups, G] = {}

    def of(self, collective: Collective) -> NetworkCost:
        """Return the network cost of one run of a collective."""
        if self._reductions is not None and collective.traits.reduces:
            return self._reductions.of(collective)
        groups, payload = collective.groups, float(collective.payload_bytes)
        if isinstance(groups, SourceTargetPairs):
            return self.permutation(groups, payload)
        if groups not in self._groups:
            inside = [g for g in groups.devices() if max(g) < len(self._coordinates)]
            whole = [group for group in inside if len(group) == groups.size]
            coordinates = self._coordinates[np.array(whole or [[0]])]
            self._groups[groups] = self._find_group(groups.size, coordinates)
        return self._in_group(self._groups[groups], payload, collective.traits)

    @abstractmethod
    def axis_rates(self, links: AxisLinks) -> AxisRates:
        """Return the rates of collectives by groups along some mesh axes.

        Args:
            links: Links along the axes, whose groups have several devices.
        """

    @abstractmethod
    def permutation(self, pairs: SourceTargetPairs, payload: float) -> NetworkCost:
        """Return the network cost of a permutation of devices.

        Args:
            pairs: Source and target of each transfer.
            payload: Bytes of a transfer.
        """

    @abstractmethod
    def _published_rates(self) -> Rates:
        """Return the rates of published measurements."""

    @abstractmethod
    def _find_group(self, size: int, coordinates: np.ndarray) -> G:
        """Return the widest extent of groups at coordinates `[groups, size, dimensions]`."""

    @abstractmethod
    def _in_group(self, group: G, payload: float, traits: CollectiveTraits) -> NetworkCost:
        """Return the cost of a collective whose groups have an extent."""


class NetworkModel(BaseNetworkModel[Topology, _GroupLinks]):
    """Links of a torus, and the network between slices."""

    @cached_property
    def _loads(self) -> dict[SourceTargetPairs, _LinkLoad]:
        return {}

    def axis_rates(self, links: AxisLinks) -> AxisRates:
        """Return the rates of collectives by groups along some mesh axes."""
        rates = self._rates
        reductions = rates.reductions or rates
        is_torus = len(torus_parts(links.parts)) > 1
        reduced = reductions.torus_reduction_share if is_torus else reductions.link_share
        share = rates.dcn_share if links.network == "dcn" else rates.link_share
        hops = sum(p.size for p in links.parts) / 2
        return AxisRates(
            bytes_per_second=share * links.bytes_per_second,
            latency=rates.collective_seconds + hops * rates.hop_seconds,
            reduction_slowdown=rates.link_share / reduced,
        )

    def _published_rates(self) -> Rates:
        return rates_of(self._topology.generation)

    def _in_group(
        self, group: _GroupLinks, payload: float, traits: CollectiveTraits
    ) -> NetworkCost:
        slices, members = group.slices, group.members
        if traits.traffic == "exchange":
            within = payload / slices
            return self._wire(
                traits.sent_bytes(within, members),
                max((p.size * within / 4 / self._speed((p,)) for p in group.parts), default=0.0),
                group.parts,
                traits.sent_bytes(payload, slices),
            )
        sent = traits.sent_bytes(payload, members) if group.parts else 0.0
        between = traits.sent_bytes(payload, slices) / members
        if traits.traffic == "broadcast":
            # All devices but the last wait for the whole value to pass.
            whole = payload if group.parts else 0.0
            passing = payload / members if slices > 1 else 0.0
            cost = self._wire(whole, whole / group.speed, group.parts, passing)
            return replace(cost, sent_bytes=sent, dcn_bytes=between)
        return self._wire(
            sent, sent / group.speed, group.parts, between, traits.rounds, traits.reduced_share
        )

    def _wire(
        self,
        sent: float,
        seconds: float,
        parts: Sequence[AxisSegment],
        dcn: float,
        rounds: int = 1,
        reduced: float = 0.0,
    ) -> NetworkCost:
        """Return the cost of traffic of which a share is reduced on its way."""
        rates = self._rates
        on_torus = torus_parts(parts)
        hops = sum(p.size // 2 if p.ring else p.size - 1 for p in on_torus)
        links = tuple(p.dimension + way for p in parts for way in "+-")
        reduction = rates.torus_reduction_share if len(on_torus) > 1 else rates.link_share
        expected = seconds * (reduced / reduction + (1 - reduced) / rates.link_share)
        return self._cost(sent, seconds, links, dcn, expected, rounds * hops)

    def _cost(
        self,
        sent: float,
        seconds: float,
        links: tuple[str, ...],
        dcn: float,
        expected: float,
        hops: int,
    ) -> NetworkCost:
        rates = self._rates
        dcn_seconds = self._dcn_seconds(dcn)
        expected += dcn_seconds / rates.dcn_share + hops * rates.hop_seconds
        if links or dcn:
            expected += rates.collective_seconds
        dimensions = tuple(dict.fromkeys(link[:-1] for link in links))
        return NetworkCost(sent, seconds, dimensions, links, dcn, dcn_seconds, expected)

    def _dcn_seconds(self, nbytes: float) -> float:
        bandwidth = self._topology.generation.device_dcn_bandwidth
        return nbytes / bandwidth if nbytes and bandwidth else 0.0

    def _find_group(self, size: int, coordinates: np.ndarray) -> _GroupLinks:
        segments = extents(self._topology.dimensions, coordinates)
        slices = next((s.size for s in segments if s.dimension == "slice"), 1)
        parts = tuple(s for s in segments if s.dimension != "slice")
        inside = max(size // slices, 1)
        speed = self._speed(parts)
        if math.prod(p.size for p in parts) != inside:
            # The group is not a box: assume a share of one link per device.
            speed = self._topology.generation.device_link_bandwidth
        return _GroupLinks(parts, slices, inside, speed)

    def _speed(self, parts: Sequence[AxisSegment]) -> float:
        """Return the bytes per second that a device sends along some dimensions."""
        links = sum(p.links for p in torus_parts(parts))
        return ici_speed(self._topology.generation, parts, links)

    def permutation(self, pairs: SourceTargetPairs, payload: float) -> NetworkCost:
        """Return the network cost of a permutation of devices."""
        if pairs not in self._loads:
            self._loads[pairs] = _load(pairs, self._topology, self._coordinates)
        load = self._loads[pairs]
        generation = self._topology.generation
        speeds = {"core": generation.core_bandwidth}
        times = [
            count * payload / speeds.get(name[:-1], generation.ici_bandwidth)
            for name, count in load.busiest
        ]
        dcn = payload * load.between_slices
        longest = max(times, default=0.0)
        return self._cost(
            payload * load.within_slices,
            longest,
            tuple(name for name, _ in load.busiest),
            dcn,
            longest / self._rates.link_share,
            load.hops,
        )


def _load(pairs: SourceTargetPairs, topology: Topology, places: np.ndarray) -> _LinkLoad:
    """Return the load of transfers, each of which follows the dimensions in order."""
    known = [p for p in pairs.pairs if p[0] != p[1] and max(p) < len(places)]
    sources, targets = np.array(known, int).reshape(-1, 2).T
    inside = places[sources][:, 0] == places[targets][:, 0]
    # Transfers on their way: the devices where they are, and where they go.
    at, end = places[sources[inside]], places[targets[inside]]
    hops = np.zeros(len(at), int)
    busiest: dict[str, int] = {}
    for number, dimension in enumerate(topology.dimensions):
        distance = end[:, number] - at[:, number]
        if dimension.wraps:
            is_shorter_around = 2 * np.abs(distance) > dimension.size
            distance -= np.where(is_shorter_around, np.sign(distance) * dimension.size, 0)
        hops += np.abs(distance)
        for step, way in ((1, "+"), (-1, "-")):
            if count := _busiest_link(at, distance * step, number, step, topology):
                busiest[dimension.name + way] = count
        at[:, number] = end[:, number]
    named = max(len({device for pair in pairs.pairs for device in pair}), 1)
    between = len(known) - len(at)
    longest = int(hops.max(initial=0))
    return _LinkLoad(tuple(busiest.items()), len(at) / named, between / named, longest)


def _busiest_link(
    at: np.ndarray, distance: np.ndarray, number: int, step: int, topology: Topology
) -> int:
    """Return how many transfers take the busiest link of a dimension in one direction.

    Devices of a chip share its links.

    Args:
        at: Coordinates of each transfer `[transfers, dimensions]`.
        distance: Links that each has before it in this direction, if any.
        number: The dimension.
        step: 1 or -1.
        topology: Topology of the coordinates.
    """
    sizes = [dimension.size for dimension in topology.dimensions]
    core = len(sizes) - 1
    links = []
    for done in range(distance.max(initial=0)):
        begins = at[distance > done].T.copy()
        begins[number] = (begins[number] + step * done) % sizes[number]
        if number != core:
            begins[core] = 0
        links.append(np.ravel_multi_index(tuple(begins), sizes))
    return int(np.bincount(np.concatenate(links)).max()) if links else 0
