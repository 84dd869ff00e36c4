"""Rewrite jaxprs: equations at their ends and inside."""

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from xlashard._jax import originals
from xlashard._jax.private import core, source_info_util
from xlashard._jax.runtime.shardings import (
    JaxNamedSharding,
    read_reduction,
)
from xlashard._jax.trace.jaxprs import from_function
from xlashard._jax.trace.tracing import (
    Jaxpr,
    bodies,
    entry_axes,
    equations,
    inner_primitives,
    is_jaxpr,
    replace_fields,
    sharding_equations,
)


def surround(
    jaxpr: Jaxpr, primitive: "core.Primitive", ins: Sequence[Any], outs: Sequence[Any]
) -> Jaxpr:
    """Apply a primitive of one value to arguments and results of a closed jaxpr.

    Args:
        jaxpr: The closed jaxpr.
        primitive: The primitive.
        ins: The primitive's parameters for each argument; None leaves the argument unchanged.
        outs: The primitive's parameters for each result; None leaves the result unchanged.
    """
    invars, outvars = list(jaxpr.invars), list(jaxpr.outvars)
    first, last = [], []
    source, context = source_info_util.new_source_info(), core.current_jaxpr_eqn_context()

    def apply(before: Any, after: Any, params: Any) -> Any:
        return core.JaxprEqn([before], [after], primitive, params, set(), source, context)

    for i, params in enumerate(ins):
        if params is not None:
            inner, invars[i] = invars[i], core.Var(invars[i].aval)
            first.append(apply(invars[i], inner, params))
    for i, params in enumerate(outs):
        if params is not None:
            inner, outvars[i] = outvars[i], core.Var(outvars[i].aval)
            last.append(apply(inner, outvars[i], params))
    eqns = [*first, *jaxpr.eqns, *last]
    return replace_fields(jaxpr, invars=invars, outvars=outvars, eqns=eqns)


def boundary(jaxpr: Jaxpr, primitive: "core.Primitive") -> tuple[list[Any], list[Any]]:
    """Return the parameters of a constraint at the arguments and results of a jaxpr.

    Returns:
        For each argument the parameters of the first equation of `primitive` that reads it, and for
        each result those of the equation that computes it; None without an equation.
    """
    reads: dict[Any, Any] = {}
    makes: dict[Any, Any] = {}
    for eqn, _, _ in sharding_equations(jaxpr):
        if eqn.primitive is not primitive:
            continue
        (source,), (target,) = eqn.invars, eqn.outvars
        if not isinstance(source, core.Literal):
            reads.setdefault(source, eqn.params)
        makes[target] = eqn.params
    ins = [reads.get(v) for v in jaxpr.invars]
    outs = [None if isinstance(v, core.Literal) else makes.get(v) for v in jaxpr.outvars]
    return ins, outs


class InsertionSite(NamedTuple):
    """Place where an equation of one value is inserted into a jaxpr.

    Attributes:
        path: Indices of the equations that lead to the place, with the index of the inner jaxpr
            between two of them, in the order of `jax.core.jaxprs_in_params`.
        kind: `operand` changes an operand of the last equation for this use alone, `result` a
            result of it for all uses, and `parameter` a parameter of the inner jaxpr in which the
            path ends for all uses inside.
        index: Position among the operands, results or parameters.
        value: Value that `params` of `insert_equations` takes.
    """

    path: tuple[int, ...]
    kind: Literal["operand", "result", "parameter"]
    index: int
    value: Hashable


def insert_equations(
    jaxpr: Jaxpr,
    primitive: "core.Primitive",
    params: Callable[[Any], dict[str, Any]],
    sites: Iterable[InsertionSite],
) -> Jaxpr:
    """Apply a primitive of one value, which keeps its type, at places inside a jaxpr.

    Nothing is traced again. Inner jaxprs that several equations share stay shared where their
    sites are equal. The bodies of `shard_map` stay as they are, and so do operands that are
    literals, references and tokens.

    Args:
        jaxpr: The closed jaxpr.
        primitive: The primitive.
        params: Returns the primitive's parameters for the value of a site.
        sites: The places. Equations at one place follow each other in their order.

    Raises:
        IndexError: If a site leads to no equation, inner jaxpr or value.
    """
    return _Insertion(primitive, params).jaxpr(jaxpr, tuple(sites))


