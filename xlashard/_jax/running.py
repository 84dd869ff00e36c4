"""Runs a compiled program: handles in, handles out."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config, core, dispatch, sharding_impls
from jax._src.interpreters import pxla

from xlashard._jax.checking import run_checked
from xlashard._jax.compiling import Executable, Handle


def result_handler(aval: Any, sharding: Any, committed: bool) -> Any:
    """What makes a buffer handle of one result's buffers; `sharding` is JAX's own."""
    return pxla.global_aval_to_result_handler(aval, sharding, committed)


def physical_sharding(aval: Any, sharding: Any) -> Any:
    """JAX's sharding of the buffers behind a value."""
    if aval is core.abstract_token or not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return sharding
    return sharding_impls.physical_sharding(aval, sharding)


def runner(
    executable: Executable,
    handlers: Sequence[Any],
    names: Sequence[str],
    donated: Sequence[bool],
) -> Callable[[Sequence[Handle]], list[Handle]]:
    """A function that runs a program without effects: handles in, handles out.

    Nothing stands between it and PJRT but the question whether results are to be checked for NaN.
    """
    execute = executable.execute_sharded
    debug_nans, debug_infs = config.debug_nans, config.debug_infs

    def run(handles: Sequence[Handle]) -> list[Handle]:
        if debug_nans.value or debug_infs.value:
            return list(run_checked(bare_run, handles, names, donated))
        return execute(handles).consume_with_handlers(handlers)

    def bare_run(handles: Sequence[Handle]) -> list[Handle]:
        return execute(handles).consume_with_handlers(handlers)

    return run


def run_with_tokens(
    executable: Executable,
    handles: Sequence[Handle],
    handlers: Sequence[Any],
    ordered_effects: Sequence[Any],
) -> list[Handle]:
    """Runs a program with effects, in order with those that ran before."""
    devices = executable.local_devices()
    runtime = dispatch.runtime_tokens
    tokens = [runtime.get_token_input(e, devices)._buf for e in ordered_effects]
    results = executable.execute_sharded([*tokens, *handles], with_tokens=True)
    token_buffers = results.consume_with_handlers(
        [lambda xs: xs] * len(ordered_effects), strict=False
    )
    sharded = results.consume_token()
    for i, device in enumerate(devices):
        runtime.set_output_runtime_token(device, sharded.get_token(i))
    for effect, buffers in zip(ordered_effects, token_buffers, strict=True):
        runtime.set_token_result(effect, core.Token(_joined_token(buffers)))
    return results.consume_with_handlers(handlers)


def _joined_token(buffers: Sequence[Any]) -> Any:
    if len(buffers) == 1:
        return buffers[0]
    devices = [b.sharding._device_assignment[0] for b in buffers]
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("token",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("token"))
    return jax.make_array_from_single_device_arrays((0,), sharding, list(buffers))
