"""The callable over a pjit-ed function, and its primitive inside a transformation or a trace.

The shardings of the primitive stand in its body as constraints on the first and last values, so
that the rules by which JAX transforms the body carry them along, and every piece that is run here
contains the shardings of its values.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, repeat
from typing import Any, Protocol

import jax

from xlashard._jax.runtime import dispatch
from xlashard._jax.runtime.global_state import cached_by_jaxpr
from xlashard._jax.runtime.shardings import UNSPECIFIED, layout_problem
from xlashard._jax.trace import tracing
from xlashard._jax.trace.jaxprs import as_function, hoist
from xlashard._jax.trace.primitives import call_primitive
from xlashard._jax.trace.rewriting import boundary, surround
from xlashard.core.array.array_class import base as array_base
from xlashard.core.array.array_class.base import DonationTracker, release_shards
from xlashard.core.pjit.arguments import (
    Argument,
    describe_arguments,
    may_share,
    split_by_donation,
)
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.cache_miss import DERIVED_PROGRAMS, CacheMiss
from xlashard.core.pjit.compile import PROGRAMS
from xlashard.core.pjit.constraint import (
    BoundaryArgument,
    boundary_p,
    constraint_params,
    only_places,
)
from xlashard.core.pjit.dispatch import DonationInfo, Results, run_repeatably
from xlashard.core.pjit.lower import is_hoisted
from xlashard.core.pjit.parameters import Parameters
from xlashard.core.pjit.shardings.device_assignment import ShardingRequest
from xlashard.core.pjit.shardings.resolve import resolve, resolve_layouts
from xlashard.core.pjit.shardings.unreduced import has_reductions
from xlashard.core.pjit.trace import (
    OF_CONSTRAINED_BODIES,
    find_constraint_line,
    inner_shardings,
    used_parts_of,
)
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.sharding import NamedSharding, to_jax
from xlashard.core.sharding.replicated import REPLICATED, names_devices
from xlashard.support.lazily import dataclass
from xlashard.support.tracebacks import shorten


class DispatchTarget(Protocol):
    """Implementation behind the callable.

    Attributes:
        fun: The Python function.
        parameters: Its parameters.
        tracer: Traces it.
        calls: The calls that its dispatchers have seen.
    """

    fun: Callable[..., Any]
    parameters: Parameters
    tracer: tracing.FunctionTracer
    calls: dispatch.SeenCalls

    @property
    def name(self) -> str:
        """Return the function's name."""
        ...

    def cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Run a call that missed the dispatcher's cache, and return its entry for that cache."""
        ...

    def clear_cache(self) -> None:
        """Drop everything that was traced and compiled."""
        ...


def dispatched[F: DispatchTarget](
    function: F, methods: Mapping[str, Any], remake: Callable[[F], Any]
) -> Any:
    """Return the C++ callable over a function; its methods are attributes of the instance.

    A deep copy of it is the callable itself, as of a Python function. A pickle holds its name where
    it stands in a module, and otherwise the function.

    Args:
        function: What is called for arguments that were not seen before.
        methods: The methods besides `clear_cache` and `_cache_size`.
        remake: Makes the callable from `function`; a pickle calls it.
    """
    call = dispatcher = dispatcher_of(function)
    tracer, calls = function.tracer, function.calls
    if tracer.static_argnums or tracer.static_argnames or function.parameters.donates:
        call = _checking(call, function)
    functools.update_wrapper(call, function.fun)
    kind = type(dispatcher)
    # A cycle would keep the arrays that the function closes over until a garbage collection. A
    # function around the dispatcher makes none, and its pickle can't hold a weak reference.
    find_dispatcher = weakref.ref(call) if call is dispatcher else lambda: dispatcher

    def clear_cache() -> None:
        calls.clear()
        function.clear_cache()

    own = {
        **methods,
        "clear_cache": clear_cache,
        "_cache_size": lambda: kind._cache_size(find_dispatcher()),
    }
    if call is dispatcher:  # Python copies and pickles functions itself.
        own["__deepcopy__"] = lambda memo: find_dispatcher()
        own["__reduce_ex__"] = lambda protocol: _named(find_dispatcher()) or (remake, (function,))
    call.__dict__ = _Attributes(own, **call.__dict__)
    return call


