"""Wrappers of JAX's functions with the exact signature, generated as source code.

A wrapper with `*args, **kwargs` spends more on packing than on the rest: with the exact signature
an operation on a small array costs a twentieth more than JAX's own, without it a sixth.

A failed call is retried under other shardings, or gets a better error. JAX's programs fail on some
shardings that XLA supports. Under Shardy they accept tiles only if a mesh of the devices, in their
order, has them; after sorting the devices by tile, any tiles have one. Under GSPMD they name every
result on the mesh of an argument, even a result that no spec there describes; from arguments with a
`GSPMDSharding`, results have one too.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xlashard._jax.lowering import uses_shardy
from xlashard._jax.runtime.shardings import default_memory_kind
from xlashard._jax.runtime.transfer import Handle, HandleType, is_unnamed_result
from xlashard.core.array.array_class.base import ArrayBase, check_alive, type_text
from xlashard.core.array.reshard.execute import (
    has_permuted_tiles,
    put_beside,
    with_device_order,
    with_gspmd_sharding,
    with_mesh_order,
)
from xlashard.core.sharding import from_jax, to_jax
from xlashard.errors import DeviceMismatchError, UnreducedError
from xlashard.support.formatting import format_two_device_lists
from xlashard.support.lazily import dataclass
from xlashard.support.tracebacks import short_tracebacks, shorten

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), type, np.ndarray})
"""Types of values that contain no array on devices."""

_WITHOUT_ARRAYS = PLAIN | {HandleType}


def map_arrays(value: Any, change: Callable[[Any], Any]) -> Any:
    """Map a function over every array and handle in a value, in nested lists, tuples and dicts too.

    A container without changes is returned as it is.
    """
    kind = type(value)
    if kind is HandleType or isinstance(value, ArrayBase):
        return change(value)
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return _rebuilt(value, parts, map_arrays(parts, change), lambda new: slice(*new))
    if isinstance(value, tuple):
        return _rebuilt(
            value, value, [map_arrays(v, change) for v in value], getattr(kind, "_make", kind)
        )
    if kind is list:
        return _rebuilt(value, value, [map_arrays(v, change) for v in value], list)
    if isinstance(value, dict):
        new = [map_arrays(v, change) for v in value.values()]
        return _rebuilt(value, value.values(), new, lambda new: kind(zip(value, new, strict=True)))
    return value


def _rebuilt(old: Any, parts: Any, new: Any, make: Callable[[Any], Any]) -> Any:
    if all(a is b for a, b in zip(parts, new, strict=True)):
        return old
    return make(new)


def unwrap(value: Any) -> Any:
    """Return the value with handles in place of Arrays; containers are copied."""
    # On the path of every argument of every operation: the commonest kinds first.
    kind = type(value)
    if kind in _WITHOUT_ARRAYS:
        return value
    if kind is list:
        return [unwrap(v) for v in value]
    if kind is tuple:
        return tuple([unwrap(v) for v in value])
    if kind is dict:
        return {key: unwrap(v) for key, v in value.items()}
    if kind is slice and {type(value.start), type(value.stop), type(value.step)} <= _WITHOUT_ARRAYS:
        return value
    if isinstance(value, ArrayBase):
        return value._handle
    return map_arrays(value, unwrap)


def wrap_results(kind: type[ArrayBase], out: Any, operands: tuple[Any, ...]) -> Any:
    """Return the result with an array around every handle in it.

    Args:
        kind: Class of the arrays.
        out: Result of JAX's function.
        operands: Its arguments, with arrays anywhere inside.
    """
    if type(out) is list:
        return [wrap_results(kind, part, operands) for part in out]
    if type(out) is not HandleType:
        # A tracer, a tuple of arrays, NotImplemented, a dtype.
        return map_arrays(out, lambda handle: wrap_results(kind, handle, operands))
    array = kind()
    free = out.committed or _all_uncommitted(kind, operands)
    array._handle = out if free else _on_operand_devices(out, operands)
    return array


def _all_uncommitted(kind: type[ArrayBase], operands: tuple[Any, ...]) -> bool:
    """Return True if a quick check finds no committed operand."""
    for x in operands:
        if type(x) is kind:
            if x._buffers.committed:
                return False
        elif type(x) not in PLAIN:
            return False
    return True


def _on_operand_devices(out: Handle, operands: Any) -> Handle:
    """Move an uncommitted result to the devices of the first committed operand."""
    for x in jax.tree.leaves(operands):
        if (type(x) is HandleType or isinstance(x, ArrayBase)) and x.committed:
            return put_beside(out, unwrap(x))
    return out


_KINDS = inspect.Parameter
_PACKED = (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)
_FOLDER = Path(__file__).parent

# With a suffix that no parameter of JAX's functions has. Slots are read and set one by one, in a
# tenth of the time of a property.
_BARE = "({name}._handle if {name}._exclusive else {name}._buffers)"
_TEMPLATE = """\
def function({parameters}):
    try:
        out_ = {call}
    except Exception as failed_:
        try:
            call_ = Call_(name_, jax_function_, ({positional}), {{{keywords}}}, operands_)
            out_ = again_(failed_, call_)
        except Exception as error_:
            shorten_(error_)
            raise
    if type_(out_) is Handle_ and out_._committed:
        array_ = {kind}()
        array_._buffers, array_._exclusive = out_, False
        array_._exposed = array_._own_sharding = None
        array_._shards_or_cause = array_._value_cache = None
        return array_
    return as_arrays_({kind}, out_, ({everything}))
