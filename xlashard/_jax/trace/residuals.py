"""Linearize calls without copies among the residuals.

JAX's rule for call primitives returns every residual as a result of the forward part, also one
that equals an argument or a result up to a sharding constraint. These rules reuse that array.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax

from xlashard._jax.private import ad, core, find_name, util
from xlashard._jax.trace.jaxprs import without_results
from xlashard._jax.trace.tracing import replace_fields
from xlashard.support.lazily import dataclass

type Jaxpr = Any


@dataclass(frozen=True, eq=False)
class _ResidualSource:
    """Source of a value of the forward part.

    Attributes:
        position: The position among the forward program's results, or among the arguments.
        is_argument: True for an argument.
        placing: The sharding constraint that the backward part must apply first, or None.
    """

    position: int
    is_argument: bool = False
    placing: Any = None


@dataclass(frozen=True, eq=False)
class _Linearized:
    """A jaxpr in two parts.

    Attributes:
        forward: The jaxpr of the values of `sources`.
        backward: The jaxpr of residuals, tangents and structured residuals.
        sources: The sources of results, residuals and structured residuals.
        count: The numbers of results, residuals and structured residuals.
        structure: The tree of the avals of structured residuals.
        handed_on: For each residual the argument that JAX forwards for it, or None.
        nonzero: For each result, True if it has a tangent.
    """

    forward: Jaxpr
    backward: Jaxpr
    sources: tuple[_ResidualSource, ...]
    count: tuple[int, int, int]
    structure: Any
    handed_on: tuple[int | None, ...]
    nonzero: tuple[bool, ...]

    def leaves_over(self, donated: Sequence[bool], consts: int) -> tuple[bool, ...]:
        """Return the donated arguments that are neither results nor residuals.

        Args:
            donated: For each argument, True if the call donates it.
            consts: The number of closed-over values, which `handed_on` counts too.
        """
        needed = {source.position for source in self.sources if source.is_argument}
        needed.update(i - consts for i in self.handed_on if i is not None)
        return tuple([gives and i not in needed for i, gives in enumerate(donated)])


def register_linearization(primitive: "core.Primitive", is_placing: Callable[[Any], bool]) -> None:
    """Register the linearization of a call primitive (with the parameter `jaxpr`).

    Args:
        primitive: The primitive.
        is_placing: Function that returns True for a sharding constraint of the body.
    """
    ad.primitive_linearizations[primitive] = partial(_linearize, primitive, is_placing)


def _linearize(
    primitive: "core.Primitive",
    is_placing: Callable[[Any], bool],
    is_vjp: bool,
    nonzero: Sequence[bool],
    *primals: Any,
    jaxpr: Jaxpr,
    donated_invars: tuple[bool, ...],
    **params: Any,
) -> tuple[Any, ...]:
    stays = tuple(map(_stays_where_it_is, primals))
    parts = _cached_parts()(jaxpr, tuple(nonzero), is_vjp, stays, is_placing)
    donated = parts.leaves_over(donated_invars, len(jaxpr.consts))
    forward = primitive.bind(*primals, jaxpr=parts.forward, donated_invars=donated, **params)
    values = [primals[s.position] if s.is_argument else forward[s.position] for s in parts.sources]
    results, residuals, structured = _split(values, parts.count)
    arguments = [*jaxpr.consts, *primals]
    rest = iter(residuals)
    residuals = [next(rest) if i is None else arguments[i] for i in parts.handed_on]

    def tangent(residuals: Sequence[Any], structured: Any, *tangents: Any) -> list[Any]:
        nonzero_tangents = [
            ad.instantiate_zeros(t) for t, nz in zip(tangents, nonzero, strict=True) if nz
        ]
        # Since JAX 0.12 the backward part of a `vjp` is marked as such.
        marked = is_vjp and find_name(ad, "vjp_node")
        backward = marked(primitive) if marked else primitive
        out = backward.bind(
            *residuals,
            *nonzero_tangents,
            *jax.tree_util.tree_leaves(structured),
            jaxpr=parts.backward,
            donated_invars=(),
            **params,
        )
        return list(_with_zeros(out, parts.nonzero, jaxpr.out_avals))

    return (
        results,
        parts.nonzero,
        residuals,
        parts.structure.update(structured).unflatten(),
        tangent,
    )


def _stays_where_it_is(primal: Any) -> bool:
    """Return True if an argument can replace its constrained value among the residuals."""
    return isinstance(primal, jax.core.Tracer) or bool(getattr(primal, "committed", False))


def _with_zeros(
    tangents: Sequence[Any], nonzero: Sequence[bool], avals: Sequence[Any]
) -> Iterator[Any]:
    rest = iter(tangents)
    for aval, nz in zip(avals, nonzero, strict=True):
        yield next(rest) if nz else ad.Zero(aval.to_tangent_aval())


def _split(values: Sequence[Any], count: Sequence[int]) -> list[list[Any]]:
    parts, at = [], 0
    for n in count:
        parts.append(list(values[at : at + n]))
        at += n
    return parts


@lru_cache(maxsize=1)
def _cached_parts() -> Callable[..., _Linearized]:
    """Return `_parts` with a cache that drops a result with its jaxpr."""
    return util.weakref_lru_cache(_parts)


def _parts(
    jaxpr: Jaxpr,
    nonzero: tuple[bool, ...],
    is_vjp: bool,
    stays: tuple[bool, ...],
    is_placing: Callable[[Any], bool],
) -> _Linearized:
    forward, out_tree, nonzero_out, handed_on, backward = ad.linearize_jaxpr(
        jaxpr, nonzero, is_vjp=is_vjp
    )
    results, residuals, structured = out_tree.unpack()
    count = len(results), len(residuals), len(structured)
    sources = _sources(forward, count[0], stays, is_placing)
    own = [i for i, s in enumerate(sources) if not s.is_argument and s.position == i]
    position = {i: k for k, i in enumerate(own)}
    settled = tuple(s if s.is_argument else _ResidualSource(position[s.position]) for s in sources)
    # The backward part takes residuals, then tangents, then structured residuals.
    own_residuals = [i for i, at in enumerate(handed_on) if at is None]
    last = len(backward.invars) - count[2]
    binders = [*own_residuals, *range(last, last + count[2])]
    placings = {
        at: s.placing
        for at, s in zip(binders, settled[count[0] :], strict=True)
        if s.placing is not None
    }
    return _Linearized(
        forward=without_results(forward, [i in position for i in range(len(sources))]),
        backward=_placing_first(backward, placings),
        sources=settled,
        count=count,
        structure=structured,
        handed_on=tuple(handed_on),
        nonzero=tuple(nonzero_out),
    )


def _sources(
    jaxpr: Jaxpr, results: int, stays: Sequence[bool], is_placing: Callable[[Any], bool]
) -> list[_ResidualSource]:
    """Return the source of each result of a forward part, with positions before pruning."""
    held = {id(v): _ResidualSource(i, is_argument=True) for i, v in enumerate(jaxpr.invars)}
    staying = {key: source for key, source in held.items() if stays[source.position]}
    unplaced: dict[int, Any] = {}
    for eqn in filter(is_placing, jaxpr.eqns):
        (value,), (target,) = eqn.invars, eqn.outvars
        unplaced[id(target)] = value
        if id(value) in staying:
            held[id(target)] = replace(staying[id(value)], placing=eqn)
    sources = []
    for i, value in enumerate(jaxpr.outvars):
        # A result keeps its own sharding; a residual can be any array of equal value.
        source = (staying if i < results else held).get(id(value)) or _ResidualSource(i)
        sources.append(source)
        if not source.is_argument:
            held.setdefault(id(value), source)
            held.setdefault(id(unplaced.get(id(value), value)), source)
    return sources


def _placing_first(jaxpr: Jaxpr, placings: dict[int, Any]) -> Jaxpr:
    """Return the jaxpr that first applies equations of one value to some of its arguments."""
    if not placings:
        return jaxpr
    invars, first = list(jaxpr.invars), []
    for at, eqn in placings.items():
        inner = invars[at]
        invars[at] = core.Var(inner.aval)
        first.append(eqn.replace(invars=[invars[at]], outvars=[inner]))
    return replace_fields(jaxpr, invars=invars, eqns=[*first, *jaxpr.eqns])
