"""`jax.experimental.host_callback`: functions of the host that programs call while they run."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from xlashard.legacy.installation.removed_api import RemovedApi, raise_removed
from xlashard.legacy.modules.entry import Entry, members

CallbackException = jax.errors.JaxRuntimeError
call_with_device = RemovedApi("jax.experimental.host_callback.call_with_device")
stop_outfeed_receiver = RemovedApi("jax.experimental.host_callback.stop_outfeed_receiver")


def call(
    callback_func: Callable[[Any], Any],
    arg: Any,
    *,
    result_shape: Any = None,
    call_with_device: bool = False,
    device_index: int = 0,
    callback_flavor: Any = None,
) -> Any:
    """Calls a function of the host with values of the program, and takes its results back.

    Args:
        callback_func: The function, of one argument.
        arg: Its argument: a tree of arrays, which the function gets as arrays of NumPy.
        result_shape: A tree like its result, of what has a shape and a dtype; None if it has none.
        call_with_device: To tell it on which device, which is refused.
        device_index: On which of the devices; they all share one host here.
        callback_flavor: Not looked at.

    Raises:
        RefusedError: `call_with_device` is on.

    Example:
        >>> import jax, numpy as np
        >>> double = lambda x: call(lambda v: np.asarray(v) * 2, x, result_shape=x)
        >>> print(jax.jit(double)(jax.numpy.arange(3)))
        [0 2 4]
    """
    if call_with_device:
        raise_removed("jax.experimental.host_callback.call_with_device")
    shapes = jax.tree.map(_shape_of, result_shape)

    def on_host(values: Any) -> Any:
        return callback_func(jax.tree.map(np.asarray, values))

    return io_callback(on_host, shapes, arg)


def _shape_of(like: Any) -> jax.ShapeDtypeStruct:
    dtype = getattr(like, "dtype", None)
    dtype = jax.numpy.result_type(like) if dtype is None else dtype
    return jax.ShapeDtypeStruct(np.shape(like), dtype)


def id_tap(
    tap_func: Callable[..., Any],
    arg: Any,
    *,
    result: Any = None,
    tap_with_device: bool = False,
    device_index: int = 0,
    callback_flavor: Any = None,
    **kwargs: Any,
) -> Any:
    """Shows values of a program to a function of the host, and goes on with them.

    Args:
        tap_func: The function: of the values, of the transformations that they went through, of
            which it is told none, and of `kwargs`.
        arg: The values: a tree of arrays, which the function gets as arrays of NumPy.
        result: What to go on with instead.
        tap_with_device: To tell it on which device, which is refused.
        device_index: On which of the devices; they all share one host here.
        callback_flavor: Not looked at.
        **kwargs: For the function.

    Returns:
        `arg`, or `result` if that is given.

    Raises:
        RefusedError: `tap_with_device` is on.

    Example:
        >>> import jax
        >>> seen = []
        >>> tap = jax.jit(lambda x: id_tap(lambda value, transforms: seen.append(value), x) + 1)
        >>> value = tap(1.5)
        >>> barrier_wait()
        >>> print(value, seen[0])
        2.5 1.5
    """
    if tap_with_device:
        raise_removed("jax.experimental.host_callback.call_with_device")

    def on_host(values: Any) -> None:
        tap_func(jax.tree.map(np.asarray, values), (), **kwargs)

    jax.debug.callback(on_host, arg)
    return arg if result is None else result


def id_print(
    arg: Any,
    *,
    result: Any = None,
    tap_with_device: bool = False,
    device_index: int = 0,
    output_stream: Any = None,
    threshold: int | None = None,
    **kwargs: Any,
) -> Any:
    """Prints values of a program, and goes on with them.

    Args:
        arg: The values: a tree of arrays.
        result: What to go on with instead.
        tap_with_device: To print on which device, which is refused.
        device_index: On which of the devices; they all share one host here.
        output_stream: Where to; by default the standard output.
        threshold: From how many elements on only the first and last ones are printed.
        **kwargs: What to print in front.

    Returns:
        `arg`, or `result` if that is given.
    """
    words = "  ".join(f"{name}: {value}" for name, value in kwargs.items())

    def show(values: Any, transforms: Any) -> None:
        lines = [words] if words else []
        lines += [np.array2string(v, threshold=threshold) for v in jax.tree.leaves(values)]
        print("\n".join(lines), file=output_stream or sys.stdout)

    return id_tap(show, arg, result=result, tap_with_device=tap_with_device)


def barrier_wait(logging_name: str | None = None) -> None:
    """Waits until all functions of the host that programs have called so far are done.

    Args:
        logging_name: Not looked at.
    """
    jax.effects_barrier()


_NAME = "jax.experimental.host_callback"

ENTRIES: tuple[Entry, ...] = (
    Entry(_NAME, "0.4.36", "differs", __name__, "jax.experimental.io_callback", "see its names"),
    Entry(
        f"{_NAME}.call",
        "0.4.36",
        "differs",
        f"{__name__}:call",
        "jax.experimental.io_callback",
        "`call_with_device` is refused; under vmap the function gets one element at a time",
    ),
    Entry(
        f"{_NAME}.id_tap",
        "0.4.36",
        "differs",
        f"{__name__}:id_tap",
        "jax.debug.callback",
        "the function is told of no transformations, and under vmap gets one element at a time",
    ),
    Entry(
        f"{_NAME}.id_print",
        "0.4.36",
        "differs",
        f"{__name__}:id_print",
        "jax.debug.print",
        "under vmap each element is printed by itself",
    ),
    *members(
        _NAME,
        "0.4.36",
        __name__,
        {
            "CallbackException": "jax.errors.JaxRuntimeError",
            "barrier_wait": "jax.effects_barrier()",
        },
    ),
    Entry(
        f"{_NAME}.call_with_device",
        "0.4.36",
        "refused",
        f"{__name__}:call_with_device",
        "jax.experimental.io_callback",
        "callbacks of today are not told on which device their program runs",
    ),
    Entry(
        f"{_NAME}.stop_outfeed_receiver",
        "0.4.36",
        "refused",
        f"{__name__}:stop_outfeed_receiver",
        "jax.effects_barrier()",
        "no thread receives what programs send, so there is none to stop",
    ),
)
