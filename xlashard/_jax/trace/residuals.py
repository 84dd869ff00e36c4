"""Linearization of a call, without copies among what it hands to its backward part.

JAX's rule for call primitives returns every value that the backward part needs as a result of the
forward one, also where the caller holds it already: an argument that the call only places, or a
result that it only constrains. Here such a value is taken from there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jax._src import ad_util, core
from jax._src.interpreters import ad
from jax._src.interpreters import partial_eval as pe
from jax._src.tree_util import tree_leaves
from jax._src.util import weakref_lru_cache

from xlashard.lazily import dataclass

type Jaxpr = Any


@dataclass(frozen=True, eq=False)
class _Source:
    """Where a value of the forward part is found.

    Attributes:
        position: Among what the forward program gives, or among the arguments.
        is_argument: Whether it is one of the arguments.
        placing: The equation that the backward part must apply to it first, or None.
    """

    position: int
    is_argument: bool = False
    placing: Any = None


@dataclass(frozen=True, eq=False)
class _Linearized:
    """A jaxpr in two parts.

    Attributes:
        forward: Gives what `sources` name.
        backward: Takes residuals, tangents and structured residuals.
        sources: Of the results, residuals and structured residuals.
        count: How many of those there are of each kind.
        structure: The avals of the structured residuals, in their tree.
        handed_on: For each residual the argument that it is, known already to JAX; else None.
        nonzero: For each result whether it has a tangent.
    """

    forward: Jaxpr
    backward: Jaxpr
    sources: tuple[_Source, ...]
    count: tuple[int, int, int]
    structure: Any
    handed_on: tuple[int | None, ...]
    nonzero: tuple[bool, ...]


def register_linearization(primitive: core.Primitive, is_placing: Callable[[Any], bool]) -> None:
    """Sets how calls of a primitive (with the parameter `jaxpr`) are linearized.

    Args:
        primitive: The primitive.
        is_placing: Of an equation inside the body, whether it only says where its value belongs.
    """
    ad.primitive_linearizations[primitive] = partial(_linearize, primitive, is_placing)


def _linearize(
    primitive: core.Primitive,
    is_placing: Callable[[Any], bool],
    is_vjp: bool,
    nonzero: Sequence[bool],
    *primals: Any,
    jaxpr: Jaxpr,
    **params: Any,
) -> tuple[Any, ...]:
    params["donated_invars"] = ()  # The backward part may need the arguments.
    stays = tuple(map(_stays_where_it_is, primals))
    parts = _parts(jaxpr, tuple(nonzero), is_vjp, stays, is_placing)
    given = primitive.bind(*primals, jaxpr=parts.forward, **params)
    found = [primals[s.position] if s.is_argument else given[s.position] for s in parts.sources]
    results, residuals, structured = _split(found, parts.count)
    arguments = [*jaxpr.consts, *primals]
    rest = iter(residuals)
    residuals = [next(rest) if i is None else arguments[i] for i in parts.handed_on]

    def tangent(residuals: Sequence[Any], structured: Any, *tangents: Any) -> list[Any]:
        taken = [ad.instantiate_zeros(t) for t, nz in zip(tangents, nonzero, strict=True) if nz]
        # Since JAX 0.12 the backward part of a `vjp` is marked as such.
        marked = is_vjp and hasattr(ad, "vjp_node")
        backward = ad.vjp_node(primitive) if marked else primitive
        out = backward.bind(
            *residuals, *taken, *tree_leaves(structured), jaxpr=parts.backward, **params
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
    """Whether an argument may stand for what is placed; others are kept as they were placed."""
    return isinstance(primal, core.Tracer) or bool(getattr(primal, "committed", False))


def _with_zeros(
    tangents: Sequence[Any], nonzero: Sequence[bool], avals: Sequence[Any]
) -> Iterator[Any]:
    rest = iter(tangents)
    for aval, nz in zip(avals, nonzero, strict=True):
        yield next(rest) if nz else ad_util.Zero(aval.to_tangent_aval())


def _split(values: Sequence[Any], count: Sequence[int]) -> list[list[Any]]:
    parts, at = [], 0
    for n in count:
        parts.append(list(values[at : at + n]))
        at += n
    return parts


@weakref_lru_cache
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
    settled = tuple(s if s.is_argument else _Source(position[s.position]) for s in sources)
    # Where the backward part takes each residual: first those, then tangents, then structured ones.
    taken = [i for i, at in enumerate(handed_on) if at is None]
    last = len(backward.invars) - count[2]
    binders = [*taken, *range(last, last + count[2])]
    placings = {
        at: s.placing
        for at, s in zip(binders, settled[count[0] :], strict=True)
        if s.placing is not None
    }
    return _Linearized(
        forward=pe.prune_jaxpr_outputs(forward, [i in position for i in range(len(sources))]),
        backward=_placing_first(backward, placings),
        sources=settled,
        count=count,
        structure=structured,
        handed_on=tuple(handed_on),
        nonzero=tuple(nonzero_out),
    )


def _sources(
    jaxpr: Jaxpr, results: int, stays: Sequence[bool], is_placing: Callable[[Any], bool]
) -> list[_Source]:
    """Where each value that a forward part gives is found; `position` as before any is dropped."""
    held = {id(v): _Source(i, is_argument=True) for i, v in enumerate(jaxpr.invars)}
    staying = {key: source for key, source in held.items() if stays[source.position]}
    unplaced: dict[int, Any] = {}
    for eqn in filter(is_placing, jaxpr.eqns):
        (value,), (target,) = eqn.invars, eqn.outvars
        unplaced[id(target)] = value
        if id(value) in staying:
            held[id(target)] = replace(staying[id(value)], placing=eqn)
    sources = []
    for i, value in enumerate(jaxpr.outvars):
        # A result is placed as it says; a residual may be whatever has its value.
        source = (staying if i < results else held).get(id(value)) or _Source(i)
        sources.append(source)
        if not source.is_argument:
            held.setdefault(id(value), source)
            held.setdefault(id(unplaced.get(id(value), value)), source)
    return sources


def _placing_first(jaxpr: Jaxpr, placings: dict[int, Any]) -> Jaxpr:
    """The jaxpr that applies equations of one value to some of its arguments before all else."""
    if not placings:
        return jaxpr
    invars, first = list(jaxpr.invars), []
    for at, eqn in placings.items():
        inner = invars[at]
        invars[at] = core.Var(inner.aval)
        first.append(eqn.replace(invars=[invars[at]], outvars=[inner]))
    return jaxpr.replace(invars=invars, eqns=[*first, *jaxpr.eqns])
