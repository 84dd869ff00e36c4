"""Trace the function of a call, and find the shardings inside it and those requested for it."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from xlashard._jax.lowering import aval_text, memory_transfers
from xlashard._jax.runtime.global_state import cached_by_jaxpr
from xlashard._jax.runtime.shardings import Device, layout_problem
from xlashard._jax.runtime.tracebacks import with_errors_as
from xlashard._jax.trace import tracing
from xlashard._jax.trace.jaxprs import used_parts
from xlashard._jax.trace.target_chip import assume_chip
from xlashard.core.array.array_class.handles import KindOf
from xlashard.core.pjit.arguments import are_arrays, check_values
from xlashard.core.pjit.cache_miss import CacheMiss
from xlashard.core.pjit.constraint import boundary_p, constraint_p
from xlashard.core.pjit.options import PjitOptions
from xlashard.core.pjit.parameters import Parameters
from xlashard.core.pjit.shardings.device_assignment import find_spec_mesh
from xlashard.core.pjit.shardings.resolve import to_sharding
from xlashard.core.pjit.shardings.resources import (
    Auto,
    FromGda,
    Resource,
    ResourceTree,
    expand,
    misfit,
)
from xlashard.core.pjit.shardings.unreduced import check_axes
from xlashard.core.sharding import AbstractMesh, Mesh, Sharding, from_jax, to_jax
from xlashard.core.sharding.replicated import names_devices
from xlashard.errors import ResourceError, TracingError
from xlashard.support.formatting import near_line
from xlashard.support.lazily import dataclass, deferred

if TYPE_CHECKING:
    from xlashard._jax.trace import origins
    from xlashard.core.program import explicit_errors
else:
    origins = deferred("xlashard._jax.trace.origins")
    explicit_errors = deferred("xlashard.core.program.explicit_errors")


@dataclass(frozen=True, eq=False)
class Call:
    """One traced call, before the placement of its program is resolved.

    Attributes:
        traced: The function, traced for the arguments.
        values: The dynamic arguments, flat.
        mesh: The mesh in force, or None.
        in_shardings: The requested sharding of each argument, or None.
        out_shardings: The requested sharding of each result, or None.
        layouts: The requested layouts of arguments and of results.
        donated: For each argument, True if its buffers may be reused.
        statics: The static arguments: names, values, and True if passed by name.
        kind_of: Returns the class of a result; None for `Array`.
        miss: The stages that the call had to run.
        assign: See `ShardingRequest`.
        auto: For each argument, True if its sharding is `AUTO`; None for a call without `AUTO`.
        moves: For each argument, True if its sharding was chosen, so that a committed array is
            resharded; empty for a call without `AUTO`.
        chosen_results: For each result, True if its sharding was chosen; empty likewise.
    """

    traced: tracing.TracedFunction
    values: tuple[Any, ...]
    mesh: Mesh | None
    in_shardings: tuple[Sharding | None, ...]
    out_shardings: tuple[Sharding | None, ...]
    layouts: tuple[tuple[Any, ...], tuple[Any, ...]]
    donated: tuple[bool, ...]
    statics: tuple[tuple[str, Any, bool], ...] = ()
    kind_of: KindOf | None = None
    miss: CacheMiss = field(default_factory=CacheMiss)
    assign: Callable[[int], tuple[Device, ...]] | None = None
    auto: tuple[bool, ...] | None = None
    moves: tuple[bool, ...] = ()
    chosen_results: tuple[bool, ...] = ()

    @property
    def jaxpr(self) -> Any:
        """Return the closed jaxpr of the function."""
        return self.traced.jaxpr

    def on(self, values: Sequence[Any]) -> "Call":
        """Return the call with other arguments of the same types."""
        return replace(self, values=tuple(values), miss=CacheMiss())


@dataclass(frozen=True, eq=False)
class ObservedPjit:
    """A program of a pjit-ed function, as `_jax.trace.observed_programs` reports it to observers.

    Attributes:
        function: The `Function`.
        call: A call of it.
    """

    function: Any
    call: Call

    @property
    def name(self) -> str:
        """Return the function's name."""
        return self.call.traced.name

    @property
    def jaxpr(self) -> Any:
        """Return the closed jaxpr."""
        return self.call.traced.jaxpr

    @property
    def values(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the types of the arguments; those that are committed have shardings."""
        return tuple(
            tracing.struct_of(a.aval, to_jax(a.sharding, a.aval.shape) if a.committed else None)
            for a in self.function.describe_arguments(self.call)
        )

    @property
    def key(self) -> Hashable:
        """Return a value that equal programs share."""
        call = self.call
        requested = call.in_shardings, call.out_shardings, call.mesh, call.donated
        types = tuple([(v.shape, v.dtype, v.weak_type, v.sharding) for v in self.values])
        return id(self.function), self.jaxpr, requested, types


class TracedCall(NamedTuple):
    """A call whose function has been traced.

    Attributes:
        traced: The function, traced for the arguments.
        args: The positional arguments.
        kwargs: The keyword arguments.
        values: The dynamic arguments, flat.
        mesh: The mesh in force, or None.
        began: The start of the call, as of `CacheMiss`.
    """

    traced: tracing.TracedFunction
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: list[Any]
    mesh: Mesh | None
    began: float


def trace_values(
    tracer: tracing.FunctionTracer,
    parameters: Parameters,
    options: PjitOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> TracedCall:
    """Trace a function for the arguments of a call.

    Args:
        tracer: Traces the function.
        parameters: Its parameters.
        options: Its options.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Raises:
        ArgumentError: If an argument is no array, or a static one is not hashable.
        TracingError: If `jax.no_tracing` forbids to trace.
    """
    began, mesh = time.perf_counter(), tracing.mesh_in_force()
    if parameters.needs_check:
        parameters.check_call(args, kwargs)
    values, tree = parameters.flatten_call(args, kwargs)
    named = options.in_resources.named_shardings
    if not are_arrays(values):
        check_values(values, parameters.paths(args, kwargs))
        named = *[v.sharding for v in values if isinstance(v, jax.ShapeDtypeStruct)], *named
    device = None if mesh is None and not named else find_target_device(mesh, named)
    call, function = (args, kwargs, mesh, tree), parameters.signature.function
    if device is None:
        traced = _traced(tracer, function, call, values)
    else:
        with assume_chip(device):
            traced = _traced(tracer, function, call, values)
    return TracedCall(traced, args, kwargs, values, mesh, began)


def read_call(call: TracedCall, parameters: Parameters, options: PjitOptions) -> Call:
    """Return a traced call with what its options request.

    Args:
        call: The call.
        parameters: The parameters of its function.
        options: Its options.

    Raises:
        MeshError: If a spec was requested and no mesh is in force.
        ResourceError: If requested shardings do not fit the trees of arguments or results.
    """
    traced, args, kwargs, values, mesh, began = call
    miss, spec_mesh = CacheMiss(began=began), find_spec_mesh(mesh)
    if traced.is_new:
        miss.record_stage("trace")
    requests = traced.shared.get(spec_mesh)
    if requests is None:
        donated = parameters.donated(args, kwargs, len(values))
        requests = _read_options(traced, parameters, options, spec_mesh, donated)
        traced.shared[spec_mesh] = requests
    if requests.from_gda:
        what = options.in_resources.what
        _check_from_gda(requests.from_gda, values, traced.arg_names, what)
    return Call(
        traced=traced,
        values=tuple(values),
        mesh=mesh,
        in_shardings=requests.in_shardings,
        out_shardings=requests.out_shardings,
        layouts=requests.layouts,
        donated=requests.donated,
        statics=parameters.statics(args, kwargs),
        kind_of=options.kind_of,
        miss=miss,
        auto=requests.auto,
    )


@dataclass(frozen=True, eq=False)
class _Requests:
    """Shardings, layouts and donation that options request; calls of equal types share them.

    Attributes:
        in_shardings: See `Call`, as for the next four.
        out_shardings: The requested sharding of each result.
        layouts: The requested layouts.
        donated: The donated arguments.
        auto: The arguments under `AUTO`.
        from_gda: The resource of each argument, if one is `FROM_GDA`; else empty.
    """

    in_shardings: tuple[Sharding | None, ...]
    out_shardings: tuple[Sharding | None, ...]
    layouts: tuple[tuple[Any, ...], tuple[Any, ...]]
    donated: tuple[bool, ...]
    auto: tuple[bool, ...] | None
    from_gda: Sequence[Resource]


def _read_options(
    traced: tracing.TracedFunction,
    parameters: Parameters,
    options: PjitOptions,
    mesh: Mesh | AbstractMesh | None,
    donated: tuple[bool, ...],
) -> _Requests:
    """Return what the options request of each argument and result of a traced function.

    Args:
        traced: The function.
        parameters: Its parameters.
        options: Its options.
        mesh: The mesh of specs.
        donated: For each argument, True if it is donated.
    """
    in_resources, out_resources = options.in_resources, options.out_resources
    ins = parameters.expand_in(in_resources, traced.in_tree)
    outs = expand(out_resources, traced.out_tree, "result")
    arguments = in_resources, ins, traced.in_avals, traced.arg_names
    results = out_resources, outs, traced.jaxpr.out_avals, traced.result_paths
    in_shardings, in_layouts = _read_requests(mesh, *arguments)
    out_shardings, out_layouts = _read_requests(mesh, *results)
    leaves = *in_resources.leaves, *out_resources.leaves
    has_auto = any([isinstance(leaf.value, Auto) for leaf in leaves])
    is_from_gda = any([type(leaf.value) is FromGda for leaf in in_resources.leaves])
    return _Requests(
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        layouts=(in_layouts, out_layouts),
        donated=donated,
        auto=tuple([isinstance(leaf.value, Auto) for leaf in ins]) if has_auto else None,
        from_gda=ins if is_from_gda else (),
    )


def find_target_device(mesh: Mesh | None, named: Sequence[Any]) -> Device | None:
    """Return a device of the first mesh that a call of shapes names; None if it names none.

    Args:
        mesh: The mesh in force.
        named: Shardings of shapes, and those that are requested. Those of arrays are left out: they
            are never on the devices of a topology.
    """
    meshes = (mesh, *[s.mesh for s in named if isinstance(s, jax.sharding.NamedSharding)])
    return next((m.devices.flat[0] for m in meshes if isinstance(m, Mesh) and m.size), None)


def _check_from_gda(
    resources: Sequence[Resource], values: Sequence[Any], paths: Sequence[str], what: str
) -> None:
    """Refuse arguments without a sharding of which `FROM_GDA` requests theirs.

    Raises:
        ResourceError: With the path of the first of them.
    """
    for resource, value, path in zip(resources, values, paths, strict=True):
        if type(resource.value) is not FromGda or isinstance(value, jax.Array):
            continue
        if getattr(value, "sharding", None) is None:
            raise ResourceError(
                f"{what} of {path} is FROM_GDA, but a {type(value).__name__} has no sharding "
                f"to take: give P(...) for it, or pass {path} as a global array, made by "
                f"multihost.host_local_array_to_global_array({path}, mesh, P(...))",
                path=path,
            )


def _traced(
    tracer: tracing.FunctionTracer, name: str, call: Any, values: Sequence[Any]
) -> tracing.TracedFunction:
    try:
        # Deferred: not loaded before there is an error.
        return with_errors_as(lambda error: explicit_errors.explained(error), tracer, *call)
    except AssertionError:
        # JAX 0.11 asserts that no mesh of an unreduced value has automatic axes.
        for value in values:
            if isinstance(value, jax.Array):
                check_axes(jax.typeof(value), name)
        raise
    except RuntimeError:
        if not jax.config.jax_no_tracing:
            raise
        raise TracingError(
            f"{name} would have to be traced, which jax.no_tracing forbids: call it once with such "
            "arguments before"
        ) from None


def _read_requests(
    mesh: Mesh | AbstractMesh | None,
    tree: ResourceTree,
    resources: Sequence[Resource],
    avals: Sequence[Any],
    paths: Sequence[str],
) -> tuple[tuple[Sharding | None, ...], tuple[Any, ...]]:
    """Return the sharding that each resource stands for under a mesh, and its layout.

    Raises:
        ResourceError: With the path of a value that can't have its sharding or layout.
    """
    if tree.names_nothing:
        nothing = (None,) * len(resources)
        return nothing, nothing
    known: dict[int, Sharding | None] = {}
    for resource, aval, path in zip(resources, avals, paths, strict=True):
        if id(resource) not in known:
            known[id(resource)] = to_sharding(resource, mesh, tree.what, path)
        problem = resource.layout and layout_problem(resource.layout, len(aval.shape))
        if problem:
            raise misfit(tree.what, path, aval_text(aval), resource.value, problem)
    shardings = tuple([known[id(resource)] for resource in resources])
    return shardings, tuple([resource.layout for resource in resources])


@cached_by_jaxpr
def inner_shardings(jaxpr: Any) -> tuple[Sharding, ...]:
    """Return the shardings that constraints inside a jaxpr name, of ours and of JAX."""
    shardings: dict[Sharding, None] = {}
    for eqn, called, _ in tracing.sharding_equations(jaxpr):
        is_own = eqn.primitive is constraint_p or eqn.primitive is boundary_p
        if is_own and names_devices(eqn.params["sharding"]):
            shardings[eqn.params["sharding"]] = None
        for body in called:
            shardings |= dict.fromkeys(inner_shardings(body))
    shardings |= dict.fromkeys(map(from_jax, tracing.named_shardings(jaxpr)))
    return tuple(shardings)


def find_constraint_line(jaxpr: Any, sharding: Sharding) -> str:
    """Return file and line of the first operation inside that names a sharding or its mesh."""
    lines = map(origins.user_line, _find_constraint(jaxpr, sharding))
    return next((near_line(*line) for line in lines if line is not None), "")


def _find_constraint(jaxpr: Any, sharding: Sharding) -> list[Any]:
    """Return the operation, and those around it, which have the line of `out_shardings` inside."""
    mesh = getattr(sharding, "mesh", None)
    for eqn, called, _ in tracing.sharding_equations(jaxpr):
        named = [eqn.params.get("sharding"), *eqn.params.get("shardings", ())]
        own = [from_jax(s) if isinstance(s, jax.sharding.Sharding) else s for s in named]
        if sharding in own or (mesh is not None and eqn.params.get("mesh") == mesh):
            return [eqn]
        for body in called:
            if inside := _find_constraint(body, sharding):
                return [*inside, eqn]
    return []


@dataclass(frozen=True)
class UsedParts:
    """Parts of a jaxpr that results or effects depend on; no other part places a program.

    Attributes:
        args: For each argument, whether it is in use.
        consts: For each closed-over value, whether it is in use.
        inner: The shardings of the constraints in use.
        moves: True if an equation in use names a memory space.
    """

    args: tuple[bool, ...]
    consts: tuple[bool, ...]
    inner: tuple[Sharding, ...]
    moves: bool


@cached_by_jaxpr
def used_parts_of(jaxpr: Any) -> UsedParts:
    """Find the parts of a closed jaxpr that are in use."""
    smaller, consts, args = used_parts(jaxpr)
    return UsedParts(args, consts, inner_shardings(smaller), bool(memory_transfers(smaller)))


@cached_by_jaxpr
def all_parts_of(jaxpr: Any) -> UsedParts:
    """Return all parts of a closed jaxpr as used, besides its moves between memories."""
    args, consts = (True,) * len(jaxpr.invars), (True,) * len(jaxpr.consts)
    return UsedParts(args, consts, inner_shardings(jaxpr), used_parts_of(jaxpr).moves)
