"""Run compiled programs on buffer handles, so that no interrupt loses what a run takes over.

Where a program takes over buffers of its arguments, its results reach a list of the caller within
one call into C. Python delivers signals between its own instructions only, so an interrupt cannot
discard results that alone hold those buffers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import methodcaller
from typing import Any

import jax
import numpy as np

from xlashard._jax import originals
from xlashard._jax.private import core, jax_dispatch, pxla, sharding_impls
from xlashard._jax.runtime.compiler import Executable, Handle
from xlashard._jax.runtime.run_checks import RunChecks, find_check_flag
from xlashard._jax.trace.tracing import all_shaped, is_extended, with_sharding_in_type

type Runner = Callable[[Sequence[Handle]], None]
"""Function that runs a program on handles and appends its raw results to a list made before."""


def make_result_handler(aval: Any, sharding: Any, committed: bool) -> Any:
    """Return the maker of one result's handle from its buffers; `sharding` is JAX's own.

    The handle of a key array is that of its integers: `as_key_array` makes the key array.
    """
    if is_extended(aval):
        aval, sharding = core.physical_aval(aval), physical_sharding(aval, sharding)
    typed = with_sharding_in_type(aval, sharding)
    return pxla.global_aval_to_result_handler(typed, sharding, committed)


def has_keys(avals: Sequence[Any]) -> bool:
    """Return True if a key array is among abstract values."""
    return any([jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in all_shaped(avals)])


def as_key_array(aval: Any, handle: Handle) -> Any:
    """Return the key array over the handle of its integers; any other handle as it is."""
    if not is_extended(aval):
        return handle
    return aval.dtype._rules.result_handler(None, aval)(None, handle)


def physical_sharding(aval: Any, sharding: Any) -> Any:
    """Return JAX's sharding of the buffers of a value."""
    return sharding_impls.physical_sharding(aval, sharding) if is_extended(aval) else sharding


def make_runner(
    executable: Executable,
    handlers: Sequence[Any],
    checked: RunChecks,
    takes_over: bool,
    out: list[list[Handle]],
) -> Runner:
    """Return the function that runs a program without effects, one call at a time.

    Args:
        executable: The compiled program.
        handlers: A maker of a handle for each result.
        checked: The checks of a run.
        takes_over: True if the program may take over the buffers of an argument.
        out: Receives the list of raw results of each run.
    """
    execute, consume = executable.execute_sharded, methodcaller("consume_with_handlers", handlers)
    checks = find_check_flag()

    def run_once(handles: Sequence[Handle], results: list[list[Handle]]) -> None:
        results.append(consume(execute(handles)))

    def run(handles: Sequence[Handle]) -> None:
        if checks.value:
            checked.run(run_once, handles, out)
        else:
            out.append(consume(execute(handles)))

    if not takes_over:
        return run

    # A chain of iterators, of which one step is a run: it pops the handles and appends the results
    # without an instruction of Python between.
    pending: list[Sequence[Handle]] = []
    popped = map(pending.pop, repeat(-1))
    steps = map(out.append, map(consume, map(execute, popped)))

    def run_uninterrupted(handles: Sequence[Handle]) -> None:
        if checks.value:
            checked.run(run_once, handles, out)
            return
        if pending:
            pending.clear()  # left by an interrupt
        pending.append(handles)
        next(steps)

    return run_uninterrupted


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
    runtime = jax_dispatch.runtime_tokens
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
        runtime.set_token_result(effect, core.Token(_join_tokens(buffers)))


def _join_tokens(buffers: Sequence[Any]) -> Any:
    if len(buffers) == 1:
        return buffers[0]
    devices = [b.sharding._device_assignment[0] for b in buffers]
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("token",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("token"))
    return originals.make_array_from_single_device_arrays((0,), sharding, list(buffers))