class _Insertion:
    def __init__(
        self, primitive: "core.Primitive", params: Callable[[Any], dict[str, Any]]
    ) -> None:
        self._primitive = primitive
        self._params = params
        self._jaxprs: dict[Hashable, tuple[Jaxpr, Jaxpr]] = {}

    def jaxpr(self, jaxpr: Jaxpr, sites: tuple[InsertionSite, ...]) -> Jaxpr:
        """Return a jaxpr with the equations at sites whose paths begin in it."""
        if not sites:
            return jaxpr
        key = id(jaxpr), sites
        known = self._jaxprs.get(key)
        if known is None:
            known = self._jaxprs[key] = jaxpr, self._rewritten(jaxpr, sites)
        return known[1]

    def _rewritten(self, jaxpr: Jaxpr, sites: tuple[InsertionSite, ...]) -> Jaxpr:
        at: dict[int, list[InsertionSite]] = {}
        for site in sites:
            at.setdefault(site.path[0] if site.path else -1, []).append(site)
        if max(at) >= len(jaxpr.eqns):
            # no-catalogue: sites come from a search in the same jaxpr
            raise IndexError(f"site {at[max(at)][0]} of a jaxpr of {len(jaxpr.eqns)} equations")
        renamed: dict[Any, Any] = {}

        def current(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else renamed.get(atom, atom)

        eqns: list[Any] = []
        for site in at.get(-1, ()):
            parameter = jaxpr.invars[site.index]
            reader = next((e for e in jaxpr.eqns if parameter in e.invars), None)
            renamed[parameter] = self._applied(site, current(parameter), reader, eqns)
        for i, eqn in enumerate(jaxpr.eqns):
            sites_here = at.get(i, ())
            ends = [site for site in sites_here if len(site.path) == 1]
            invars = list(map(current, eqn.invars))
            for site in ends:
                if site.kind == "operand":
                    invars[site.index] = self._applied(site, invars[site.index], eqn, eqns)
            new = self._with_bodies(eqn, [site for site in sites_here if len(site.path) > 1])
            eqns.append(new if _all_same(invars, eqn.invars) else new.replace(invars=invars))
            for site in ends:
                if site.kind == "result":
                    result = eqn.outvars[site.index]
                    renamed[result] = self._applied(site, current(result), eqn, eqns)
        outvars = list(map(current, jaxpr.outvars))
        return replace_fields(jaxpr, eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)

    def _applied(self, site: InsertionSite, atom: Any, like: Any, eqns: list[Any]) -> Any:
        """Append the equation of a site, with the source of another one; return its result."""
        skipped = isinstance(atom, core.Literal | core.DropVar)
        if skipped or not isinstance(atom.aval, jax.core.ShapedArray):
            return atom
        result = core.Var(atom.aval)
        parts = [atom], [result], self._primitive, self._params(site.value), set()
        if like is None:
            source, context = source_info_util.new_source_info(), core.current_jaxpr_eqn_context()
        else:
            source, context = like.source_info, like.ctx
        eqns.append(core.JaxprEqn(*parts, source, context))
        return result

    def _with_bodies(self, eqn: Any, sites: Sequence[InsertionSite]) -> Any:
        """Return an equation with the sites in its inner jaxprs."""
        if not sites or eqn.primitive.name == "shard_map":
            return eqn
        inner: dict[int, list[InsertionSite]] = {}
        for site in sites:
            inner.setdefault(site.path[1], []).append(site._replace(path=site.path[2:]))
        new = [self.jaxpr(body, tuple(inner.pop(k, ()))) for k, body in enumerate(bodies(eqn))]
        if inner:
            # no-catalogue: sites come from a search in the same jaxpr
            raise IndexError(f"{eqn.primitive} has {len(new)} inner jaxprs, not {max(inner) + 1}")
        return replace_bodies(eqn, new)


class Rewriting:
    """Replacement of equations in a jaxpr and in those inside it.

    A jaxpr in which nothing is replaced is returned itself.
    """

    def __init__(self) -> None:
        self._jaxprs: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        """Return a jaxpr with the replacements in its equations."""
        known = self._jaxprs.get(id(jaxpr))
        if known is None:
            eqns = [new for eqn in jaxpr.eqns for new in self._equations(eqn)]
            is_same = len(eqns) == len(jaxpr.eqns) and _all_same(eqns, jaxpr.eqns)
            new = jaxpr if is_same else replace_fields(jaxpr, eqns=eqns)
            known = self._jaxprs[id(jaxpr)] = jaxpr, new
        return known[1]

    def _equations(self, eqn: Any) -> list[Any]:
        """Return the equations that replace one, whose inner jaxprs are rewritten."""
        old = list(bodies(eqn))
        new = list(map(self.jaxpr, old))
        return [eqn if _all_same(new, old) else replace_bodies(eqn, new)]


def replace_bodies(eqn: Any, new: Iterable[Jaxpr]) -> Any:
    """Return an equation with other inner jaxprs, in the order of `bodies`."""
    left = iter(new)

    def swap_value(value: Any) -> Any:
        return next(left) if is_jaxpr(value) else value

    def rebuild(value: Any) -> Any:
        if not isinstance(value, tuple) or not any(map(is_jaxpr, value)):
            return swap_value(value)
        members = map(swap_value, value)
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)

    return eqn.replace(params={name: rebuild(value) for name, value in eqn.params.items()})


