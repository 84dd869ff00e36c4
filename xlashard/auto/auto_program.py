"""Program of an automatic layout: the function traced for a mesh, and what its layout must keep."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import NoneType
from typing import Any, Self

import jax
import numpy as np

from xlashard._jax.runtime.shardings import is_compile_only
from xlashard._jax.runtime.topologies import named_topology
from xlashard._jax.trace.jaxprs import without_high_level
from xlashard.analysis.programs.from_jax import unwrap
from xlashard.analysis.programs.program import LoweredModule, Program, ProgramValue, find_fed_back
from xlashard.analysis.programs.program_reader import check_tracers, find_stage, read_call
from xlashard.auto.problem import (
    AutoProblem,
    ProgramLayout,
    chip_of,
    insert_constraints,
    machine_of,
)
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec
from xlashard.errors import ArgumentError, MeshError, check_type, counted
from xlashard.geometry.strides import divisors
from xlashard.predict.costs.rates import Rates
from xlashard.predict.preflight.mesh_mapping import (
    MeshLike,
    find_topology,
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
        program: The program, with arguments that are placed nowhere.
        mesh: Mesh, whose axes are automatic.
        topology: Topology of its devices; None for devices of no topology, such as emulated ones.
        traced_on: The same mesh over the devices that the program names; None for those of `mesh`.
        at_hand: The same mesh on devices that can run programs; None if there are none.
        rates: Rates of a device; those of published measurements if None.
    """

    program: Program
    mesh: Mesh
    topology: BaseTopology | None
    traced_on: Mesh | None = None
    at_hand: Mesh | None = None
    rates: Rates | None = None

    @property
    def jaxpr(self) -> Any:
        """Return the closed jaxpr."""
        return self.program.jaxpr

    @cached_property
    def donated(self) -> tuple[bool, ...]:
        """Return for each argument True if its buffers may be reused."""
        return tuple(value.donated for value in self.program.arguments)

    def with_layout(self, layout: ProgramLayout, marks: Sequence[Any] = ()) -> Program:
        """Return the program under a layout, on the devices that it names.

        Args:
            layout: The layout.
            marks: For the arguments and for the results, True for each sharding that was chosen.
        """
        on = self.traced_on or self.mesh
        jaxpr = insert_constraints(self.jaxpr, on, layout.constraints)
        ins, outs = (
            tuple(NamedSharding(on, spec) for spec in side)
            for side in (layout.in_specs, layout.out_specs)
        )
        program = self.program.with_layout(jaxpr, ins, outs, on)
        return program.with_choices(*marks) if marks else program

    def lower(
        self, layout: ProgramLayout, mesh: Mesh | None = None, marks: Sequence[Any] = ()
    ) -> LoweredModule:
        """Return the program under a layout, lowered for its mesh, or for one of other devices.

        Args:
            layout: The layout.
            mesh: A mesh with the same axes; None for the own one.
            marks: As for `with_layout`.
        """
        own, new = self.traced_on or self.mesh, mesh or self.mesh
        devices = dict(zip(own.devices.flat, new.devices.flat, strict=True))
        return self.with_layout(layout, marks).lower(None if own == new else devices)

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
        machine = machine_of(self.mesh, self.topology, self.rates)
        arguments, results = self.program.arguments, self.program.results
        ins, outs = self._requested(arguments), self._requested(results)
        if fixed:
            specs = self._fixed(fixed, {value.path: value.aval for value in arguments + results})
            ins = [specs.get(v.path, spec) for v, spec in zip(arguments, ins, strict=True)]
            outs = [specs.get(v.path, spec) for v, spec in zip(results, outs, strict=True)]
        return AutoProblem(
            jaxpr=self.jaxpr,
            machine=machine,
            in_specs=tuple(ins),
            out_specs=tuple(outs),
            tied=find_fed_back(self.program),
            donated=self.donated,
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

    def _requested(self, values: Sequence[ProgramValue]) -> list[PartitionSpec | None]:
        requested = [value.requested for value in values]
        return [s.spec if isinstance(s, NamedSharding) else None for s in requested]

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
                if path not in specs:  # The first expression that matches holds.
                    sharding.check_compatible_aval(avals[path].shape)
                    specs[path] = spec
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
        fun: The function, as for `explain`.
        args: Positional arguments of a call, or their shapes. Where they are placed has no effect.
        kwargs: Keyword arguments of the call.
        mesh: Mesh, or its axis sizes; None for the mesh in force.
        topology: Topology of the devices of a mesh that has others, or none.

    Raises:
        ArgumentError: If the function or a sharding of it is invalid.
        MeshError: If there is no mesh, or its sizes don't multiply to the number of devices.
        TopologyError: If the topology is unknown, or the mesh doesn't match it.
    """
    fun, args, kwargs = unwrap(fun, args, dict(kwargs))
    check_tracers(fun, args, kwargs)
    place, on, at_hand = _target(mesh, topology, meshes_of_function(fun))
    bare = jax.tree.map(unplaced, (args, kwargs))
    program = _trace(fun, bare[0], bare[1], on)
    # A search looks inside of high-level primitives, which have no sharding rules.
    program = replace(program, jaxpr=without_high_level(program.jaxpr))
    traced_on, own = None, program.mesh
    if own is not None and set(own.devices.flat) != set(on.devices.flat):
        traced_on = Mesh(own.devices.reshape(on.devices.shape), on.axis_names)
    return AutoProgram(program, on, place, traced_on, at_hand)


def _trace(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on: Mesh) -> Program:
    """Trace a function for a mesh; in the context of the caller if it names devices of its own."""
    try:
        with jax.set_mesh(on):
            return read_call(fun, args, kwargs)
    except Exception:
        with suppress(Exception):
            program = read_call(fun, args, kwargs)
            if program.mesh is not None and program.mesh.size == on.size:
                return program
        raise


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
    if find_stage(fun) is not None or not callable(fun):
        raise ArgumentError(
            f"auto_shard takes a function, not {type(fun).__name__}: write "
            "xlashard.auto_shard(f, x, mesh={'data': 8}), without calling f"
        )
    types = Mesh, jax.sharding.AbstractMesh, Mapping, BaseTopology, str, NoneType
    expected = "a mesh, its axis sizes such as {'data': 8}, or a topology such as 'v5e-8'"
    check_type("mesh", mesh, types, expected)
    if isinstance(mesh, BaseTopology) or (isinstance(mesh, str) and mesh != "auto"):
        own = meshes_of_function(unwrap(fun, args, kwargs)[0])
        mesh, topology = None if own else "auto", mesh
    if topology is not None:
        topology = find_topology(topology)
    if mesh != "auto":
        yield read_program(fun, args, kwargs, mesh, topology)
        return
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
        at_hand = mesh = mesh if isinstance(mesh, Mesh) and not mesh.empty else _local_mesh(mesh)
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
