"""Resolve, trace, lower, compile and run the calls of a pjit-ed function."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import compress, repeat
from typing import Any, NamedTuple

import jax

from xlashard._jax.runtime import compiler
from xlashard._jax.runtime.dispatch import SeenCalls
from xlashard._jax.runtime.global_state import BoundedCache, cleared_with_jax
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.topologies import unassigned_devices
from xlashard._jax.trace import observed_programs, tracing
from xlashard._jax.trace.jaxprs import is_reference
from xlashard.core.array.array_class.deletion import DonationTracker
from xlashard.core.array.array_class.handles import wrap_result
from xlashard.core.pjit.arguments import (
    Argument,
    are_arrays,
    check_concrete,
    describe_arguments,
)
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.cache_miss import CacheMiss
from xlashard.core.pjit.compile import PROGRAMS
from xlashard.core.pjit.compile_log import CompileLog, make_call_key
from xlashard.core.pjit.constraint import BoundaryArgument, constraint_p
from xlashard.core.pjit.dispatch import DonationInfo, Results, run_repeatably
from xlashard.core.pjit.lower import (
    check_closed_over,
    closed_over_places,
    closed_over_values,
    named_value,
)
from xlashard.core.pjit.options import PjitOptions, Selected
from xlashard.core.pjit.parameters import Parameters
from xlashard.core.pjit.pjit_primitive import constrain_body, pjit_p
from xlashard.core.pjit.shardings.automatic import planned_call, report_replicated
from xlashard.core.pjit.shardings.device_assignment import ShardingRequest, find_spec_mesh
from xlashard.core.pjit.shardings.resolve import resolve, resolve_layouts
from xlashard.core.pjit.shardings.resources import FromGda, check_whole
from xlashard.core.pjit.shardings.unreduced import has_reductions
from xlashard.core.pjit.trace import (
    Call,
    ObservedPjit,
    TracedCall,
    all_parts_of,
    find_constraint_line,
    inner_shardings,
    read_call,
    trace_values,
    used_parts_of,
)
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.program.ignored_shardings import report_ignored
from xlashard.core.program.lowered import LoweredProgram
from xlashard.core.program.uneven_shardings import is_strict, report_uneven_constraints
from xlashard.core.sharding import Sharding, SingleDeviceSharding, XLACompatibleSharding
from xlashard.errors import ArgumentError

type _Boundary = tuple[
    tuple[XLACompatibleSharding | None, ...], tuple[XLACompatibleSharding | None, ...]
]
"""Shardings of arguments and of results; None leaves a value to the partitioner."""

BOUNDARIES = cleared_with_jax(BoundedCache())
"""Boundary shardings of nested calls, by what was requested of them and by their types."""


class _FunctionState:
    """Traces, calls and records of a function and its options; it keeps no function alive.

    Args:
        fun: The Python function.
        options: The checked options.
        static: Positions and names of static arguments.
    """

    def __init__(self, fun: Callable[..., Any], options: PjitOptions, static: Selected) -> None:
        self.parameters = Parameters.of(fun, static, options.donate)
        self.compile_log = CompileLog(self.parameters.signature.function, fun)
        self.tracer = tracing.FunctionTracer(
            fun,
            self.parameters.signature.python,
            self.parameters.static_argnums,
            self.parameters.static_argnames,
        )
        self.calls = SeenCalls()
        self.planned: weakref.WeakSet[Any] = weakref.WeakSet()

    @cached_property
    def tracker(self) -> DonationTracker:
        """Return the record of the arrays that calls donate."""
        return DonationTracker(self.parameters.signature.function)


# As many functions as JAX keeps the calls of.
_STATES = cleared_with_jax(BoundedCache(8192))


def _find_state(fun: Any, options: PjitOptions, static: Selected) -> _FunctionState:
    """Return the state of a function and its options; `jit(f)` in each call has one of them."""
    key = options.cache_key, static
    try:
        hash((fun, key))
        known = _STATES.get(id(fun))
        if known is None or known[0]() is not fun:
            known = weakref.ref(fun, partial(_forget_states, id(fun))), {}
            _STATES.add(id(fun), known)
    except TypeError:  # an unhashable option or function, or one without weak references
        return _FunctionState(fun, options, static)
    states: dict[Any, _FunctionState] = known[1]
    state = states.get(key)
    return states.setdefault(key, _FunctionState(fun, options, static)) if state is None else state


def _forget_states(identity: int, reference: weakref.ref[Any]) -> None:
    known = _STATES.get(identity)
    if known is not None and known[0] is reference:  # and not a function at the same address
        _STATES.drop(identity)


class _Equation(NamedTuple):
    """Common part of the equations of calls with one trace. It keeps no jaxpr alive.

    Attributes:
        find_body: Returns the body, while it is alive.
        closed: The closed-over arrays that it takes before its arguments.
        params: Its parameters besides the body.
    """

    find_body: Callable[[], Any]
    closed: tuple[Any, ...]
    params: dict[str, Any]

    def bind(self, body: Any, values: Sequence[Any], out_tree: Any) -> Any:
        """Bind the equation for closed-over tracers and arguments; return the tree of results."""
        results = pjit_p.bind_complete(*self.closed, *values, **self.params, jaxpr=body)
        return out_tree.unflatten([wrap_result(r) for r in results])


class Function:
    """Implementation of a pjit-ed function. Functions of equal options share their state.

    Args:
        fun: The Python function.
        options: The checked options.
        static: Positions and names of static arguments.

    Attributes:
        name: The function's name.
        planned: Its jaxprs with the constraints of a layout that was chosen under `AUTO`.

    Raises:
        ArgumentError: If a static or donated parameter does not exist, or is both.
    """

    def __init__(self, fun: Callable[..., Any], options: PjitOptions, static: Selected) -> None:
        self.fun = fun
        self.options = options
        self.static = static
        # A subclass traces or runs other programs for the same function and options.
        find_state = _find_state if type(self) is Function else _FunctionState
        self._state = find_state(fun, options, static)
        self.parameters = self._state.parameters
        self.name = self.parameters.signature.function
        self.compile_log = self._state.compile_log
        self.planned = self._state.planned
        self.tracer = self._state.tracer
        self.calls = self._state.calls

    @property
    def _donation_mode(self) -> str:
        return "strict" if is_strict(self.options.strict) else self.options.donation

    @property
    def requested_shardings(self) -> list[Any]:
        """Return the leaves of `in_shardings` and `out_shardings`."""
        leaves = (*self.options.in_resources.leaves, *self.options.out_resources.leaves)
        return [resource.value for resource in leaves]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.fun, self.options, self.static)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Trace for the arguments of a call."""
        return self.read_call(self.trace_values(args, kwargs))

    def trace_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedCall:
        """Trace for the arguments of a call, whose options are not read yet."""
        return trace_values(self.tracer, self.parameters, self.options, args, kwargs)

    def read_call(self, call: TracedCall) -> Call:
        """Return a traced call with what the options request."""
        return read_call(call, self.parameters, self.options)

    def report_stages(
        self, call: Call, request: LoweringRequest | None = None, *, is_last: bool = False
    ) -> None:
        """Report the stages that a call has run since its last report.

        Args:
            call: The call.
            request: The request for its program; None for a call that is traced only.
            is_last: True if the call runs no further stage.
        """
        make_key = partial(make_call_key, call, request, self.options.compiler_options)
        self.compile_log.take(call.miss, make_key, is_last=is_last)

    def describe_arguments(self, call: Call, *, runs: bool = False) -> tuple[Argument, ...]:
        """Return types and placements of the arguments of a call.

        Args:
            call: The call.
            runs: True if it is about to run, for which the arguments need their buffers.
        """
        traced = call.traced
        return describe_arguments(call.values, traced.arg_names, traced.in_avals, runs=runs)

    def request_program(self, call: Call, *, runs: bool = False) -> LoweringRequest:
        """Return the request for the program of a call.

        Args:
            call: The call.
            runs: True if it is about to run, for which the arguments need their buffers.

        Raises:
            IgnoredShardingError: For a sharding that the program does not follow, if strict.
            UnevenShardingError: For a constraint by which a dimension does not divide, if strict.
        """
        jaxpr, options = call.traced.jaxpr, self.options
        arguments = self.describe_arguments(call, runs=runs)
        self.check_host_values(call)
        report_uneven_constraints(jaxpr, constraint_p, self.name, options.strict)
        shardings = self._sharding_request(call, arguments, keep_unused=options.keep_unused)
        call.miss.arguments = arguments = shardings.arguments
        in_layouts, out_layouts = call.layouts
        placement = resolve(shardings)
        unplaced = shardings.find_unplaced() if len(placement.devices) == 1 else ()
        report_ignored(jaxpr, unplaced, placement.devices, self.name, options.strict)
        return LoweringRequest(
            name=call.traced.name,
            placement=placement,
            donated=call.donated,
            layouts=(
                resolve_layouts(arguments, call.values, in_layouts, options.in_resources.what),
                out_layouts,
            ),
            keep_unused=options.keep_unused,
            options=options.compiler_options,
            share_binary=options.share_binary,
        )

    def check_host_values(self, call: Call) -> None:
        """Refuse NumPy arrays that a requested sharding would split between processes."""
        if tracing.is_top_level():
            # Shardings that `AUTO` chose are not requested.
            pairs = zip(call.in_shardings, call.moves or repeat(False), strict=False)
            requested = [None if is_chosen else sharding for sharding, is_chosen in pairs]
            check_whole(call.values, call.traced.arg_names, requested)

    def _sharding_request(
        self, call: Call, arguments: tuple[Argument, ...], *, keep_unused: bool
    ) -> ShardingRequest:
        """Return the request for devices and shardings of a call.

        Args:
            call: The call.
            arguments: Its arguments.
            keep_unused: Let unused arguments and dead code name devices too, and place the program
                on stand-ins where all shardings stand on abstract meshes.
        """
        traced, options = call.traced, self.options
        jaxpr, closed = traced.jaxpr, ()
        used = (all_parts_of if keep_unused else used_parts_of)(jaxpr)
        if closed_over_values(jaxpr, jaxpr.consts):
            check_closed_over(jaxpr, traced.name, self.fun)
            values = closed_over_values(jaxpr, compress(jaxpr.consts, used.consts))
            closed = closed_over_places(values, self.fun)
        device = self._find_requested_device()
        # All arguments move to a requested device.
        moves = call.moves if device is None else (True,) * len(arguments)
        if moves:
            pairs = zip(arguments, moves, strict=True)
            arguments = tuple(a.unbound() if moved else a for a, moved in pairs)
        return ShardingRequest(
            arguments=arguments,
            in_shardings=call.in_shardings,
            out_shardings=call.out_shardings,
            result_avals=tuple(tracing.all_shaped(jaxpr.out_avals)),
            result_paths=traced.result_paths,
            used=used.args,
            inner=used.inner,
            find_line=partial(find_constraint_line, jaxpr),
            closed=closed,
            mesh=call.mesh if device is None else None,
            device=device,
            assign=unassigned_devices if keep_unused else call.assign,
            names=(options.in_resources.what, options.out_resources.what),
            commits=used.moves,
        )

    def _find_requested_device(self) -> Device | None:
        backend = self.options.backend
        if backend is None:
            return self.options.device
        try:
            return compiler.devices_of(backend)[0]
        except RuntimeError as error:
            raise ArgumentError(
                f"backend={backend!r} of {self.name} is invalid: {error}; write "
                f"backend={jax.default_backend()!r}",
                also=type(error),
            ) from None

    def lower(self, call: Call, request: LoweringRequest) -> LoweredProgram:
        """Return the module of a call."""
        for observer in observed_programs.observers():
            observer.lowered(ObservedPjit(self, call))
        jaxpr = call.traced.jaxpr
        lowered = PROGRAMS.entry(jaxpr, request).lower(jaxpr, call.miss)
        self.report_stages(call, request)
        return lowered

    def compile(
        self,
        call: Call,
        request: LoweringRequest,
        options: tuple[tuple[str, Any], ...] = (),
        *,
        reports_donation: bool = False,
    ) -> CompiledProgram:
        """Return the program of a call, after lowering it if need be.

        Args:
            call: The call.
            request: The request for its program.
            options: Compiler options past those of the request, with which the call alone gets the
                program.
            reports_donation: Report donated arguments whose buffers no result can reuse.

        Raises:
            DonationError: For such an argument, under `donation="strict"`.
            ReplicationError: For a large argument that is replicated, if strict.
        """
        jaxpr = call.traced.jaxpr
        entry = PROGRAMS.entry(jaxpr, request)
        if options:
            # Another program than that of the call's record.
            call = replace(call, miss=CacheMiss(arguments=call.miss.arguments))
        lowered = entry.lower(jaxpr, call.miss)
        if reports_donation:
            lowered.report_donation(self._donation_mode, self.name)
        compiled = entry.compile(jaxpr, request, call.miss, options)
        request = replace(request, options=(*request.options, *options)) if options else request
        self.report_stages(call, request, is_last=True)
        if reports_donation:
            compiled.report_donation(self._donation_mode, self.name)
        report_replicated(call, compiled, self.options)
        return compiled

    def compile_to_run(self, call: Call) -> CompiledProgram:
        """Return the program of a call that is about to run."""
        call, request = planned_call(self, call), None
        if call.moves and jax.config.jax_enable_checks:
            # Arguments elsewhere than in the chosen layout are refused, as by pjit of 2022.
            call = replace(call, moves=())
        try:
            request = self.request_program(call, runs=True)
            compiled = self.compile(call, request, reports_donation=True)
        except BaseException:
            self.report_stages(call, request)
            raise
        self.calls.is_spread |= compiled.is_spread
        return compiled

    def cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Run a call that missed the dispatcher's cache, and return its entry for that cache."""
        if type(self) is Function and not tracing.is_top_level():
            return self._bind_arguments(args, kwargs), None, False
        return *self.run(self.trace(args, kwargs)), False

    def run(self, call: Call) -> tuple[Any, Any]:
        """Run a call, or bind it in the trace under way.

        Returns:
            The result, and the dispatcher's cache entry; None for a call that it can't repeat.
        """
        traced = call.traced
        if traced.consts or not tracing.is_top_level():
            return self.bind(call), None
        check_concrete(call.values, traced.arg_names)
        if observed_programs.all_observers and observed_programs.observers():

            def run_flat() -> list[Any]:
                return traced.out_tree.flatten_up_to(self._run_program(call)[0])

            seen = observed_programs.ObservedCall(ObservedPjit(self, call), call.values, run_flat)
            outs = observed_programs.observed(seen)
            return traced.out_tree.unflatten(outs), None
        return self._run_program(call)

    def _run_program(self, call: Call) -> tuple[Any, Any]:
        compiled, traced = self.compile_to_run(call), call.traced
        naming = partial(named_value, function=self.fun, called=self.name)
        tracker = self._state.tracker if any(call.donated) else None
        donation = DonationInfo(call.donated, traced.arg_names, self.name, tracker, naming)
        results = Results(traced.out_tree, call.kind_of)
        return run_repeatably(compiled, call.values, results, donation, traced.jaxpr)

    def _bind_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Bind a call under a transformation or a trace, by what an earlier one has found."""
        options, alike = self.options, None
        values, tree = self.parameters.flatten_call(args, kwargs)
        if are_arrays(values) and not is_strict(options.strict):
            alike = self.tracer.find_alike(values, tree, options.inline and tracing.is_staging())
        if alike is not None and alike.shared is not None:
            equation, out_tree = alike.shared
            body = equation.find_body()
            if body is not None:
                return equation.bind(body, values, out_tree)
        seen = self.trace_values(args, kwargs)
        consts, out_tree = seen.traced.consts, seen.traced.out_tree
        body, equation, is_kept = self._find_equation(seen)
        if alike is not None and is_kept and not consts:
            alike.shared = equation, out_tree
        return equation.bind(body, (*consts, *seen.values), out_tree)

    def _find_equation(self, seen: TracedCall) -> "tuple[Any, _Equation, bool]":
        """Return the body of the equation of a call, what else it consists of, and if it is kept.

        Calls with the same trace have one in common.
        """
        traced, mesh, options = seen.traced, seen.mesh, self.options
        key = "equation", mesh, find_spec_mesh(mesh), options.inline and tracing.is_staging()
        equation = traced.shared.get(key)
        if equation is not None and (body := equation.find_body()) is not None:
            if is_strict(options.strict):
                self._report_bound(self.read_call(seen))
            return body, equation, True
        call = self.read_call(seen)
        self._report_bound(call)
        body, equation = self._make_equation(call)
        # Of `FROM_GDA` the values of each call are checked.
        is_kept = not any([type(leaf.value) is FromGda for leaf in options.in_resources.leaves])
        if is_kept:
            traced.shared[key] = equation
        return body, equation, is_kept

    def bind(self, call: Call) -> Any:
        """Bind a call under a transformation or a trace as one equation of our primitive."""
        self._report_bound(call)
        body, equation = self._make_equation(call)
        return equation.bind(body, (*call.traced.consts, *call.values), call.traced.out_tree)

    def _report_bound(self, call: Call) -> None:
        self.report_stages(call, is_last=True)
        jaxpr, strict = call.traced.jaxpr, self.options.strict
        if is_strict(strict):
            report_uneven_constraints(jaxpr, constraint_p, self.name, strict)

    def _make_equation(self, call: Call) -> "tuple[Any, _Equation]":
        """Return the body of the equation of a call, and what else it consists of."""
        traced, options, jaxpr = call.traced, self.options, call.traced.jaxpr
        is_inlined = options.inline and tracing.is_staging()
        device = self._find_requested_device()
        places = call.in_shardings, call.out_shardings, call.mesh, device
        ins = outs = ()  # Where nothing names devices.
        if device or jaxpr.consts or any(places[0]) or any(places[1]) or inner_shardings(jaxpr):
            ins, outs = self._shared_boundary(call, (*places, is_inlined))
        names: tuple[Any, ...] = (None,) * len(ins)
        if not is_inlined and any(ins):
            keyword = repeat(options.in_resources.what)
            named = tuple(map(BoundaryArgument, keyword, traced.arg_names, call.layouts[0]))
            names = names[len(named) :] + named
        body, closed = constrain_body(jaxpr, ins, outs, names)
        num_first = len(closed) + len(traced.consts)
        donated = *(False,) * num_first, *call.donated
        params = {
            "jaxpr": body,
            "name": traced.name,
            "donated_invars": donated,
            "ctx_mesh": tracing.NO_MESH if call.mesh is None else call.mesh,
            "keep_unused": options.keep_unused,
            "inline": options.inline,
            "compiler_options_kvs": options.compiler_options,
            "donation": options.donation,
        }
        params = pjit_p.with_own_names(params, len(donated))
        del params["jaxpr"]
        return body, _Equation(weakref.ref(body), closed, params)

    def _shared_boundary(self, call: Call, requested: tuple[Any, ...]) -> _Boundary:
        """Return shardings for all inputs of the jaxpr; nested calls that are alike share them."""
        traced = call.traced
        jaxpr = traced.jaxpr
        if jaxpr.consts or not all([isinstance(value, tracing.Tracer) for value in call.values]):
            ins, outs = self._boundary_shardings(call)
        else:
            # Nested calls are often alike, as the layers of a model are.
            key = requested, traced.in_avals, tuple(jaxpr.out_avals), inner_shardings(jaxpr)
            ins, outs = BOUNDARIES.get_or_make(key, lambda: self._boundary_shardings(call))
        return (*(None,) * len(traced.consts), *ins), outs

    def _boundary_shardings(self, call: Call) -> _Boundary:
        """Return the shardings to pin at the boundary of the jaxpr of a call."""
        # Inside a trace the program around the call is placed later.
        arguments = tuple(a.unbound() for a in self.describe_arguments(call))
        request = self._sharding_request(call, arguments, keep_unused=True)
        placement = resolve(replace(request, commits=False))
        # Otherwise the devices are those of the program around this call.
        named = placement.committed and not placement.is_unassigned
        device = self._find_requested_device()

        def pinned(
            aval: Any,
            requested: Sharding | None,
            sharding: XLACompatibleSharding | None,
            is_typed: bool,
        ) -> XLACompatibleSharding | None:
            if device is not None:
                return SingleDeviceSharding(placement.devices[0])
            if requested is None or (is_typed and not has_reductions(aval, sharding)):
                return None
            return (
                sharding if named or not isinstance(requested, XLACompatibleSharding) else requested
            )

        traced = call.traced
        ins = tuple(
            None if is_reference(aval) else pinned(aval, requested, sharding, True)
            for aval, requested, sharding in zip(
                traced.in_avals, call.in_shardings, placement.in_shardings, strict=True
            )
        )
        # A call that runs as a program of its own makes partial results of whole ones. In another
        # program the lowering leaves them whole, but the ends of an inlined body can be its ends.
        are_typed = repeat(self.options.inline and tracing.is_staging())
        avals = traced.jaxpr.out_avals
        return ins, tuple(
            map(pinned, avals, call.out_shardings, placement.out_shardings, are_typed)
        )

    def clear_cache(self) -> None:
        """Drop what was traced of the function, and its programs."""
        for jaxpr in (*self.tracer.forget(), *self.planned):
            PROGRAMS.drop(jaxpr)
        self.compile_log.clear()
