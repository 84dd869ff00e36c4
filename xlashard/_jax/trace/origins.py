"""Trace dimensions of values in a jaxpr back to their origins."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xlashard._jax.private import core, source_info_util
from xlashard._jax.trace.jaxprs import Jaxpr, as_function, scan_operands
from xlashard._jax.trace.primitive_names import CONSTRAINT, CONTROL_FLOW, ELEMENTWISE, REDUCTIONS
from xlashard._jax.trace.tracing import bodies, is_jaxpr, replace_fields
from xlashard.support.tracebacks import is_users_file

type Line = tuple[str, int]
"""File and line of the user's code."""


@dataclass(frozen=True, eq=False)
class Scope:
    """A jaxpr inside a program, and the origins of its arguments.

    Attributes:
        jaxpr: The jaxpr.
        makers: The position and the equation that computes each value.
        outer: For each argument the value outside, its scope, and the number of additional leading
            dimensions of that value.
        inner: The scopes of the jaxprs of an equation, by the equation's position.
    """

    jaxpr: Any
    makers: dict[Any, tuple[int, Any]]
    outer: dict[Any, "tuple[Scope, Any, int]"]
    inner: dict[int, list["Scope"]] = field(default_factory=dict)

    @classmethod
    def of(cls, jaxpr: Any, outer: "Mapping[Any, tuple[Scope, Any, int]] | None" = None) -> "Scope":
        """Return the scope of a jaxpr, with the scopes of all jaxprs inside it."""
        makers = {v: (i, eqn) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        scope = cls(jaxpr, makers, dict(outer or {}))
        for i, eqn in enumerate(jaxpr.eqns):
            for body in bodies(eqn):
                scope.inner.setdefault(i, []).append(cls.of(body, _body_origins(scope, eqn, body)))
        return scope

    def all(self) -> "Iterator[Scope]":
        """Yield this scope and all scopes inside it."""
        yield self
        for scopes in self.inner.values():
            for scope in scopes:
                yield from scope.all()

    def sites(
        self, caller: Any = None, *, on_shards: bool = False
    ) -> "Iterator[tuple[Scope, Any, Any, bool]]":
        """Yield all equations, the inner ones of calls after them.

        Yields:
            The scope; the equation; the equation that has its line, itself or a call of one of
            JAX's functions; True inside of `shard_map`.
        """
        for position, eqn in enumerate(self.jaxpr.eqns):
            site = caller if source_line(eqn) is None and caller is not None else eqn
            yield self, eqn, site, on_shards
            inside = on_shards or eqn.primitive.name == "shard_map"
            for inner in self.inner.get(position, ()):
                yield from inner.sites(site, on_shards=inside)


def _body_origins(scope: Scope, eqn: Any, body: Any) -> dict[Any, tuple[Scope, Any, int]]:
    """Return the origins of the arguments of an equation's body."""
    # Inside shard_map a value is a shard, which the mesh shards no further.
    if len(body.invars) != len(eqn.invars) or eqn.primitive.name == "shard_map":
        return {}
    sources = {}
    for inside, outside in zip(body.invars, eqn.invars, strict=True):
        # The arguments of a scan's body are slices.
        sliced = int(eqn.primitive.name == "scan" and outside.aval.ndim > inside.aval.ndim)
        if outside.aval.shape[sliced:] == inside.aval.shape:
            sources[inside] = scope, outside, sliced
    return sources


@dataclass(frozen=True, eq=False)
class Origin:
    """A value whose dimension is the origin of another value's dimension.

    Attributes:
        scope: The scope of the value.
        variable: The value.
        dim: The dimension.
        eqn: The equation that computes the value; None for an argument of the scope.
        lines: The lines of the equations in between, its own included.
    """

    scope: Scope
    variable: Any
    dim: int
    eqn: Any
    lines: frozenset[Line]


def origins(scope: Scope, variable: Any, dim: int, stops: Collection[str]) -> Iterator[Origin]:
    """Trace a dimension back through operations that preserve it, and yield its origins.

    Args:
        scope: The scope of the value.
        variable: The value.
        dim: The dimension.
        stops: Names of primitives at whose results to stop, besides arguments of the program.
    """
    waiting = [Origin(scope, variable, dim, None, frozenset())]
    seen: set[tuple[int, Any, int]] = set()
    while waiting:
        at = waiting.pop()
        key = id(at.scope), at.variable, at.dim
        if isinstance(at.variable, core.Literal) or key in seen:
            continue
        seen.add(key)
        maker = at.scope.makers.get(at.variable)
        if maker is not None:
            place, eqn = maker
            lines = at.lines | _lines(eqn)
            if eqn.primitive.name in stops:
                yield Origin(at.scope, at.variable, at.dim, eqn, lines)
                continue
            sources = _back(at, place, eqn)
            waiting += [Origin(s, v, d, None, lines) for s, v, d in sources]
        elif at.variable in at.scope.outer:
            outside, value, shift = at.scope.outer[at.variable]
            waiting.append(Origin(outside, value, at.dim + shift, None, at.lines))
        else:
            yield at


def _back(at: Origin, place: int, eqn: Any) -> list[tuple[Scope, Any, int]]:
    """Return the values and dimensions that a dimension of an equation's result comes from."""
    called = _enter_call(at.scope, at.variable, place, eqn)
    if called is not None:
        return [(*called, at.dim)]
    return [(at.scope, value, dim) for value, dim in _operands(eqn, at.dim)]


def _enter_call(scope: Scope, variable: Any, place: int, eqn: Any) -> tuple[Scope, Any] | None:
    """Return the value inside of a call that is one of its results; None for other equations."""
    inner = scope.inner.get(place, [])
    if len(inner) == 1 and eqn.primitive.name not in CONTROL_FLOW:
        outputs = inner[0].jaxpr.outvars
        if len(outputs) == len(eqn.outvars):
            return inner[0], outputs[eqn.outvars.index(variable)]
    return None


@dataclass(frozen=True, eq=False)
class CheckpointName:
    """A name that `jax.ad_checkpoint.checkpoint_name` gives to a value.

    Attributes:
        name: The name.
        eqn: The equation that gives it.
        maker: The equation of the value, inside of calls; None for an argument, and for a
            result of a loop or branch.
    """

    name: str
    eqn: Any
    maker: Any

    @property
    def op_name(self) -> str:
        """Return the end of the maker's name in a module; empty without a maker."""
        if self.maker is None:
            return ""
        stack = str(self.maker.source_info.name_stack)
        return "/".join(filter(None, (stack, self.maker.primitive.name)))


def find_checkpoint_names(jaxpr: Any) -> list[CheckpointName]:
    """Return the names that a jaxpr, and those inside it, give to values for `jax.checkpoint`."""
    return [
        CheckpointName(eqn.params["name"], eqn, _find_maker(scope, eqn.invars[0]))
        for scope in Scope.of(jaxpr).all()
        for eqn in scope.jaxpr.eqns
        if eqn.primitive.name == "name"
    ]


def _find_maker(scope: Scope, variable: Any) -> Any:
    """Return the equation that computes a value, inside of calls; None without a single one."""
    while is_variable(variable) and variable in scope.makers:
        place, eqn = scope.makers[variable]
        called = _enter_call(scope, variable, place, eqn)
        if called is not None:
            scope, variable = called
        elif eqn.primitive.name == "name":
            variable = eqn.invars[0]
        else:
            return None if eqn.primitive.name in CONTROL_FLOW else eqn
    return None


def _operands(eqn: Any, dim: int) -> Iterator[tuple[Any, int]]:
    name, params = eqn.primitive.name, eqn.params
    if name in ELEMENTWISE or name == CONSTRAINT:
        shape = eqn.outvars[0].aval.shape
        yield from ((v, dim) for v in eqn.invars if v.aval.shape == shape)
    elif name == "dot_general":
        yield from _factors(eqn, dim)
    elif name == "transpose":
        yield eqn.invars[0], params["permutation"][dim]
    elif name == "broadcast_in_dim" and dim in params["broadcast_dimensions"]:
        before = params["broadcast_dimensions"].index(dim)
        if eqn.invars[0].aval.shape[before] == eqn.outvars[0].aval.shape[dim]:
            yield eqn.invars[0], before
    elif name in REDUCTIONS or name == "squeeze":
        removed = params["dimensions"] if name == "squeeze" else params["axes"]
        yield eqn.invars[0], [d for d in range(eqn.invars[0].aval.ndim) if d not in removed][dim]


def _factors(eqn: Any, dim: int) -> Iterator[tuple[Any, int]]:
    """Yield the operands that a dimension of a dot product comes from."""
    contracted, batched = eqn.params["dimension_numbers"]
    count = len(batched[0])
    if dim < count:
        yield from ((v, dims[dim]) for v, dims in zip(eqn.invars, batched, strict=True))
        return
    dim -= count
    for value, *used in zip(eqn.invars, contracted, batched, strict=True):
        free = [d for d in range(value.aval.ndim) if d not in (*used[0], *used[1])]
        if dim < len(free):
            yield value, free[dim]
            return
        dim -= len(free)


def is_variable(value: Any) -> bool:
    """Return True if an operand of an equation is a variable, not a literal."""
    return not isinstance(value, core.Literal)


def source_line(eqn: Any) -> Line | None:
    """Return file and line of the user's code of an equation, or None if unknown."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line)


def source_frames(eqn: Any) -> list[tuple[str, int, str]]:
    """Return file, line and function of the stack that made an equation, innermost first.

    Frames of JAX and of this package are left out.
    """
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return [(f.file_name, f.start_line, f.function_name) for f in frames]


def user_line(eqn: Any) -> Line | None:
    """Return the innermost line of an equation outside of installed packages, or the innermost."""
    lines = [(file, line) for file, line, _ in source_frames(eqn)]
    return next((line for line in lines if is_users_file(line[0])), lines[0] if lines else None)


def _lines(eqn: Any) -> frozenset[Line]:
    line = source_line(eqn)
    return frozenset() if line is None else frozenset([line])


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
        operands = [v.val if isinstance(v, core.Literal) else values[v] for v in eqn.invars]
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
    return [v for v in eqn.invars if not isinstance(v, core.Literal)]


def _culprit(eqn: Any, kind: str) -> NanOrigin:
    source = source_info_util.summarize(eqn.source_info)
    return NanOrigin(eqn.primitive.name, "" if source == "unknown" else source, kind)


def _run_one(jaxpr: Jaxpr, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the results of one equation."""
    operand_of = {
        v: operand
        for v, operand in zip(eqn.invars, operands, strict=True)
        if not isinstance(v, core.Literal)
    }
    alone = replace_fields(
        jaxpr,
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
        if is_jaxpr(body) and len(body.invars) == len(operands):
            return find_nan_origin(body, operands, forbids)
    return None


def _in_scan(params: Any, operands: Sequence[Any], forbids: Forbids) -> NanOrigin | None:
    consts, carry, xs = scan_operands(params, operands)
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


def _in_round(origin: NanOrigin | None, loop: str, count: int) -> NanOrigin | None:
    return None if origin is None else replace(origin, rounds=((loop, count), *origin.rounds))
