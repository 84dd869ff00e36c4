"""Program of an automatic layout: the function traced for a mesh, and what its layout must keep."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import NoneType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import AxisType

from xlashard._jax.runtime.shardings import is_compile_only
from xlashard._jax.runtime.topologies import named_topology
from xlashard._jax.trace.jaxprs import without_high_level
from xlashard._jax.trace.prescriptions import prescribe_by_constraints
from xlashard._jax.trace.primitive_names import CONSTRAINT
from xlashard._jax.trace.tracing import entry_axes, inner_sharding_equations
from xlashard.analysis.programs.from_jax import unwrap
from xlashard.analysis.programs.program import LoweredModule, Program, ProgramValue, find_fed_back
from xlashard.analysis.programs.program_reader import check_tracers, find_stage, read_call
from xlashard.auto.plan.plan_model import spec_of_text
from xlashard.auto.problem import (
    OPEN,
    AutoProblem,
    ProgramLayout,
    chip_of,
    insert_constraints,
    machine_of,
)
from xlashard.core.pjit.constraint import constraint_p, constraint_params
from xlashard.core.program.signature import function_name
from xlashard.core.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, spec_of
from xlashard.errors import ArgumentError, MeshError, XlashardError, check_type, counted
from xlashard.geometry.strides import divisors
from xlashard.predict.costs.rates import Rates
from xlashard.predict.preflight.mesh_mapping import (
    MeshLike,
    argument_placer,
    find_topology,
    leaves_by_path,
    meshes_of_function,
    resolve_mesh,
)
from xlashard.predict.preflight.report.measured import RatesSources, read_calibrations
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.predict.targets.mesh_layout import resolve_axis_sizes

type Target = MeshLike | BaseTopology | str
"""A mesh, its axis sizes, a topology, or `auto` to choose the sizes."""

type FixedSpecs = Mapping[str, PartitionSpec | str]
"""Specs, or their text in reports, by regular expressions over paths."""

OWN_LAYOUT = "as it is written"
"""Name of the layout that a program comes with."""
_AXES = ("data", "model")
_LONGEST = 32
"""Longest second axis of the meshes to choose from."""


@dataclass(frozen=True)
class Tracing:
    """Context in which a function is traced for its layout.

    Attributes:
        explicit_axes: Mesh axes that are explicit during the trace; empty for a function that
            prescribes no sharding by types.
        types: Spec in the type of each argument under explicit axes.
        ignores_constraints: Whether the function's own constraints are left out.
    """

    explicit_axes: tuple[str, ...] = ()
    types: tuple[PartitionSpec, ...] = ()
    ignores_constraints: bool = False

    def set_axis_types(self, mesh: Mesh) -> Mesh:
        """Return a mesh with the axis types of the trace."""
        kinds = [
            AxisType.Explicit if name in self.explicit_axes else AxisType.Auto
            for name in mesh.axis_names
        ]
        return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(kinds))

    def place(self, leaves: Sequence[Any], mesh: Mesh) -> list[Any]:
        """Return the leaves of a call as shapes that the function is traced for."""
        bare = list(map(unplaced, leaves))
        if not self.types or len(self.types) != len(bare):
            return bare
        places = [NamedSharding(self.set_axis_types(mesh), spec) for spec in self.types]
        return [
            leaf.update(sharding=place) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
            for leaf, place in zip(bare, places, strict=True)
        ]

    def release(self, jaxpr: Any, mesh: Mesh) -> Any:
        """Return a jaxpr of the trace as a layout is searched for it.

        Args:
            jaxpr: The closed jaxpr.
            mesh: Mesh of the constraints that explicit axes become; its axes are automatic.
        """
        # A search looks inside of high-level primitives, which have no sharding rules.
        jaxpr = without_high_level(jaxpr)
        if not (self.explicit_axes or self.ignores_constraints):
            return jaxpr

        def constrain(spec: PartitionSpec) -> tuple[Any, dict[str, Any]]:
            return constraint_p, constraint_params(NamedSharding(mesh, spec))

        return prescribe_by_constraints(jaxpr, None if self.ignores_constraints else constrain)


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
        tracing: How the function was traced.
        placed: Spec of each argument where it is now; whole if it isn't on the axes of the mesh.
            Empty if all are.
    """

    program: Program
    mesh: Mesh
    topology: BaseTopology | None
    traced_on: Mesh | None = None
    at_hand: Mesh | None = None
    rates: Rates | None = None
    tracing: Tracing = Tracing()
    placed: tuple[PartitionSpec, ...] = ()

    @property
    def jaxpr(self) -> Any:
        """Return the closed jaxpr."""
        return self.program.jaxpr

    @cached_property
    def program_ties(self) -> tuple[tuple[int, int], ...]:
        """Return the positions of arguments and results that are fed back."""
        return find_fed_back(self.program)

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
            tuple(None if spec == OPEN else NamedSharding(on, spec) for spec in side)
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

    def problem(self, memory: float = 0.9, fixed: FixedSpecs | None = None) -> AutoProblem:
        """Return the problem of its layout.

        Args:
            memory: Share of a device's memory that the program may use.
            fixed: Specs by regular expressions over the paths of arguments and results.

        Raises:
            ArgumentError: If an expression matches nothing, or a spec doesn't fit.
        """
        machine = machine_of(self.mesh, self.topology, self.rates)
        arguments, results = self.program.arguments, self.program.results
        ins, outs = ([self._find_spec(v) for v in side] for side in (arguments, results))
        if not self.tracing.ignores_constraints:
            # A type that shards nothing is that of any array without a sharding, too.
            typed = zip(ins, self.tracing.types or [None] * len(ins), strict=True)
            ins = [
                spec if requested is None and spec and any(spec) else requested
                for requested, spec in typed
            ]
        if fixed:
            avals = {value.path: value.aval for value in arguments + results}
            specs = self._read_fixed(fixed, avals)
            ins = [specs.get(v.path, spec) for v, spec in zip(arguments, ins, strict=True)]
            outs = [specs.get(v.path, spec) for v, spec in zip(results, outs, strict=True)]
        return AutoProblem(
            jaxpr=self.jaxpr,
            machine=machine,
            in_specs=tuple(ins),
            out_specs=tuple(outs),
            tied=self.program_ties,
            donated=self.donated,
            memory_bytes=memory * machine.memory_bytes,
        )

    def read_own_layout(self, problem: AutoProblem) -> ProgramLayout | None:
        """Return the layout that the program comes with; None if it has none, or an invalid one.

        Arguments have the function's own specs, or those that they are placed by, and fed-back
        results those of their arguments. Other results without a spec are `OPEN`. A program whose
        constraints are ignored is another one than was written.

        Args:
            problem: The problem, whose fixed specs hold.
        """
        if self.tracing.ignores_constraints:
            return None
        arguments, results = self.program.arguments, self.program.results
        placed = self.placed or (PartitionSpec(),) * len(arguments)
        pairs = zip(map(_requested_spec, arguments), placed, strict=True)
        ins = [place if own is None else own for own, place in pairs]
        fed_back = {result: ins[argument] for argument, result in self.program_ties}
        outs = [
            fed_back.get(i, OPEN) if (spec := _requested_spec(v)) is None else spec
            for i, v in enumerate(results)
        ]
        fixed = (*problem.in_specs, *problem.out_specs)
        for spec, kept, value in zip((*ins, *outs), fixed, (*arguments, *results), strict=True):
            rank = len(value.aval.shape)
            if spec == OPEN:
                continue
            try:
                NamedSharding(self.mesh, spec).check_compatible_aval(value.aval.shape)
            except (ValueError, XlashardError):
                return None
            if kept is not None and spec_of(kept).for_rank(rank) != spec_of(spec).for_rank(rank):
                return None
        if not any(entry for spec in ins for entry in spec):
            return None
        return ProgramLayout(OWN_LAYOUT, tuple(ins), tuple(outs), (), math.inf, math.inf)

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

    def _find_spec(self, value: ProgramValue) -> PartitionSpec | None:
        return None if self.tracing.ignores_constraints else _requested_spec(value)

    def _read_fixed(self, fixed: FixedSpecs, avals: Mapping[str, Any]) -> dict[str, PartitionSpec]:
        specs: dict[str, PartitionSpec] = {}
        for pattern, spec in fixed.items():
            matching = [path for path in avals if re.search(pattern, path)]
            if not matching:
                raise ArgumentError(
                    f"fixed[{pattern!r}] matches no argument and no result: expected a regular "
                    f"expression that matches paths such as {next(iter(avals), '')!r}"
                )
            sharding = NamedSharding(self.mesh, _read_spec(pattern, spec))
            for path in matching:
                if path not in specs:  # The first expression that matches holds.
                    sharding.check_compatible_aval(avals[path].shape)
                    specs[path] = sharding.spec
        return specs


