"""Describe a proven layout: its values, constraints with their lines, and the alternatives."""

import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Literal

import jax

from xlashard._jax.trace.origins import source_frames, source_line
from xlashard._jax.trace.tracing import bodies, count_bytes, entry_axes, shaped, source_of
from xlashard._jax.tree_definitions import outline
from xlashard.analysis.explain.descriptions import describe_collective
from xlashard.analysis.explain.model import CollectiveReport, ValueReport
from xlashard.analysis.explain.sections import read_causes
from xlashard.analysis.programs.program import ProgramValue, find_fed_back
from xlashard.analysis.programs.source_lines import SourceLocator, distinguish_lines
from xlashard.auto.auto_program import AutoProgram
from xlashard.auto.foreseen import link_seconds
from xlashard.auto.layout_builder import INSIDE
from xlashard.auto.plan.auto_plan import AutoPlan, fingerprint_of
from xlashard.auto.plan.plan_model import (
    HeldMemory,
    LogicalAxisRule,
    Outcome,
    PlannedArgument,
    PlannedConstraint,
    PlannedLayout,
    is_parameter_path,
    text_of_spec,
)
from xlashard.auto.problem import AutoProblem, ProgramLayout, site_value
from xlashard.auto.proof import ProvenLayout, ProvenLayouts
from xlashard.auto.rules.op_rules import op_rule
from xlashard.core.program.wrapper_paths import is_equinox
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec, spec_of
from xlashard.core.sharding.named import grid_of
from xlashard.errors import counted
from xlashard.hlo.collectives import add_up
from xlashard.hlo.module import Frame
from xlashard.predict.preflight.memory_breakdown import describe_temporaries
from xlashard.predict.preflight.report.preflight_model import TemporaryReport
from xlashard.support.formatting import typed

_MOST_HELD = 20


def describe_plan(
    program: AutoProgram,
    problem: AutoProblem,
    layouts: ProvenLayouts,
    arguments: Any,
    fun: Any = None,
    untied_seconds: float | None = None,
) -> AutoPlan:
    """Return the report of the best layout.

    Args:
        program: The program.
        problem: The problem that was solved.
        layouts: The layouts.
        arguments: Arguments of the call, which may name logical axes.
        fun: The function.
        untied_seconds: Time of a step with a spec for each array, if the layout is tied.
    """
    best, own = layouts.proven[0], program.program
    jaxpr, layout = own.jaxpr, best.layout
    second = next((p.layout for p in layouts.proven[1:] if p.fits), layout)
    in_specs = layout.in_specs, second.in_specs, problem.in_specs
    inputs = _values(program.mesh, own.arguments, *in_specs)
    out_specs = layout.out_specs, second.out_specs, problem.out_specs
    outputs = _values(program.mesh, own.results, *out_specs)
    unforeseen = tuple(_unforeseen(program, best))
    names = _read_names([value.shape for value in inputs], arguments)
    rules = axis_rules(
        [*zip(names, layout.in_specs, (value.device_bytes for value in inputs), strict=True)]
    )
    by_rules = map(text_of_spec, tie_specs(program, layout.in_specs, arguments))
    shown = [
        replace(each, title=describe_axes(program, layout))
        for each, layout in (
            *((_proven_text(proven), proven.layout) for proven in layouts.proven),
            *((_predicted(layout), layout) for layout in layouts.others),
        )
    ]
    plan = AutoPlan(
        name=own.name,
        devices=_devices_text(program),
        mesh=tuple((str(name), size) for name, size in program.mesh.shape.items()),
        outcome=shown[0].outcome,
        memory_bytes=round(problem.memory_bytes),
        inputs=inputs,
        outputs=outputs,
        constraints=tuple(_constraints(program, layout)),
        layouts=tuple(shown),
        collectives=best.collectives,
        shares=best.shares,
        links="ici" if program.topology is None else program.topology.chip.links,
        fingerprint=fingerprint_of(jaxpr),
        arguments=tuple(_arguments(program)),
        axis_rules=tuple(LogicalAxisRule(*rule) for rule in rules),
        beyond_rules=sum(map(operator.ne, by_rules, (value.spec for value in inputs))),
        untied_seconds=untied_seconds,
        unforeseen=unforeseen,
        excerpts=read_causes(unforeseen),
        gap=layouts.gap,
        least_seconds=layouts.least_seconds,
        unknown_primitives=unknown_primitives(jaxpr),
        held=() if best.fits else _held(best, inputs, source_of(jaxpr)),
        explicit_axes=program.tracing.explicit_axes,
        types=tuple(map(text_of_spec, program.tracing.types)),
        ignores_constraints=program.tracing.ignores_constraints,
        wrapper=_find_library(fun),
    )
    return distinguish_lines(plan).bound_to(program)


