"""Read errors of JAX about explicit mesh axes: the operation, its operands and the user's line."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jax

from xlashard._jax.private import core, pe
from xlashard._jax.runtime.shardings import AbstractMesh
from xlashard._jax.runtime.tracebacks import JAX_FOLDER
from xlashard._jax.trace.tracing import value_behind
from xlashard.support.tracebacks import INNER_FOLDERS, is_users_file

_BATCHING = f"{JAX_FOLDER}_src/interpreters/batching.py"


@dataclass(frozen=True)
class Operand:
    """An operand of an operation that failed.

    Attributes:
        aval: Its abstract value.
        name: The expression for it at the user's line; empty without one.
        origins: Paths of the arguments that it is, or is computed from.
        is_argument: True for an argument itself.
        is_closed_over: True for an array that is no argument.
        is_internal: True for a value that a function of JAX computes in between.
    """

    aval: Any
    name: str = ""
    origins: tuple[str, ...] = ()
    is_argument: bool = False
    is_closed_over: bool = False
    is_internal: bool = False


@dataclass(frozen=True)
class InvalidSpec:
    """A spec that does not fit its mesh, or the shape of its value (None if unknown)."""

    mesh: AbstractMesh
    spec: Any
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class TypeDifference:
    """Two values whose types must be equal.

    Attributes:
        kind: Name of JAX's function: `"scan body"`, `"while_loop body"`, `"cond"`.
        path: Path of the carry; for branches, that of the value below their results.
        branches: Names of the branches; none for a carry.
        before: Type of the carry, or of the first branch's result.
        after: Type of the next carry, or of the other branch's result.
    """

    kind: str
    path: str
    branches: tuple[str, ...]
    before: Any
    after: Any


@dataclass(frozen=True)
class TypeFailure:
    """An operation that the explicit mesh axes of its operands don't allow.

    Attributes:
        text: JAX's message.
        file: File of the user's line; empty if unknown.
        line: Its number.
        function: The function that holds it.
        operation: Name of the primitive; before one is reached, that of JAX's function.
        params: Parameters of the primitive.
        operands: Its operands.
        problem: The invalid spec, the types that differ, or None.
        duplicate: The spec of a result that would use an axis twice, or None.
        is_batched: Whether `jax.vmap` maps an operand.
    """

    text: str
    file: str
    line: int
    function: str
    operation: str
    params: Mapping[str, Any] = field(default_factory=dict)
    operands: tuple[Operand, ...] = ()
    problem: InvalidSpec | TypeDifference | None = None
    duplicate: Any = None
    is_batched: bool = False


def read_type_failure(error: BaseException) -> TypeFailure | None:
    """Return what failed with an exception of JAX; None if it is not about explicit mesh axes."""
    frames = _frames(error)
    if not frames or not frames[-1][0].f_code.co_filename.startswith(JAX_FOLDER):
        return None
    last = frames[-1][0]
    operation = _operation(frames)
    problem, duplicate = _problem(error, last), getattr(error.__cause__, "pspec", None)
    if isinstance(problem, InvalidSpec) and operation and not _has_sharding(operation[1]):
        # The spec of a result, which follows from those of the operands.
        problem, duplicate = None, problem.spec
    if problem is None and duplicate is None and not _is_of_types(error, last, operation):
        return None
    at, line = _users_frame(frames) or (None, 0)
    name, params, values = operation or (last.f_code.co_name.strip("_"), {}, ())
    naming = _Naming(frames, at)
    return TypeFailure(
        text=str(error),
        file="" if at is None else at.f_code.co_filename,
        line=line,
        function=naming.function if at is None else at.f_code.co_name,
        operation=name,
        params=params,
        operands=tuple(naming.operand(value) for value in values),
        problem=problem,
        duplicate=duplicate,
        is_batched=any(_maps_operand(frame) for frame, _ in frames),
    )


def _maps_operand(frame: FrameType) -> bool:
    dims = frame.f_locals.get("dims_in", ()) if frame.f_code.co_filename == _BATCHING else ()
    return any(dim is not None for dim in dims)


def _has_sharding(params: Mapping[str, Any]) -> bool:
    """Return True if the user chose the sharding of an operation's result."""
    return any(params.get(key) is not None for key in ("out_sharding", "sharding"))


