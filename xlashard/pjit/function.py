"""One pjit-ed function: from a call's arguments to a program, and its results."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import jax

from xlashard._jax.runtime import compiler, global_state
from xlashard._jax.runtime.global_state import BoundedCache, cleared_with_jax
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.topologies import unassigned_devices
from xlashard._jax.runtime.tracebacks import shortened
from xlashard._jax.trace import tracing
from xlashard._jax.trace.jaxprs import as_function, is_reference
from xlashard.array.core.donation import DonationTracker
from xlashard.array.core.handles import wrap_result
from xlashard.errors import ArgumentError, TracingError
from xlashard.pjit.arguments import (
    Argument,
    are_arrays,
    check_concrete,
    check_values,
    describe_arguments,
    follow_layouts,
)
from xlashard.pjit.closed_over import check_closed_over, closed_over_places, named_value
from xlashard.pjit.compile import PROGRAMS, CompiledProgram, compile_lowered
from xlashard.pjit.dispatch import DonationInfo, Results, run_repeatably
from xlashard.pjit.lower import LoweredSignature, LoweringRequest
from xlashard.pjit.options import PjitOptions, Selected
from xlashard.pjit.parameters import Parameters
from xlashard.pjit.primitive import (
    all_parts_of,
    constrained_body,
    inner_shardings,
    pjit_p,
    used_parts_of,
)
from xlashard.pjit.recompile.compile_log import CompileLog
from xlashard.pjit.recompile.history import CacheMiss
from xlashard.pjit.shardings.device_assignment import ShardingRequest
from xlashard.pjit.shardings.prefix import expand
from xlashard.pjit.shardings.resolve import resolve
from xlashard.pjit.shardings.resources import Resource, check_from_gda, to_sharding
from xlashard.pjit.shardings.unreduced import check_axes, has_reductions
from xlashard.pjit.trace import Call
from xlashard.program import LoweredProgram
from xlashard.sharding import (
    Mesh,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
)

type _Boundary = tuple[
    tuple[XLACompatibleSharding | None, ...], tuple[XLACompatibleSharding | None, ...]
]
"""Shardings of arguments and of results; None leaves the value to the partitioner."""

BOUNDARIES = cleared_with_jax(BoundedCache(1024))
"""Boundary shardings of nested calls, by what was requested of them and by their types."""


class Function:
    """What stands behind a pjit-ed function.

    Args:
        fun: The Python function.
        options: The checked options.
        static: Positions and names of static arguments.

    Attributes:
        is_spread: True once a program of it runs on several devices.

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
        self.compile_log = CompileLog(self.name, fun)
        self.taker = DonationTracker(self.parameters.signature.function)
        self.is_spread = False
        # Programs that closed-over arrays are arguments of, where they could be donated too.
        self._closes_over: weakref.WeakSet[CompiledProgram] = weakref.WeakSet()
        self.tracer = tracing.FunctionTracer(
            fun,
            self.parameters.signature.python,
            self.parameters.static_argnums,
            self.parameters.static_argnames,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.fun, self.options, self.static)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.parameters.signature.function

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Traces for a call's arguments and looks up what was said of each."""
        miss, mesh = CacheMiss(), tracing.mesh_in_force()
        self.parameters.check_call(args, kwargs)
        values = self.parameters.leaves(args, kwargs)
        if not are_arrays(values):
            check_values(values, self.parameters.paths(args, kwargs))
        try:
            traced = self.tracer(args, kwargs, mesh)
        except AssertionError:
            # JAX 0.11 asserts that no mesh of an unreduced value has automatic axes.
            for value in values:
                if isinstance(value, jax.Array):
                    check_axes(jax.typeof(value), self.name)
            raise
        except RuntimeError:
            if not global_state.is_tracing_forbidden():
                raise
            raise TracingError(
                f"{self.name} would have to be traced, which jax.no_tracing forbids: call it once "
                "with such arguments before"
            ) from None
        ins = self.in_resources(traced.in_tree)
        outs = self.out_resources(traced.out_tree)
        in_paths, out_paths = traced.arg_names, traced.result_paths
        said_in, said_out = self.options.in_resources.what, self.options.out_resources.what
        check_from_gda(ins, values, in_paths, said_in)
        call = Call(
            traced=traced,
            values=tuple(values),
            mesh=mesh,
            in_shardings=_shardings(ins, mesh, in_paths, said_in),
            out_shardings=_shardings(outs, mesh, out_paths, said_out),
            layouts=(tuple(r.layout for r in ins), tuple(r.layout for r in outs)),
            donated=self.parameters.donated(args, kwargs, len(values)),
            statics=self.parameters.statics(args, kwargs),
            kind_of=self.options.kind_of,
            miss=miss,
        )
        if traced.is_new:
            miss.record_stage("trace")
            self.compile_log.record(miss, lambda: call.key(None, self.options.compiler_options))
        return call

    def in_resources(self, in_tree: Any) -> list[Resource]:
        """What was said of each argument, for a tree of `(args, kwargs)` without static ones."""
        tree = self.options.in_resources
        if len(tree.leaves) == 1 and jax.tree_util.treedef_is_leaf(tree.treedef):
            return [tree.leaves[0]] * in_tree.num_leaves
        return self.parameters.expand_in(tree, in_tree)

    def out_resources(self, out_tree: Any) -> list[Resource]:
        """What was said of each result, for their tree."""

        def path_of(path: Sequence[Any]) -> str:
            return "result" + jax.tree_util.keystr(tuple(path))

        return expand(self.options.out_resources, out_tree, path_of)

    def arguments(self, call: Call) -> tuple[Argument, ...]:
        """Where the arguments of a call are."""
        return describe_arguments(call.values, call.traced.arg_names, call.traced.in_avals)

    def lowering_request(self, call: Call, arguments: tuple[Argument, ...]) -> LoweringRequest:
        """The program that a call needs."""
        options = self.options
        wanted = self._sharding_request(call, arguments, keep_unused=options.keep_unused)
        call.miss.arguments = arguments = wanted.arguments
        in_layouts, out_layouts = call.layouts
        return LoweringRequest(
            name=call.traced.name,
            placement=resolve(wanted),
            donated=call.donated,
            layouts=(follow_layouts(arguments, in_layouts), out_layouts),
            keep_unused=options.keep_unused,
            options=options.compiler_options,
            share_binary=options.share_binary,
        )

    def _sharding_request(
        self, call: Call, arguments: tuple[Argument, ...], *, keep_unused: bool
    ) -> ShardingRequest:
        """Return what decides the devices and shardings of a call.

        Args:
            call: The call.
            arguments: Its arguments.
            keep_unused: Place the program by unused arguments and dead code too, and on stand-ins
                where all shardings stand on abstract meshes: a program around it has the devices.
        """
        traced, options = call.traced, self.options
        check_closed_over(traced.jaxpr, traced.name, self.fun)
        device = self._device()
        if device is not None:
            # It was asked for by name: whatever is elsewhere comes there.
            arguments = tuple(a.unbound() for a in arguments)
        used = (all_parts_of if keep_unused else used_parts_of)(traced.jaxpr)
        return ShardingRequest(
            arguments=arguments,
            in_shardings=call.in_shardings,
            out_shardings=call.out_shardings,
            result_avals=tuple(map(tracing.shaped, traced.jaxpr.out_avals)),
            result_paths=traced.result_paths,
            used=used.args,
            inner=used.inner,
            closed=closed_over_places(compress(traced.jaxpr.consts, used.consts), self.fun),
            mesh=call.mesh if device is None else None,
            device=device,
            assign=unassigned_devices if keep_unused else call.assign,
            names=(options.in_resources.what, options.out_resources.what),
        )

    def _device(self) -> Device | None:
        backend = self.options.backend
        if backend is None:
            return self.options.device
        try:
            return compiler.devices_of(backend)[0]
        except RuntimeError as error:
            raise ArgumentError(
                f"{self.name} was told to run on backend={backend!r}: {error}; here write "
                f"backend={jax.default_backend()!r}"
            ) from None

    def lower(self, call: Call, order: LoweringRequest) -> tuple[LoweredSignature, LoweredProgram]:
        """The module of an order."""
        lowered = PROGRAMS.lowered(call.traced.jaxpr, order, call.miss)
        self.compile_log.record(call.miss, lambda: call.key(order))
        return lowered

    def compile(self, call: Call, order: LoweringRequest) -> CompiledProgram:
        """The program of an order."""
        compiled = PROGRAMS.compiled(call.traced.jaxpr, order, call.miss)
        self.compile_log.record(call.miss, lambda: call.key(order))
        self.compile_log.log_reason(call.miss)
        return compiled

    def compile_uncached(
        self,
        call: Call,
        order: LoweringRequest,
        lowered: tuple[LoweredSignature, LoweredProgram],
        options: tuple[tuple[str, Any], ...],
    ) -> CompiledProgram:
        """The program of an order under more options of the compiler; no other call gets it."""
        again = replace(call, miss=CacheMiss(arguments=call.miss.arguments))
        with again.miss.timed("compile"):
            compiled = compile_lowered(*lowered, options, share=order.share_binary)
        again.miss.executable_source = compiled.program.source
        whole = replace(order, options=(*order.options, *options))
        self.compile_log.record(again.miss, lambda: again.key(whole))
        self.compile_log.log_reason(again.miss)
        return compiled.with_user_shardings(order.placement)

    def compile_call(self, call: Call) -> CompiledProgram:
        """The compiled program of a call."""
        order = self.lowering_request(call, self.arguments(call))
        _, lowered = self.lower(call, order)
        self.report_donation(lowered)
        compiled = self.compile(call, order)
        self.is_spread |= compiled.program.is_spread
        self.report_donation(lowered, compiled)
        if compiled.consts and self.parameters.donates:
            self._closes_over.add(compiled)
        return compiled

    def report_donation(
        self, lowered: LoweredProgram, compiled: CompiledProgram | None = None
    ) -> None:
        """Says which donated arguments no result can take over, and of a program: takes over.

        Raises:
            DonationError: If there is one, under `donation="strict"`.
        """
        program = None if compiled is None else compiled.program
        lowered.report_donation(self.options.donation, self.name, program)

    @shortened
    def cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """A call that the dispatcher has not seen: runs it, and says how to repeat it."""
        call = self.trace(args, kwargs)
        if call.traced.consts or not tracing.is_top_level():
            return self.bind(call), None, False
        return *self._executed(call), False

    def run(self, call: Call) -> Any:
        """Runs a call, or makes it a part of the trace that is under way."""
        if call.traced.consts or not tracing.is_top_level():
            return self.bind(call)
        return self._executed(call)[0]

    def _executed(self, call: Call) -> tuple[Any, Any]:
        """The result of a call at the top level, and how the dispatcher may repeat it."""
        traced = call.traced
        check_concrete(call.values, traced.arg_names)
        naming = partial(named_value, function=self.fun, called=self.name)
        given = DonationInfo(call.donated, traced.arg_names, self.taker, naming)
        results = Results(traced.out_tree, call.kind_of)
        return run_repeatably(self.compile_call(call), call.values, results, given, traced.jaxpr)

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
        """A call under a transformation or a trace: one equation of our primitive."""
        self.compile_log.log_reason(call.miss)
        traced, options = call.traced, self.options
        key = "ends", call.in_shardings, call.out_shardings, call.mesh, self._device()
        # The body may be the jaxpr itself, which a value kept for it would keep alive.
        ends = PROGRAMS.kept(traced.jaxpr, key, lambda: self._shared_boundary(call))
        body, closed = constrained_body(traced.jaxpr, *ends)
        values = [*closed, *traced.consts, *call.values]
        if options.inline and tracing.is_staging():
            results = list(map(tracing.staged, as_function(body)(*values)))
        else:
            results = pjit_p.bind(
                *values,
                jaxpr=body,
                name=traced.name,
                donated_invars=(*(False,) * (len(values) - len(call.donated)), *call.donated),
                options=options.compiler_options,
                donation=options.donation,
            )
        return traced.out_tree.unflatten([wrap_result(r) for r in results])

    def _shared_boundary(self, call: Call) -> _Boundary:
        """Return shardings for all inputs of the jaxpr; nested calls that are alike share them."""
        traced = call.traced
        jaxpr = traced.jaxpr
        if jaxpr.consts or not all(isinstance(value, tracing.Tracer) for value in call.values):
            ins, outs = self._boundary_shardings(call)
        else:
            # Nested calls are often alike, as the layers of a model are.
            requested = call.in_shardings, call.out_shardings, call.mesh, self._device()
            types = traced.in_avals, tuple(jaxpr.out_avals), inner_shardings(jaxpr)
            ins, outs = BOUNDARIES.kept((requested, types), lambda: self._boundary_shardings(call))
        return (*(None,) * len(traced.consts), *ins), outs

    def _boundary_shardings(self, call: Call) -> _Boundary:
        """Return the shardings to pin at the boundary of the jaxpr of a call."""
        # Inside a trace the whole is placed later.
        arguments = tuple(a.unbound() for a in self.arguments(call))
        placement = resolve(self._sharding_request(call, arguments, keep_unused=True))
        # Else the devices are those of the program around this call.
        named = placement.committed and not placement.is_unassigned
        device = self._device()

        def pinned(
            aval: Any, requested: Sharding | None, sharding: XLACompatibleSharding | None
        ) -> XLACompatibleSharding | None:
            if device is not None:
                return SingleDeviceSharding(placement.devices[0])
            if requested is None or not has_reductions(aval, sharding):
                return None
            return (
                sharding if named or not isinstance(requested, XLACompatibleSharding) else requested
            )

        traced = call.traced
        ins = tuple(
            None if is_reference(aval) else pinned(aval, requested, sharding)
            for aval, requested, sharding in zip(
                traced.in_avals, call.in_shardings, placement.in_shardings, strict=True
            )
        )
        avals = traced.jaxpr.out_avals
        return ins, tuple(map(pinned, avals, call.out_shardings, placement.out_shardings))

    def clear_cache(self) -> None:
        """Forgets what was traced of the function, and its programs."""
        for jaxpr in self.tracer.forget():
            PROGRAMS.drop(jaxpr)
        self.compile_log.clear()


def _shardings(
    resources: Sequence[Resource], mesh: Mesh | None, paths: Sequence[str], what: str
) -> tuple[Sharding | None, ...]:
    return tuple(
        to_sharding(r, mesh, f"{what} of {p}") for r, p in zip(resources, paths, strict=True)
    )
