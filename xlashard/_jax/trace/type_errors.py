"""Read errors of JAX about explicit mesh axes: the operation, its operands and the user's line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax

from xlashard._jax.private import core, pe
from xlashard._jax.runtime.tracebacks import JAX_FOLDER
from xlashard._jax.trace.tracing import value_behind
from xlashard.support.tracebacks import INNER_FOLDERS, is_users_file


@dataclass(frozen=True)
class Operand:
    """An operand of an operation that failed.

    Attributes:
        aval: Its abstract value.
        name: The expression for it at the user's line; empty without one.
        origins: Paths of the arguments that it is, or is computed from.
        is_argument: True for an argument itself.
        is_closed_over: True for an array that is no argument.
    """

    aval: Any
    name: str = ""
    origins: tuple[str, ...] = ()
    is_argument: bool = False
    is_closed_over: bool = False


@dataclass(frozen=True)
class TypeFailure:
    """An operation that the explicit mesh axes of its operands don't allow.

    Attributes:
        text: JAX's message.
        file: File of the user's line; empty if unknown.
        line: Its number.
        function: The function that holds it.
        operation: Name of the primitive; before one is reached, that of JAX's function.
        operands: Its operands.
    """

    text: str
    file: str
    line: int
    function: str
    operation: str
    operands: tuple[Operand, ...]


def read_type_failure(error: BaseException) -> TypeFailure | None:
    """Return what failed with an exception of JAX; None if it is not about explicit mesh axes."""
    frames = _frames(error)
    if not frames or not frames[-1][0].f_code.co_filename.startswith(JAX_FOLDER):
        return None
    last = frames[-1][0]
    operation = _operation(frames)
    if not _is_of_types(error, last, operation):
        return None
    at, line = _users_frame(frames) or (None, 0)
    name, values = operation or (last.f_code.co_name.strip("_"), ())
    naming = _Naming(frames, at)
    return TypeFailure(
        text=str(error),
        file="" if at is None else at.f_code.co_filename,
        line=line,
        function=naming.function if at is None else at.f_code.co_name,
        operation=name,
        operands=tuple(naming.operand(value) for value in values),
    )


type _Frames = Sequence[tuple[FrameType, int]]
"""Frames and their lines, outermost first."""

type _Operation = tuple[str, Sequence[Any]]
"""Name and operands of an operation."""


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


# Functions of JAX that raise other classes than `ShardingTypeError`.
_CHECKS = (
    *("assert_shardings_equal", "_check_unique_resources", "_mapped_axis_spec"),
    "check_avals_context_mesh",
)


def _is_of_types(error: BaseException, last: FrameType, operation: _Operation | None) -> bool:
    """Return True for errors about the explicit axes of operands."""
    if isinstance(error, core.ShardingTypeError):
        return True
    if last.f_code.co_name not in _CHECKS and not last.f_code.co_name.endswith("_sharding_rule"):
        return False
    meshes = [jax.typeof(value).sharding.mesh for value in operation[1]] if operation else []
    return any(mesh._any_axis_explicit for mesh in meshes if not mesh.empty)


def _operation(frames: _Frames) -> _Operation | None:
    """Return the innermost operation."""
    for frame, _ in reversed(frames):
        local = frame.f_locals
        match frame.f_code.co_name:
            case "default_process_primitive":
                return local["primitive"].name, local["tracers"]
            case "with_sharding_constraint" if "xf" in local:
                return "with_sharding_constraint", [local["xf"]]
            case "_mapped_axis_spec":
                return "vmap", local["args_flat"]
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
        return Operand(aval, name, origins, is_argument)

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
