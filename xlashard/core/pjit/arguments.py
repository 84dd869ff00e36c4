"""Arguments of one call: types, placements, and checks of values and of shared buffers.

XLA refuses a donated argument that shares buffers with another one on each device independently. If
only some devices hold the shared buffer, as with an array on one device that is passed twice to a
program over eight, the other devices have started already and wait in a collective forever: those
calls are compared before the program starts. XLA refuses a repeat call on a single device as a
whole, and the arguments are compared only for the error.

A result of a program whose handle no code has read since is the only holder of its buffers. A
repeat call therefore compares the ids of its arguments, and inspects the buffers of the remaining
donated arrays only.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from operator import not_
from typing import Any

import jax
import numpy as np

from xlashard._jax.lowering import aval_text
from xlashard._jax.runtime.compiler import custom_layout, custom_struct_layout
from xlashard._jax.runtime.global_state import Transfer, active_guards, check_transfer
from xlashard._jax.runtime.transfer import (
    HandleType,
    base_handle,
    callback_result,
    lacks_buffer,
    shared_pair,
)
from xlashard._jax.trace.jaxprs import buffer_of, is_ref
from xlashard._jax.trace.tracing import Tracer, abstractify, all_shaped, escaped_tracer_error
from xlashard.core.array import Array
from xlashard.core.array.array_class.base import type_text
from xlashard.core.array.array_class.deletion import describe_deleted
from xlashard.core.sharding import Sharding, XLACompatibleSharding, as_tiles, from_jax
from xlashard.core.sharding.replicated import custom_memory_kind, names_devices
from xlashard.errors import ArgumentError, DeletedError, DonationError
from xlashard.support.formatting import shortened
from xlashard.support.lazily import dataclass


@dataclass(frozen=True)
class Argument:
    """Type and placement of one dynamic argument, which decide the program.

    Attributes:
        path: Its path as code: `state['params']['w']`.
        aval: Its abstract value.
        sharding: Its current sharding; None for a value of the host.
        committed: True if it is committed to its devices.
        layout: Its layout in memory; None for the default one.
    """

    path: str
    aval: Any
    sharding: XLACompatibleSharding | None
    committed: bool
    layout: Any = None

    def describe(self) -> str:
        """Return path and type: `state['w'] (float32[8,16])`."""
        return f"{self.path} ({aval_text(self.aval)})"

    @property
    def is_replicated(self) -> bool:
        """Return True if each of several devices holds the whole value, in its default memory."""
        own = self.sharding
        if own is None or not names_devices(own) or own.is_unreduced:
            return False
        return own.is_fully_replicated and custom_memory_kind(own) is None

    def unbound(self) -> "Argument":
        """Return the argument without a placement, which the program may place anywhere."""
        if self.sharding is None and not self.committed:
            return self
        return Argument(self.path, self.aval, None, False)


def bare(value: Any) -> Any:
    """Return the handle of an Array, or of the buffer of a reference; another value unchanged."""
    if isinstance(value, Array):
        return value._handle
    return buffer_of(value) if is_ref(value) else callback_result(value)


def bare_values(values: Sequence[Any]) -> list[Any]:
    """Return the handles of Arrays, for use within one call; other values as `bare` does."""
    return [value._buffers if type(value) is Array else bare(value) for value in values]


def describe_arguments(
    values: Sequence[Any], paths: Sequence[str], avals: Sequence[Any], *, runs: bool = True
) -> tuple[Argument, ...]:
    """Return type and placement of each value of a call.

    Args:
        values: The values.
        paths: Their paths.
        avals: Their abstract values.
        runs: False for a program that is lowered or explained only, which needs no buffers.

    Raises:
        DeletedError: If a value of a call that runs lacks buffers.
    """
    known: dict[int, Sharding] = {}  # arguments that stay alive share most shardings
    arguments = []
    every = zip(values, bare_values(values), paths, all_shaped(avals), strict=True)
    for value, handle, path, aval in every:
        is_buffer = type(handle) is HandleType
        is_array = is_buffer or (isinstance(handle, jax.Array) and not isinstance(handle, Tracer))
        is_struct = (
            not is_array and isinstance(value, jax.ShapeDtypeStruct) and value.sharding is not None
        )
        if not is_array and not is_struct:
            arguments.append(Argument(path, aval, None, False))
            continue
        if runs and is_array and (not is_buffer or lacks_buffer(handle)):
            check_alive(value, path, aval)
        own: Any = handle.sharding if is_array else value.sharding
        sharding = known.get(id(own)) or known.setdefault(id(own), from_jax(own))
        if not isinstance(sharding, XLACompatibleSharding):
            sharding = as_tiles(sharding, aval.shape)
        if is_struct:
            layout, committed = custom_struct_layout(value), True
        else:
            layout = None if handle.is_deleted() else custom_layout(handle)
            committed = bool(handle.committed)
        arguments.append(Argument(path, aval, sharding, committed, layout))
    return tuple(arguments)


def check_alive(value: Any, path: str, aval: Any) -> None:
    """Refuse an array that lacks buffers; anything else passes.

    Raises:
        DeletedError: With the path.
    """
    handle = base_handle(bare(value))
    if handle is None or not lacks_buffer(handle):
        return
    name = f"{path} ({aval_text(aval)})"
    if handle.is_deleted():
        consumer = value._deleted_by if isinstance(value, Array) else None
        raise DeletedError(describe_deleted(name, bare(value), consumer))
    raise DeletedError(_lost_shard_text(name))


def _lost_shard_text(name: str) -> str:
    return (
        f"{name} lacks the buffer of one of its devices: that shard was deleted or donated by "
        "itself; make it anew"
    )


def own_layout(value: Any) -> Any:
    """Return the layout of an array, or the one that a struct names; None without one."""
    handle = bare(value)
    if type(handle) is HandleType:
        return None if handle.is_deleted() else handle.format.layout
    return handle.format.layout if isinstance(handle, jax.ShapeDtypeStruct) else None


def are_arrays(values: Sequence[Any]) -> bool:
    """Return True if all values are arrays or tracers, which `check_values` accepts."""
    return all([isinstance(value, (Tracer, Array, jax.Array)) for value in values])


def check_values(values: Sequence[Any], paths: Sequence[str], *, static: bool = True) -> None:
    """Refuse arguments that JAX does not compute with, before tracing.

    Args:
        values: The arguments.
        paths: Their paths.
        static: True if an argument could be marked static instead.

    Raises:
        ArgumentError: With the path of the first such argument.
    """
    for value, path in zip(values, paths, strict=True):
        if isinstance(value, Array | jax.Array):
            continue
        if isinstance(value, np.ndarray | np.generic):
            if type(value) is np.ndarray and value.dtype.kind in _NUMERIC:
                continue
            if value.dtype.kind in _NEVER_NUMERIC:
                kind = "array" if isinstance(value, np.ndarray) else "scalar"
                raise ArgumentError(
                    f"{path} is a NumPy {kind} of dtype {value.dtype}, which no device computes "
                    f"with: convert it to numbers first{_static_hint(path, static)}"
                )
        try:
            abstractify(value)
        except OverflowError:
            raise ArgumentError(
                f"{path} is the int {value}, which does not fit the default integer type: pass "
                "np.int64(...) with jax_enable_x64, or a float",
                also=OverflowError,
            ) from None
        except (TypeError, ValueError):
            raise ArgumentError(
                f"{path} is {shortened(repr(value))} ({type(value).__name__}), which is no array: "
                f"pass an array{_static_hint(path, static)}"
            ) from None


# By NumPy's letters: bool, (un)signed int, float, complex. "V" may be a float of ml_dtypes.
_NUMERIC = "biufc"
_NEVER_NUMERIC = "OSUMm"


def check_concrete(values: Sequence[Any], paths: Sequence[str]) -> None:
    """Refuse arguments that have a type but no value, before a program runs on them.

    Raises:
        ArgumentError: With the path of the first such argument.
        jax.errors.UnexpectedTracerError: For a tracer that outlived its trace.
    """
    for value, path in zip(values, paths, strict=True):
        if isinstance(value, jax.ShapeDtypeStruct):
            raise ArgumentError(
                f"{path} is a ShapeDtypeStruct, which has no value to compute with: pass an array, "
                "or give it to .lower(...), .trace(...) or .eval_shape(...)"
            )
        if isinstance(value, Tracer):
            error = escaped_tracer_error(value)
            error.add_note(f"It was passed as {path}.")
            raise error  # no-catalogue: raises an error of JAX or of the caller again


def _static_hint(path: str, static: bool) -> str:
    name = path.split("[")[0].split(".")[0]
    return f", or mark the argument static: static_argnames=({name!r},)" if static else ""


def arguments_may_move(
    values: Sequence[Any], paths: Iterable[str], jax_shardings: Sequence[Any]
) -> AbstractContextManager[Any]:
    """Return a context that places a program's arguments, if transfer guards allow it.

    Args:
        values: The arguments.
        paths: Their paths.
        jax_shardings: JAX's sharding under which the program takes each.

    Raises:
        TransferGuardError: With the path of an argument that must not be transferred.
    """
    guards = active_guards()
    if guards is None:
        return nullcontext()
    for value, path, jax_sharding in zip(values, paths, jax_shardings, strict=True):
        handle = bare(value)
        advice = f"device_put({path}, sharding) before"
        if not isinstance(handle, jax.Array):
            what = f"{path} ({type(value).__name__} {type_text(abstractify(value))})"
            check_transfer(guards, Transfer.HOST_TO_DEVICE, what, advice)
        elif not handle.sharding.is_equivalent_to(jax_sharding, handle.ndim):
            what = f"{path} ({type_text(handle)})"
            check_transfer(guards, Transfer.DEVICE_TO_DEVICE, what, advice)
    return jax.transfer_guard("allow")


def split_by_donation[T](values: Sequence[T], donated: Sequence[bool]) -> tuple[list[T], list[T]]:
    """Return the donated values, and the others.

    Args:
        values: The values.
        donated: For each value, True if it is donated.
    """
    return list(compress(values, donated)), list(compress(values, map(not_, donated)))


def may_share(donated: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if a donated argument shares buffers with another one, or lacks one.

    Args:
        donated: The leaves of the donated arguments.
        others: The leaves of the other arguments, and arrays that the program closes over.
    """
    try:
        # In a list: Python reads a slot in a tenth of the time of a call of getattr.
        all_exclusive = all([x._exclusive for x in donated])
    except AttributeError:  # no Array
        all_exclusive = False
    # The same Array can be given twice, whether others hold its buffers or not.
    exclusive = donated if all_exclusive else list(filter(_is_exclusive, donated))
    ids = set(map(id, exclusive))
    if len(ids) < len(exclusive) or not ids.isdisjoint(map(id, others)):
        return True
    if all_exclusive:
        return False
    donated_handles = list(_handles(donated))
    if not donated_handles:
        return False
    return (
        shared_pair([*donated_handles, *_handles(others)], range(len(donated_handles))) is not None
    )


