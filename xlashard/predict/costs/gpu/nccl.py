"""Network model of GPUs: time of NCCL's collectives on NVLink and between nodes.

NCCL chooses the fastest of its algorithms and protocols by a model of its own; this one has the
same form. For a group of `n` GPUs on `s` nodes (NVLink domains), with `r = n / s` of them per node,
and `D` bytes that the group gathers, reduces or exchanges:

- bytes: a GPU sends `D (n-1)/n` over NVLink for a gather or a reduction with scattered results and
  twice that for an all-reduce. The GPUs of a group on a node share its traffic to other nodes, `D
  (s-1)/s`, each through its own network interface. Both flow at once: the slower one counts;
- NVLS: switches of Hopper and later sum on their way, so that an all-reduce within a node takes the
  time of a single pass and a bit;
- latency: a ring has `n-1` steps (twice that for an all-reduce), `s` of them between nodes; an
  all-reduce may take a tree instead, with `2 log2 s` steps between nodes and `2 (r-1)` within;
- protocols: `LL` and `LL128` have short steps and send flags with the data, `Simple` sends at full
  bandwidth.

Steps and protocols are those of https://github.com/NVIDIA/nccl/blob/v2.21.5-1/src/graph/tuning.cc,
bandwidths those of nccl-tests (azure and others beside the constants).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from xlashard.geometry.groups import SourceTargetPairs
from xlashard.hlo.collective_kinds import TRAITS, CollectiveTraits
from xlashard.predict.costs.gpu.gpu_operation import gpu_rates
from xlashard.predict.costs.network_model import AxisRates, BaseNetworkModel, NetworkCost
from xlashard.predict.costs.rates import Rates
from xlashard.predict.targets.base_topology import AxisLinks
from xlashard.predict.targets.gpu.topologies import GpuTopology
from xlashard.predict.targets.mesh_layout import extents


@dataclass(frozen=True)
class _Protocol:
    """A protocol of NCCL.

    Attributes:
        start: Seconds besides the steps.
        ring: Seconds of a step of a ring on NVLink.
        tree: Seconds of a step of a tree on NVLink.
        ring_between: Seconds of a step of a ring between nodes.
        tree_between: Seconds of a step of a tree between nodes.
        share: Share of the bandwidth that it sends data with.
    """

    start: float
    ring: float
    tree: float
    ring_between: float
    tree_between: float
    share: float


_PROTOCOLS = (
    _Protocol(6.6e-6, 0.6e-6, 0.6e-6, 2.7e-6, 5.0e-6, 0.25),
    _Protocol(14.0e-6, 1.9e-6, 1.25e-6, 4.0e-6, 8.5e-6, 0.75),
    _Protocol(8.4e-6, 3.4e-6, 4.0e-6, 14.0e-6, 14.0e-6, 1.0),
)
"""LL, LL128 and Simple."""

_LAUNCH = 15e-6
"""Seconds to launch a collective: https://github.com/marin-community/marin/issues/6736, 20
microseconds for an all-reduce of 4 bytes over 8 H100, of which the protocol takes 5 or more."""

_RING_SHARE = 0.72
"""azure: all-reduces of 64 MiB to 4 GiB over 8 A100, 0.56 to 0.77 of 300 GB/s."""

_SWITCH_SHARES = {
    # azure: all-reduces of 512 MiB and 4 GiB over 8 GPUs, 438 to 477 of 450 GB/s.
    "h100": 1.0,
    "h200": 1.0,
    # https://github.com/coreweave/nccl-tests/pull/43: all-reduces of 512 MiB and 1 GiB over 72
    # GPUs, 813 of 900 GB/s between them.
    "b200": 0.9,
    "gb200": 0.9,
}
"""Bytes of a ring beside the bandwidth of NVLink, for all-reduces that switches sum."""

_SWITCH_START = 25e-6
"""azure: all-reduces of 2 to 32 MiB over 8 H200, besides launch and bytes."""

_SWITCH_MEMBERS = 8
"""GPUs up to which switches sum faster: azure; the 72 of an NVL72 show the latency of a ring."""

_NETWORK_SHARE = 0.8
"""Share of a network interface. The published all-reduces between nodes name no network; NVLink's
rings reach 0.72 and its switches 1.0."""


_LARGE = 1e9
"""Bytes that take the time of their bandwidth alone."""


@dataclass(frozen=True)
class _GroupShape:
    """Extent of a replica group.

    Attributes:
        size: Number of GPUs.
        nodes: Number of nodes, or NVLink domains.
    """

    size: int
    nodes: int

    @property
    def per_node(self) -> int:
        """GPUs of the group on a node."""
        return max(self.size // self.nodes, 1)


class NcclModel(BaseNetworkModel[GpuTopology, _GroupShape]):
    """NVLink and network between the GPUs of a mesh."""

    def _published_rates(self) -> Rates:
        return gpu_rates(self._topology.chip)

    def _find_group(self, size: int, coordinates: np.ndarray) -> _GroupShape:
        parts = extents(self._topology.dimensions, coordinates)
        nodes = next((part.size for part in parts if part.dimension == "node"), 1)
        return _GroupShape(max(size, 1), nodes)

    def _in_group(
        self, group: _GroupShape, payload: float, traits: CollectiveTraits
    ) -> NetworkCost:
        if group.size < 2:
            return NetworkCost()
        if traits.traffic == "exchange":
            own = payload / group.size
            within, between = own * (group.per_node - 1), own * (group.size - group.per_node)
            return self._cost(within, between, self._steps(min(group.nodes - 1, 1), 1))
        ring = self._passing(group, traits, payload)
        if traits.traffic == "broadcast":
            # All GPUs but the last wait for the whole value to pass.
            within = payload * (group.per_node > 1)
            between = payload / group.per_node * (group.nodes > 1)
            cost = self._cost(within, between, self._ring(group, 1))
            return replace(cost, sent_bytes=ring.sent_bytes, dcn_bytes=ring.dcn_bytes)
        if traits.rounds < 2:
            return ring
        tree = self._cost(ring.sent_bytes, ring.dcn_bytes, self._tree(group))
        return min(ring, tree, self._summed(group, ring), key=lambda c: c.expected_seconds)

    def axis_rates(self, links: AxisLinks) -> AxisRates:
        """Return the rates of collectives by groups along some mesh axes.

        A device sends `(size - 1) / size` of the bytes that a group gathers.
        """
        group = _GroupShape(links.size, links.domains)
        traits = TRAITS["all-gather"]
        small, large = (self._passing(group, traits, n).expected_seconds for n in (0.0, _LARGE))
        sent = _LARGE * (links.size - 1) / links.size
        reductions = self._rates.reductions or self._rates
        return AxisRates(
            bytes_per_second=sent / (large - small),
            latency=small,
            reduction_slowdown=self._rates.link_share / reductions.link_share,
        )

    def _passing(self, group: _GroupShape, traits: CollectiveTraits, payload: float) -> NetworkCost:
        """Return the cost of values that pass around a ring."""
        within = traits.sent_bytes(payload, group.size) * (group.per_node > 1)
        between = traits.sent_bytes(payload, group.nodes) / group.per_node
        return self._cost(within, between, self._ring(group, traits.rounds))

    def _ring(self, group: _GroupShape, rounds: int) -> list[float]:
        """Return the seconds of the steps of a ring, by protocol."""
        between = group.nodes if group.nodes > 1 and rounds > 1 else group.nodes - 1
        return self._steps(rounds * between, rounds * (group.size - 1 - between))

    def _steps(self, between: float, within: float) -> list[float]:
        within = max(within, 0)
        return [p.start + between * p.ring_between + within * p.ring for p in _PROTOCOLS]

    def _tree(self, group: _GroupShape) -> list[float]:
        """Return the seconds of the steps of a tree, by protocol."""
        between, within = 2 * math.log2(group.nodes), 2 * (group.per_node - 1)
        return [p.start + between * p.tree_between + within * p.tree for p in _PROTOCOLS]

    def _summed(self, group: _GroupShape, ring: NetworkCost) -> NetworkCost:
        """Return the cost of an all-reduce that switches sum; that of the ring if none can."""
        share = _SWITCH_SHARES.get(self._topology.chip.family)
        if share is None or group.nodes > 1:
            return ring
        start = _SWITCH_START
        if group.size > _SWITCH_MEMBERS:
            start = self._ring(group, 2)[-1]
        switched = ring.seconds / share / self._rates.link_share
        return replace(ring, expected_seconds=_LAUNCH + start + switched)

    def _cost(self, within: float, between: float, steps: Sequence[float]) -> NetworkCost:
        """Return the cost of bytes that a GPU sends over NVLink and to other nodes.

        Args:
            within: Bytes over NVLink.
            between: Bytes to other nodes.
            steps: Seconds of the steps, by protocol.
        """
        chip, nic = self._topology.chip, self._topology.network_bandwidth
        seconds = within / chip.node_bandwidth
        dcn_seconds = between / nic
        slower = max(
            seconds / _RING_SHARE / self._rates.link_share,
            dcn_seconds / _NETWORK_SHARE / self._rates.dcn_share,
        )
        fastest = min(
            latency + slower / protocol.share
            for latency, protocol in zip(steps, _PROTOCOLS, strict=True)
        )
        # XLA runs the collectives of a device one after the other, in a stream of their own.
        return NetworkCost(
            within, seconds, ("gpu",), ("gpu",), between, dcn_seconds, _LAUNCH + fastest
        )

    def permutation(self, pairs: SourceTargetPairs, payload: float) -> NetworkCost:
        """Return the network cost of a permutation of devices."""
        nodes = self._coordinates[:, 0]
        moved = [(a, b) for a, b in pairs.pairs if a != b and max(a, b) < len(nodes)]
        if not moved:
            return NetworkCost()
        crossing = [nodes[a] != nodes[b] for a, b in moved]
        within, between = payload * (not all(crossing)), payload * any(crossing)
        return self._cost(within, between, self._steps(any(crossing), 1))