def dispatcher_of(function: DispatchTarget) -> Any:
    """Return jaxlib's dispatcher of a function."""
    static = function.tracer.static_argnums, function.tracer.static_argnames
    miss, calls = function.cache_miss, function.calls
    call = dispatch.new_dispatcher(function.name, function.fun, miss, static, calls)
    call.__dict__["__reduce_ex__"] = lambda protocol: (dispatcher_of, (function,))
    return call


def _named(call: Any) -> str | None:
    """Return the name under which a module other than `__main__` has a callable, or None."""
    module, name = getattr(call, "__module__", None), getattr(call, "__qualname__", "")
    value = None if module == "__main__" else sys.modules.get(module or "")
    for part in name.split("."):
        value = getattr(value, part, None)
    return name if value is call else None


class _Attributes(dict[str, Any]):
    """The attributes of a pjit-ed function, of which wrappers around it copy only the public info.

    `functools.wraps`, and `jax.jit` and `jax.vmap` with their own, copy the attributes of what they
    wrap. Without this `jax.jit(f).lower` would be that of `f`. Looking an attribute up doesn't come
    here.
    """

    def __init__(self, own: dict[str, Any], **copied: Any) -> None:
        super().__init__(copied)
        self.update(own)
        self._own = frozenset(own)

    def keys(self) -> Any:
        return [key for key in dict.keys(self) if key not in self._own]

    def __iter__(self) -> Any:
        return iter(self.keys())


