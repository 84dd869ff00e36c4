"""Program of an automatic layout: the function traced for a mesh, and what its layout must keep."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import numpy as np

from xlashard._jax.runtime.shardings import is_compile_only
from xlashard._jax.runtime.topologies import named_topology
from xlashard._jax.trace.jaxprs import without_high_level
from xlashard._jax.tree_definitions import split_leaves
from xlashard.auto.problem import AutoProblem, chip_of, machine_of
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.stages.from_jax import traced_call, unwrapped
from xlashard.core.pjit.trace import Call
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec
from xlashard.errors import ArgumentError, MeshError, counted
from xlashard.geometry.strides import divisors
from xlashard.predict.costs.rates import Rates
from xlashard.predict.preflight.mesh_mapping import (
    MeshLike,
    find_topology,
    map_call,
    meshes_of_function,
    resolve_mesh,
)
from xlashard.predict.preflight.report.measured import RatesSources, read_calibrations
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.predict.targets.mesh_layout import resolve_axis_sizes

type Target = MeshLike | BaseTopology | str
"""A mesh, its axis sizes, a topology, or `auto` to choose the sizes."""

_AXES = ("data", "model")
_LONGEST = 32
"""Longest second axis of the meshes to choose from."""


@dataclass(frozen=True, eq=False)
class AutoProgram:
    """Function traced for a mesh.

    Attributes:
        function: The function.
        call: Its call, with arguments that are placed nowhere.
        mesh: Mesh, whose axes are automatic.
        topology: Topology of its devices; None for devices of no topology, such as emulated ones.
        closed_over: Number of arrays that the function closes over; they precede the arguments.
        at_hand: The same mesh on devices that can run programs; None if there are none.
        rates: Rates of a device; those of published measurements if None.
    """

    function: Function
    call: Call
    mesh: Mesh
    topology: BaseTopology | None
    closed_over: int = 0
    at_hand: Mesh | None = None
    rates: Rates | None = None

    def problem(
        self, memory: float = 0.9, fixed: Mapping[str, PartitionSpec] | None = None
    ) -> AutoProblem:
        """Return the problem of its layout.

        Args:
            memory: Share of a device's memory that the program may use.
            fixed: Specs by regular expressions over the paths of arguments and results.

        Raises:
            ArgumentError: If an expression matches nothing, or a spec doesn't fit.
        """
        traced, machine = self.call.traced, machine_of(self.mesh, self.topology, self.rates)
        ins = self._requested(self.call.in_shardings)
        outs = self._requested(self.call.out_shardings)
        if fixed:
            paths = (*traced.arg_names, *traced.result_paths)
            avals = (*traced.in_avals, *traced.jaxpr.out_avals)
            specs = self._fixed(fixed, dict(zip(paths, avals, strict=True)))
            ins = [specs.get(p, spec) for p, spec in zip(traced.arg_names, ins, strict=True)]
            outs = [specs.get(p, spec) for p, spec in zip(traced.result_paths, outs, strict=True)]
        return AutoProblem(
            jaxpr=traced.jaxpr,
            machine=machine,
            in_specs=tuple(ins),
            out_specs=tuple(outs),
            tied=fed_back(self.call),
            donated=self.call.donated,
            memory_bytes=memory * machine.memory_bytes,
        )

    def with_rates(self, rates: RatesSources | None) -> Self:
        """Return the program on devices of measured rates.

        Args:
            rates: File of measured rates of the chip, or its content; None for published ones.

        Raises:
            ArgumentError: If the file is invalid, or of another chip.
        """
        chip = chip_of(self.topology)
        calibration = read_calibrations(rates, [chip]).get(chip.name)
        return self if calibration is None else replace(self, rates=calibration.rates(chip))

    def _requested(self, shardings: Sequence[Any]) -> list[PartitionSpec | None]:
        return [s.spec if isinstance(s, NamedSharding) else None for s in shardings]

    def _fixed(
        self, fixed: Mapping[str, PartitionSpec], avals: Mapping[str, Any]
    ) -> dict[str, PartitionSpec]:
        specs: dict[str, PartitionSpec] = {}
        for pattern, spec in fixed.items():
            matching = [path for path in avals if re.search(pattern, path)]
            if not matching:
                raise ArgumentError(
                    f"fixed[{pattern!r}] matches no argument and no result: expected a regular "
                    f"expression that matches paths such as {next(iter(avals), '')!r}"
                )
            sharding = NamedSharding(self.mesh, spec)
            for path in matching:
                sharding.check_compatible_aval(avals[path].shape)
                specs.setdefault(path, spec)
        return specs


def read_program(
    fun: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: MeshLike | None,
    topology: BaseTopology | str | None = None,
) -> AutoProgram:
    """Trace a function for a mesh.

    Args:
        fun: The function, as for `traced_call`.
        args: Positional arguments of a call, or their shapes. Where they are placed has no effect.
        kwargs: Keyword arguments of the call.
        mesh: Mesh, or its axis sizes; None for the mesh in force.
        topology: Topology of the devices of a mesh that has others, or none.

    Raises:
        ArgumentError: If the function or a sharding of it is invalid.
        MeshError: If there is no mesh, or its sizes don't multiply to the number of devices.
        TopologyError: If the topology is unknown, or the mesh doesn't match it.
    """
    fun, args, kwargs = unwrapped(fun, args, dict(kwargs))
    place, on, at_hand = _target(mesh, topology, meshes_of_function(fun))
    bare = jax.tree.map(unplaced, (args, kwargs))
    with jax.set_mesh(on):
        function, call = traced_call(fun, *bare)
    before = len(call.values)
    call = map_call(call, on)
    # A search looks inside of high-level primitives, which have no sharding rules.
    traced = replace(call.traced, jaxpr=without_high_level(call.traced.jaxpr))
    call = replace(call, traced=traced, values=tuple(map(unplaced, call.values)))
    return AutoProgram(function, call, on, place, len(call.values) - before, at_hand)


_LARGER = 4


def read_larger(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], program: AutoProgram
) -> Iterator[AutoProgram]:
    """Yield the program on larger slices of the same chip, with a longer first mesh axis.

    Args:
        fun: The function.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        program: The program on a topology.
    """
    place = program.topology
    assert place is not None
    (first, size), *others = program.mesh.shape.items()
    for larger in itertools.islice(place.larger(), _LARGER):
        axes = {first: size * (larger.chips // place.chips), **dict(others)}
        yield replace(read_program(fun, args, kwargs, axes, larger), rates=program.rates)


def read_programs(
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Target | None,
    topology: BaseTopology | str | None = None,
) -> Iterator[AutoProgram]:
    """Yield the program on the mesh, or on each mesh to choose from.

    Args:
        fun: The function.
        args: Positional arguments of a call.
        kwargs: Keyword arguments of the call.
        mesh: As for `read_program`; `auto`, or a topology for a function without a mesh, for all
            meshes with the axes `data` and `model`.
        topology: Topology of the devices.
    """
    if isinstance(mesh, BaseTopology) or (isinstance(mesh, str) and mesh != "auto"):
        own = meshes_of_function(unwrapped(fun, args, kwargs)[0])
        mesh, topology = None if own else "auto", mesh
    if mesh != "auto":
        yield read_program(fun, args, kwargs, mesh, topology)
        return
    if isinstance(topology, str):
        topology = find_topology(topology)
    count = len(jax.devices()) if topology is None else topology.num_devices
    first, second = _AXES
    for size in (n for n in divisors(count) if n <= _LONGEST):
        axes = {first: count // size, second: size} if size > 1 else {first: count}
        yield read_program(fun, args, kwargs, axes, topology)


def _target(
    mesh: MeshLike | None, topology: BaseTopology | str | None, own: Mapping[str, MeshLike]
) -> tuple[BaseTopology | None, Mesh, Mesh | None]:
    """Return topology, mesh to compile for, and mesh to run on; None for what there isn't."""
    if isinstance(topology, str):
        topology = find_topology(topology)
    if mesh is None and own:
        mesh = next(iter(own.values()))
    at_hand = None
    if topology is None:
        at_hand = mesh = mesh if isinstance(mesh, Mesh) else _local_mesh(mesh)
        topology = topology_of(mesh)
    on = at_hand if topology is None else resolve_mesh(topology, mesh, own)
    assert isinstance(on, Mesh)
    if at_hand is not None and is_compile_only(at_hand.devices.flat[0]):
        at_hand = None
    # Explicit axes are part of types, which no layout may change.
    auto = None if at_hand is None else Mesh(at_hand.devices, at_hand.axis_names)
    return topology, Mesh(on.devices, on.axis_names), auto


