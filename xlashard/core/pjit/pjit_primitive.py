"""The primitive of a pjit-ed function inside of a transformation or a trace.

The shardings of the primitive stand in its body as constraints on the first and last values, so
that the rules by which JAX transforms the body carry them along, and every piece that is run here
contains the shardings of its values.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from typing import Any

import jax

from xlashard._jax.runtime import dispatch
from xlashard._jax.runtime.global_state import cached_by_jaxpr
from xlashard._jax.runtime.shardings import UNSPECIFIED, layout_problem
from xlashard._jax.trace import tracing
from xlashard._jax.trace.jaxprs import as_function, hoist
from xlashard._jax.trace.primitives import call_primitive
from xlashard._jax.trace.rewriting import boundary, surround
from xlashard.core.array.array_class.deletion import DonationTracker, release_shards
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
from xlashard.core.pjit.shardings.device_assignment import ShardingRequest
from xlashard.core.pjit.shardings.resolve import resolve, resolve_layouts
from xlashard.core.pjit.shardings.unreduced import has_reductions
from xlashard.core.pjit.trace import (
    find_constraint_line,
    used_parts_of,
)
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.sharding import NamedSharding, to_jax
from xlashard.core.sharding.replicated import REPLICATED
from xlashard.support.lazily import dataclass


def _run_piece(
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
    call, miss = PROGRAMS.cached(jaxpr, ("piece", piece), lambda: _make_dispatcher(jaxpr, piece))
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


def _make_dispatcher(jaxpr: Any, piece: _Piece) -> tuple[Callable[..., Any], Callable[..., Any]]:
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
        compiled = _compile_piece(args, body(), piece)
        return *run_repeatably(compiled, args, results, donation, body()), False

    def evaluate(*args: Any) -> list[Any]:
        return as_function(body())(*args)

    return dispatch.new_dispatcher(piece.name, evaluate, miss), miss


def _compile_piece(args: Sequence[Any], jaxpr: Any, piece: _Piece) -> CompiledProgram:
    """Return the program of a piece for its arguments."""
    label = piece.name
    # Constraints that a transformation has kept name the user's argument and its sharding.
    ins, outs = boundary(jaxpr, boundary_p)
    checked = [None if params is None else params["argument"] for params in ins]
    known = zip(checked, _argument_paths(jaxpr, label), strict=True)
    paths = [path if named is None else named.path for named, path in known]
    arguments = describe_arguments(args, paths, jaxpr.in_avals)
    # A committed value that no annotation of the user concerns, such as a residual, stays where the
    # piece before has left it.
    in_shardings = tuple(
        None
        if argument.committed and named is None
        else _find_boundary_sharding(params, argument.aval, is_typed=True)
        for params, argument, named in zip(ins, arguments, checked, strict=True)
    )
    keyword = next((named.keyword for named in checked if named is not None), "in_shardings")
    used = used_parts_of(jaxpr)
    # The mesh in force counts only where nothing else names devices.
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
    # `explain_recompile` lists the piece below the function that was transformed.
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
def _read_boundary(jaxpr: Any) -> dict[str, Any]:
    """Return shardings and layouts of a body by the names that the equations of `jax.jit` have.

    Tools that walk jaxprs read them; the constraints of the body are what counts.
    """
    ins, outs = boundary(jaxpr, boundary_p)
    return {
        "in_shardings": tuple(map(_describe_sharding, ins, jaxpr.invars)),
        "out_shardings": tuple(map(_describe_sharding, outs, jaxpr.outvars)),
        "in_layouts": (None,) * len(ins),
        "out_layouts": (None,) * len(outs),
    }


def _describe_sharding(params: Any, variable: Any) -> Any:
    if params is None:
        return UNSPECIFIED
    sharding = params["sharding"]
    # It stands for any devices, of which JAX's shardings need at least one.
    return sharding if sharding is REPLICATED else to_jax(sharding, variable.aval.shape)


pjit_p: Any = call_primitive("pjit", _run_piece, only_places, _read_boundary)
"""A call of a pjit-ed function; `call_primitive` lists its parameters."""


def constrain_body(
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

    def build() -> tuple[Any, tuple[Any, ...]]:
        hoisted, closed = hoist(jaxpr, chosen)
        first = [*(None,) * len(closed), *map(_make_params, ins, names)]
        last = list(map(_make_params, outs, repeat(None)))
        return surround(hoisted, boundary_p, first, last), tuple(closed)

    return PROGRAMS.cached(jaxpr, ("body", ins, outs, names), build)


def _make_params(sharding: Any, argument: BoundaryArgument | None) -> dict[str, Any] | None:
    return None if sharding is None else {**constraint_params(sharding), "argument": argument}