def unknown_primitives(jaxpr: Any) -> tuple[str, ...]:
    """Return the names of the primitives of a jaxpr that have no sharding rule.

    Args:
        jaxpr: The closed jaxpr.
    """
    unknown: set[str] = set()
    for eqn in jaxpr.eqns:
        inner = list(bodies(eqn))
        # Inside shard_map each device runs what is written.
        if eqn.primitive.name != "shard_map":
            unknown.update(*map(unknown_primitives, inner))
        if not inner and not op_rule(eqn).known:
            unknown.add(eqn.primitive.name)
    return tuple(sorted(unknown))


def _find_library(fun: Any) -> Literal["", "nnx", "equinox"]:
    if is_equinox(fun):
        return "equinox"
    return "nnx" if type(fun).__module__.startswith("flax.nnx") else ""


def _arguments(program: AutoProgram) -> Iterator[PlannedArgument]:
    """Yield the arguments of the call."""
    own = program.program
    args, kwargs = outline(own.in_tree, range(own.in_tree.num_leaves))
    trees = [*((tree, False) for tree in args), *((tree, True) for tree in kwargs.values())]
    for tree, keyword in trees:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        prefixes = {
            path.removesuffix(suffix) if path.endswith(suffix) else ""
            for keys, leaf in leaves
            for path, suffix in [(own.arguments[leaf].path, jax.tree_util.keystr(keys))]
        }
        path = prefixes.pop() if len(prefixes) == 1 else ""
        # Of code, an argument is a name or an entry of `*args`.
        path = path if is_parameter_path(path) else ""
        is_donated = bool(leaves) and all(own.arguments[leaf].donated for _, leaf in leaves)
        yield PlannedArgument(path, keyword, is_donated)


def _values(
    mesh: Mesh,
    shown: Sequence[ProgramValue],
    specs: Sequence[PartitionSpec],
    second: Sequence[PartitionSpec],
    fixed: Sequence[PartitionSpec | None],
) -> tuple[ValueReport, ...]:
    """Describe arguments or results.

    Args:
        mesh: The mesh.
        shown: The arguments or results.
        specs: Spec of each in the layout.
        second: Spec of each in the layout that came second.
        fixed: Spec of each that is prescribed, or None.
    """
    values = []
    for own, spec, other, kept in zip(shown, specs, second, fixed, strict=True):
        aval, text, other_text = shaped(own.aval), text_of_spec(spec), text_of_spec(other)
        sharding = NamedSharding(mesh, spec)
        value = ValueReport(
            path=own.path,
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            spec=text,
            decided_by="auto" if kept is None else "caller",
            nbytes=count_bytes(aval),
            device_bytes=count_bytes(aval, sharding.shard_shape(aval.shape)),
            copies=sharding.rank_tiling(aval.ndim).num_replicas,
            runner_up="" if other_text == text else other_text,
        )
        values.append(value)
    return tuple(values)


def _constraints(program: AutoProgram, layout: ProgramLayout) -> Iterator[PlannedConstraint]:
    """Yield the constraints inside, by line of source."""
    jaxpr = program.jaxpr
    sources = SourceLocator.of(source_of(jaxpr))
    places = dict(_number_operations(jaxpr, (), Counter())) if layout.constraints else {}
    for site, spec in layout.constraints:
        is_parameter = site.kind == "parameter"
        line, number = places[site.path[:-1] if is_parameter else site.path]
        eqn, value = site_value(jaxpr, site)
        frames = () if eqn is None else tuple(Frame(*f) for f in source_frames(eqn))
        if not hasattr(value.aval, "shape"):
            continue
        yield PlannedConstraint(
            operation="" if eqn is None else eqn.primitive.name,
            kind=site.kind,
            index=site.index,
            type=typed(value.aval.dtype, value.aval.shape),
            spec=text_of_spec(spec),
            source=sources.line(frames),
            site=site.path,
            line=line,
            number=number,
            body=site.path[-1] if is_parameter and site.path else 0,
        )