"""


def wrap_jax_function(
    jax_function: Callable[..., Any], name: str, kind: type | None, operands: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Return a wrapper that passes handles in place of Arrays and wraps the result.

    Args:
        jax_function: JAX's function.
        name: Name of the function in errors.
        kind: Class of the results; None for a method, whose results have the class of its first
            argument.
        operands: Names of the positional arguments in errors; those of the signature if empty.
    """
    try:
        parameters = list(inspect.signature(jax_function).parameters.values())
        is_packing = any(p.kind in _PACKED for p in parameters)
    except ValueError:
        parameters, is_packing = [], True
    source = (
        _packing(kind is None)
        if is_packing
        else _written(parameters, kind is None, is_operator=bool(operands))
    )
    names = {f"default_{p.name}_": p.default for p in parameters} | {
        "jax_function_": jax_function,
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
        "jax_sharding_": to_jax,
        "keywords_": _keywords,
        "operands_": operands,
    }
    # In the package's folder, so that tracebacks leave it out.
    exec(compile(source, str(_FOLDER / f"<{name}>"), "exec"), names)
    # Python's own errors about arguments use this name.
    names["function"].__name__ = names["function"].__qualname__ = name
    return names["function"]


def _packing(is_method: bool) -> str:
    """Return the source of a function with any arguments."""
    kind = "type_(args[0])" if is_method else "kind_"
    bare = f"{_BARE.format(name='x_')} if type_(x_) is {kind} else bare_(x_)"
    return _TEMPLATE.format(
        parameters="*args, **kwargs",
        call=f"jax_function_(*[{bare} for x_ in args], **keywords_(kwargs))",
        positional="*args, ",
        keywords="**kwargs",
        everything="args, kwargs",
        kind=kind,
    )


def _written(
    parameters: list[inspect.Parameter], is_method: bool, *, is_operator: bool = False
) -> str:
    """Return the source of a function with these parameters."""
    first = parameters[0].name if is_method else ""
    kind = f"type_({first})" if is_method else "kind_"
    positional = [p.name for p in parameters if p.kind is not _KINDS.KEYWORD_ONLY]
    keywords = [p.name for p in parameters if p.kind is _KINDS.KEYWORD_ONLY]
    values = [_BARE.format(name=first) if p.name == first else _value(p, kind) for p in parameters]
    if is_operator:
        # JAX leaves operands that it does not know to their own operators.
        other = parameters[1].name
        values[1] = f"({_BARE.format(name=other)} if type_({other}) is {kind} else {other})"
    return _TEMPLATE.format(
        parameters=_heading(parameters),
        call=_call(parameters, values),
        positional="".join(f"{name}, " for name in positional),
        keywords=", ".join(f"{name!r}: {name}" for name in keywords),
        everything="".join(f"{p.name}, " for p in parameters),
        kind=kind,
    )


def _call(parameters: list[inspect.Parameter], values: list[str]) -> str:
    """Return the call of JAX's function; defaults are left out, as JAX checks every argument."""
    full = f"jax_function_({', '.join(values)})"
    optional = [p.name for p in parameters if p.default is not p.empty]
    needed = [v for p, v in zip(parameters, values, strict=True) if p.default is p.empty]
    if not optional:
        return full
    left_out = " and ".join(f"{name} is default_{name}_" for name in optional)
    return f"jax_function_({', '.join(needed)}) if {left_out} else {full}"


class _Code(str):
    """Text that stands in a signature as it is."""

    __repr__ = str.__str__


def _heading(parameters: list[inspect.Parameter]) -> str:
    """Return the parameters as code, with the names of their defaults."""
    named = [
        p if p.default is p.empty else p.replace(default=_Code(f"default_{p.name}_"))
        for p in parameters
    ]
    bare = [p.replace(annotation=p.empty) for p in named]
    return str(inspect.Signature(bare))[1:-1]


def _value(p: inspect.Parameter, kind: str) -> str:
    """Return the expression that JAX's function gets for a parameter."""
    name = p.name
    if p.default is not p.empty:
        if name == "out_sharding":
            value = f"({name} if {name} is default_{name}_ else jax_sharding_({name}, ()))"
        else:
            value = f"({name} if type_({name}) in plain_ else bare_({name}))"
    else:
        value = f"({_BARE.format(name=name)} if type_({name}) is {kind} else bare_({name}))"
    return f"{name}={value}" if p.kind is _KINDS.KEYWORD_ONLY else value


