"""Shardings that a call leaves open: chosen under `AUTO`, else reported if large and replicated.

The planner of `AUTO` stands on the compilers, above this room: `xlashard.support.hooks` has it.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, Protocol

import jax
from jax.sharding import AxisType

from xlashard._jax.lowering import aval_text
from xlashard._jax.runtime.global_state import trace_context
from xlashard._jax.trace.jaxprs import is_reference
from xlashard._jax.trace.primitive_names import CONSTRAINTS
from xlashard._jax.trace.tracing import explicit_sharding, is_token
from xlashard.core.pjit.arguments import Argument
from xlashard.core.pjit.compile import PROGRAMS
from xlashard.core.pjit.options import PjitOptions
from xlashard.core.pjit.shardings.device_assignment import mesh_of
from xlashard.core.pjit.shardings.resolve import named
from xlashard.core.pjit.trace import Call
from xlashard.core.program import uneven_shardings as settings
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.program.uneven_shardings import is_strict, tile_bytes, warn
from xlashard.core.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    XLACompatibleSharding,
    on_mesh,
)
from xlashard.core.sharding.replicated import REPLICATED
from xlashard.errors import MeshError, ReplicationError, ReplicationWarning
from xlashard.support import hooks
from xlashard.support.formatting import in_bytes
from xlashard.support.lazily import dataclass


@dataclass(frozen=True, eq=False)
class ChosenLayout:
    """Layout of a call's program.

    Attributes:
        in_specs: Spec of each argument.
        out_specs: Spec of each result.
        jaxpr: The closed jaxpr with sharding constraints; None for that of the call.
    """

    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    jaxpr: Any = None


class LayoutPlanner(Protocol):
    """Planner of layouts."""

    def plan_call(self, function: Any, call: Call, mesh: Mesh) -> ChosenLayout:
        """Return a layout for the shardings of a call of a `Function` that are None."""
        ...


_PLANNERS: list[LayoutPlanner] = [hooks.planner]


def use_planner(planner: LayoutPlanner) -> LayoutPlanner:
    """Register the planner, and return the previous one."""
    before, _PLANNERS[:] = _PLANNERS[0], [planner]
    return before


def planned_call(function: Any, call: Call) -> Call:
    """Return a call with the layout that the planner chose, if one of its shardings is `AUTO`.

    The planner also chooses shardings that are unspecified, except of committed arguments. Its
    choice is kept as long as the jaxpr.

    Args:
        function: The `Function`.
        call: A traced call of it, outside of other programs.

    Raises:
        MeshError: If there is no mesh, or one with explicit axes.
    """
    if call.auto is None:
        return call
    arguments = function.describe_arguments(call)
    ins = tuple(map(_own_sharding, call.in_shardings, arguments, call.auto))
    outs, traced = call.out_shardings, call.traced
    if None not in (*ins, *outs):
        return replace(call, auto=None, in_shardings=ins)
    mesh = call.mesh or _mesh_at_hand((*ins, *outs), arguments)
    if mesh is None and jax.device_count() == 1:
        return replace(call, auto=None)
    mesh = _usable(mesh, function, call)
    moves = tuple([sharding is None for sharding in ins])
    request = replace(
        call,
        mesh=mesh,
        auto=None,
        moves=moves,
        in_shardings=_fixed(ins, traced.in_avals, mesh),
        out_shardings=_fixed(outs, traced.jaxpr.out_avals, mesh),
    )
    layout = _layout(function, request, mesh)
    new_ins, new_outs = (
        tuple(
            named(mesh, spec) if own is None and _is_array(aval) else own
            for own, spec, aval in zip(side, specs, avals, strict=True)
        )
        for side, specs, avals in (
            (ins, layout.in_specs, traced.in_avals),
            (outs, layout.out_specs, traced.jaxpr.out_avals),
        )
    )
    if layout.jaxpr is not None:
        traced = traced._replace(jaxpr=layout.jaxpr, shared={})
    chosen = tuple([sharding is None for sharding in outs])
    call = replace(call, traced=traced, auto=None, moves=moves, chosen_results=chosen)
    return replace(call, in_shardings=new_ins, out_shardings=new_outs)


def _own_sharding(requested: Sharding | None, argument: Argument, auto: bool) -> Sharding | None:
    """Return the sharding that an argument keeps; None to choose it."""
    return argument.sharding if requested is None and argument.committed and not auto else requested


def _mesh_at_hand(
    shardings: Sequence[Sharding | None], arguments: Sequence[Argument]
) -> Mesh | None:
    """Return the mesh of a sharding or argument, without one in force; None if none has one."""
    committed = [a.sharding for a in arguments if a.committed]
    meshes = [mesh_of(s) for s in (*shardings, *committed) if s is not None]
    return next((mesh for mesh in meshes if mesh is not None), None)


def _usable(mesh: Mesh | None, function: Any, call: Call) -> Mesh:
    """Return the mesh, if a layout can be chosen on it.

    Raises:
        MeshError: Without a mesh, or for one with explicit axes.
    """
    if mesh is not None and AxisType.Explicit not in mesh.axis_types:
        return mesh
    options, traced = function.options, call.traced
    what, paths, chosen = options.in_resources.what, traced.arg_names, call.auto or ()
    if not any(chosen):
        what, paths = options.out_resources.what, traced.result_paths
        chosen = [sharding is None for sharding in call.out_shardings]
    path = next((path for path, auto in zip(paths, chosen, strict=True) if auto), "the result")
    if mesh is None:
        raise MeshError(
            f"{what} of {path} is AUTO, but no mesh is in force over whose axes {traced.name} "
            "could be sharded: call inside `with jax.set_mesh(mesh):`, or write P() for whole "
            "arrays"
        )
    axis = mesh.axis_names[mesh.axis_types.index(AxisType.Explicit)]
    raise MeshError(
        f"{what} of {path} is AUTO, but axis {axis!r} of the mesh is explicit, so the types in "
        f"{traced.name} prescribe its shardings: write jax.make_mesh({mesh.axis_sizes}, "
        f"{mesh.axis_names}, axis_types=(AxisType.Auto,) * {len(mesh.axis_names)})"
    )


def _is_array(aval: Any) -> bool:
    return not (is_reference(aval) or is_token(aval))


def _fixed(
    shardings: Sequence[Sharding | None], avals: Sequence[Any], mesh: Mesh
) -> tuple[Sharding | None, ...]:
    """Return shardings as specs on a mesh; None to choose them."""
    whole = NamedSharding(mesh, PartitionSpec())

    def fixed(sharding: Sharding | None, aval: Any) -> Sharding | None:
        if not _is_array(aval):
            return whole
        if sharding is REPLICATED:
            return whole
        if isinstance(sharding, XLACompatibleSharding):
            sharding = on_mesh(sharding, mesh, aval.ndim)
        return whole if sharding is not None and mesh_of(sharding) != mesh else sharding

    return tuple(map(fixed, shardings, avals))


def _layout(function: Any, request: Call, mesh: Mesh) -> ChosenLayout:
    ins, outs = request.in_shardings, request.out_shardings
    if mesh.size == 1 or None not in (*ins, *outs):
        whole = PartitionSpec()
        return ChosenLayout((whole,) * len(ins), (whole,) * len(outs))
    jaxpr, options = request.traced.jaxpr, function.options.compiler_options
    key = "layout", mesh, ins, outs, request.donated, options, trace_context()

    def chosen() -> ChosenLayout:
        layout = _PLANNERS[0].plan_call(function, request, mesh)
        if layout.jaxpr is None or layout.jaxpr is jaxpr:
            return replace(layout, jaxpr=None)  # a value kept for the jaxpr would keep it alive
        function.planned.add(layout.jaxpr)
        return layout

    return PROGRAMS.cached(jaxpr, key, chosen)


type _Value = tuple[str, Any, XLACompatibleSharding]
"""Path, abstract value and final sharding."""


def report_replicated(call: Call, compiled: CompiledProgram, options: PjitOptions) -> None:
    """Report large values of a call that have no sharding and are replicated.

    These are arguments without a requested sharding that are not committed, and results without one
    of a type that no argument has. A layout chosen under `AUTO` replicates on purpose.

    Args:
        call: The call, which has missed the caches.
        compiled: Its program.
        options: The options of its function.

    Raises:
        ReplicationError: If any, under `strict`.
    """
    least, plan = settings.FLAGS.warn_replicated * 2**20, compiled.plan
    if len(plan.devices) == 1 or not least:
        return
    values = [(each, "by device_put or in_shardings") for each in _arguments(call, compiled)]
    values += [(each, "by out_shardings") for each in _results(call, compiled)]
    for (path, aval, sharding), where in values:
        nbytes = tile_bytes(aval, (1,) * aval.ndim)
        if nbytes < least or not sharding.rank_tiling(aval.ndim).is_replicated:
            continue
        text = (
            f"{path} of {call.traced.name} ({aval_text(aval)}) has no sharding, and the "
            f"partitioner leaves it whole: {in_bytes(nbytes)} on each of {len(plan.devices)} "
            f"devices. Give it {_advice(plan.mesh, aval.shape)}, {where}; P() keeps it whole, and "
            "AUTO chooses"
        )
        if is_strict(options.strict):
            raise ReplicationError(text, path=path, device_bytes=nbytes)
        warn(text, ReplicationWarning)


def _arguments(call: Call, compiled: CompiledProgram) -> Iterator[_Value]:
    """Yield the arguments that have no placement."""
    kept = compiled.kept
    arguments = compress(call.miss.arguments or (), kept)
    shardings = compiled.in_shardings[len(compiled.consts) :]
    for argument, requested, sharding in zip(
        arguments, compress(call.in_shardings, kept), shardings, strict=True
    ):
        if requested is None and not argument.committed and _is_array(argument.aval):
            yield argument.path, argument.aval, sharding


def _results(call: Call, compiled: CompiledProgram) -> Iterator[_Value]:
    """Yield the results without a requested sharding, of types that no argument has."""
    jaxpr = call.traced.jaxpr
    # Most values of a large program have one of few types.
    types = {(aval.shape, aval.dtype) for aval in set(compiled.in_avals) if _is_array(aval)}
    free = {
        aval
        for aval in set(jaxpr.out_avals)
        if _is_array(aval)
        and explicit_sharding(aval) is None
        and (aval.shape, aval.dtype) not in types
    }
    constrained = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name in CONSTRAINTS}
    for variable, path, requested, sharding in zip(
        jaxpr.outvars,
        call.traced.result_paths,
        call.out_shardings,
        compiled.out_shardings,
        strict=False,
    ):
        aval = variable.aval
        pinned = isinstance(variable, Hashable) and variable in constrained
        if requested is None and aval in free and not pinned:
            yield path or "the result", aval, sharding


def _advice(mesh: Mesh | None, shape: Sequence[int]) -> str:
    """Return a sharding over the largest axes that divide a dimension, as code."""
    if mesh is None:
        return "one, such as NamedSharding(mesh, P('data'))"
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    for names in (tuple(sizes), *sorted(((name,) for name in sizes), key=lambda n: -sizes[n[0]])):
        for dim, length in enumerate(shape):
            if length and length % math.prod(sizes[name] for name in names) == 0:
                entry = names[0] if len(names) == 1 else names
                return f"one, such as NamedSharding(mesh, {PartitionSpec(*[None] * dim, entry)})"
    return "one after xlashard.pad_to_mesh"