def _local_mesh(mesh: MeshLike | None) -> Mesh:
    """Return a mesh of this process's devices.

    Raises:
        MeshError: If there are no sizes, or they don't multiply to the number of devices.
    """
    devices = jax.devices()
    if mesh is None:
        raise MeshError(
            f"mesh of auto_shard is missing, and none is in force: write mesh={{'data': "
            f"{len(devices)}}} for the {counted(len(devices), 'device')} of this process, or "
            "mesh='v5e-16' for a topology"
        )
    axes = mesh if isinstance(mesh, Mapping) else mesh.shape
    sizes = resolve_axis_sizes(axes, len(devices), "this process")
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def topology_of(mesh: Mesh) -> BaseTopology | None:
    """Return the topology of a mesh's devices; None for other devices than TPUs at hand.

    Args:
        mesh: The mesh, of a topology's devices or of devices at hand.
    """
    device = mesh.devices.flat[0]
    if device.platform != "tpu" and not is_compile_only(device):
        return None
    topology = find_topology(*named_topology(device))
    return topology if topology.num_devices == mesh.size else None


def unplaced(value: Any) -> Any:
    """Return shape and dtype of an array; other values unchanged.

    Args:
        value: A leaf of the arguments of a call.
    """
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return value
    weak = bool(getattr(value, "weak_type", False))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=weak)