def _requested_spec(value: ProgramValue) -> PartitionSpec | None:
    sharding = value.requested
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _read_placements(
    leaves: Mapping[str, Any], program: Program, mesh: Mesh
) -> tuple[PartitionSpec, ...]:
    """Return the spec of each argument, by the leaves of a call, which may be static, too."""
    shardings = [getattr(leaves.get(v.path), "sharding", None) for v in program.arguments]
    return tuple(
        sharding.spec
        if isinstance(sharding, jax.sharding.NamedSharding)
        and dict(sharding.mesh.shape) == dict(mesh.shape)
        else PartitionSpec()
        for sharding in shardings
    )


def _read_spec(pattern: str, spec: object) -> PartitionSpec:
    """Return a fixed spec, also of the text that reports have."""
    with suppress(ValueError):
        spec = spec_of_text(spec) if isinstance(spec, str) else spec
    if not isinstance(spec, PartitionSpec):
        raise ArgumentError(
            f"fixed[{pattern!r}] is {spec!r}: expected a PartitionSpec, such as P('data'), or its "
            "text in a report"
        )
    return spec


def read_program(
    fun: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: MeshLike | None,
    topology: BaseTopology | str | None = None,
    *,
    ignore_constraints: bool = False,
) -> AutoProgram:
    """Trace a function for a mesh.

    Args:
        fun: The function, as for `explain`.
        args: Positional arguments of a call, or their shapes.
        kwargs: Keyword arguments of the call.
        mesh: Mesh, or its axis sizes; None for the mesh in force.
        topology: Topology of the devices of a mesh that has others, or none.
        ignore_constraints: Leave out the shardings that the function prescribes.

    Raises:
        ArgumentError: If the function or a sharding of it is invalid.
        MeshError: If there is no mesh, or its sizes don't multiply to the number of devices.
        TopologyError: If the topology is unknown, or the mesh doesn't match it.
    """
    fun, args, kwargs = unwrap(fun, args, dict(kwargs))
    check_tracers(fun, args, kwargs)
    place, typed, at_hand = _target(mesh, topology, meshes_of_function(fun))
    on = Tracing().set_axis_types(typed)
    program, tracing = _trace(fun, args, kwargs, typed)
    tracing = replace(tracing, ignores_constraints=ignore_constraints)
    traced_on, own = None, program.mesh
    if own is not None and set(own.devices.flat) != set(on.devices.flat):
        traced_on = Mesh(own.devices.reshape(on.devices.shape), on.axis_names)
    program = replace(program, jaxpr=tracing.release(program.jaxpr, traced_on or on))
    if not ignore_constraints:
        _check_axes(program, on)
    placed = _read_placements(leaves_by_path(fun, args, kwargs), program, on)
    return AutoProgram(program, on, place, traced_on, at_hand, tracing=tracing, placed=placed)


