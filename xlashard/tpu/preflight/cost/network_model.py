"""How long a collective takes on the links of a torus, and on the network between slices.

The formulas count bytes by bandwidth; the time to the first byte (about a microsecond for each hop)
is left out, so that a program of many tiny collectives takes longer. They are those of rings, as in
Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (Journal of
Parallel and Distributed Computing 69(2), 2009), and of several rings at once on a torus, as in the
chapter on sharded matrices of How to Scale Your Model (https://jax-ml.github.io/scaling-book).

With groups of `n` devices that hold `D` bytes together, links of `w` bytes per second in each
direction, and `k` links by which a device can send along the group's dimensions (2 for a ring, 1
for a line, added up over dimensions, a share of them where groups interleave, and where two devices
of a chip have its links for different groups):

- all-gather and reduce-scatter: `D (n-1)/n / (k w)`; all-reduce: both, twice that;
- all-to-all: what crosses the middle of its longest dimension. Of a dimension of `m`, half of all
  devices send half of what they hold, `d = D/n`: `m d / 4 / (k w)` with the `k` of that dimension;
- collective-permute: each transfer goes along x, then y, then z, by the shorter way; the busiest
  link sets the time;
- between slices: with `s` slices in the group, what a slice sends is shared by its devices. A
  gather sends `D (s-1)/s` for each slice, an all-reduce of `D` bytes twice that, each device its
  part of it; inside the slices the rest goes over the links.

Collectives of a program over several slices, which TPU's compiler cuts in two.

What it compiles is the program of one slice: its devices count from 0, its collectives stay inside,
and what goes to the other slices is a send to the host and a receive from there, on which the
runtime of the data-center network does the rest.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from xlashard.geometry.groups import DeviceGroups, DevicePairs
from xlashard.program.calls import runs_of
from xlashard.program.collectives import (
    Collective,
    CollectiveKind,
    collectives_of,
    told_user,
)
from xlashard.program.hlo import Computation, HloText, Instruction, array_types
from xlashard.sharding import Mesh
from xlashard.tpu.links import ici_speed
from xlashard.tpu.mesh_layout import AxisPart, part
from xlashard.tpu.topologies import Topology

_KINDS: dict[str, CollectiveKind] = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


def multislice_collectives(module: HloText, mesh: Mesh) -> list[Collective]:
    """The collectives of a program, in all of its slices and between them.

    Args:
        module: The compiled program.
        mesh: Its mesh, whose order of devices the groups count in.
    """
    found = collectives_of(module)
    slices = _slices(mesh)
    if len(slices) == 1 or module.num_partitions * module.num_replicas == mesh.size:
        return found
    spread = [replace(c, groups=_in_all(c.groups, slices)) for c in found]
    return [*spread, *_transfers(module, slices)]


def rendezvous_name(instruction: Instruction) -> str:
    """The name under which a send and its receive meet; empty for other instructions."""
    if instruction.opcode not in ("send", "recv"):
        return ""
    found = _MEETING.search(instruction.attributes)
    return found[1] if found else ""


def _slices(mesh: Mesh) -> list[list[int]]:
    """The places in the mesh of the devices of each slice."""
    slices: dict[int, list[int]] = {}
    for position, device in enumerate(mesh.devices.flat):
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(position)
    return [slices[number] for number in sorted(slices)]


def _in_all(
    groups: DeviceGroups | DevicePairs, slices: Sequence[list[int]]
) -> DeviceGroups | DevicePairs:
    """The groups of one slice, in each of them."""
    if isinstance(groups, DevicePairs):
        pairs = groups.pairs
        return DevicePairs(tuple((s[a], s[b]) for s in slices for a, b in pairs))
    listed = groups.devices()
    return DeviceGroups.of_list([[s[d] for d in group] for s in slices for group in listed])


def _transfers(module: HloText, slices: Sequence[list[int]]) -> list[Collective]:
    runs = runs_of(module)
    return [
        replace(
            _transfer(module, computation, instruction, slices),
            times=runs[computation.name].times,
            times_known=runs[computation.name].known,
            conditional=runs[computation.name].conditional,
        )
        for computation in module.computations.values()
        if computation.name in runs
        for instruction in computation.instructions.values()
        if instruction.opcode == "send" and _TRANSFER.search(instruction.attributes)
    ]


def _transfer(
    module: HloText, computation: Computation, send: Instruction, slices: Sequence[list[int]]
) -> Collective:
    found = _TRANSFER.search(send.attributes)
    kind = _KINDS.get(found[1] if found else "", "collective-permute")
    operands = tuple(array_types(send.type)[:1])
    received = next(
        (
            i
            for i in computation.instructions.values()
            if i.opcode == "recv" and rendezvous_name(i) == rendezvous_name(send)
        ),
        None,
    )
    results = operands if received is None else tuple(array_types(received.type)[:1])
    user = None if received is None else told_user(module, computation, received)
    groups: DeviceGroups | DevicePairs = DeviceGroups.of_list(
        [list(group) for group in zip(*slices, strict=True)]
    )
    if kind == "collective-permute":
        turned = [*slices[1:], slices[0]]
        pairs = zip(slices, turned, strict=True)
        groups = DevicePairs(tuple(p for a, b in pairs for p in zip(a, b, strict=True)))
    return Collective(
        kind=kind,
        name=send.name,
        computation=computation.name,
        operands=operands,
        results=results,
        groups=groups,
        asynchronous=True,
        op_name=module.op_name(send),
        frames=module.frames(send),
        needed_by="" if user is None else module.op_name(user),
        needed_by_frames=() if user is None else module.frames(user),
    )


_NOT_LINKS = ("slice", "core")


@dataclass(frozen=True)
class NetworkCost:
    """What one run of a collective takes of the links.

    Attributes:
        sent_bytes: Bytes that a device sends to others of its slice.
        seconds: How long that takes.
        dimensions: The dimensions whose links are busy for that time.
        dcn_bytes: Bytes that a device sends to other slices.
        dcn_seconds: How long that takes.
    """

    sent_bytes: float = 0.0
    seconds: float = 0.0
    dimensions: tuple[str, ...] = ()
    dcn_bytes: float = 0.0
    dcn_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        """Both, one after the other."""
        return self.seconds + self.dcn_seconds


@dataclass(frozen=True)
class _GroupLinks:
    """What the groups of a collective have of the links.

    Attributes:
        parts: Of each dimension of a slice.
        slices: Over how many slices a group spreads.
        members: How many devices of a group are in one slice.
        speed: Bytes per second that a device sends to the others of its slice.
    """

    parts: tuple[AxisPart, ...]
    slices: int
    members: int
    speed: float


class NetworkModel:
    """The links between the devices of a mesh."""

    def __init__(self, topology: Topology, mesh: Mesh) -> None:
        """For the devices of a mesh.

        Args:
            topology: Whose devices they are.
            mesh: Of the program.
        """
        self._topology = topology
        self._mesh = mesh
        self._group_links: dict[DeviceGroups, _GroupLinks] = {}
        self._loads: dict[DevicePairs, _LinkLoad] = {}

    def of(self, collective: Collective) -> NetworkCost:
        """What one run of a collective takes of the links."""
        groups, payload = collective.groups, float(collective.payload_bytes)
        if isinstance(groups, DevicePairs):
            return self._permutation(groups, payload)
        if groups not in self._group_links:
            self._group_links[groups] = self._find_group_links(groups)
        lines = self._group_links[groups]
        slices, members = lines.slices, lines.members
        if collective.kind in ("all-to-all", "ragged-all-to-all"):
            within = payload / slices
            return self._wire(
                within * (members - 1) / members,
                max((p.size * within / 4 / self._speed((p,)) for p in lines.parts), default=0.0),
                lines.parts,
                payload * (slices - 1) / slices,
            )
        twice = 2 if collective.kind == "all-reduce" else 1
        if collective.kind == "collective-broadcast":
            # The value goes through every device once.
            sent, between = payload, payload if slices > 1 else 0.0
        else:
            sent = twice * payload * (members - 1) / members
            between = twice * payload * (slices - 1) / slices / members
        sent = sent if lines.parts else 0.0
        return self._wire(sent, sent / lines.speed, lines.parts, between)

    def _wire(
        self, sent: float, seconds: float, parts: Sequence[AxisPart], dcn: float
    ) -> NetworkCost:
        return NetworkCost(
            sent, seconds, tuple(p.dimension for p in parts), dcn, self._dcn_seconds(dcn)
        )

    def _dcn_seconds(self, nbytes: float) -> float:
        bandwidth = self._topology.generation.device_dcn_bandwidth
        return nbytes / bandwidth if nbytes and bandwidth else 0.0

    @cached_property
    def _places(self) -> np.ndarray:
        """Where the devices lie along each dimension, in the order of the mesh."""
        positions = self._topology.positions
        found = [positions[device.id] for device in self._mesh.devices.flat]
        return self._topology.coordinates[np.array(found)]

    def _find_group_links(self, groups: DeviceGroups) -> _GroupLinks:
        """The dimensions along which the devices of a group differ; all groups as the first."""
        members = np.array(groups.devices()[0]) if groups.count else np.zeros(1, np.int64)
        places = self._places[members[members < len(self._places)]]
        parts, slices = [], 1
        for number, dimension in enumerate(self._topology.dimensions):
            values = np.unique(places[:, number])
            if len(values) < 2:
                continue
            if dimension.name == "slice":
                slices = len(values)
                continue
            parts.append(part(dimension, len(values), int(np.diff(values).min())))
        inside = max(groups.size // slices, 1)
        speed = self._speed(parts)
        if math.prod(p.size for p in parts) != inside:
            # Not a box: nobody knows the ways, and each device counts with its part of one link.
            generation = self._topology.generation
            speed = generation.ici_bandwidth / generation.devices_per_chip
        return _GroupLinks(tuple(parts), slices, inside, speed)

    def _speed(self, parts: Sequence[AxisPart]) -> float:
        """Bytes per second that a device sends along some dimensions."""
        links = sum(p.links for p in parts if p.dimension not in _NOT_LINKS)
        return ici_speed(self._topology.generation, parts, links)

    def _permutation(self, pairs: DevicePairs, payload: float) -> NetworkCost:
        if pairs not in self._loads:
            self._loads[pairs] = _load(pairs, self._topology, self._places)
        load = self._loads[pairs]
        generation = self._topology.generation
        speeds = {"core": generation.core_bandwidth}
        times = [
            count * payload / speeds.get(name, generation.ici_bandwidth)
            for name, count in load.busiest
        ]
        dcn = payload * load.between_slices
        return NetworkCost(
            payload * load.within_slices,
            max(times, default=0.0),
            tuple(name for name, _ in load.busiest),
            dcn,
            self._dcn_seconds(dcn),
        )


@dataclass(frozen=True)
class _LinkLoad:
    """What a permutation asks of the links.

    Attributes:
        busiest: For each dimension how many transfers go over its busiest link.
        within_slices: Transfers within slices, for each device that is named.
        between_slices: Transfers between slices, for each device that is named.
    """

    busiest: tuple[tuple[str, int], ...]
    within_slices: float
    between_slices: float


def _load(pairs: DevicePairs, topology: Topology, places: np.ndarray) -> _LinkLoad:
    links: Counter[tuple[int, tuple[int, ...], int]] = Counter()
    within = between = 0
    for source, target in pairs.pairs:
        if source == target or max(source, target) >= len(places):
            continue
        here, there = places[source].tolist(), places[target].tolist()
        if here[0] != there[0]:
            between += 1
            continue
        within += 1
        _route(here, there, topology, links)
    named = max(len({device for pair in pairs.pairs for device in pair}), 1)
    busiest: Counter[str] = Counter()
    for (number, _, _), count in links.items():
        name = topology.dimensions[number].name
        busiest[name] = max(busiest[name], count)
    return _LinkLoad(tuple(busiest.items()), within / named, between / named)


def _route(
    here: list[int],
    there: list[int],
    topology: Topology,
    links: Counter[tuple[int, tuple[int, ...], int]],
) -> None:
    """Counts a transfer on every link that it goes over; devices of a chip share its links."""
    core = len(here) - 1
    for number, dimension in enumerate(topology.dimensions):
        distance = there[number] - here[number]
        if dimension.wraps and 2 * abs(distance) > dimension.size:
            distance -= dimension.size if distance > 0 else -dimension.size
        step = 1 if distance > 0 else -1
        for _ in range(abs(distance)):
            links[number, tuple(here if number == core else here[:core]), step] += 1
            here[number] = (here[number] + step) % dimension.size