def _number_operations(
    jaxpr: Any, path: tuple[int, ...], counts: Counter[tuple[str, str]]
) -> Iterator[tuple[tuple[int, ...], tuple[str, int]]]:
    """Yield the path of each equation with its line, and its number there among its name's."""
    if not path:
        yield (), ("", 0)
    for position, eqn in enumerate(jaxpr.eqns):
        file, line = source_line(eqn) or ("", 0)
        place = f"{re.split(r'[/\\\\]', file)[-1]}:{line}" if file else ""
        key = place, eqn.primitive.name
        yield (*path, position), (place, counts[key])
        counts[key] += 1
        for number, body in enumerate(bodies(eqn) if key[1] != "shard_map" else ()):
            yield from _number_operations(body, (*path, position, number), counts)


def _unforeseen(program: AutoProgram, best: ProvenLayout) -> Iterator[CollectiveReport]:
    sources, grid = SourceLocator.of(source_of(program.jaxpr)), grid_of(program.mesh)
    for collective, cost in best.unforeseen:
        yield replace(
            describe_collective(collective, grid, {}, sources),
            **add_up([collective]),
            network=cost.resource,
            seconds=link_seconds(collective, cost),
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


def describe_axes(program: AutoProgram, layout: ProgramLayout) -> str:
    """Return what each mesh axis does in a layout, in the words of parallel training.

    Empty for a program without state, whose arguments show no batch.
    """
    own, arguments = program.program, program.program.arguments
    state = {argument for argument, _ in find_fed_back(own)}
    batch = {v.aval.shape[0] for i, v in enumerate(arguments) if i not in state and v.aval.shape}
    if not state or not batch:
        return ""
    stored, activations = [], []
    for i, (value, spec) in enumerate(zip(arguments, layout.in_specs, strict=True)):
        (stored if i in state else activations).append((value.aval, spec))
    inside = ((site_value(program.jaxpr, site)[1].aval, spec) for site, spec in layout.constraints)
    activations += [(aval, spec) for aval, spec in inside if {*aval.shape[:1]} & batch]
    axes_by_role: dict[str, list[str]] = defaultdict(list)
    for axis in (str(name) for name, size in program.mesh.shape.items() if size > 1):
        whole = sum(count_bytes(aval) for aval, _ in stored)
        sharded = sum(count_bytes(aval) for aval, spec in stored if axis in spec_of(spec).axes)
        places = {
            # The second dimension is the sequence, unless it is the last.
            0 if place == 0 else 1 if place == 1 and aval.ndim > 2 else 2
            for aval, spec in activations
            for place, entry in enumerate(spec)
            if axis in entry_axes(entry)
        }
        axes_by_role[_name_role(places, 2 * sharded > whole)].append(axis)
    roles = [f"{role} over {' × '.join(axes)}" for role, axes in axes_by_role.items()]
    kept = layout.name.partition(INSIDE)[2]
    pinned = [f"{'nothing' if kept == 'none' else kept} pinned inside"] if kept else []
    words = ("corrected", "lighter", "small state replicated")
    return ", ".join([*roles, *(word for word in words if word in layout.name), *pinned])


def _name_role(places: Set[int], shards_state: bool) -> str:
    """Return the name of what a mesh axis does.

    Args:
        places: Dimensions of activations that it shards: 0 is the batch, 1 the sequence.
        shards_state: Whether it shards most of the state.
    """
    if 0 in places:
        return "FSDP" if shards_state else "data"
    if 1 in places:
        return "FSDP with sequence" if shards_state else "sequence"
    return "tensor" if shards_state or places else "replicated"


def _predicted(layout: ProgramLayout) -> PlannedLayout:
    return PlannedLayout(layout.name, "not compiled", layout.seconds, round(layout.memory_bytes))


def _devices_text(program: AutoProgram) -> str:
    if program.topology is not None:
        return str(program.topology)
    return counted(program.mesh.size, f"{program.mesh.devices.flat[0].device_kind} device")


def _read_names(shapes: Sequence[tuple[int, ...]], arguments: Any) -> list[tuple[Any, ...]]:
    """Return the names of the dimensions of each argument; none where a wrapper passes others."""
    passed = [jax.numpy.shape(leaf) for leaf in jax.tree_util.tree_leaves(arguments)]
    return list(logical_axes(arguments)) if passed == list(shapes) else [()] * len(shapes)


def tie_specs(
    program: AutoProgram, specs: Sequence[PartitionSpec], arguments: Any
) -> tuple[PartitionSpec, ...]:
    """Return one spec for each logical name and for equal layers, near those of a layout.

    A name gets the mesh axes that shard most of its bytes, and arrays without names, whose paths
    differ by numbers alone, the spec of most of them.

    Args:
        program: The program.
        specs: Spec of each argument.
        arguments: Arguments of the call.
    """
    own = program.program.arguments
    shapes = [tuple(value.aval.shape) for value in own]
    names = _read_names(shapes, arguments)
    rules = dict(axis_rules([*zip(names, specs, (v.nbytes for v in own), strict=True)]))
    layers = [(re.sub(r"\d+", "", v.path), s) for v, s in zip(own, shapes, strict=True)]
    counts: dict[Any, Counter[PartitionSpec]] = defaultdict(Counter)
    for layer, spec in zip(layers, specs, strict=True):
        counts[layer][spec] += 1
    sizes = dict(program.mesh.shape)
    return tuple(
        spec_by_names(named, rules, shape, sizes) if named else counts[layer].most_common(1)[0][0]
        for named, shape, layer in zip(names, shapes, layers, strict=True)
    )


def spec_by_names(
    names: Sequence[str | None],
    rules: Mapping[str, tuple[str, ...]],
    shape: Sequence[int],
    sizes: Mapping[Any, int],
) -> PartitionSpec:
    """Return the spec that rules of logical axes give an array, each mesh axis once.

    Args:
        names: Names of its dimensions.
        rules: Mesh axes of each name.
        shape: Its shape.
        sizes: Sizes of the mesh axes.
    """
    left, entries = set(sizes), []
    for name, size in zip(names, shape, strict=False):
        axes = tuple(axis for axis in rules.get(name or "", ()) if axis in left)
        axes = axes if size % math.prod(sizes[axis] for axis in axes) == 0 else ()
        left -= set(axes)
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def logical_axes(args: Any) -> tuple[tuple[str | None, ...], ...]:
    """Return the names of the dimensions of each array of a pytree; empty for one without names.

    Flax's boxes (`nn.Partitioned`) and variables, and haliax's arrays, name the dimensions of the
    array inside.

    Args:
        args: The pytree.
    """
    boxes = jax.tree_util.tree_leaves(args, is_leaf=lambda v: bool(_names(v)))
    return tuple(_names(box) for box in boxes for _ in jax.tree_util.tree_leaves(box))


def _names(value: Any) -> tuple[Any, ...]:
    """Return the names of the dimensions of a box; empty for other values."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct | tuple | list | dict):
        return ()
    metadata = value.get_metadata() if hasattr(value, "get_metadata") else {}
    names = getattr(value, "names", None) or metadata.get("out_sharding")
    names = names or metadata.get("sharding_names")
    axes = getattr(value, "axes", None)
    if not names and isinstance(axes, tuple):
        names = tuple([getattr(axis, "name", axis) for axis in axes])
    if not isinstance(names, tuple) or not any(names):
        return ()
    return names if all(name is None or isinstance(name, str) for name in names) else ()


def axis_rules(
    values: Sequence[tuple[tuple[str | None, ...], PartitionSpec, int]],
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the mesh axes of each logical axis: those that shard most of its bytes.

    Args:
        values: Names of the dimensions, spec and bytes of each value.
    """
    weights: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for names, spec, nbytes in values:
        dims = [*spec, *(None,) * (len(names) - len(spec))]
        for name, axes in zip(names, dims, strict=False):
            if name is not None:
                listed = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
                weights[name][tuple(map(str, listed))] += nbytes
    return tuple((name, counts.most_common(1)[0][0]) for name, counts in sorted(weights.items()))


def _held(
    best: ProvenLayout, inputs: Sequence[ValueReport], described: str
) -> tuple[HeldMemory, ...]:
    """Return what holds the memory, largest first."""
    arguments = [HeldMemory(v.path, v.type, v.device_bytes) for v in inputs]
    temporaries: Sequence[TemporaryReport] = ()
    if (compilation := best.compilation) is not None:
        sources, names = SourceLocator.of(described), compilation.argument_names
        temporaries = describe_temporaries(compilation.module, sources, names)
    inside = [
        HeldMemory(t.op_name or t.name, t.type, t.device_bytes, t.source) for t in temporaries
    ]
    return tuple(sorted((*arguments, *inside), key=lambda held: -held.device_bytes)[:_MOST_HELD])
