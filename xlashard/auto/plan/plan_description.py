"""Describe a proven layout: its values, constraints with their lines, and the alternatives."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from xlashard._jax.trace.origins import source_frames
from xlashard._jax.trace.tracing import bodies, shaped, source_of
from xlashard.auto.auto_program import AutoProgram
from xlashard.auto.plan.auto_plan import AutoPlan
from xlashard.auto.plan.path_rules import axis_rules, logical_axes
from xlashard.auto.plan.plan_model import (
    HeldMemory,
    LogicalAxisRule,
    Outcome,
    PlannedArgument,
    PlannedConstraint,
    PlannedLayout,
    PlannedValue,
    UnforeseenTransfer,
    text_of_spec,
)
from xlashard.auto.plan.planned_function import fingerprint_of
from xlashard.auto.problem import AutoProblem, ProgramLayout, site_value
from xlashard.auto.proof import ProvenLayout, ProvenLayouts
from xlashard.auto.rules.op_rules import op_rule
from xlashard.errors import counted
from xlashard.hlo.collectives import along_text
from xlashard.hlo.module import Frame
from xlashard.pjit.report.explained_program import SourceLocator
from xlashard.preflights.memory_breakdown import describe_temporaries
from xlashard.sharding import NamedSharding, PartitionSpec
from xlashard.wording import typed

_MOST_HELD = 20


def describe_plan(
    program: AutoProgram, problem: AutoProblem, found: ProvenLayouts, arguments: Any
) -> AutoPlan:
    """Return the report of the best layout.

    Args:
        program: The program.
        problem: The problem that was solved.
        found: The layouts.
        arguments: Arguments of the call, which may name logical axes.
    """
    best, traced = found.proven[0], program.call.traced
    second = next((p.layout for p in found.proven[1:] if p.fits), None)
    values = _Values(program, problem, best.layout, second)
    inputs, outputs = values.inputs(), values.outputs()
    shown = [*map(_proven_text, found.proven), *map(_predicted, found.others)]
    jaxpr = traced.jaxpr
    plan = AutoPlan(
        name=traced.name,
        devices=_devices_text(program),
        mesh=tuple((str(name), size) for name, size in program.mesh.shape.items()),
        outcome=shown[0].outcome,
        memory_bytes=round(problem.memory_bytes),
        inputs=inputs,
        outputs=outputs,
        constraints=tuple(_constraints(program, best.layout)),
        layouts=tuple(shown),
        collectives=best.collectives,
        shares=best.shares,
        links="ici" if program.topology is None else program.topology.chip.links,
        fingerprint=fingerprint_of(jaxpr),
        arguments=tuple(_arguments(program)),
        axis_rules=_axis_rules(inputs, best.layout.in_specs[program.closed_over :], arguments),
        unforeseen=tuple(_unforeseen(program, best)),
        gap=found.gap,
        least_seconds=found.least_seconds,
        unknown_primitives=unknown_primitives(jaxpr),
        held=() if best.fits else _held(best, inputs, source_of(jaxpr)),
    )
    return plan.bound_to(program)


def unknown_primitives(jaxpr: Any) -> tuple[str, ...]:
    """Return the names of the primitives of a jaxpr that have no sharding rule.

    Args:
        jaxpr: The closed jaxpr.
    """
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        inner = list(bodies(eqn))
        # Inside shard_map each device runs what is written.
        if eqn.primitive.name != "shard_map":
            found.update(*map(unknown_primitives, inner))
        if not inner and not op_rule(eqn).known:
            found.add(eqn.primitive.name)
    return tuple(sorted(found))


def _arguments(program: AutoProgram) -> Iterator[PlannedArgument]:
    """Yield the arguments of the call, without closed-over arrays."""
    traced, donated = program.call.traced, program.call.donated
    args, kwargs = traced.in_tree.unflatten(range(traced.in_tree.num_leaves))
    trees = [*((tree, False) for tree in args), *((tree, True) for tree in kwargs.values())]
    for tree, keyword in trees[program.closed_over :]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        prefixes = {
            path.removesuffix(suffix) if path.endswith(suffix) else ""
            for keys, leaf in leaves
            for path, suffix in [(traced.arg_names[leaf], jax.tree_util.keystr(keys))]
        }
        path = prefixes.pop() if len(prefixes) == 1 else ""
        is_donated = bool(leaves) and all(donated[leaf] for _, leaf in leaves)
        yield PlannedArgument(path, keyword, is_donated)


class _Values:
    """Arguments and results of a layout."""

    def __init__(
        self,
        program: AutoProgram,
        problem: AutoProblem,
        layout: ProgramLayout,
        second: ProgramLayout | None,
    ) -> None:
        self._program, self._problem = program, problem
        self._layout, self._second = layout, second or layout

    def inputs(self) -> tuple[PlannedValue, ...]:
        """Describe the arguments."""
        traced, layout = self._program.call.traced, self._layout
        specs = layout.in_specs, self._second.in_specs, self._problem.in_specs
        rows = zip(traced.arg_names, traced.in_avals, *specs, strict=True)
        return tuple(self._value(*row) for row in rows)[self._program.closed_over :]

    def outputs(self) -> tuple[PlannedValue, ...]:
        """Describe the results."""
        traced, layout = self._program.call.traced, self._layout
        specs = layout.out_specs, self._second.out_specs, self._problem.out_specs
        rows = zip(traced.result_paths, traced.jaxpr.out_avals, *specs, strict=True)
        return tuple(self._value(*row) for row in rows)

    def _value(
        self,
        path: str,
        aval: Any,
        spec: PartitionSpec,
        second: PartitionSpec,
        fixed: PartitionSpec | None,
    ) -> PlannedValue:
        aval = shaped(aval)
        sharding = NamedSharding(self._program.mesh, spec)
        count = 1
        for size in sharding.shard_shape(aval.shape):
            count *= size
        text, other = text_of_spec(spec), text_of_spec(second)
        return PlannedValue(
            path=path,
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            spec=text,
            device_bytes=count * aval.dtype.itemsize,
            is_fixed=fixed is not None,
            runner_up="" if other == text else other,
        )


def _constraints(program: AutoProgram, layout: ProgramLayout) -> Iterator[PlannedConstraint]:
    """Yield the constraints inside, by line of source."""
    jaxpr = program.call.traced.jaxpr
    sources = SourceLocator.of(source_of(jaxpr))
    for site, spec in layout.constraints:
        eqn, value = site_value(jaxpr, site)
        frames = () if eqn is None else tuple(Frame(*f) for f in source_frames(eqn))
        index = site.index
        if not site.path:
            # Closed-over arrays are no arguments of the function itself.
            index -= program.closed_over
        if index < 0 or not hasattr(value.aval, "shape"):
            continue
        yield PlannedConstraint(
            operation="" if eqn is None else eqn.primitive.name,
            kind=site.kind,
            index=index,
            type=typed(value.aval.dtype, value.aval.shape),
            spec=text_of_spec(spec),
            source=sources.line(frames),
            site=site.path,
        )


def _unforeseen(program: AutoProgram, best: ProvenLayout) -> Iterator[UnforeseenTransfer]:
    sources = SourceLocator.of(source_of(program.call.traced.jaxpr))
    for each in best.unforeseen:
        collective = each.collective
        yield UnforeseenTransfer(
            kind=collective.kind,
            along=along_text(collective, program.mesh),
            type=", ".join(map(str, each.shapes)),
            times=collective.times,
            seconds=each.seconds,
            operation=collective.op_name,
            source=sources.line(collective.frames),
        )


def _proven_text(proven: ProvenLayout) -> PlannedLayout:
    outcome: Outcome = "fits" if proven.fits else "out of memory"
    layout, compiled = proven.layout, proven.compilation is not None
    return PlannedLayout(
        name=layout.name,
        outcome=outcome if compiled else "refused",
        predicted_seconds=layout.seconds,
        predicted_bytes=round(layout.memory_bytes),
        seconds=proven.seconds if compiled else None,
        total_bytes=proven.memory_bytes if compiled else None,
        measured_seconds=proven.measured_seconds,
        reason=proven.reason,
    )


def _predicted(layout: ProgramLayout) -> PlannedLayout:
    return PlannedLayout(layout.name, "not compiled", layout.seconds, round(layout.memory_bytes))


def _devices_text(program: AutoProgram) -> str:
    if program.topology is not None:
        return str(program.topology)
    return counted(program.mesh.size, f"{program.mesh.devices.flat[0].device_kind} device")


def _axis_rules(
    inputs: Sequence[PlannedValue], specs: Sequence[PartitionSpec], arguments: Any
) -> tuple[LogicalAxisRule, ...]:
    """Return the mesh axes of the logical axes that arguments name."""
    named = logical_axes(arguments)
    values = [
        (names, spec, value.device_bytes)
        for value, spec in zip(inputs, specs, strict=True)
        for path, names in named.items()
        if value.path.endswith(path)
    ]
    return tuple(LogicalAxisRule(*rule) for rule in axis_rules(values))


def _held(
    best: ProvenLayout, inputs: Sequence[PlannedValue], described: str
) -> tuple[HeldMemory, ...]:
    """Return what holds the memory, largest first."""
    arguments = [HeldMemory(v.path, v.type, v.device_bytes) for v in inputs]
    module = None if best.compilation is None else best.compilation.module
    temporaries = (
        [] if module is None else describe_temporaries(module, SourceLocator.of(described))
    )
    inside = [
        HeldMemory(t.op_name or t.name, t.type, t.device_bytes, t.source) for t in temporaries
    ]
    return tuple(sorted((*arguments, *inside), key=lambda held: -held.device_bytes)[:_MOST_HELD])