def check_unshared(
    pair: tuple[int, int] | None, paths: Sequence[str], donated: Sequence[bool], name: str
) -> None:
    """Refuse a call in which a buffer that the program takes over belongs to another argument too.

    Args:
        pair: The positions of two arguments that share a buffer; twice the same for an argument
            that lacks one of its buffers; None if there are neither.
        paths: Each argument as the user would write it.
        donated: For each argument, True if it is donated.
        name: The function.

    Raises:
        DonationError: With the paths of the two arguments.
        DeletedError: With the path of an argument that lacks one of its buffers.
    """
    if pair is None:
        return
    first, second = (paths[i] for i in pair)
    if pair[0] == pair[1]:
        # no-catalogue: needs a shard that is deleted during the call
        raise DeletedError(_lost_shard_text(first))
    donated_path = first if donated[pair[0]] else second
    raise DonationError(
        f"{name} got the same buffers as {first} and as {second}, and {donated_path} is donated: "
        f"pass a copy as one of them (jnp.copy(x)), or take {donated_path} out of donate_argnums",
        also=jax.errors.JaxRuntimeError,
    )


def _is_exclusive(value: Any) -> bool:
    return bool(getattr(value, "_exclusive", False))


def _handles(values: Iterable[Any]) -> Iterable[Any]:
    """Return the handles of arrays that may share their buffers."""
    handles = (base_handle(bare(value)) for value in values if not _is_exclusive(value))
    return (handle for handle in handles if handle is not None)
