"""Runs a compiled program: handles in, handles out.

The results of a run reach a list that the caller holds within one call into C where the program
takes over buffers of its arguments: Python delivers signals between its own instructions only, so
an interrupt cannot discard results that alone hold those buffers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import jax
import numpy as np
from jax._src import config, core, dispatch, sharding_impls
from jax._src.interpreters import pxla

from xlashard._jax.checking import run_checked
from xlashard._jax.compiling import Executable, Handle
from xlashard._jax.tracing import is_extended

type Runner = Callable[[Sequence[Handle], list[list[Handle]]], None]
"""Runs a program on handles, and appends the list of its raw results to a list."""


def result_handler(aval: Any, sharding: Any, committed: bool) -> Any:
    """Return the maker of one result's handle from its buffers; `sharding` is JAX's own.

    The handle of a key array is that of its integers: `dress` makes the key array.
    """
    if _is_key(aval):
        aval, sharding = core.physical_aval(aval), physical_sharding(aval, sharding)
    return pxla.global_aval_to_result_handler(aval, sharding, committed)


def has_keys(avals: Sequence[Any]) -> bool:
    """Return True if a key array is among abstract values."""
    return any(map(_is_key, avals))


def _is_key(aval: Any) -> bool:
    return aval is not core.abstract_token and is_extended(aval)


def dress(aval: Any, handle: Handle) -> Any:
    """Return the key array over the handle of its integers; any other handle as it is."""
    return aval.dtype._rules.result_handler(None, aval)(None, handle) if _is_key(aval) else handle


def physical_sharding(aval: Any, sharding: Any) -> Any:
    """JAX's sharding of the buffers behind a value."""
    return sharding_impls.physical_sharding(aval, sharding) if _is_key(aval) else sharding


def runner(
    executable: Executable,
    handlers: Sequence[Any],
    names: Sequence[str],
    donated: Sequence[bool],
    takes_over: bool,
) -> Runner:
    """Return the function that runs a program without effects.

    Nothing stands between it and PJRT but the question whether results are to be checked for NaN.

    Args:
        executable: The compiled program.
        handlers: A maker of a handle for each result.
        names: A name for each result, for errors.
        donated: For each argument, True if it is donated.
        takes_over: True if the program may take over the buffers of an argument.
    """
    execute, consume = executable.execute_sharded, methodcaller("consume_with_handlers", handlers)
    debug_nans, debug_infs = config.debug_nans, config.debug_infs

    def run(handles: Sequence[Handle], out: list[list[Handle]]) -> None:
        if debug_nans.value or debug_infs.value:
            run_checked(bare_run, handles, names, donated, out)
        elif takes_over:
            out.extend(map(consume, map(execute, (handles,))))
        else:
            out.append(consume(execute(handles)))

    def bare_run(handles: Sequence[Handle], out: list[list[Handle]]) -> None:
        out.extend(map(consume, map(execute, (handles,))))

    return run


def run_with_tokens(
    executable: Executable,
    handlers: Sequence[Any],
    ordered_effects: Sequence[Any],
    handles: Sequence[Handle],
    out: list[list[Any]],
) -> None:
    """Run a program with effects, in order with those that ran before.

    The raw results that it appends to `out` begin with one list of buffers for each ordered effect.
    """
    devices = executable.local_devices()
    runtime = dispatch.runtime_tokens
    tokens = [runtime.get_token_input(e, devices)._buf for e in ordered_effects]
    execute = partial(executable.execute_sharded, with_tokens=True)
    launched: dict[str, Any] = {}
    keep = partial(launched.setdefault, "results")
    consume = methodcaller("consume_with_handlers", [*[list] * len(tokens), *handlers])
    out.extend(map(consume, map(keep, map(execute, ([*tokens, *handles],)))))
    sharded = launched["results"].consume_token()
    for i, device in enumerate(devices):
        runtime.set_output_runtime_token(device, sharded.get_token(i))
    for effect, buffers in zip(ordered_effects, out[-1], strict=False):
        runtime.set_token_result(effect, core.Token(_joined_token(buffers)))


def _joined_token(buffers: Sequence[Any]) -> Any:
    if len(buffers) == 1:
        return buffers[0]
    devices = [b.sharding._device_assignment[0] for b in buffers]
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("token",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("token"))
    return jax.make_array_from_single_device_arrays((0,), sharding, list(buffers))