def _trace(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], typed: Mesh
) -> tuple[Program, Tracing]:
    """Trace a function for a mesh, on automatic axes if it can be.

    A function that names devices of its own is traced in the context of the caller.
    """
    explicit = tuple(map(str, typed.explicit_axes))
    errors: list[Exception] = []
    for tracing in (Tracing(), Tracing(explicit))[: 1 + bool(explicit)]:
        on = tracing.set_axis_types(typed)
        place = argument_placer(on) if tracing.explicit_axes else unplaced
        try:
            with jax.set_mesh(on):
                program = read_call(fun, *jax.tree.map(place, (args, kwargs)))
        except Exception as error:
            errors.append(error)
        else:
            types = program.jaxpr.in_avals if tracing.explicit_axes else ()
            return program, replace(tracing, types=tuple([aval.sharding.spec for aval in types]))
    with suppress(Exception):
        program = read_call(fun, *jax.tree.map(unplaced, (args, kwargs)))
        if program.mesh is not None and program.mesh.size == typed.size:
            return program, Tracing()
    missing = re.search(r"axis:? '?(\w+)'?.*(?:not found in mesh|the mesh has)", str(errors[-1]))
    if missing is not None:
        raise _missing_axis(function_name(fun), missing[1], typed) from None
    raise errors[-1]


