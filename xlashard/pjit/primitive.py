"""The primitive that a pjit-ed function becomes inside a transformation or a trace.

Its shardings stand in the body as constraints on its first and last values, so that each rule by
which JAX transforms the body carries them along, and every piece that comes back to be run here
still says where its values belong.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from xlashard._jax import dispatch, tracing
from xlashard._jax.jaxprs import as_function, boundary, hoist, surround
from xlashard._jax.primitives import call_primitive
from xlashard.lazily import dataclass
from xlashard.pjit.arguments import describe_arguments, follow_layouts
from xlashard.pjit.closed import is_hoisted
from xlashard.pjit.constraint import (
    boundary_p,
    constraint_params,
    constraints_in,
    only_places,
)
from xlashard.pjit.lower import Order
from xlashard.pjit.prepare import PROGRAMS, Prepared
from xlashard.pjit.recompile.making import Making
from xlashard.pjit.recompile.pieces import PIECES
from xlashard.pjit.resolve import Wanted, resolve
from xlashard.pjit.run import Giving, Results, run_repeatably
from xlashard.sharding import NamedSharding, Sharding, from_jax


@dataclass(frozen=True, eq=False)
class BatchGiving(Giving):
    """What a call gives away that is about to run under `vmap`, and under nothing else.

    Only then each of its arguments is an argument of the program that runs, and nobody keeps one
    for later, as a gradient does.

    Attributes:
        mode: What to do about a donated argument that no result can reuse.
    """

    mode: str = "warn"


_giving: ContextVar[BatchGiving | None] = ContextVar(
    "what the call under vmap gives away", default=None
)


@contextmanager
def giving(what: BatchGiving | None) -> Iterator[None]:
    """Lets the call that is bound within the block give away its arguments."""
    token = _giving.set(what)
    try:
        yield
    finally:
        _giving.reset(token)


def _impl(
    *args: Any, call_jaxpr: Any, label: str, options: tuple[tuple[str, Any], ...]
) -> Sequence[Any]:
    """Runs a piece of a transformed call as a program."""
    given = _giving.get()
    if given is not None and len(given.donated) != len(args):
        given = None
    kept_as = None if given is None else (given.donated, given.mode)
    key = "piece", label, options, kept_as
    call = PROGRAMS.kept(call_jaxpr, key, lambda: _dispatched(call_jaxpr, label, options, given))
    return call(*args)


def _dispatched(
    call_jaxpr: Any, label: str, options: tuple[tuple[str, Any], ...], given: BatchGiving | None
) -> Any:
    """What repeats the calls of a piece without entering Python.

    It is kept as long as the piece is, and so must not keep that.
    """
    piece = weakref.ref(call_jaxpr)
    results = Results(jax.tree_util.tree_structure([0] * len(call_jaxpr.outvars)))

    def miss(*args: Any) -> tuple[Any, Any, bool]:
        body = piece()
        prepared = _prepared(args, body, label, options, given)
        return *run_repeatably(prepared, args, results, given, body), False

    def evaluate(*args: Any) -> list[Any]:
        return as_function(piece())(*args)

    return dispatch.new_dispatcher(label, evaluate, miss, ((), ()), label)


def _prepared(
    args: Sequence[Any],
    call_jaxpr: Any,
    label: str,
    options: tuple[tuple[str, Any], ...],
    given: BatchGiving | None,
) -> Prepared:
    """The program of a piece for its arguments."""
    paths = [f"argument {i} of {label}" for i in range(len(args))]
    arguments = describe_arguments(args, paths, call_jaxpr.in_avals)
    ins, outs = boundary(call_jaxpr, boundary_p, "sharding")
    in_shardings = tuple(
        None if argument.committed else _closed(sharding, argument.aval)
        for sharding, argument in zip(ins, arguments, strict=True)
    )
    inner = inner_shardings(call_jaxpr)
    placed = inner or any(argument.committed for argument in arguments)
    wanted = Wanted(
        arguments=arguments,
        in_shardings=in_shardings,
        out_shardings=tuple(map(_closed, outs, call_jaxpr.out_avals)),
        result_avals=tuple(call_jaxpr.out_avals),
        result_paths=tuple(f"result {i} of {label}" for i in range(len(outs))),
        inner=inner,
        mesh=None if placed else tracing.mesh_in_force(),
    )
    free = (None,) * len(args), (None,) * len(outs)
    layouts = follow_layouts(arguments, free[0]), free[1]
    donated = (False,) * len(args) if given is None else given.donated
    order = Order(label, resolve(wanted), layouts, donated, options=options)
    making = Making()
    prepared = PROGRAMS.prepared(call_jaxpr, order, making)
    PIECES.note(tracing.source_of(call_jaxpr), making, (call_jaxpr.in_avals, call_jaxpr.out_avals))
    if given is not None and prepared.lowered is not None:
        prepared.lowered.report_donation(given.mode, label)
        prepared.lowered.report_donation(given.mode, label, prepared.program)
    return prepared


def _closed(sharding: Any, aval: Any) -> Any:
    """A constraint as a sharding of an argument or result, where it can be one."""
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
"""A call of a pjit-ed function; parameters `call_jaxpr`, `label`, the function's name, and
`options` of the compiler."""


def inner_shardings(jaxpr: Any) -> tuple[Sharding, ...]:
    """The shardings that constraints inside a jaxpr name, of ours and of JAX."""
    theirs = [from_jax(s) for s in tracing.inner_shardings(jaxpr)]
    return tuple(constraints_in(jaxpr) + theirs)


def constrained_body(
    jaxpr: Any, ins: tuple[Any, ...], outs: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """The jaxpr with constraints on its first and last values; made once per shardings.

    Args:
        jaxpr: The closed jaxpr.
        ins: For each argument a sharding or None.
        outs: For each result a sharding or None.

    Returns:
        The body, and the closed-over arrays that it takes in front of its arguments.
    """
    chosen = [is_hoisted(value) for value in jaxpr.consts]
    if not any(ins) and not any(outs) and not any(chosen):
        return jaxpr, ()
    return PROGRAMS.kept(jaxpr, ("body", ins, outs), lambda: _constrained(jaxpr, ins, outs, chosen))


def _constrained(
    jaxpr: Any, ins: Sequence[Any], outs: Sequence[Any], chosen: Sequence[bool]
) -> tuple[Any, tuple[Any, ...]]:
    hoisted, closed = hoist(jaxpr, chosen)
    first = [*(None,) * len(closed), *map(_params, ins)]
    return surround(hoisted, boundary_p, first, list(map(_params, outs))), tuple(closed)


def _params(sharding: Any) -> dict[str, Any] | None:
    return None if sharding is None else constraint_params(sharding)
