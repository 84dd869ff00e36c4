"""Problem of a layout, and the layouts that solve it.

A problem is a jaxpr, a mesh, the shardings that are fixed, and the machine's rates. A layout is the
shardings at the boundary of the jaxpr, and constraints inside, which are inserted at sites.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

import numpy as np

from xlashard._jax.trace.rewriting import InsertionSite, insert_equations
from xlashard._jax.trace.tracing import bodies
from xlashard.core.pjit.constraint import constraint_p, constraint_params
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec
from xlashard.geometry import MeshGrid
from xlashard.geometry.groups import SourceTargetPairs
from xlashard.hlo.collective_kinds import CollectiveKind
from xlashard.predict.costs.models_by_target import network_for, rates_for
from xlashard.predict.costs.network_model import BaseNetworkModel
from xlashard.predict.costs.rates import Rates
from xlashard.predict.preflight.memory_breakdown import available_bytes
from xlashard.predict.targets.base_topology import BaseTopology, axis_links
from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.tpu.generations import GENERATIONS
from xlashard.predict.targets.tpu.topologies import Topology

NOMINAL = next(g for g in GENERATIONS if g.name == "v5e")
"""Generation whose rates stand for devices of no topology, such as emulated ones."""

_LARGE_BYTES = 2.0**30
"""Bytes of a transfer whose latency is negligible."""
_SMALL_GATHER, _PLANE_DEVICES = 2.0**24, (64, 128)
"""Most bytes of a gather that is an all-reduce, and numbers of devices."""

OPEN = PartitionSpec(PartitionSpec.UNCONSTRAINED)
"""Spec of a result that the compiler shards."""


@dataclass(frozen=True)
class ConstraintSite:
    """Place in a jaxpr where a sharding constraint is inserted.

    Attributes:
        path: Indices of the equations that lead there, with the index of the inner jaxpr between
            two of them: `(4, 0, 7)` is equation 7 of the first inner jaxpr of equation 4. The inner
            jaxprs of an equation are numbered as `jax.core.jaxprs_in_params` yields them.
        kind: `operand` constrains an operand of the last equation for this use alone, `result` a
            result of the last equation for all uses, and `parameter` a parameter of the inner jaxpr
            in which the path ends: `(4, 0)`; the empty path is the whole jaxpr.
        index: Position among the operands, results or parameters.
    """

    path: tuple[int, ...]
    kind: Literal["operand", "result", "parameter"]
    index: int


@dataclass(frozen=True)
class ForeseenTransfer:
    """Transfer of a value that a layout needs on a mesh axis.

    Attributes:
        axis: The mesh axis.
        kind: Kind of the collective.
        elements: Elements of the whole value.
        times: Number of runs in a step.
    """

    axis: str
    kind: CollectiveKind
    elements: int
    times: float


@dataclass(frozen=True)
class ProgramLayout:
    """Shardings of a program: of arguments, of results, and inside.

    Attributes:
        name: Name, such as `fsdp` or `auto`.
        in_specs: Spec of each argument.
        out_specs: Spec of each result.
        constraints: Specs inside.
        seconds: Predicted time of a step, in seconds, before any compilation.
        memory_bytes: Predicted memory per device, in bytes.
        transfers: Transfers that the search foresaw; empty for a layout of other origin.
    """

    name: str
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    constraints: tuple[tuple[ConstraintSite, PartitionSpec], ...]
    seconds: float
    memory_bytes: float
    transfers: tuple[ForeseenTransfer, ...] = ()


def insert_constraints(
    jaxpr: Any, mesh: Mesh, constraints: Iterable[tuple[ConstraintSite, PartitionSpec]]
) -> Any:
    """Return a jaxpr with sharding constraints at some places.

    Nothing is traced again, so that JAX's caches of traces keep no constraint. Operands that are
    literals are skipped, and so are sites inside `shard_map`.

    Args:
        jaxpr: The closed jaxpr.
        mesh: The mesh, whose axes are automatic.
        constraints: Each place, with the spec of its value.

    Raises:
        IndexError: If a place isn't in the jaxpr.
    """
    sites = [
        InsertionSite(site.path, site.kind, site.index, NamedSharding(mesh, spec))
        for site, spec in constraints
    ]
    return insert_equations(jaxpr, constraint_p, constraint_params, sites)


def check_layout(jaxpr: Any, mesh: Mesh, layout: ProgramLayout) -> None:
    """Check that a layout, which may come from a file, is one of a program.

    Args:
        jaxpr: The program's closed jaxpr.
        mesh: Its mesh.
        layout: The layout.

    Raises:
        IndexError: A constraint leads to no value.
        ValueError: A spec doesn't match the mesh or its value, or values lack one.
    """
    avals = [*jaxpr.in_avals, *jaxpr.out_avals]
    if (len(layout.in_specs), len(layout.out_specs)) != (len(jaxpr.in_avals), len(jaxpr.out_avals)):
        raise ValueError("the layout has other numbers of arguments and results")
    for site, _ in layout.constraints:
        if min((site.index, *site.path)) < 0:
            raise IndexError(f"a position below 0 in {site}")
        avals.append(site_value(jaxpr, site)[1].aval)
    specs = (*layout.in_specs, *layout.out_specs, *(spec for _, spec in layout.constraints))
    for aval, spec in zip(avals, specs, strict=True):
        NamedSharding(mesh, spec).check_compatible_aval(getattr(aval, "shape", ()))


def site_value(jaxpr: Any, site: ConstraintSite) -> tuple[Any, Any]:
    """Return the equation and the value of a site; the equation is None for an argument.

    Args:
        jaxpr: The closed jaxpr.
        site: The site.
    """
    path = list(site.path)
    eqn: Any = None
    while path:
        eqn = jaxpr.eqns[path.pop(0)]
        if path:
            jaxpr = list(bodies(eqn))[path.pop(0)]
    match site.kind:
        case "parameter":
            return eqn, jaxpr.invars[site.index]
        case "operand":
            return eqn, eqn.invars[site.index]
        case _:
            return eqn, eqn.outvars[site.index]


@dataclass(frozen=True)
class MeshAxis:
    """Mesh axis with the rates of its links.

    Attributes:
        name: Name.
        size: Number of devices along it.
        bytes_per_second: Bytes per second that a device sends along it.
        latency: Seconds of a collective beside its bytes.
        reduction_slowdown: Time to reduce and scatter some bytes over the time to gather them.
        small_bytes: Bytes of a value up to which the compiler gathers it by an all-reduce.
    """

    name: str
    size: int
    bytes_per_second: float
    latency: float
    reduction_slowdown: float = 1.0
    small_bytes: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Rates of a device of a mesh, and of its links.

    Attributes:
        axes: Axes of the mesh, in its order.
        rates: Rates of the device.
        memory_bytes: Memory of the device that programs can use.
        joint: Several axes that are used at once, as one axis.
        swap_speeds: For two axes, the bytes per second that a device sends where they swap places
            in the order of the devices of a dimension.
    """

    axes: tuple[MeshAxis, ...]
    rates: Rates
    memory_bytes: float
    joint: tuple[tuple[frozenset[str], MeshAxis], ...] = ()
    swap_speeds: tuple[tuple[frozenset[str], float], ...] = ()

    @cached_property
    def size(self) -> int:
        """Number of devices."""
        return self.grid.size

    @cached_property
    def grid(self) -> MeshGrid:
        """Axes over device positions."""
        return MeshGrid(tuple(a.name for a in self.axes), tuple(a.size for a in self.axes))

    def join(self, axes: Sequence[MeshAxis]) -> MeshAxis:
        """Return several axes as one.

        Args:
            axes: The axes.
        """
        if len(axes) == 1:
            return axes[0]
        known = self._joint_by_names.get(frozenset(axis.name for axis in axes))
        return known or MeshAxis(
            "+".join(axis.name for axis in axes),
            math.prod(axis.size for axis in axes),
            sum(axis.bytes_per_second for axis in axes),
            max((axis.latency for axis in axes), default=0.0),
        )

    def swap_seconds(self, nbytes: float, axis: MeshAxis, other: MeshAxis) -> float:
        """Return the time to permute a value for another order of two axes.

        Args:
            nbytes: Bytes on a device.
            axis: One of the axes.
            other: The other one.
        """
        slower = min(axis.bytes_per_second, other.bytes_per_second)
        return nbytes / self._speed_by_names.get(frozenset((axis.name, other.name)), slower)

    @cached_property
    def _joint_by_names(self) -> dict[frozenset[str], MeshAxis]:
        return dict(self.joint)

    @cached_property
    def _speed_by_names(self) -> dict[frozenset[str], float]:
        return dict(self.swap_speeds)


