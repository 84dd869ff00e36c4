"""Register arrays and shardings with JAX, and apply settings of the environment.

All registrations are here, except those of `xlashard.legacy`, whose docstring lists them.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import jax
from jax.experimental import multihost_utils

from xlashard._jax import warn_of_untested_version
from xlashard._jax.private import mlir, pxla, source_info_util, try_steps, xc
from xlashard._jax.runtime import dispatch
from xlashard._jax.runtime.compiler import note_event
from xlashard._jax.runtime.coordination import exit_on_uncaught_error, listen_on_loopback
from xlashard._jax.runtime.execute import watch_flags
from xlashard._jax.runtime.global_state import clear_caches_with_jax
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
    # Functions of JAX that accept only its own class of arrays.
    unwrap_in_multihost_utils(array_type, attrgetter("_handle"))


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


# Looked up by name at each call, also by a `process_allgather` that was imported before.
_NAMES = ("_handle_array_process_allgather", "assert_equal")


def unwrap_in_multihost_utils(array_type: type, handle_of: Callable[[Any], Any]) -> None:
    """Make functions of `jax.experimental.multihost_utils` take the handles of arrays of a type.

    These functions treat any array of another class than JAX's as local NumPy data. They test for
    `ArrayImpl`, which has no virtual subclasses; a `__class__` that claims to be one would pass the
    same test all over JAX, in front of code that reads the fields of jaxlib's class.
    """

    def bare(x: Any) -> Any:
        return handle_of(x) if isinstance(x, array_type) else x

    def on_handles(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(in_tree: Any, *args: Any, **kwargs: Any) -> Any:
            return function(jax.tree.map(bare, in_tree), *args, **kwargs)

        return call

    for name in _NAMES:
        setattr(multihost_utils, name, on_handles(getattr(multihost_utils, name)))
