"""Resolve, trace, lower, compile and run the calls of a pjit-ed function."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from itertools import compress, repeat
from typing import Any

import jax

from xlashard._jax.runtime import compiler
from xlashard._jax.runtime.global_state import BoundedCache, cleared_with_jax
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.topologies import unassigned_devices
from xlashard._jax.trace import observed_programs, tracing
from xlashard._jax.trace.jaxprs import is_reference
from xlashard.core.array.array_class.base import DonationTracker
from xlashard.core.array.array_class.handles import wrap_result
from xlashard.core.pjit.arguments import (
    Argument,
    check_concrete,
    describe_arguments,
)
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.cache_miss import CacheMiss
from xlashard.core.pjit.callables import constrained_body, pjit_p
from xlashard.core.pjit.compile import PROGRAMS, CompiledProgram, compile_lowered
from xlashard.core.pjit.compile_log import CompileLog
from xlashard.core.pjit.constraint import BoundaryArgument, constraint_p
from xlashard.core.pjit.dispatch import DonationInfo, Results, run_repeatably
from xlashard.core.pjit.lower import (
    LoweredSignature,
    check_closed_over,
    closed_over_places,
    closed_over_values,
    named_value,
)
from xlashard.core.pjit.options import PjitOptions, Selected
from xlashard.core.pjit.shardings.automatic import planned_call, report_replicated
from xlashard.core.pjit.shardings.device_assignment import ShardingRequest
from xlashard.core.pjit.shardings.ignored import report_ignored
from xlashard.core.pjit.shardings.resolve import resolve, resolve_layouts
from xlashard.core.pjit.shardings.resources import check_whole
from xlashard.core.pjit.shardings.uneven import is_strict, report_uneven_constraints
from xlashard.core.pjit.shardings.unreduced import has_reductions
from xlashard.core.pjit.signature import Parameters
from xlashard.core.pjit.trace import (
    Call,
    PjitProgram,
    all_parts_of,
    inner_shardings,
    trace_call,
    used_parts_of,
)
from xlashard.core.program.compile import LoweredProgram
from xlashard.core.sharding import Sharding, SingleDeviceSharding, XLACompatibleSharding
from xlashard.errors import ArgumentError

type _Boundary = tuple[
    tuple[XLACompatibleSharding | None, ...], tuple[XLACompatibleSharding | None, ...]
]
"""Shardings of arguments and of results; None leaves a value to the partitioner."""

BOUNDARIES = cleared_with_jax(BoundedCache())
"""Boundary shardings of nested calls, by what was requested of them and by their types."""


class Function:
    """Implementation of a pjit-ed function.

    Args:
        fun: The Python function.
        options: The checked options.
        static: Positions and names of static arguments.

    Attributes:
        name: The function's name.
        is_spread: True once a program of it runs on several devices.
        planned: Its jaxprs with the constraints of a layout that was chosen under `AUTO`.

    Raises:
        ArgumentError: If a static or donated parameter does not exist, or is both.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: PjitOptions,
        static: Selected,
    ) -> None:
        self.fun = fun
        self.options = options
        self.static = static
        self.parameters = Parameters.of(fun, static, options.donate)
        self.name = self.parameters.signature.function
        self.compile_log = CompileLog(self.name, fun)
        self.is_spread = False
        self.planned: weakref.WeakSet[Any] = weakref.WeakSet()
        self.tracer = tracing.FunctionTracer(
            fun,
            self.parameters.signature.python,
            self.parameters.static_argnums,
            self.parameters.static_argnames,
        )

    @cached_property
    def _tracker(self) -> DonationTracker:
        return DonationTracker(self.name)

    @cached_property
    def _closes_over(self) -> weakref.WeakSet[CompiledProgram]:
        """Programs with closed-over arrays as arguments, which a call could donate too."""
        return weakref.WeakSet()

    @property
    def requested_shardings(self) -> list[Any]:
        """Return the leaves of `in_shardings` and `out_shardings`."""
        leaves = (*self.options.in_resources.leaves, *self.options.out_resources.leaves)
        return [resource.value for resource in leaves]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.fun, self.options, self.static)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Trace for the arguments of a call."""
        return trace_call(self.tracer, self.parameters, self.options, args, kwargs)

    def record(self, call: Call, request: LoweringRequest | None = None) -> None:
        """Record the stages that a call has run since its last record.

        Args:
            call: The call.
            request: The request for its program; None for a call that is traced only.
        """
        miss, options = call.miss, self.options.compiler_options
        if miss.stages > miss.recorded:
            self.compile_log.record(miss, lambda: call.key(request, options))

    def arguments(self, call: Call, *, runs: bool = False) -> tuple[Argument, ...]:
        """Return types and placements of the arguments of a call.

        Args:
            call: The call.
            runs: True if it is about to run, for which the arguments need their buffers.
        """
        traced = call.traced
        return describe_arguments(call.values, traced.arg_names, traced.in_avals, runs=runs)

    def lowering_request(self, call: Call, arguments: tuple[Argument, ...]) -> LoweringRequest:
        """Return the request for the program of a call.

        Raises:
            IgnoredShardingError: For a sharding that the program does not follow, if strict.
            UnevenShardingError: For a constraint by which a dimension does not divide, if strict.
        """
        jaxpr, options = call.traced.jaxpr, self.options
        self.check_host_values(call)
        if tracing.may_constrain(jaxpr):
            report_uneven_constraints(jaxpr, constraint_p, self.name, options.strict)
        shardings = self._sharding_request(call, arguments, keep_unused=options.keep_unused)
        call.miss.arguments = arguments = shardings.arguments
        in_layouts, out_layouts = call.layouts
        keyword = repeat(options.in_resources.what)
        placement = resolve(shardings)
        report_ignored(jaxpr, shardings, placement.devices, self.name, options.strict)
        return LoweringRequest(
            name=call.traced.name,
            placement=placement,
            donated=call.donated,
            layouts=(resolve_layouts(arguments, call.values, in_layouts, keyword), out_layouts),
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
        device = self._device()
        # All arguments move to a requested device.
        moves = call.moves if device is None else (True,) * len(arguments)
        if moves:
            pairs = zip(arguments, moves, strict=True)
            arguments = tuple(a.unbound() if moved else a for a, moved in pairs)
        return ShardingRequest(
            arguments=arguments,
            in_shardings=call.in_shardings,
            out_shardings=call.out_shardings,
            result_avals=tuple(map(tracing.shaped, jaxpr.out_avals)),
            result_paths=traced.result_paths,
            used=used.args,
            inner=used.inner,
            closed=closed,
            mesh=call.mesh if device is None else None,
            device=device,
            assign=unassigned_devices if keep_unused else call.assign,
            names=(options.in_resources.what, options.out_resources.what),
            commits=used.moves,
        )

    def _device(self) -> Device | None:
        backend = self.options.backend
        if backend is None:
            return self.options.device
        try:
            return compiler.devices_of(backend)[0]
        except RuntimeError as error:
            raise ArgumentError(
                f"backend={backend!r} of {self.name} is invalid: {error}; write "
                f"backend={jax.default_backend()!r}"
            ) from None

    def lower(
        self, call: Call, request: LoweringRequest
    ) -> tuple[LoweredSignature, LoweredProgram]:
        """Return the module of a call."""
        for observer in observed_programs.observers():
            observer.lowered(PjitProgram(self, call))
        entry = PROGRAMS.entry(call.traced.jaxpr, request)
        lowered = entry.lower(call.traced.jaxpr, call.miss)
        self.record(call, request)
        return lowered

    def compile(self, call: Call, request: LoweringRequest) -> CompiledProgram:
        """Return the program of a call."""
        entry = PROGRAMS.entry(call.traced.jaxpr, request)
        compiled = entry.compile(call.traced.jaxpr, request, call.miss)
        self.record(call, request)
        self.compile_log.log_reason(call.miss)
        report_replicated(call, compiled, self.options)
        return compiled

    def compile_uncached(
        self,
        call: Call,
        request: LoweringRequest,
        lowered: tuple[LoweredSignature, LoweredProgram],
        options: tuple[tuple[str, Any], ...],
    ) -> CompiledProgram:
        """Return the program of a call under more compiler options, which no other call gets."""
        again = replace(call, miss=CacheMiss(arguments=call.miss.arguments))
        compiled = compile_lowered(*lowered, options, share=request.share_binary)
        again.miss.record_stage("compile")
        again.miss.executable_source = compiled.program.source
        self.record(again, replace(request, options=(*request.options, *options)))
        self.compile_log.log_reason(again.miss)
        compiled = compiled.with_user_shardings(request.placement)
        report_replicated(call, compiled, self.options)
        return compiled

    def compile_call(self, call: Call) -> CompiledProgram:
        """Return the program of a call that is about to run."""
        call = call if call.auto is None else planned_call(self, call)
        if call.moves and jax.config.jax_enable_checks:
            # Arguments elsewhere than in the chosen layout are refused, as by pjit of 2022.
            call = replace(call, moves=())
        jaxpr, miss, request = call.traced.jaxpr, call.miss, None
        try:
            request = self.lowering_request(call, self.arguments(call, runs=True))
            entry = PROGRAMS.entry(jaxpr, request)
            _, lowered = entry.lower(jaxpr, miss)
            self.report_donation(lowered)
            compiled = entry.compile(jaxpr, request, miss)
        finally:
            self.record(call, request)
        self.compile_log.log_reason(miss)
        self.is_spread |= compiled.program.is_spread
        self.report_donation(lowered, compiled)
        if any([sharding is None for sharding in (*call.in_shardings, *call.out_shardings)]):
            report_replicated(call, compiled, self.options)
        if compiled.consts and self.parameters.donates:
            self._closes_over.add(compiled)
        return compiled

    def report_donation(
        self, lowered: LoweredProgram, compiled: CompiledProgram | None = None
    ) -> None:
        """Report donated arguments whose buffers no result can reuse, or none of a program reuses.

        Raises:
            DonationError: If any, under `donation="strict"`.
        """
        if not any(lowered.plan.donated) and not lowered.unused:
            return
        program = None if compiled is None else compiled.program
        lowered.report_donation(self.options.donation, self.name, program)

    def cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Run a call that missed the dispatcher's cache, and return its entry for that cache."""
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
            outs = observed_programs.observed(
                observed_programs.ObservedCall(
                    PjitProgram(self, call), call.values, lambda: self._results(call)
                )
            )
            return traced.out_tree.unflatten(outs), None
        return self._run(call)

    def _results(self, call: Call) -> list[Any]:
        return call.traced.out_tree.flatten_up_to(self._run(call)[0])

    def _run(self, call: Call) -> tuple[Any, Any]:
        traced = call.traced
        naming = partial(named_value, function=self.fun, called=self.name)
        tracker = self._tracker if any(call.donated) else None
        donation = DonationInfo(call.donated, traced.arg_names, self.name, tracker, naming)
        results = Results(traced.out_tree, call.kind_of)
        return run_repeatably(self.compile_call(call), call.values, results, donation, traced.jaxpr)

    def donated_leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the leaves of donated arguments, and all other arrays that a call passes."""
        donated, others = self.parameters.donated_leaves(args, kwargs)
        if self._closes_over:
            for compiled in list(self._closes_over):
                others.extend(compiled.consts)
        return donated, others

    def bind(self, call: Call) -> Any:
        """Bind a call under a transformation or a trace as one equation of our primitive."""
        self.record(call)
        self.compile_log.log_reason(call.miss)
        traced, options = call.traced, self.options
        if is_strict(options.strict):
            report_uneven_constraints(traced.jaxpr, constraint_p, self.name, options.strict)
        is_inlined = options.inline and tracing.is_staging()
        places = call.in_shardings, call.out_shardings, call.mesh, self._device()
        key = "boundary", *places, is_inlined
        # The body may be the jaxpr itself, which a value kept for it would keep alive.
        ins, outs = PROGRAMS.cached(traced.jaxpr, key, lambda: self._shared_boundary(call, key))
        names: tuple[Any, ...] = (None,) * len(ins)
        if not is_inlined:
            keyword = repeat(options.in_resources.what)
            named = tuple(map(BoundaryArgument, keyword, traced.arg_names, call.layouts[0]))
            names = names[len(named) :] + named
        body, closed = constrained_body(traced.jaxpr, ins, outs, names)
        values = [*closed, *traced.consts, *call.values]
        results = pjit_p.bind(
            *values,
            jaxpr=body,
            name=traced.name,
            donated_invars=(*(False,) * (len(values) - len(call.donated)), *call.donated),
            ctx_mesh=tracing.NO_MESH if call.mesh is None else call.mesh,
            keep_unused=options.keep_unused,
            inline=options.inline,
            compiler_options_kvs=options.compiler_options,
            donation=options.donation,
        )
        return traced.out_tree.unflatten([wrap_result(r) for r in results])

    def _shared_boundary(self, call: Call, requested: tuple[Any, ...]) -> _Boundary:
        """Return shardings for all inputs of the jaxpr; nested calls that are alike share them."""
        traced = call.traced
        jaxpr = traced.jaxpr
        if jaxpr.consts or not all([isinstance(value, tracing.Tracer) for value in call.values]):
            ins, outs = self._boundary_shardings(call)
        else:
            # Nested calls are often alike, as the layers of a model are.
            types = traced.in_avals, tuple(jaxpr.out_avals), inner_shardings(jaxpr)
            ins, outs = BOUNDARIES.get_or_make(
                (requested, types), lambda: self._boundary_shardings(call)
            )
        return (*(None,) * len(traced.consts), *ins), outs

    def _boundary_shardings(self, call: Call) -> _Boundary:
        """Return the shardings to pin at the boundary of the jaxpr of a call."""
        # Inside a trace the program around the call is placed later.
        arguments = tuple(a.unbound() for a in self.arguments(call))
        request = self._sharding_request(call, arguments, keep_unused=True)
        placement = resolve(replace(request, commits=False))
        # Otherwise the devices are those of the program around this call.
        named = placement.committed and not placement.is_unassigned
        device = self._device()

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
