"""Paths of the arguments that `eqx.filter_jit` passes to JAX as flat tuples of arrays."""

import re
from typing import Any

from jax.tree_util import keystr, tree_flatten_with_path

from xlashard._jax.trace.observed_programs import caller_locals
from xlashard.pjit.options import Selected
from xlashard.pjit.signature import Parameters, function_name

type Paths = tuple[str, ...]
type Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

_OWN = re.compile(r"dynamic_(?:no)?donate\['(fun|first|rest)'\]\[(\d+)\]")
_FILE, _RESULT = "equinox/_jit.py", "result[1]"


def call_under_way(own: Paths) -> Call | None:
    """Return the call of `eqx.filter_jit` that this thread makes, for the program of these paths.

    Args:
        own: JAX's path of each argument of the program.
    """
    if not any(map(_OWN.fullmatch, own)):
        return None
    values = caller_locals(_FILE, "_call")
    return None if values is None else tuple(values[n] for n in ("jit_wrapper", "args", "kwargs"))


def is_equinox(fun: Any) -> bool:
    """Return True for a function that `eqx.filter_jit` returned."""
    return type(fun).__module__ == "equinox._jit" and hasattr(fun, "_signature")


def equinox_paths(call: Call, own: Paths, results: Paths) -> tuple[Paths, Paths]:
    """Return the user's paths of the arguments and results of a program of `eqx.filter_jit`.

    Args:
        call: The function, and the arguments of its call.
        own: JAX's path of each argument.
        results: JAX's path of each result.
    """
    fun, args, kwargs = call
    user, bound = fun.__wrapped__, fun._signature.bind(*args, **kwargs)
    parameters = Parameters.of(user, Selected((), ()), Selected((), ()))
    paths = parameters.paths(bound.args, bound.kwargs)
    first = len(parameters.paths(bound.args[:1], {})) if bound.args else 0
    name = function_name(user)
    closed = [name + keystr(path) for path, _ in tree_flatten_with_path(user)[0]]
    parts = {"fun": closed, "first": paths[:first], "rest": paths[first:]}

    def named(path: str) -> str:
        match = _OWN.fullmatch(path)
        return parts[match[1]][int(match[2])] if match else path

    return tuple(map(named, own)), tuple(map(_result, results))


def _result(path: str) -> str:
    if path == "result[0]":
        return "marker of equinox"
    return "result" + path.removeprefix(_RESULT) if path.startswith(_RESULT) else path