def _missing_axis(name: str, axis: str, mesh: Mesh) -> ArgumentError:
    sizes = ", ".join(f"{str(own)!r}: {size}" for own, size in mesh.shape.items())
    return ArgumentError(
        f"mesh of auto_shard has no axis {axis!r}, which a sharding in {name} names: write "
        f"mesh={{{sizes}, {axis!r}: 1}}, or a larger size"
    )


def _check_axes(program: Program, mesh: Mesh) -> None:
    """Check that the mesh has the axes of the shardings that a program prescribes."""
    values = (*program.arguments, *program.results)
    eqns = inner_sharding_equations(program.jaxpr)
    named = [value.requested for value in values]
    named += [eqn.params["sharding"] for eqn in eqns if eqn.primitive.name == CONSTRAINT]
    for sharding in named:
        for entry in getattr(sharding, "spec", ()):
            for axis in entry_axes(entry):
                if axis not in mesh.axis_names:
                    raise _missing_axis(program.name, axis, mesh)


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
    (_, size), *others = program.mesh.shape.items()
    for larger in itertools.islice(place.larger(), _LARGER):
        sizes = size * (larger.chips // place.chips), *(n for _, n in others)
        kinds = program.tracing.set_axis_types(program.mesh).axis_types
        mesh = AbstractMesh(sizes, program.mesh.axis_names, axis_types=kinds)
        ignored = program.tracing.ignores_constraints
        new = read_program(fun, args, kwargs, mesh, larger, ignore_constraints=ignored)
        yield replace(new, rates=program.rates)


def read_programs(
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Target | None,
    topology: BaseTopology | str | None = None,
    *,
    ignore_constraints: bool = False,
) -> Iterator[AutoProgram]:
    """Yield the program on the mesh, or on each mesh to choose from.

    Args:
        fun: The function.
        args: Positional arguments of a call.
        kwargs: Keyword arguments of the call.
        mesh: As for `read_program`; `auto`, or a topology for a function without a mesh, for all
            meshes with the axes `data` and `model`.
        topology: Topology of the devices.
        ignore_constraints: As for `read_program`.
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
        yield read_program(fun, args, kwargs, mesh, topology, ignore_constraints=ignore_constraints)
        return
    count = len(jax.devices()) if topology is None else topology.num_devices
    first, second = _AXES
    for size in (n for n in divisors(count) if n <= _LONGEST):
        axes = {first: count // size, second: size} if size > 1 else {first: count}
        yield read_program(fun, args, kwargs, axes, topology, ignore_constraints=ignore_constraints)


def _target(
    mesh: MeshLike | None, topology: BaseTopology | str | None, own: Mapping[str, MeshLike]
) -> tuple[BaseTopology | None, Mesh, Mesh | None]:
    """Return topology, mesh to compile for with its axis types, and mesh to run on.

    None stands for what there isn't.
    """
    if isinstance(topology, str):
        topology = find_topology(topology)
    if mesh is None or isinstance(mesh, Mapping):
        # The function's own mesh has axis types, beside the sizes.
        sizes = None if mesh is None else dict(mesh)
        meshes = (each for each in own.values() if not isinstance(each, Mapping))
        mesh = next((each for each in meshes if sizes in (None, dict(each.shape))), mesh)
    at_hand = None
    if topology is None:
        at_hand = mesh = mesh if isinstance(mesh, Mesh) and not mesh.empty else _local_mesh(mesh)
        topology = topology_of(mesh)
    on = at_hand if topology is None else resolve_mesh(topology, mesh, own)
    assert isinstance(on, Mesh)
    if at_hand is None or is_compile_only(at_hand.devices.flat[0]):
        return topology, on, None
    return topology, on, Tracing().set_axis_types(at_hand)


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
    kinds = None if isinstance(mesh, Mapping) else mesh.axis_types
    sizes = resolve_axis_sizes(axes, len(devices), "this process")
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=kinds)


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