def chip_of(topology: BaseTopology | None) -> Chip:
    """Return the chip of a topology; the nominal one for None.

    Args:
        topology: The topology.
    """
    return NOMINAL if topology is None else topology.chip


def machine_of(
    mesh: Mesh, topology: BaseTopology | None = None, rates: Rates | None = None
) -> Machine:
    """Return the machine behind a mesh.

    Args:
        mesh: The mesh.
        topology: Topology of its devices; None for devices without one, which get the rates of a
            nominal chip with one link per axis.
        rates: Rates of a device; those of published measurements if None.
    """
    chip = chip_of(topology)
    rates, memory = rates or rates_for(chip), float(available_bytes(chip))
    nominal = MeshAxis("", 1, rates.link_share * NOMINAL.ici_bandwidth, rates.collective_seconds)
    axes = {
        str(name): replace(
            nominal,
            name=str(name),
            size=size,
            latency=nominal.latency + size / 2 * rates.hop_seconds,
        )
        for name, size in mesh.shape.items()
    }
    if topology is None:
        return Machine(tuple(axes.values()), rates, memory)
    network = network_for(topology, mesh, rates)
    long = [name for name, axis in axes.items() if axis.size > 1]
    groups = {}
    for names in (each for k in range(1, len(long) + 1) for each in combinations(long, k)):
        links = axis_links(topology, mesh, names)
        along = network.axis_rates(links)
        groups[names] = MeshAxis(
            "+".join(names),
            links.size,
            along.bytes_per_second,
            along.latency,
            along.reduction_slowdown,
            _small_bytes(topology) if links.size == mesh.size else 0.0,
        )
    return Machine(
        tuple(groups.pop((name,), axis) for name, axis in axes.items()),
        rates,
        memory,
        tuple((frozenset(names), axis) for names, axis in groups.items()),
        tuple(_swap_speeds(network, mesh)),
    )


