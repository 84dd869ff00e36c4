"""A function of `jax.numpy` that gives Arrays."""

import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.tracebacks import shorten
from xlashard._jax.trace.tracing import is_top_level
from xlashard.array import Array, device_put
from xlashard.array.core.wrappers import wrap_jax_function
from xlashard.array.placement.target import parse_placement
from xlashard.pjit import pjit, with_sharding_constraint
from xlashard.sharding import Sharding


def function_over(theirs: Callable[..., Any], name: str, module: str) -> Callable[..., Any]:
    """The function of ours for one of JAX's.

    Args:
        theirs: A function of arrays and other values.
        name: What it is called in `module`.
        module: The full name of the module that has ours.
    """
    ours = wrap_jax_function(theirs, name, Array)
    try:
        has_device = "device" in inspect.signature(theirs).parameters
    except ValueError:
        has_device = False
    return as_named(placing(theirs, ours, name) if has_device else ours, theirs, name, module)


def as_named(ours: Any, theirs: Any, name: str, module: str) -> Any:
    """Gives a function the name, text and signature of JAX's, and a place to be pickled by."""
    ours.__name__ = ours.__qualname__ = name
    ours.__module__ = module
    ours.__doc__ = theirs.__doc__
    ours.__wrapped__ = theirs
    return ours


type Function = Callable[..., Any]

# Their argument is the value, which has to be brought there; the others make it there.
_CONVERTERS = ("array", "asarray", "astype")
# Arguments that are numbers to compute with; the others decide what is computed.
_OPERANDS = {
    "full": ("fill_value",),
    "full_like": ("fill_value",),
    "linspace": ("start", "stop"),
    "fftfreq": ("d",),
    "rfftfreq": ("d",),
}
# Arguments of which only the shape and the dtype count.
_MODELS = ("a", "prototype")


def placing(theirs: Function, ours: Function, name: str) -> Function:
    """The function with a `device=` that may be any sharding.

    Args:
        theirs: JAX's function.
        ours: The function over it.
        name: What it is called.
    """
    signature = inspect.signature(theirs)

    def function(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        try:
            if device is None:
                return _itself(args, ours(*args, **kwargs))
            return placed(args, kwargs, device)
        except Exception as error:
            shorten(error)
            raise

    def placed(args: tuple[Any, ...], kwargs: dict[str, Any], device: Any) -> Any:
        placement = parse_placement(device, f"device of {name}()")
        sharding = placement.sharding
        if sharding is None:
            return ours(*args, **kwargs)
        if not is_top_level():
            return _traced(ours, args, kwargs, sharding)
        if name in _CONVERTERS:
            return device_put(_host_value(ours, args, kwargs), device)
        out = _made(theirs, signature.bind(*args, **kwargs), sharding)
        return out if placement.layout is None else device_put(out, device)

    return function


def _itself(args: tuple[Any, ...], out: Any) -> Any:
    """The argument, if the result is the same buffers: `asarray(x)` is `x`."""
    if args and type(args[0]) is type(out) is Array and args[0]._handle is out._handle:
        return args[0]
    return out


def _traced(ours: Function, args: Any, kwargs: dict[str, Any], sharding: Sharding) -> Any:
    """Inside another program, which has devices of its own, only the tiles count."""
    out = ours(*args, **kwargs)
    return out if sharding.num_devices == 1 else with_sharding_constraint(out, sharding)


def _host_value(ours: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """The value to bring somewhere: a NumPy array goes there straight from the host."""
    value, dtype = args[0], kwargs.get("dtype")
    if type(value) is not np.ndarray or len(args) > 1 or not set(kwargs) <= {"dtype", "copy"}:
        return ours(*args, **kwargs)
    return value if dtype is None else value.astype(dtype)


def _made(theirs: Function, bound: inspect.BoundArguments, sharding: Sharding) -> Array:
    """Run a function of a shape and some numbers as a program on a sharding's devices."""
    operands, settings = {}, {}
    for name, value in bound.arguments.items():
        if name in _OPERANDS.get(theirs.__name__, ()):
            operands[name] = value
        else:
            settings[name] = _shape_of(value) if name in _MODELS else value
    program = _program(theirs, bound.signature, _Settings(settings), sharding)
    return program(operands)


def _shape_of(model: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the result."""
    aval = jax.typeof(np.asarray(model) if isinstance(model, list | tuple) else model)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


class _Settings:
    """Arguments that decide what is computed; equal if they are so and of the same types."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        # 0.0 and -0.0 are equal.
        self._key = tuple((name, type(v), repr(v)) for name, v in values.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=256)
def _program(
    theirs: Function, signature: inspect.Signature, settings: _Settings, sharding: Sharding
) -> Function:
    def make(operands: dict[str, Any]) -> Any:
        bound = inspect.BoundArguments(signature, OrderedDict())
        everything = settings.values | operands
        bound.arguments.update({n: everything[n] for n in signature.parameters if n in everything})
        return theirs(*bound.args, **bound.kwargs)

    make.__name__ = theirs.__name__
    return pjit(make, out_shardings=sharding)