def _keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = unwrap(kwargs)
    if "out_sharding" in kwargs:
        kwargs["out_sharding"] = to_jax(kwargs["out_sharding"], ())
    return kwargs


@dataclass(frozen=True, slots=True)
class JaxCall:
    """A call of a function of JAX with arrays.

    Attributes:
        name: Name of the function in errors.
        function: JAX's function.
        args: Positional arguments, with Arrays or handles anywhere inside.
        kwargs: Keyword arguments.
        names: Names of the positional arguments; those of the signature if empty.
    """

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    names: tuple[str, ...] = ()

    def operands(self) -> list[tuple[str, Any]]:
        """Return every array among the arguments with its path."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._bound())
        operands = []
        for (first, *rest), leaf in leaves:
            if isinstance(leaf, ArrayBase) or type(leaf) is HandleType:
                operands.append((f"{first.key}{jax.tree_util.keystr(tuple(rest))}", leaf))
        return operands

    def _bound(self) -> dict[str, Any]:
        if self.names:
            return dict(zip(self.names, self.args, strict=False)) | self.kwargs
        try:
            return inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments
        except TypeError:
            return {f"args[{i}]": x for i, x in enumerate(self.args)} | self.kwargs

    def again(self, change: Callable[[Handle], Handle]) -> Any:
        """Call the function with every handle changed."""
        args, kwargs = unwrap(list(self.args)), unwrap(self.kwargs)
        return self.function(*map_arrays(args, change), **map_arrays(kwargs, change))


def retry_call(error: Exception, call: JaxCall) -> Any:
    """Retry a failed call under other shardings, or raise a better error.

    Args:
        error: The error of the first attempt, raised again if there is no better one.
        call: The call.

    Raises:
        DeletedError: An array among the arguments is deleted.
        DeviceMismatchError: The arguments are committed to different devices.
    """
    with short_tracebacks:
        if isinstance(error, RuntimeError):
            check_alive(*(x for _, x in call.operands()))
        elif isinstance(error, TypeError) or is_unnamed_result(error):
            return _retry_on_other_shardings(error, call)
        elif isinstance(error, AssertionError):
            _check_unreduced(call)
        elif isinstance(error, ValueError):
            _check_devices(call)
            _note_memory(error, call)
        raise error  # no-catalogue: raises an error of JAX or of the caller again


def _check_unreduced(call: JaxCall) -> None:
    """Check that no argument is unreduced, which JAX's rules do not support under GSPMD.

    Raises:
        UnreducedError: An argument is unreduced.
    """
    for name, x in call.operands():
        if not uses_shardy() and from_jax(x.sharding).is_unreduced:
            raise UnreducedError(  # no-catalogue: needs the GSPMD partitioner
                f"{call.name} does not support unreduced arrays under the GSPMD partitioner, but "
                f"{name}, {type_text(x)}, is unreduced: reduce it first, by device_put({name}, "
                f"{name}.sharding.reduced_sharding), or use Shardy, by XLASHARD_PARTITIONER=shardy"
            ) from None


def _check_devices(call: JaxCall) -> None:
    bound = [(name, x) for name, x in call.operands() if x.committed]
    for name, x in bound[1:]:
        first, other = bound[0]
        expected, devices = (tuple(y.sharding._device_assignment) for y in (other, x))
        if expected != devices:
            texts = format_two_device_lists(expected, devices)
            raise DeviceMismatchError(
                f"{call.name} needs its arrays on the same devices in the same order: {first}, "
                f"{type_text(other)}, is on {texts[0]} and {name}, {type_text(x)}, on {texts[1]}; "
                f"move one of them, for example device_put({name}, {first}.sharding)"
            ) from None


def _note_memory(error: ValueError, call: JaxCall) -> None:
    """Add a note about arguments in other memory, with which JAX supports few operations."""
    for name, x in call.operands():
        sharding = from_jax(x.sharding)
        usual = default_memory_kind(sharding.devices[0])
        if sharding.memory_kind not in (None, usual):
            error.add_note(
                f"{name}, {type_text(x)}, is in {sharding.memory_kind} memory, which few "
                f"operations of JAX support: write device_put({name}, "
                f"{name}.sharding.with_memory_kind({usual!r}))"
            )


def _retry_on_other_shardings(error: Exception, call: JaxCall) -> Any:
    if is_unnamed_result(error):
        return call.again(with_gspmd_sharding)
    first = next((x for _, x in call.operands() if has_permuted_tiles(x)), None)
    if first is None:
        raise error  # no-catalogue: raises an error of JAX or of the caller again
    sharding = from_jax(first.sharding)
    by_tile = np.argsort(sharding.tiling(first.shape).tile_ids(), kind="stable")
    devices = tuple(sharding.devices[i] for i in by_tile.tolist())
    out = call.again(lambda handle: with_mesh_order(handle, devices))
    return map_arrays(out, lambda handle: with_device_order(handle, sharding.devices))
