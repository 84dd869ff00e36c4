"""Find the first operation of a jaxpr with a forbidden result of allowed operands."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax._src import core, source_info_util

from xlashard._jax.trace.jaxprs import Jaxpr, Literal, as_function
from xlashard.lazily import dataclass

type Forbids = Callable[[Any], str | None]


@dataclass(frozen=True)
class NanOrigin:
    """An operation with a forbidden result.

    Attributes:
        primitive: Its name.
        source: File, line and function; "" if unknown.
        kind: `"nan"` or `"inf"`.
        rounds: The loops around it, outermost first, each with the index of its iteration.
    """

    primitive: str
    source: str
    kind: str
    rounds: tuple[tuple[str, int], ...] = ()


def find_nan_origin(jaxpr: Jaxpr, args: Sequence[Any], forbids: Forbids) -> NanOrigin | None:
    """Run a closed jaxpr operation by operation until a result is forbidden.

    Args:
        jaxpr: The jaxpr, without effects.
        args: Its arguments, all allowed.
        forbids: Function that returns the kind of a forbidden element of a value, or None.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)
    last_use = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in _variables(eqn)}
    for number, eqn in enumerate(jaxpr.eqns):
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        results = _run_one(jaxpr, eqn, operands)
        kind = next(filter(None, map(forbids, results)), None)
        if kind is not None:
            return _inside(eqn, operands, forbids) or _culprit(eqn, kind)
        values |= zip(eqn.outvars, results, strict=True)
        for v in {*_variables(eqn), *eqn.outvars}:
            if last_use.get(v, number) == number:
                # All intermediate values of a training step together may not fit into memory.
                del values[v]
    return None


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _culprit(eqn: Any, kind: str) -> NanOrigin:
    source = source_info_util.summarize(eqn.source_info)
    return NanOrigin(eqn.primitive.name, "" if source == "unknown" else source, kind)


def _run_one(jaxpr: Jaxpr, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the results of one equation."""
    operand_of = {
        v: operand
        for v, operand in zip(eqn.invars, operands, strict=True)
        if not isinstance(v, Literal)
    }
    alone = jaxpr.replace(
        constvars=[],
        consts=[],
        invars=list(operand_of),
        outvars=list(eqn.outvars),
        eqns=[eqn],
        debug_info=core.DebugInfo("operation", eqn.primitive.name, None, None),
    )
    return as_function(alone)(*operand_of.values())


def _inside(eqn: Any, operands: Sequence[Any], forbids: Forbids) -> NanOrigin | None:
    """Return the origin inside the body of an equation; None without a body."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _in_scan(params, operands, forbids)
    if name == "while":
        return _in_while(params, operands, forbids)
    if name == "cond":
        chosen = params["branches"][int(operands[0])]
        return find_nan_origin(chosen, operands[1:], forbids)
    for key in ("jaxpr", "call_jaxpr"):
        body = params.get(key)
        if isinstance(body, core.Jaxpr) and len(body.invars) == len(operands):
            return find_nan_origin(body, operands, forbids)
    return None


def _in_scan(params: Any, operands: Sequence[Any], forbids: Forbids) -> NanOrigin | None:
    consts, carry, xs = (list(part) for part in params["ft_in"].update(operands).unpack())
    body, length = params["jaxpr"], params["length"]
    rounds = range(length)
    for count, at in enumerate(reversed(rounds) if params["reverse"] else rounds):
        args = [*consts, *carry, *(x[at] for x in xs)]
        results = as_function(body)(*args)
        if any(map(forbids, results)):
            return _in_round(find_nan_origin(body, args, forbids), "scan", count)
        carry = results[: len(carry)]
    return None


def _in_while(params: Any, operands: Sequence[Any], forbids: Forbids) -> NanOrigin | None:
    for_cond, for_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = operands[:for_cond]
    consts, carry = operands[for_cond : for_cond + for_body], operands[for_cond + for_body :]
    goes_on, body = as_function(params["cond_jaxpr"]), params["body_jaxpr"]
    count = 0
    while goes_on(*cond_consts, *carry)[0]:
        results = as_function(body)(*consts, *carry)
        if any(map(forbids, results)):
            return _in_round(find_nan_origin(body, [*consts, *carry], forbids), "while", count)
        carry, count = results, count + 1
    return None


def _in_round(found: NanOrigin | None, loop: str, count: int) -> NanOrigin | None:
    return None if found is None else replace(found, rounds=((loop, count), *found.rounds))
