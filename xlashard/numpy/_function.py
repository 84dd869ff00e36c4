"""A function of `jax.numpy` that gives Arrays."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from xlashard._jax.transfer import HandleType
from xlashard.array import Array
from xlashard.array.attempts import Call, tried_again
from xlashard.array.nested import bare
from xlashard.array.results import as_arrays
from xlashard.numpy._placing import placing, without_twins

# Functions that JAX itself compiles, which unwrap their arguments by themselves.
_PROGRAM = type(jax.jit(lambda: None))


def function_over(theirs: Callable[..., Any], name: str, module: str) -> Callable[..., Any]:
    """The function of ours for one of JAX's.

    Args:
        theirs: A function of arrays and other values.
        name: What it is called in `module`.
        module: The full name of the module that has ours.
    """
    ours = (_over_program if type(theirs) is _PROGRAM else _over_python)(theirs, name)
    parameters = _parameters(theirs)
    if "out_sharding" in parameters:
        ours = without_twins(ours)
    if "device" in parameters:
        ours = placing(theirs, ours, name)
    return as_named(ours, theirs, name, module)


def _parameters(theirs: Callable[..., Any]) -> Any:
    try:
        return inspect.signature(theirs).parameters
    except ValueError:
        return ()


def as_named(ours: Any, theirs: Any, name: str, module: str) -> Any:
    """Gives a function the name, text and signature of JAX's, and a place to be pickled by."""
    ours.__name__ = ours.__qualname__ = name
    ours.__module__ = module
    ours.__doc__ = theirs.__doc__
    ours.__wrapped__ = theirs
    return ours


def _over_program(theirs: Callable[..., Any], name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            out = theirs(*args, **kwargs)
        except Exception as error:
            out = tried_again(error, Call(name, theirs, args, kwargs))
        if type(out) is HandleType and out.committed:
            array = Array()
            array._handle = out
            return array
        return as_arrays(Array, out, (args, kwargs))

    return function


def _over_python(theirs: Callable[..., Any], name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            out = theirs(*[bare(x) for x in args], **bare(kwargs))
        except Exception as error:
            out = tried_again(error, Call(name, theirs, args, kwargs))
        for x in args:
            # asarray(x) is x.
            if type(x) is Array and x._handle is out:
                return x
        return as_arrays(Array, out, (args, kwargs))

    return function
