"""Everything that this project registers with JAX or sets there, in one list.

But for `xlashard.legacy`, whose docstring has its own: it is in force only where that is imported.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import jax
from jax._src import core, dtypes, source_info_util
from jax._src.interpreters import mlir, pxla
from jax.experimental import multihost_utils

from xlashard._jax.runtime import dispatch
from xlashard._jax.runtime.compiler import note_event
from xlashard._jax.runtime.coordination import exit_on_uncaught_error, listen_on_loopback
from xlashard._jax.runtime.execute import watch_flags
from xlashard._jax.runtime.topologies import probe_for_tpus_quietly
from xlashard._jax.runtime.tracebacks import INNER_FOLDERS, hide_frames
from xlashard._jax.runtime.transfer import HandleType
from xlashard.config import RECOMPILE_LOGGER, Flags

_installed: list[type] = []


def install(
    array_type: type,
    wrappers: dispatch.Wrappers,
    sharding_types: Sequence[type],
    check_constant: Callable[[Any], None],
) -> None:
    """Makes JAX take an array type for what it is. Doing it again changes nothing.

    Args:
        array_type: The class; its instances hold their buffer handle in the slot `_buffers`,
            and give it to other code by the property `_handle`.
        wrappers: What makes instances of handles.
        sharding_types: Our classes of shardings that derive from one of JAX's.
        check_constant: Refuses a handle that can't become a constant of a program of JAX.
    """
    if array_type in _installed:
        return
    bare_constant = mlir.get_constant_handler(HandleType)

    def constant_of_handle(val: Any, aval: Any) -> Any:
        try:
            return bare_constant(val, aval)
        except RuntimeError:
            check_constant(val)
            raise

    # Operators have put its handle in its place: only what is said of one that can't be read is
    # ours.
    mlir.register_constant_handler(HandleType, constant_of_handle)
    install_array_type(array_type)
    # jaxlib's dispatcher: results out.
    dispatch.register_wrapping(wrappers)
    # Arrays that span processes, where JAX asks for its own class.
    unwrap_in_multihost_utils(array_type, _HANDLE)
    # What its own compiled functions give back is said on the mesh of what they were given.
    for kind in sharding_types:
        for base, name_on_mesh in list(pxla._orig_out_sharding_handlers.items()):
            if issubclass(kind, base):
                pxla._orig_out_sharding_handlers[kind] = name_on_mesh
    # Whether results are looked through for NaN.
    watch_flags()
    # Whether an executable came out of the persistent cache.
    jax.monitoring.register_event_listener(note_event)
    # The search for TPUs on a machine without one.
    probe_for_tpus_quietly()
    # Frames of ours are none of the user's: errors and profiles name the line that is.
    for folder in INNER_FOLDERS:
        source_info_util.register_exclusion(folder)
        hide_frames(folder)
    _installed.append(array_type)


_HANDLE = attrgetter("_handle")


def install_array_type(array_type: type) -> None:
    """Makes JAX take a class of arrays, or one that derives from it, for what it is.

    JAX's tables hold the very classes, so each derived class needs entries of its own.

    Args:
        array_type: The class; its instances hold their buffer handle in the slot `_buffers`,
            and give it to other code by the property `_handle`.
    """

    def aval_of(x: Any) -> Any:
        handle = x._buffers
        return core.pytype_aval_mappings[type(handle)](handle)

    def shard_arg(
        xs: Sequence[Any],
        shardings: Sequence[Any],
        layouts: Sequence[Any],
        semantics: Sequence[Any],
    ) -> Sequence[Any]:
        return pxla.shard_args(shardings, layouts, semantics, [x._handle for x in xs])

    constant_of_handle = mlir.get_constant_handler(HandleType)

    def constant(val: Any, aval: Any) -> Any:
        return constant_of_handle(val._handle, aval)

    # Its abstract value, wherever JAX looks at an argument or a closed-over value.
    core.pytype_aval_mappings[array_type] = aval_of
    # Operators of JAX take the handle itself.
    dtypes.register_canonicalize_value_handler(array_type, _HANDLE)
    # Placement of arguments of JAX's own compiled functions.
    pxla.shard_arg_handlers[array_type] = shard_arg
    # Closed-over values of traced functions.
    mlir.register_constant_handler(array_type, constant)
    # jaxlib's dispatcher: arguments in.
    dispatch.register_unwrapping(array_type, "_buffers")


def apply_flags(flags: Flags) -> None:
    """Sets what the environment says of JAX and of logs; what it leaves unsaid stays as it is."""
    if flags.partitioner is not None:
        jax.config.update("jax_use_shardy_partitioner", flags.partitioner == "shardy")
    if flags.explain_recompiles:
        logging.getLogger(RECOMPILE_LOGGER).setLevel(logging.INFO)
    if flags.pod is not None:
        listen_on_loopback()
        exit_on_uncaught_error()


# By these names they are looked up at each call, so that who imported `process_allgather` earlier
# comes through here as well.
_NAMES = ("_handle_array_process_allgather", "assert_equal")


def unwrap_in_multihost_utils(array_type: type, handle_of: Callable[[Any], Any]) -> None:
    """Makes those functions see the handle of every array of a type, or of one derived from it."""

    def bare(x: Any) -> Any:
        return handle_of(x) if isinstance(x, array_type) else x

    def on_handles(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(in_tree: Any, *args: Any, **kwargs: Any) -> Any:
            return function(jax.tree.map(bare, in_tree), *args, **kwargs)

        return call

    for name in _NAMES:
        setattr(multihost_utils, name, on_handles(getattr(multihost_utils, name)))