def _all_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(map(operator.is_, new, old))


class WholeValuesFirst(Rewriting):
    """Placement of the values that become partial results of a sum, before they do.

    XLA takes a value that no operation has placed, such as a constant, as the partial result of
    each device, and adds up as many copies. Its equation gets a sharding without unreduced axes
    here, and a `reshard` to the partial results follows.
    """

    # Other primitives with whole operands and partial results contract a sharded dimension, or
    # have a jaxpr.
    _PLACING = frozenset({"reshard", "device_put", "broadcast_in_dim", "iota"})

    def _equations(self, eqn: Any) -> list[Any]:
        if eqn.primitive.name not in self._PLACING or not self._copies(eqn):
            return super()._equations(eqn)
        outvars, reshards = list(eqn.outvars), []
        for i, result in enumerate(eqn.outvars):
            sharding = result.aval.sharding
            whole = _without_partial_results(sharding)
            if whole is sharding:
                continue
            # `device_put` places nothing inside a program, so a reshard precedes the other.
            value, replica = (core.Var(result.aval.update(sharding=whole)) for _ in range(2))
            outvars[i] = value
            with jax.sharding.use_abstract_mesh(sharding.mesh):
                reshard = from_function(
                    lambda x, to=sharding: (originals.reshard(x, to),),
                    [value.aval],
                    "reshard",
                ).eqns[0]
            reshard = reshard.replace(source_info=eqn.source_info, ctx=eqn.ctx)
            placement = reshard.replace(params=_place_whole(reshard.params))
            reshards += [
                placement.replace(invars=[value], outvars=[replica]),
                reshard.replace(invars=[replica], outvars=[result]),
            ]
        return [eqn.replace(params=_place_whole(eqn.params), outvars=outvars), *reshards]

    def _copies(self, eqn: Any) -> bool:
        """Return True if an operand, or a made value, has to be placed whole."""
        before = [operand.aval.sharding for operand in eqn.invars]
        if any(sharding.spec.unreduced for sharding in before):
            return False
        if eqn.primitive.name in ("broadcast_in_dim", "iota"):
            return True
        return any(map(must_be_whole, before, [result.aval.sharding for result in eqn.outvars]))


def must_be_whole(before: Any, after: Any) -> bool:
    """Return True if XLA makes no right partial results of a value that is not placed whole.

    Args:
        before: The sharding in the type of the value.
        after: A sharding with unreduced axes.
    """
    if not before.mesh.are_all_axes_explicit:
        return True
    # XLA of jaxlib 0.12 mixes up the parts of a dimension that is sharded over axes of different
    # sizes.
    sizes = before.mesh.shape
    return any(
        len({sizes[axis] for axis in entry_axes(entry) if axis in after.spec.unreduced}) > 1
        for entry in before.spec.partitions
    )


