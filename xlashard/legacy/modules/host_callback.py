"""`jax.experimental.host_callback`: Python functions that programs call on the host."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from xlashard.legacy.entries.entry import raise_removed


def call(
    callback_func: Callable[[Any], Any],
    arg: Any,
    *,
    result_shape: Any = None,
    call_with_device: bool = False,
    device_index: int = 0,
    callback_flavor: Any = None,
) -> Any:
    """Call a Python function on the host, and return its result to the program.

    Args:
        callback_func: The function, of one argument.
        arg: The argument: a pytree of arrays, converted to NumPy arrays.
        result_shape: A pytree of shapes and dtypes like the result; None for no result.
        call_with_device: Not supported.
        device_index: Ignored.
        callback_flavor: Ignored.

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
    """Call a Python function on the host for its effect, and return the values.

    Args:
        tap_func: The function of the values, of the transformations (always `()`), and of
            `kwargs`.
        arg: The values: a pytree of arrays, converted to NumPy arrays.
        result: The value to return instead of `arg`.
        tap_with_device: Not supported.
        device_index: Ignored.
        callback_flavor: Ignored.
        **kwargs: Keyword arguments of the function.

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
    """Print values of a program, and return them.

    Args:
        arg: The values: a pytree of arrays.
        result: The value to return instead of `arg`.
        tap_with_device: Not supported.
        device_index: Ignored.
        output_stream: The stream; the standard output by default.
        threshold: The number of elements above which arrays are summarized.
        **kwargs: Labels printed before the values.

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
    """Wait until all pending host callbacks are done.

    Args:
        logging_name: Ignored.
    """
    jax.effects_barrier()