def fed_back(call: Call) -> tuple[tuple[int, int], ...]:
    """Return the positions of arguments and of results that the next call is likely to get.

    A donated argument, or one of several arrays, is taken for fed back if the function returns a
    tree of its structure and types; and any array whose path a result has, as those of a module
    that the function changes.

    Args:
        call: The call.
    """
    traced = call.traced
    ins = [_type(aval) for aval in traced.in_avals]
    outs = [_type(aval) for aval in traced.jaxpr.out_avals]
    args, kwargs = split_leaves(traced.in_tree, range(traced.in_tree.num_leaves))
    results = traced.out_tree, range(traced.out_tree.num_leaves)
    by_path = {path: position for position, path in enumerate(traced.arg_names)}
    tied: dict[int, int] = {}

    def tie(structure: Any, leaves: Sequence[int]) -> bool:
        if not leaves or (len(leaves) == 1 and not call.donated[leaves[0]]):
            return False
        for other, candidate_leaves in (results, *split_leaves(*results)):
            if structure != other or not tied.keys().isdisjoint(candidate_leaves):
                continue
            if [ins[i] for i in leaves] == [outs[i] for i in candidate_leaves]:
                tied.update(zip(candidate_leaves, leaves, strict=True))
                return True
        return False

    for tree in (*split_leaves(*args), *split_leaves(*kwargs)):
        if not tie(*tree):
            for child in split_leaves(*tree):
                tie(*child)
    for position, path in enumerate(traced.result_paths):
        source = by_path.get(path)
        if source is not None and ins[source] == outs[position]:
            tied.setdefault(position, source)
    return tuple(sorted((argument, result) for result, argument in tied.items()))


def _type(aval: Any) -> tuple[Any, Any]:
    return getattr(aval, "shape", None), getattr(aval, "dtype", aval)