def _place_whole(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a placing primitive, with shardings without partial results."""
    whole = _without_partial_results
    return {
        name: tuple(map(whole, value)) if type(value) is tuple else whole(value)
        for name, value in params.items()
    }


def _without_partial_results(sharding: Any) -> Any:
    """Return a sharding of the values whose partial sums another one holds; others unchanged."""
    if not isinstance(sharding, JaxNamedSharding) or read_reduction(sharding.spec) != "sum":
        return sharding
    return sharding.update(spec=jax.sharding.PartitionSpec(*sharding.spec.partitions))


class TrimmingBeforeDilation(Rewriting):
    """Split of equations that dilate a dimension of an operand and remove its first elements.

    The SPMD partitioner of jaxlib 0.12 ends the process if such a dimension is sharded. A `pad`
    removes whole elements first; it adds as many at the end as tiles of equal size require, which
    the equation removes.
    """

    def _equations(self, eqn: Any) -> list[Any]:
        if not trims_dilated(eqn):
            return super()._equations(eqn)
        # Windowed reductions may have several operands, before their initial values.
        count = len(eqn.outvars) if eqn.primitive.name == "reduce_window" else 1
        invars, pads = list(eqn.invars), []
        aval = invars[0].aval
        config, paddings = [(0, 0, 0)] * aval.ndim, []
        for dim, low, high, dilation in _read_windows(eqn):
            removed = -(low // dilation) if low < 0 and dilation > 1 else 0
            length = aval.shape[dim] - removed
            if length < 0:
                return [eqn]  # every element is removed
            axes = entry_axes(aval.sharding.spec.partitions[dim])
            tiles = math.prod(aval.sharding.mesh.shape[axis] for axis in axes)
            added = -length % tiles if removed else 0
            config[dim] = (-removed, added, 0)
            paddings.append((low + removed * dilation, high - added * dilation))
        for i in range(count):
            zero = np.zeros((), invars[i].aval.dtype)
            with jax.sharding.use_abstract_mesh(aval.sharding.mesh):
                (pad,) = from_function(
                    lambda x, zero=zero: (jax.lax.pad(x, zero, config),), [invars[i].aval], "pad"
                ).eqns
            operand = core.Var(pad.outvars[0].aval)
            fields = {"source_info": eqn.source_info, "ctx": eqn.ctx}
            pads.append(pad.replace(invars=[invars[i], pad.invars[1]], outvars=[operand], **fields))
            invars[i] = operand
        params = {**eqn.params, **_write_paddings(eqn, paddings)}
        return [*pads, eqn.replace(params=params, invars=invars)]


def trims_dilated(eqn: Any) -> bool:
    """Return True for an equation that dilates a dimension and removes its first elements."""
    return any(low < 0 and dilation > 1 for _, low, _, dilation in _read_windows(eqn))


def has_trimmed_dilation(jaxpr: Any) -> bool:
    """Return True if an equation in a jaxpr, or in one inside it, is one of `trims_dilated`."""
    is_padding = any([p.name.startswith(_PADDING) for p in inner_primitives(jaxpr)])
    return is_padding and any(map(trims_dilated, equations(jaxpr)))


_PADDING = "pad", "conv_general_dilated", "reduce_window"
"""Beginnings of the names of primitives that `_read_windows` reads."""


def _read_windows(eqn: Any) -> list[tuple[int, int, int, int]]:
    """Return each padded dimension of an operand, its padding at both ends, and its dilation."""
    params = eqn.params
    match eqn.primitive.name:
        case "pad":
            windows = enumerate(params["padding_config"])
            return [(dim, low, high, inner + 1) for dim, (low, high, inner) in windows]
        case "conv_general_dilated":
            dims, dilations = params["dimension_numbers"].lhs_spec[2:], params["lhs_dilation"]
        case name if name.startswith("reduce_window"):
            dims, dilations = range(len(params["padding"])), params["base_dilation"]
        case _:
            return []
    ends = zip(dims, params["padding"], dilations, strict=True)
    return [(dim, low, high, dilation) for dim, (low, high), dilation in ends]


def _write_paddings(eqn: Any, paddings: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the parameter of an equation with other paddings of the dimensions that it pads."""
    if eqn.primitive.name != "pad":
        return {"padding": tuple(paddings)}
    pairs = zip(paddings, eqn.params["padding_config"], strict=True)
    return {"padding_config": tuple((*ends, inner) for ends, (_, _, inner) in pairs)}