def _checking(call: Any, function: DispatchTarget) -> Any:
    """Return the dispatcher for a function with static or donated arguments.

    Where a donated argument may share its buffers with another one, the function compares them once
    they are placed as its program takes them: before the call if other devices could start, and
    otherwise for the error. A static argument that jaxlib refuses gets its name.
    """
    parameters = function.parameters
    donates, check_call = parameters.donates, parameters.check_call
    are_exclusive, donated_leaves = parameters.are_exclusive, parameters.donated_leaves
    miss = function.cache_miss

    def shares(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        donated, others = donated_leaves(args, kwargs)
        return may_share(donated, [*others, *function.calls.closed.values()])

    def checked(*args: Any, **kwargs: Any) -> Any:
        # Not by short_tracebacks, which costs something where nothing goes wrong.
        try:
            try:
                if (
                    donates
                    and function.calls.is_spread
                    and not are_exclusive(args, kwargs)
                    and shares(args, kwargs)
                    and not jax.config.jax_disable_jit
                ):
                    return miss(*args, **kwargs)[0]
                return call(*args, **kwargs)
            except ValueError as error:
                check_call(args, kwargs)
                if donates and type(error) is ValueError and shares(args, kwargs):
                    return miss(*args, **kwargs)[0]
                raise
            finally:
                # Read from the module: a pickle of this function must not hold the records.
                if donates and array_base.SHARDS:
                    donated = donated_leaves(args, kwargs)[0]
                    array_base.release_shards(donated, function.name)
        except Exception as error:
            shorten(error)
            raise

    return checked


def _impl(
    *args: Any,
    jaxpr: Any,
    name: str,
    donated_invars: tuple[bool, ...],
    compiler_options_kvs: tuple[tuple[str, Any], ...],
    donation: str,
    **_: Any,
) -> Sequence[Any]:
    """Run a piece of a transformed call as a program."""
    piece = _Piece(name, compiler_options_kvs, donated_invars, donation)
    call, miss = PROGRAMS.cached(jaxpr, ("piece", piece), lambda: _dispatched(jaxpr, piece))
    if not any(donated_invars):
        return call(*args)
    donated, others = split_by_donation(args, donated_invars)
    try:
        return miss(*args)[0] if may_share(donated, others) else call(*args)
    finally:
        release_shards(donated, name)


@dataclass(frozen=True)
class _Piece:
    """Parameters of a piece besides its jaxpr.

    Attributes:
        name: The name of the called function.
        options: Options of the compiler.
        donated: For each argument, True if the program may reuse its buffers.
        donation: Mode of reporting a donated argument that no result can reuse.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    donated: tuple[bool, ...]
    donation: str


def _dispatched(jaxpr: Any, piece: _Piece) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the dispatcher that repeats the calls of a piece without entering Python.

    Also return the function behind it, which runs a call that the dispatcher has not seen.

    They are kept as long as the jaxpr is, and so must not keep that.
    """
    body = weakref.ref(jaxpr)
    results = Results(jax.tree_util.tree_structure([0] * len(jaxpr.outvars)))
    paths = _argument_paths(jaxpr, piece.name)
    tracker = DonationTracker(piece.name) if any(piece.donated) else None
    donation = DonationInfo(piece.donated, paths, piece.name, tracker)

    def miss(*args: Any) -> tuple[Any, Any, bool]:
        compiled = _compiled(args, body(), piece)
        return *run_repeatably(compiled, args, results, donation, body()), False

    def evaluate(*args: Any) -> list[Any]:
        return as_function(body())(*args)

    return dispatch.new_dispatcher(piece.name, evaluate, miss), miss


def _compiled(args: Sequence[Any], jaxpr: Any, piece: _Piece) -> CompiledProgram:
    """Return the program of a piece for its arguments."""
    label = piece.name
    ins, outs = boundary(jaxpr, boundary_p)
    checked = [None if params is None else params["argument"] for params in ins]
    known = zip(checked, _argument_paths(jaxpr, label), strict=True)
    paths = [path if named is None else named.path for named, path in known]
    arguments = describe_arguments(args, paths, jaxpr.in_avals)
    in_shardings = tuple(
        None
        if argument.committed and named is None
        else _find_boundary_sharding(params, argument.aval, is_typed=True)
        for params, argument, named in zip(ins, arguments, checked, strict=True)
    )
    keyword = next((named.keyword for named in checked if named is not None), "in_shardings")
    used = used_parts_of(jaxpr)
    placed = used.inner or any(a.committed for a in compress(arguments, used.args))
    shardings = ShardingRequest(
        arguments=arguments,
        in_shardings=in_shardings,
        out_shardings=tuple(map(_find_boundary_sharding, outs, jaxpr.out_avals)),
        result_avals=tuple(tracing.all_shaped(jaxpr.out_avals)),
        result_paths=tuple(f"result {i} of {label}" for i in range(len(outs))),
        used=used.args,
        inner=used.inner,
        find_line=functools.partial(find_constraint_line, jaxpr),
        mesh=None if placed else tracing.mesh_in_force(),
        names=(keyword, "out_shardings"),
        commits=used.moves,
    )
    placement = resolve(shardings)
    requested = list(map(_requested_layout, checked, arguments))
    layouts = resolve_layouts(arguments, args, requested, keyword), (None,) * len(outs)
    request = LoweringRequest(label, placement, layouts, piece.donated, options=piece.options)
    miss = CacheMiss()
    compiled = PROGRAMS.entry(jaxpr, request).compile(jaxpr, request, miss)
    DERIVED_PROGRAMS.record(tracing.source_of(jaxpr), miss, (jaxpr.in_avals, jaxpr.out_avals))
    if any(piece.donated) and compiled.lowered is not None:
        compiled.lowered.report_donation(piece.donation, label)
        compiled.report_donation(piece.donation, label)
    return compiled


def _argument_paths(jaxpr: Any, name: str) -> tuple[str, ...]:
    """Return the path of each argument, or its position where a transformation dropped the path."""
    paths = jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))
    return tuple([path or f"argument {i} of {name}" for i, path in enumerate(paths)])


