"""Register arrays and shardings with JAX, and apply settings of the environment.

All registrations are here, except those of `xlashard.legacy`, whose docstring lists them.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding

from xlashard._jax import warn_of_untested_version
from xlashard._jax.private import (
    jax_dispatch,
    lax_lib,
    mlir,
    pxla,
    replace_name,
    source_info_util,
    try_steps,
    xc,
)
from xlashard._jax.runtime import dispatch
from xlashard._jax.runtime.compiler import note_event
from xlashard._jax.runtime.coordination import exit_on_uncaught_error, listen_on_loopback
from xlashard._jax.runtime.global_state import clear_caches_with_jax
from xlashard._jax.runtime.run_checks import watch_flags
from xlashard._jax.runtime.tracebacks import hide_frames
from xlashard.config import RECOMPILE_LOGGER, Flags
from xlashard.support.tracebacks import INNER_FOLDERS


def install() -> None:
    """Prepare JAX for this package: settings, events, and frames that tracebacks leave out."""
    warn_of_untested_version()
    try_steps(
        # Our caches, which jax.clear_caches() empties.
        clear_caches_with_jax,
        # jax_debug_nans and jax_debug_infs.
        watch_flags,
        # Source locations and tracebacks name the user's line, and not ours.
        *[functools.partial(_hide_folder, folder) for folder in INNER_FOLDERS],
    )
    # Hits in the persistent compilation cache.
    jax.monitoring.register_event_listener(note_event)


def _hide_folder(folder: str) -> None:
    source_info_util.register_exclusion(folder)
    hide_frames(folder)


def install_arrays(
    array_type: type, wrappers: dispatch.Wrappers, check_constant: Callable[[Any], None]
) -> None:
    """Register an array type with JAX, once.

    Args:
        array_type: The class. Its instances hold their buffer handle in the slot `_buffers` and
            return it from the property `_handle`.
        wrappers: The functions that make instances of handles.
        check_constant: Function that raises for a handle that cannot be a constant of a program.
    """
    if array_type in dispatch.ARRAY_TYPES:
        return
    # Operators replace an array by its handle, so only the error is ours.
    try_steps(functools.partial(_check_constants, check_constant))
    dispatch.register_array_type(array_type)
    # Results of jaxlib's dispatcher.
    dispatch.register_wrapping(wrappers)
    _unwrap_arguments(array_type)


def _check_constants(check: Callable[[Any], None]) -> None:
    emit = mlir.get_constant_handler(xc.ArrayImpl)

    def emit_or_check(val: Any, aval: Any) -> Any:
        try:
            return emit(val, aval)
        except RuntimeError:
            check(val)
            raise

    mlir.register_constant_handler(xc.ArrayImpl, emit_or_check)


def install_shardings(sharding_types: Sequence[type]) -> None:
    """Register classes of shardings that derive from JAX's.

    Results of `jax.jit` are then named on the mesh of the arguments.
    """
    try_steps(functools.partial(_name_on_meshes, sharding_types))


def _name_on_meshes(sharding_types: Sequence[type]) -> None:
    handlers = pxla._orig_out_sharding_handlers
    for kind in sharding_types:
        for base, name_on_mesh in list(handlers.items()):
            if issubclass(kind, base):
                handlers[kind] = name_on_mesh


def apply_flags(flags: Flags) -> None:
    """Apply the environment variables that concern JAX and logs; unset ones change nothing."""
    if flags.partitioner is not None:
        jax.config.update("jax_use_shardy_partitioner", flags.partitioner == "shardy")
    if flags.explain_recompiles:
        logging.getLogger(RECOMPILE_LOGGER).setLevel(logging.INFO)
    if flags.pod is not None:
        listen_on_loopback()
        exit_on_uncaught_error()


def _unwrap_arguments(array_type: type) -> None:
    """Make functions of JAX that only accept its own class of arrays take the handles of a type.

    They test for `ArrayImpl`, which has no virtual subclasses; a `__class__` that claims to be one
    would pass the same test all over JAX, in front of code that reads the fields of jaxlib's class.
    """

    def on_handles(
        function: Callable[..., Any], handle_of: Callable[[Any], Any] = attrgetter("_handle")
    ) -> Callable[..., Any]:
        def bare(x: Any) -> Any:
            return handle_of(x) if isinstance(x, array_type) else x

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = jax.tree.map(bare, (args, kwargs))
            return function(*args, **kwargs)

        return call

    def check_compiled() -> None:
        checked = on_handles(pxla.check_array_xla_sharding_layout_match)
        replace_name(pxla, "check_array_xla_sharding_layout_match", checked)

    def put() -> None:
        put_value = jax_dispatch._device_put_impl

        @functools.wraps(put_value)
        def put_handle(x: Any, *, device: Any, **kwargs: Any) -> Any:
            if not isinstance(x, array_type):
                return put_value(x, device=device, **kwargs)
            handle = x._handle
            if isinstance(device, Sharding):
                # JAX reorders devices of its arrays between named shardings only.
                is_named = [isinstance(s, NamedSharding) for s in (device, handle.sharding)]
                handle = handle if all(is_named) else x
            out = put_value(handle, device=device, **kwargs)
            return x if out is handle else out

        replace_name(jax_dispatch, "_device_put_impl", put_handle)

    def fill() -> None:
        full = on_handles(lax_lib.full)
        replace_name(lax_lib, "full", full)
        jax.lax.full = full

    try_steps(
        # Compiled functions would let arrays of another class pass unchecked, and read a buffer of
        # another layout in the wrong order.
        check_compiled,
        # `device_put(x)` would move the array to the default device.
        put,
        # `full(shape, x, sharding=...)` would ignore the sharding.
        fill,
    )
    # The layout would be lost.
    like = jax.ShapeDtypeStruct.like.__func__  # pyright: ignore[reportFunctionMemberAccess]
    jax.ShapeDtypeStruct.like = classmethod(on_handles(like))
    # They would be values of another type. The result shares their buffers, and may be donated.
    name = "make_array_from_single_device_arrays"
    setattr(jax, name, on_handles(getattr(jax, name), methodcaller("to_jax")))
    # They would be local NumPy data: both functions test for JAX's own class, and read any other
    # value by `__array__`, which returns what this process holds; a replicated array would be
    # stacked once per process. JAX looks these names up at each call, also in a
    # `process_allgather` that was imported before.
    for name in ("_handle_array_process_allgather", "assert_equal"):
        setattr(multihost_utils, name, on_handles(getattr(multihost_utils, name)))