type _Frames = Sequence[tuple[FrameType, int]]
"""Frames and their lines, outermost first."""

type _Operation = tuple[str, Mapping[str, Any], Sequence[Any]]
"""Name, parameters and operands of an operation."""


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    frames, at = [], error.__traceback__
    outside = None if at is None else at.tb_frame.f_back
    if outside is not None and outside.f_code.co_name == "_infer_params":
        # The error is read where JAX traces a function, whose operands its caller holds.
        frames.append((outside, outside.f_lineno))
    while at is not None:
        frames.append((at.tb_frame, at.tb_lineno))
        at = at.tb_next
    return frames


def _users_frame(frames: _Frames) -> tuple[FrameType, int] | None:
    """Return the innermost frame of the user's own code; without one, of any other package."""
    own = [at for at in frames if is_users_file(at[0].f_code.co_filename)]
    inner = (*INNER_FOLDERS, JAX_FOLDER)
    others = [at for at in frames if not at[0].f_code.co_filename.startswith(inner)]
    return (own or others or [None])[-1]


def _problem(error: BaseException, last: FrameType) -> InvalidSpec | TypeDifference | None:
    """Return what the function of JAX that raised had found."""
    local = last.f_locals
    match last.f_code.co_name:
        case "_check_mesh_resource_axis":
            invalid = InvalidSpec(local["mesh"], local["pspec"], None)
        case "_check_unique_resources" if hasattr(error, "pspec"):
            invalid = InvalidSpec(error.mesh, error.pspec, None)
        case "_check_divisibility":
            sharding = local["sharding"]
            invalid = InvalidSpec(sharding.mesh, sharding.spec, tuple(local["shape"]))
        case "get_sharding" if "out_s" in local:
            invalid = InvalidSpec(local["out_s"].mesh, local["out_s"].spec, tuple(local["shape"]))
        case "_check_carry_type":
            before, after = local["in_carry"], local["out_carry"]
            carry = local.get("carry_name") or "carry"
            return _difference(local["name"], carry, (), before.paths, before, after)
        case "_check_branch_outputs":
            first, second = local["out_avals1"], local["out_avals2"]
            names = local["name1"], local["name2"]
            return _difference(local["api_name"], "", names, first.paths, first, second)
        case _:
            return None
    is_explicit = invalid.mesh is not None and getattr(invalid.mesh, "_any_axis_explicit", False)
    return invalid if is_explicit else None


def _difference(
    kind: str, root: str, branches: tuple[str, ...], paths: Any, before: Any, after: Any
) -> TypeDifference | None:
    """Return the first difference of types, if all types differ by explicit axes alone."""
    pairs = [
        (path, one, other)
        for path, one, other in zip(paths, before, after, strict=True)
        if not core.typematch(one, other)
    ]
    for _, one, other in pairs:
        if (one.shape, one.dtype) != (other.shape, other.dtype) or one.sharding == other.sharding:
            return None
    if not pairs:
        return None
    path, one, other = pairs[0]
    return TypeDifference(kind, root + jax.tree_util.keystr(path), branches, one, other)


def _is_of_types(error: BaseException, last: FrameType, operation: _Operation | None) -> bool:
    """Return True for errors about the explicit axes of operands."""
    if isinstance(error, core.ShardingTypeError):
        return True
    names = ("assert_shardings_equal", "_mapped_axis_spec", "check_avals_context_mesh")
    if last.f_code.co_name not in names and not last.f_code.co_name.endswith("_sharding_rule"):
        return False
    meshes = [jax.typeof(value).sharding.mesh for value in operation[2]] if operation else []
    return any(mesh._any_axis_explicit for mesh in meshes if not mesh.empty)


def _operation(frames: _Frames) -> _Operation | None:
    """Return the innermost operation."""
    for frame, _ in reversed(frames):
        local = frame.f_locals
        match frame.f_code.co_name:
            case "default_process_primitive":
                return local["primitive"].name, local["params"], local["tracers"]
            case "with_sharding_constraint" if "xf" in local:
                return "with_sharding_constraint", {"spec": local["s"].spec}, [local["xf"]]
            case "_mapped_axis_spec":
                pairs = zip(local["args_flat"], local["in_axes_flat"], strict=True)
                mapped = [(arg, axis) for arg, axis in pairs if axis is not None]
                return "vmap", {"axes": [axis for _, axis in mapped]}, [arg for arg, _ in mapped]
            case _:
                continue
    return None