def _requested_layout(named: BoundaryArgument | None, argument: Argument) -> Any:
    """Return the layout that was requested for a committed argument, unless `vmap` added to it."""
    if named is None or named.layout is None or not argument.committed:
        return None
    return None if layout_problem(named.layout, argument.aval.ndim) else named.layout


def _find_boundary_sharding(params: Any, aval: Any, *, is_typed: bool = False) -> Any:
    """Return the sharding of a constraint, if an argument or result can have it; else None.

    Args:
        params: The parameters of the constraint; None without one.
        aval: The type of the argument or result.
        is_typed: Leave out a sharding that is unreduced over other axes than the type.
    """
    if params is None:
        return None
    sharding = params["sharding"]
    if isinstance(sharding, NamedSharding) and not sharding.normal_spec.is_constrained:
        return None
    if is_typed and not has_reductions(aval, sharding):
        return None
    try:
        sharding.is_compatible_aval(aval.shape)
    except ValueError:
        return None
    return sharding


@cached_by_jaxpr
def _boundary_params(jaxpr: Any) -> dict[str, Any]:
    """Return shardings and layouts of a body by the names that the equations of `jax.jit` have.

    Tools that walk jaxprs read them; the constraints of the body are what counts.
    """
    ins, outs = boundary(jaxpr, boundary_p)
    return {
        "in_shardings": tuple(map(_as_param, ins, jaxpr.in_avals)),
        "out_shardings": tuple(map(_as_param, outs, jaxpr.out_avals)),
        "in_layouts": (None,) * len(ins),
        "out_layouts": (None,) * len(outs),
    }


def _as_param(params: Any, aval: Any) -> Any:
    if params is None:
        return UNSPECIFIED
    sharding = params["sharding"]
    # It stands for any devices, of which JAX's shardings need at least one.
    return sharding if sharding is REPLICATED else to_jax(sharding, aval.shape)


pjit_p: Any = call_primitive("pjit", _impl, only_places, _boundary_params)
"""A call of a pjit-ed function; `call_primitive` lists its parameters."""


def constrained_body(
    jaxpr: Any, ins: tuple[Any, ...], outs: tuple[Any, ...], names: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """Return the jaxpr with constraints on its first and last values, cached by shardings.

    Args:
        jaxpr: The closed jaxpr.
        ins: The sharding of each argument, or None.
        outs: The sharding of each result, or None.
        names: The `BoundaryArgument` of each argument, or None.

    Returns:
        The body, and the closed-over arrays that it takes before its arguments.
    """
    chosen = [is_hoisted(value) for value in jaxpr.consts]
    if not any(ins) and not any(outs) and not any(chosen):
        return jaxpr, ()
    return PROGRAMS.cached(
        jaxpr, ("body", ins, outs, names), lambda: _constrained(jaxpr, ins, outs, chosen, names)
    )


def _constrained(
    jaxpr: Any,
    ins: Sequence[Any],
    outs: Sequence[Any],
    chosen: Sequence[bool],
    names: Sequence[Any],
) -> tuple[Any, tuple[Any, ...]]:
    hoisted, closed = hoist(jaxpr, chosen)
    first = [*(None,) * len(closed), *map(_params, ins, names)]
    body = surround(hoisted, boundary_p, first, list(map(_params, outs, repeat(None))))
    first_pinned, last_pinned = (
        [s for s in side if s is not None and names_devices(s)] for side in (ins, outs)
    )
    OF_CONSTRAINED_BODIES[body] = tuple(
        dict.fromkeys([*first_pinned, *inner_shardings(jaxpr), *last_pinned])
    )
    return body, tuple(closed)


def _params(sharding: Any, argument: BoundaryArgument | None) -> dict[str, Any] | None:
    return None if sharding is None else {**constraint_params(sharding), "argument": argument}