def _small_bytes(topology: BaseTopology) -> float:
    """Return the bytes of a value up to which the compiler gathers it by an all-reduce.

    It does so between all 64 or 128 devices of a slice of v5e or v6e, and neither between fewer of
    them, nor on the tori of v5p or 256 devices of v6e: compiled with libtpu 0.0.50.
    """
    if not isinstance(topology, Topology) or topology.slices > 1:
        return 0.0
    is_plane = topology.generation.name in ("v5e", "v6e")
    return _SMALL_GATHER if is_plane and topology.num_devices in _PLANE_DEVICES else 0.0


def _swap_speeds(
    network: BaseNetworkModel[Any, Any], mesh: Mesh
) -> Iterator[tuple[frozenset[str], float]]:
    """Yield for each two axes the bytes per second at which a device sends if they swap places."""
    sizes = tuple(mesh.shape.values())
    devices = np.arange(mesh.size).reshape(sizes)
    names = {str(name): number for number, name in enumerate(mesh.shape)}
    for axes in combinations((name for name in names if mesh.shape[name] > 1), 2):
        before = np.moveaxis(devices, [names[axis] for axis in axes], (0, 1))
        moves = zip(before.ravel().tolist(), before.swapaxes(0, 1).ravel().tolist(), strict=True)
        cost = network.permutation(SourceTargetPairs(tuple(moves)), _LARGE_BYTES)
        yield frozenset(axes), _LARGE_BYTES / cost.expected_seconds


@dataclass(frozen=True, eq=False)
class AutoProblem:
    """Program, machine and requirements of a layout.

    Attributes:
        jaxpr: The closed jaxpr.
        machine: The machine.
        in_specs: Spec of each argument that is fixed; None to choose it.
        out_specs: The same for results.
        tied: Positions of arguments and of results that are fed back, which get one spec.
        donated: For each argument, whether its buffers may be reused.
        memory_bytes: Memory per device that the program may use, in bytes.
    """

    jaxpr: Any
    machine: Machine
    in_specs: tuple[PartitionSpec | None, ...]
    out_specs: tuple[PartitionSpec | None, ...]
    tied: tuple[tuple[int, int], ...] = ()
    donated: tuple[bool, ...] = ()
    memory_bytes: float = math.inf