class _Naming:
    """Names of traced values at the user's line.

    Args:
        frames: The frames of the error.
        at: The frame of the user's line, if there is one.
    """

    def __init__(self, frames: _Frames, at: FrameType | None) -> None:
        # For the trace of each function of JAX's own, the operands of its call.
        self._calls: dict[Any, Sequence[Any]] = {}
        self.function = ""
        self._locals = {} if at is None else dict(at.f_locals)
        names = [] if at is None else [(n, at.f_globals.get(n)) for n in at.f_code.co_names]
        self._visible = {**dict(names), **self._locals}
        operands: Sequence[Any] | None = None
        for frame, _ in frames:
            if frame.f_code.co_name == "_infer_params":
                operands = frame.f_locals.get("dynargs")
            trace = frame.f_locals.get("trace")
            if operands is not None and isinstance(trace, pe.DynamicJaxprTrace):
                if not self.function:
                    self.function = getattr(trace.frame.debug_info, "func_name", "")
                elif _is_of_jax(trace):
                    self._calls[trace] = operands
                operands = None

    def operand(self, value: Any) -> Operand:
        """Return an operand with its name and origins."""
        aval, value = jax.typeof(value), self._outside(_staged(value))
        constant = _constant(value)
        if constant is not None:
            same = (name for name, held in self._visible.items() if held is constant)
            return Operand(aval, next(same, ""), is_closed_over=True)
        origins = tuple(dict.fromkeys(self._origins(value, set())))
        is_argument = _position(value) is not None and len(origins) == 1
        name = self._local_name(value)
        if not name and is_argument and origins[0].split("[")[0].split(".")[0] in self._locals:
            name = origins[0]
        internal = isinstance(value, jax.core.Tracer) and value._trace in self._calls
        return Operand(aval, name, origins, is_argument, is_internal=internal)

    def _outside(self, value: Any) -> Any:
        """Return the operand of the user's call that an argument of JAX's function is."""
        while (position := _position(value)) is not None and value._trace in self._calls:
            value = _staged(self._calls[value._trace][position])
        return value

    def _origins(self, value: Any, seen: set[int]) -> Iterator[str]:
        """Yield the paths of the arguments of the user's function behind a value."""
        waiting = [value]
        while waiting:
            value = self._outside(waiting.pop())
            if id(value) in seen or not isinstance(value, pe.DynamicJaxprTracer):
                continue
            seen.add(id(value))
            position, info = _position(value), value._trace.frame.debug_info
            if position is None:
                parent = value.parent
                waiting += reversed([] if parent is None else parent.in_tracers)
            elif info is not None and value._trace not in self._calls:
                yield info.safe_arg_names(len(value._trace.frame.invars))[position]

    def _local_name(self, value: Any) -> str:
        """Return the local variable of the user's line that holds a value."""
        for name, held in self._locals.items():
            if isinstance(held, jax.core.Tracer) and _staged(held) is value:
                return name
        return ""


def _staged(value: Any) -> Any:
    """Return the value of a jaxpr behind the tracers of transformations."""
    return value_behind(value, pe.DynamicJaxprTracer)


def _is_of_jax(trace: Any) -> bool:
    """Return True for the trace of a function that JAX defines, such as `jnp.add`."""
    return JAX_FOLDER in (trace.frame.debug_info.func_src_info or "")


def _constant(value: Any) -> Any:
    """Return the array that a value is outside of the jaxpr; None for other values."""
    if not isinstance(value, pe.DynamicJaxprTracer):
        return value
    variable = value.val
    if isinstance(variable, core.Literal):
        return variable.val
    return value._trace.frame.constvar_to_val.get(variable)


def _position(value: Any) -> int | None:
    """Return the position of a value among the arguments of its function; None for others."""
    if not isinstance(value, pe.DynamicJaxprTracer):
        return None
    return next((i for i, v in enumerate(value._trace.frame.invars) if v is value.val), None)
