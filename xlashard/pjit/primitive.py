"""The primitive that a pjit-ed function becomes inside a transformation or a trace.

Its shardings stand in the body as constraints on its first and last values, so that the rules by
which JAX transforms the body carry them along, and every piece that is run here contains the
shardings of its values.
"""

import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from operator import not_
from typing import Any

import jax

from xlashard._jax.runtime import dispatch
from xlashard._jax.trace import tracing
from xlashard._jax.trace.jaxprs import as_function, hoist
from xlashard._jax.trace.primitives import call_primitive
from xlashard._jax.trace.rewriting import boundary, surround
from xlashard.array.core.base import DonationTracker, release_shards
from xlashard.lazily import dataclass
from xlashard.pjit.arguments import describe_arguments, follow_layouts, may_share
from xlashard.pjit.compile import PROGRAMS, CompiledProgram
from xlashard.pjit.constraint import boundary_p, constraint_params, only_places
from xlashard.pjit.dispatch import DonationInfo, Results, run_repeatably
from xlashard.pjit.lower import LoweringRequest, is_hoisted
from xlashard.pjit.recompile.history import DERIVED_PROGRAMS, CacheMiss
from xlashard.pjit.shardings.device_assignment import ShardingRequest, names_devices
from xlashard.pjit.shardings.resolve import resolve
from xlashard.pjit.trace import OF_CONSTRAINED_BODIES, inner_shardings, used_parts_of
from xlashard.sharding import NamedSharding


def _impl(
    *args: Any,
    jaxpr: Any,
    name: str,
    donated_invars: tuple[bool, ...],
    options: tuple[tuple[str, Any], ...],
    donation: str,
) -> Sequence[Any]:
    """Run a piece of a transformed call as a program."""
    piece = _Piece(name, options, donated_invars, donation)
    call, miss = PROGRAMS.cached(jaxpr, ("piece", piece), lambda: _dispatched(jaxpr, piece))
    if not any(donated_invars):
        return call(*args)
    donated = list(compress(args, donated_invars))
    others = list(compress(args, map(not_, donated_invars)))
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
    given = None
    if any(piece.donated):
        paths = jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))
        given = DonationInfo(piece.donated, tuple(paths), piece.name, DonationTracker(piece.name))

    def miss(*args: Any) -> tuple[Any, Any, bool]:
        compiled = _compiled(args, body(), piece)
        return *run_repeatably(compiled, args, results, given, body()), False

    def evaluate(*args: Any) -> list[Any]:
        return as_function(body())(*args)

    return dispatch.new_dispatcher(piece.name, evaluate, miss), miss


def _compiled(args: Sequence[Any], jaxpr: Any, piece: _Piece) -> CompiledProgram:
    """Return the program of a piece for its arguments."""
    label = piece.name
    paths = [f"argument {i} of {label}" for i in range(len(args))]
    arguments = describe_arguments(args, paths, jaxpr.in_avals)
    ins, outs = boundary(jaxpr, boundary_p, "sharding")
    in_shardings = tuple(
        None if argument.committed else _closed(sharding, argument.aval)
        for sharding, argument in zip(ins, arguments, strict=True)
    )
    used = used_parts_of(jaxpr)
    placed = used.inner or any(a.committed for a in compress(arguments, used.args))
    shardings = ShardingRequest(
        arguments=arguments,
        in_shardings=in_shardings,
        out_shardings=tuple(map(_closed, outs, jaxpr.out_avals)),
        result_avals=tuple(map(tracing.shaped, jaxpr.out_avals)),
        result_paths=tuple(f"result {i} of {label}" for i in range(len(outs))),
        used=used.args,
        inner=used.inner,
        mesh=None if placed else tracing.mesh_in_force(),
    )
    free = (None,) * len(args), (None,) * len(outs)
    layouts = follow_layouts(arguments, free[0]), free[1]
    request = LoweringRequest(
        label, resolve(shardings), layouts, piece.donated, options=piece.options
    )
    miss = CacheMiss()
    compiled = PROGRAMS.entry(jaxpr, request).compile(jaxpr, request, miss)
    DERIVED_PROGRAMS.record(tracing.source_of(jaxpr), miss, (jaxpr.in_avals, jaxpr.out_avals))
    if any(piece.donated) and compiled.lowered is not None:
        compiled.lowered.report_donation(piece.donation, label)
        compiled.lowered.report_donation(piece.donation, label, compiled.program)
    return compiled


def _closed(sharding: Any, aval: Any) -> Any:
    """Return the sharding of a constraint, if an argument or result can have it; else None."""
    if sharding is None:
        return None
    if isinstance(sharding, NamedSharding) and not sharding.normal_spec.is_constrained:
        return None
    try:
        sharding.is_compatible_aval(aval.shape)
    except ValueError:
        return None
    return sharding


pjit_p = call_primitive("pjit", _impl, only_places)
"""A call of a pjit-ed function; `call_primitive` lists its parameters."""


def constrained_body(
    jaxpr: Any, ins: tuple[Any, ...], outs: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """Return the jaxpr with constraints on its first and last values, cached by shardings.

    Args:
        jaxpr: The closed jaxpr.
        ins: The sharding of each argument, or None.
        outs: The sharding of each result, or None.

    Returns:
        The body, and the closed-over arrays that it takes before its arguments.
    """
    chosen = [is_hoisted(value) for value in jaxpr.consts]
    if not any(ins) and not any(outs) and not any(chosen):
        return jaxpr, ()
    return PROGRAMS.cached(
        jaxpr, ("body", ins, outs), lambda: _constrained(jaxpr, ins, outs, chosen)
    )


def _constrained(
    jaxpr: Any, ins: Sequence[Any], outs: Sequence[Any], chosen: Sequence[bool]
) -> tuple[Any, tuple[Any, ...]]:
    hoisted, closed = hoist(jaxpr, chosen)
    first = [*(None,) * len(closed), *map(_params, ins)]
    body = surround(hoisted, boundary_p, first, list(map(_params, outs)))
    first_pinned, last_pinned = (
        [s for s in side if s is not None and names_devices(s)] for side in (ins, outs)
    )
    OF_CONSTRAINED_BODIES[body] = tuple(
        dict.fromkeys([*first_pinned, *inner_shardings(jaxpr), *last_pinned])
    )
    return body, tuple(closed)


def _params(sharding: Any) -> dict[str, Any] | None:
    return None if sharding is None else constraint_params(sharding)
