"""Wrappers of JAX's functions with the exact signature, generated as source code.

A wrapper with `*args, **kwargs` spends more on packing than on the rest: with the exact signature
an operation on a small array costs a twentieth more than JAX's own, without it a sixth.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xlashard._jax.runtime.tracebacks import shorten
from xlashard._jax.runtime.transfer import HandleType
from xlashard.array.core.fallback import JaxCall, retry_call
from xlashard.array.core.unwrap import PLAIN, unwrap, wrap_results
from xlashard.sharding import Sharding, to_jax

_KINDS = inspect.Parameter
_PACKED = (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)
_FOLDER = Path(__file__).parent

# Suffix that no parameter of JAX's functions has.
_TEMPLATE = """\
def function({parameters}):
    try:
        out_ = {call}
    except Exception as failed_:
        try:
            out_ = again_(failed_, Call_(name_, theirs_, ({positional}), {{{keywords}}}))
        except Exception as error_:
            shorten_(error_)
            raise
    if type_(out_) is Handle_ and out_.committed:
        array_ = {kind}()
        array_._handle = out_
        return array_
    return as_arrays_({kind}, out_, ({everything}))
"""


def wrap_jax_function(
    theirs: Callable[..., Any], name: str, kind: type | None
) -> Callable[..., Any]:
    """Return a wrapper that passes handles in place of Arrays and wraps the result.

    Args:
        theirs: JAX's function.
        name: Name of the function in errors.
        kind: Class of the results; None for a method, whose results have the class of its first
            argument.
    """
    try:
        parameters = list(inspect.signature(theirs).parameters.values())
    except ValueError:
        return _packing(theirs, name, kind)
    if any(p.kind in _PACKED for p in parameters):
        return _packing(theirs, name, kind)
    names = {f"default_{p.name}_": p.default for p in parameters} | {
        "theirs_": theirs,
        "type_": type,
        "name_": name,
        "kind_": kind,
        "again_": retry_call,
        "shorten_": shorten,
        "Call_": JaxCall,
        "Handle_": HandleType,
        "as_arrays_": wrap_results,
        "bare_": unwrap,
        "plain_": PLAIN,
        "jax_sharding_": _jax_sharding,
    }
    # In the package's folder, so that tracebacks leave it out.
    exec(compile(_written(parameters, kind is None), str(_FOLDER / f"<{name}>"), "exec"), names)
    # Python's own errors about arguments use this name.
    names["function"].__name__ = names["function"].__qualname__ = name
    return names["function"]


def _written(parameters: list[inspect.Parameter], is_method: bool) -> str:
    """Return the source of a function with these parameters."""
    first = parameters[0].name if parameters else ""
    positional = [p.name for p in parameters if p.kind is not _KINDS.KEYWORD_ONLY]
    keywords = [p.name for p in parameters if p.kind is _KINDS.KEYWORD_ONLY]
    values = [_value(p, is_method and p.name == first) for p in parameters]
    return _TEMPLATE.format(
        parameters=_heading(parameters),
        call=_call(parameters, values),
        positional="".join(f"{name}, " for name in positional),
        keywords=", ".join(f"{name!r}: {name}" for name in keywords),
        everything="".join(f"{p.name}, " for p in parameters),
        kind=f"type_({first})" if is_method else "kind_",
    )


def _call(parameters: list[inspect.Parameter], values: list[str]) -> str:
    """Return the call of JAX's function; defaults are left out, as JAX checks every argument."""
    full = f"theirs_({', '.join(values)})"
    optional = [p.name for p in parameters if p.default is not p.empty]
    needed = [v for p, v in zip(parameters, values, strict=True) if p.default is p.empty]
    if not optional:
        return full
    left_out = " and ".join(f"{name} is default_{name}_" for name in optional)
    return f"theirs_({', '.join(needed)}) if {left_out} else {full}"


def _heading(parameters: list[inspect.Parameter]) -> str:
    entries: list[str] = []
    kinds = [p.kind for p in parameters]
    for number, p in enumerate(parameters):
        if p.kind is _KINDS.KEYWORD_ONLY and _KINDS.KEYWORD_ONLY not in kinds[:number]:
            entries.append("*")
        entries.append(p.name if p.default is p.empty else f"{p.name}=default_{p.name}_")
        if p.kind is _KINDS.POSITIONAL_ONLY and kinds[number + 1 :].count(p.kind) == 0:
            entries.append("/")
    return ", ".join(entries)


def _value(p: inspect.Parameter, is_self: bool) -> str:
    """Return the expression that JAX's function gets for a parameter."""
    name = p.name
    if is_self:
        return f"{name}._handle"
    if p.default is not p.empty:
        if name == "out_sharding":
            value = f"({name} if {name} is default_{name}_ else jax_sharding_({name}))"
        else:
            value = f"({name} if type_({name}) in plain_ else bare_({name}))"
    else:
        value = f"({name}._handle if type_({name}) is kind_ else bare_({name}))"
    return f"{name}={value}" if p.kind is _KINDS.KEYWORD_ONLY else value


def _packing(theirs: Callable[..., Any], name: str, kind: type | None) -> Callable[..., Any]:
    """Return a wrapper with `*args, **kwargs`."""

    def function(*args: Any, **kwargs: Any) -> Any:
        result = type(args[0]) if kind is None else kind
        try:
            bare_args = [x._handle if type(x) is result else unwrap(x) for x in args]
            out = theirs(*bare_args, **_keywords(kwargs)) if kwargs else theirs(*bare_args)
        except Exception as failed:
            try:
                out = retry_call(failed, JaxCall(name, theirs, args, kwargs))
            except Exception as error:
                shorten(error)
                raise
        if type(out) is HandleType and out.committed:
            array = result()
            array._handle = out
            return array
        return wrap_results(result, out, (args, kwargs))

    return function


def _keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = unwrap(kwargs)
    if "out_sharding" in kwargs:
        kwargs["out_sharding"] = _jax_sharding(kwargs["out_sharding"])
    return kwargs


def _jax_sharding(sharding: Any) -> Any:
    """Return JAX's class of a sharding, which results carry."""
    return to_jax(sharding, ()) if isinstance(sharding, Sharding) else sharding
