"""Errors of JAX about explicit mesh axes, with the operands by name and the user's line."""

from pathlib import PurePath

from xlashard._jax import installed_version
from xlashard._jax.lowering import aval_text
from xlashard._jax.trace.type_errors import Operand, TypeFailure, read_type_failure
from xlashard.errors import ShardingTypeError, XlashardError


def explained(error: Exception) -> Exception:
    """Return an error of JAX about explicit mesh axes with names and a fix; others unchanged.

    JAX's message names types and specs, and often the fix. The traceback stays.
    """
    if isinstance(error, XlashardError):
        return error
    try:
        failure = read_type_failure(error)
    except (AttributeError, KeyError) as missing:
        # Of variables of JAX's own functions, which a release can rename: the error itself counts.
        error.add_note(
            f"xlashard can't name the operands with jax {installed_version()}, in which "
            f"{missing.args[0]!r} has another name"
        )
        return error
    if failure is None:
        return error
    text = failure.text.partition(" This error occurs at source:")[0]
    paths = dict.fromkeys(path for operand in failure.operands for path in operand.origins)
    return ShardingTypeError(
        f"{_subject(failure)}: {text.rstrip('.')}. {_fix(failure)}",
        operation=failure.operation,
        paths=tuple(paths),
        source=f"{failure.file}:{failure.line}",
        also=type(error),
    ).with_traceback(error.__traceback__)


def _subject(failure: TypeFailure) -> str:
    operands = [o for o in failure.operands if o.aval.ndim or len(failure.operands) == 1]
    listed = " and ".join(map(_described, operands))
    place = failure.function
    if failure.file:
        place = f"{PurePath(failure.file).name}:{failure.line} in {place}"
    return f"{failure.operation} at {place}" + (f" takes {listed}" if listed else "")


def _described(operand: Operand) -> str:
    kind, path = aval_text(operand.aval), " and ".join(operand.origins)
    if operand.is_argument:
        same = operand.name in ("", path)
        return f"{path} ({kind})" if same else f"{operand.name} ({kind}, which is {path})"
    origin = "closed over" if operand.is_closed_over else f"computed from {path or 'constants'}"
    article = "an" if kind[0] in "aeio" else "a"
    return f"{operand.name} ({kind}, {origin})" if operand.name else f"{article} {kind} {origin}"


def _fix(failure: TypeFailure) -> str:
    names = [operand.name for operand in failure.operands if operand.name and operand.aval.ndim]
    return (
        f"Reshard an operand by jax.sharding.reshard({(names or ['x'])[-1]}, P(...)), or before "
        "the call by jax.device_put; or pass out_sharding, or leave the operation to the "
        "partitioner by jax.sharding.auto_axes"
    )
