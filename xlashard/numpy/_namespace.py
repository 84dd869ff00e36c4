"""Functions, ufuncs and indexed objects of `jax.numpy` for Arrays, each created at first use."""

import difflib
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax.runtime.transfer import HandleType
from xlashard._jax.trace.tracing import is_top_level, struct_of
from xlashard.core.array import Array, device_put
from xlashard.core.array.array_class.wrappers import (
    JaxCall,
    retry_call,
    unwrap,
    wrap_jax_function,
    wrap_results,
)
from xlashard.core.array.placement.target import parse_placement
from xlashard.core.pjit.api import pjit
from xlashard.core.pjit.constraint import with_sharding_constraint
from xlashard.core.sharding import Sharding
from xlashard.support.tracebacks import shorten

type Function = Callable[..., Any]


class Namespace:
    """The `__getattr__` and `__dir__` of a module with the names of one of JAX's modules.

    Args:
        jax_module: JAX's module.
        name: Full name of the module of this package.
        members: Members of the module; new ones are added, so that each is created once.
    """

    def __init__(self, jax_module: ModuleType, name: str, members: dict[str, Any]) -> None:
        self._jax_module = jax_module
        self._name = name
        self._members = members

    def listing(self) -> list[str]:
        """Return the public names of JAX's module."""
        return [name for name in dir(self._jax_module) if not name.startswith("_")]

    def get(self, name: str) -> Any:
        """Create the member of a name that the module does not have yet.

        Raises:
            AttributeError: JAX's module does not have the name.
        """
        if name == "__all__":
            return self.listing()
        member: Any = None if name.startswith("_") else getattr(self._jax_module, name, None)
        if name not in self.listing() and member is None:
            close = difflib.get_close_matches(name, self.listing(), n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise AttributeError(
                f"{self._name} has no {name!r}, nor has {self._jax_module.__name__}{hint}",
                name=name,
            )
        if isinstance(member, _JaxScalarType):
            if member.__name__ != name:  # `single` is `float32`
                return self._members.get(member.__name__) or self.get(member.__name__)
            member = _scalar_type_over(member, self._name)
        elif isinstance(member, jnp.ufunc):
            member = ufunc.over(member, self._name)
        elif callable(member) and not isinstance(member, type):
            member = function_over(member, name, self._name)
        # Of several threads that create one at once, all get the same.
        return self._members.setdefault(name, member)


# The metaclass of `jax.numpy.float32` and its siblings, which are dtypes and convert arrays.
_JaxScalarType: Any = type(jnp.float32)


class _ScalarType(_JaxScalarType):
    """A dtype that JAX and NumPy accept, and which converts values to Arrays when it is called."""

    convert: Function

    def __call__(cls, x: Any) -> Any:  # pyright: ignore[reportSelfClsParameterName]
        """Return a value as an Array of this dtype."""
        return cls.convert(x, dtype=cls.dtype)


def _scalar_type_over(jax_type: Any, module: str) -> _ScalarType:
    name = jax_type.__name__
    convert = _with_device(jnp.asarray, wrap_jax_function(jnp.asarray, name, Array), name)
    members = {"dtype": jax_type.dtype, "convert": staticmethod(convert)}
    return _ScalarType(name, (), {**members, "__module__": module, "__doc__": jax_type.__doc__})


def function_over(jax_function: Function, name: str, module: str) -> Function:
    """Return the function on Arrays of a function of JAX.

    Args:
        jax_function: A function of arrays and other values.
        name: Its name in `module`.
        module: Full name of the module of this package that has the function.
    """
    function = wrap_jax_function(jax_function, name, Array)
    try:
        has_device = "device" in inspect.signature(jax_function).parameters
    except ValueError:
        has_device = False
    if has_device:
        function = _with_device(jax_function, function, name)
    return _as_named(function, jax_function, name, module)


def _as_named(member: Any, jax_member: Any, name: str, module: str) -> Any:
    """Set name, text and signature of JAX's member, and the module that pickles refer to."""
    member.__name__ = member.__qualname__ = name
    member.__module__ = module
    member.__doc__ = jax_member.__doc__
    member.__wrapped__ = jax_member
    return member


# Functions whose argument is the value, which is moved to the devices; others create it there.
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


def _with_device(jax_function: Function, on_arrays: Function, name: str) -> Function:
    """Return a function with a `device=` that may be any sharding.

    An array that is created of a shape is created by a program on all devices of the sharding at
    once: no device and no host ever holds the whole of it.

    Args:
        jax_function: JAX's function.
        on_arrays: The function on Arrays.
        name: Name of the function.
    """
    signature = inspect.signature(jax_function)

    def function(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        try:
            if device is not None:
                return placed(args, kwargs, device)
            out = on_arrays(*args, **kwargs)
            if args and type(args[0]) is type(out) is Array and args[0]._handle is out._handle:
                return args[0]  # `asarray(x)` is `x`
            return out
        except Exception as error:
            shorten(error)
            raise

    def placed(args: tuple[Any, ...], kwargs: dict[str, Any], device: Any) -> Any:
        placement = parse_placement(device, f"device of {name}()")
        sharding = placement.sharding
        if sharding is None:
            return on_arrays(*args, **kwargs)
        if not is_top_level():
            # Another program has devices of its own, so that only the tiles count.
            out = on_arrays(*args, **kwargs)
            return out if sharding.num_devices == 1 else with_sharding_constraint(out, sharding)
        if name in _CONVERTERS:
            return device_put(_converted(on_arrays, args, kwargs), device)
        out = _created(jax_function, signature.bind(*args, **kwargs), sharding)
        return out if placement.layout is None else device_put(out, device)

    return function


def _converted(on_arrays: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the value to move to devices: a NumPy array goes there straight from the host."""
    value, dtype = args[0], kwargs.get("dtype")
    if type(value) is not np.ndarray or len(args) > 1 or not set(kwargs) <= {"dtype", "copy"}:
        return on_arrays(*args, **kwargs)
    return value if dtype is None else value.astype(dtype)


def _created(jax_function: Function, bound: inspect.BoundArguments, sharding: Sharding) -> Array:
    """Run a function of a shape and some numbers as a program on a sharding's devices."""
    operands, settings = {}, {}
    for name, value in bound.arguments.items():
        if name in _OPERANDS.get(jax_function.__name__, ()):
            operands[name] = value
        elif name in _MODELS:
            aval = jax.typeof(np.asarray(value) if isinstance(value, list | tuple) else value)
            settings[name] = struct_of(aval, None)
        else:
            settings[name] = value
    # By type and text too: 0.0 and -0.0 are equal.
    key = tuple((name, type(v), repr(v)) for name, v in settings.items())
    program = _program(jax_function, bound.signature, _Settings(key, settings), sharding)
    return program(operands)


@dataclass(frozen=True)
class _Settings:
    """Arguments that decide what is computed, compared by their key."""

    key: tuple[Any, ...]
    values: dict[str, Any] = field(compare=False)


@lru_cache(maxsize=256)
def _program(
    jax_function: Function, signature: inspect.Signature, settings: _Settings, sharding: Sharding
) -> Function:
    def make(operands: dict[str, Any]) -> Any:
        bound = inspect.BoundArguments(signature, OrderedDict())
        everything = settings.values | operands
        bound.arguments.update({n: everything[n] for n in signature.parameters if n in everything})
        return jax_function(*bound.args, **bound.kwargs)

    make.__name__ = jax_function.__name__
    return pjit(make, out_shardings=sharding)


class Indexed:
    """An object of `jax.numpy` that creates arrays when it is indexed, as Arrays: `mgrid[...]`."""

    def __init__(self, jax_object: Any) -> None:
        self._jax_object = jax_object
        self.__doc__ = jax_object.__doc__

    def __getitem__(self, key: Any) -> Any:
        return wrap_results(Array, self._jax_object[unwrap(key)], (key,))

    def __repr__(self) -> str:
        return repr(self._jax_object)


_NAMES = ("x", "y", "z")


def _ufunc_method(name: str) -> cached_property[Function]:
    def method(self: "ufunc") -> Function:
        jax_method = getattr(self._jax_ufunc, name)
        return function_over(jax_method, f"{self.__name__}.{name}", self._module)

    method.__doc__ = getattr(jnp.ufunc, name).__doc__
    return cached_property(method)


class ufunc:
    """An element-wise function of Arrays; `frompyfunc` makes one of a Python function.

    Its arguments are those of `jax.numpy.ufunc`.
    """

    __name__: str

    def __init__(self, func: Function, /, nin: int, nout: int, **options: Any) -> None:
        self._set(jnp.ufunc(func, nin, nout, **options), "")

    @classmethod
    def over(cls, jax_ufunc: Any, module: str = "") -> "ufunc":
        """Return the ufunc on Arrays of a ufunc of JAX.

        Args:
            jax_ufunc: A `jax.numpy.ufunc`.
            module: The module that has it by its name; empty if none has.
        """
        self = cls.__new__(cls)
        self._set(jax_ufunc, module)
        return self

    def _set(self, jax_ufunc: Any, module: str) -> None:
        self._jax_ufunc = jax_ufunc
        self._call = jax_ufunc.__call__
        self._module = module
        _as_named(self, jax_ufunc, jax_ufunc.__name__, module or __name__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        try:
            if len(args) == 2 and not kwargs:
                # Nearly all calls; a list of them to unpack again costs a tenth of the cheapest.
                x, y = args
                x = x._handle if type(x) is Array else unwrap(x)
                out = call(x, y._handle if type(y) is Array else unwrap(y))
            else:
                out = call(*map(unwrap, args), **unwrap(kwargs))
        except Exception as failed:
            try:
                out = retry_call(failed, JaxCall(self.__name__, call, args, kwargs, _NAMES))
            except Exception as error:
                shorten(error)
                raise
        if type(out) is HandleType and out.committed:
            array = Array()
            array._handle = out
            return array
        return wrap_results(Array, out, (args, kwargs))

    reduce = _ufunc_method("reduce")
    accumulate = _ufunc_method("accumulate")
    at = _ufunc_method("at")
    outer = _ufunc_method("outer")
    reduceat = _ufunc_method("reduceat")

    nin = property(attrgetter("_jax_ufunc.nin"), doc="Number of arrays that it takes.")
    nout = property(attrgetter("_jax_ufunc.nout"), doc="Number of arrays that it returns.")
    nargs = property(attrgetter("_jax_ufunc.nargs"), doc="Number of arguments, as JAX counts them.")
    identity = property(attrgetter("_jax_ufunc.identity"), doc="Identity element.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ufunc) and self._jax_ufunc == other._jax_ufunc

    def __hash__(self) -> int:
        return hash(self._jax_ufunc)

    def __repr__(self) -> str:
        return f"<xlashard.numpy.ufunc {self.__name__!r}>"

    def __reduce__(self) -> Any:
        return self.__name__ if self._module else (ufunc.over, (self._jax_ufunc,))


def frompyfunc(func: Function, /, nin: int, nout: int, *, identity: Any = None) -> ufunc:
    """Return the `ufunc` of a Python function of scalars, as `jax.numpy.frompyfunc` does.

    Args:
        func: The function; it is traced by JAX.
        nin: Number of scalars that it takes.
        nout: Number of scalars that it returns.
        identity: The reduction of no elements.
    """
    return ufunc.over(jnp.frompyfunc(func, nin, nout, identity=identity))


def vectorize(pyfunc: Function, *args: Any, **options: Any) -> Function:
    """Return a function of arrays for one of single elements, as `jax.numpy.vectorize` does.

    Args:
        pyfunc: The function; it is traced by JAX.
        args: As for `jax.numpy.vectorize`.
        options: `excluded` and `signature`, as for `jax.numpy.vectorize`.
    """
    vectorized = jnp.vectorize(pyfunc, *args, **options)
    function = function_over(vectorized, vectorized.__name__, vectorized.__module__)
    function.__qualname__ = vectorized.__qualname__
    return function
