"""Run compiled programs; check runs by JAX's settings; observe first runs of `jax.jit`.

Where a program takes over buffers of its arguments, its results reach a list of the caller within
one call into C. Python delivers signals between its own instructions only, so an interrupt cannot
discard results that alone hold those buffers.

jaxlib's dispatcher runs repeat calls without Python, and JAX's own hook for their results has
neither the name of the function nor of the result, and calls the function again with arguments that
may be donated. Therefore `jax_debug_nans` and `jax_debug_infs` are part of the dispatch key: while
one is set, or `jax_no_execution`, every call enters Python.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from itertools import repeat
from operator import methodcaller
from typing import Any

import jax
import numpy as np

from xlashard._jax import originals
from xlashard._jax.private import (
    api,
    core,
    jax_dispatch,
    lib_jax,
    pxla,
    sharding_impls,
    xc,
)
from xlashard._jax.runtime.compiler import Executable, Handle
from xlashard._jax.runtime.global_state import (
    dispatch_flag,
    follow_settings,
    hook_before,
)
from xlashard._jax.runtime.shardings import Device, UnspecifiedValue
from xlashard._jax.runtime.transfer import copy_to, split
from xlashard._jax.trace.tracing import all_shaped, is_extended, with_sharding_in_type
from xlashard.errors import ExecutionError, NonFiniteError
from xlashard.support.lazily import dataclass

type Runner = Callable[[Sequence[Handle]], None]
"""Function that runs a program on handles and appends its raw results to a list made before."""


def result_handler(aval: Any, sharding: Any, committed: bool) -> Any:
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


def runner(
    executable: Executable,
    handlers: Sequence[Any],
    checked: "RunChecks",
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
    checks = _run_checks()

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
        runtime.set_token_result(effect, core.Token(_joined_token(buffers)))


def _joined_token(buffers: Sequence[Any]) -> Any:
    if len(buffers) == 1:
        return buffers[0]
    devices = [b.sharding._device_assignment[0] for b in buffers]
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("token",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("token"))
    return originals.make_array_from_single_device_arrays((0,), sharding, list(buffers))


@lru_cache(maxsize=1)
def _run_checks() -> Any:
    """Return the flag that is on while any run has to be checked."""
    return dispatch_flag("xlashard_checks_runs")


def _flags() -> tuple[Any, ...]:
    return jax.debug_nans, jax.debug_infs


def checks_runs() -> bool:
    """Return True if runs are forbidden, or results have to be checked for NaN or infinity."""
    return _run_checks().value


def check_may_run(name: str) -> None:
    """Refuse to run a program while `jax_no_execution` is on.

    Args:
        name: The function.

    Raises:
        ExecutionError: While it is on.
    """
    if jax.config.jax_no_execution:
        raise ExecutionError(
            f"{name} would run, which jax.no_execution forbids: call it outside of that block, or "
            f"compile it there by {name}.lower(...).compile()"
        )


class NonFinite:
    """The non-finite values that the flags forbade when this object was created."""

    def __init__(self) -> None:
        self._tests = [
            (kind, test)
            for kind, test, flag in (
                ("nan", np.isnan, jax.debug_nans),
                ("inf", np.isinf, jax.debug_infs),
            )
            if flag.value
        ]

    def kind_in(self, value: Any) -> str | None:
        """Return `"nan"` or `"inf"` if a local element of a value is forbidden, else None."""
        for piece in _pieces(value):
            for kind, test in self._tests:
                if test(piece).any():
                    return kind
        return None


def _pieces(value: Any) -> list[np.ndarray]:
    """Return the local pieces of a floating-point value; no pieces of other values."""
    if type(value) is xc.ArrayImpl:
        if not jax.dtypes.issubdtype(value.dtype, np.inexact):
            return []
        buffers = split(value)[:1] if value.is_fully_replicated else split(value)
        with jax.transfer_guard("allow"):
            return [np.asarray(buffer) for buffer in buffers]
    if isinstance(value, np.ndarray | np.generic | float | complex):
        value = np.asarray(value)
        return [value] if jax.dtypes.issubdtype(value.dtype, np.inexact) else []
    return []


def debug_flag(kind: str) -> str:
    """Return the setting that forbids a kind."""
    return f"jax_debug_{kind}s"


@dataclass(frozen=True, eq=False)
class RunChecks:
    """Checks of the runs of a program while a setting requests them.

    Attributes:
        name: The function.
        results: The name of each result, the last of the raw results.
        donated: For each argument, True if the program may take its buffers.
    """

    name: str
    results: Sequence[str]
    donated: Sequence[bool]

    def run(
        self,
        run: Callable[[Sequence[Any], list[Any]], None],
        handles: Sequence[Any],
        out: list[Any],
    ) -> None:
        """Run the program, check its results, and append them to `out`.

        The program gets copies of donated handles, which are deleted once its results have passed:
        the search for the operation that made a forbidden value needs them.

        Args:
            run: Runs the program on handles, and appends its raw results to a list.
            handles: The arguments of the program.
            out: Receives the list of raw results.

        Raises:
            ExecutionError: If no program may run.
            NonFiniteError: With the first result that has a forbidden element.
        """
        check_may_run(self.name)
        copies = [
            copy_to(handle, handle.sharding, fresh=True) if gives else handle
            for handle, gives in zip(handles, self.donated, strict=True)
        ]
        raw: list[Any] = []
        run(copies, raw)
        forbidden, first = NonFinite(), len(raw[0]) - len(self.results)
        for result, name in zip(raw[0][first:], self.results, strict=True):
            kind = forbidden.kind_in(result)
            if kind is not None:
                raise NonFiniteError(
                    f"{name} holds {kind}, which {debug_flag(kind)} forbids: call the function "
                    "inside `with jax.disable_jit():` to stop at the operation that makes it",
                    result=name,
                    kind=kind,
                )
        out.extend(raw)
        for handle, copy in zip(handles, copies, strict=True):
            if copy is not handle and copy.is_deleted():
                handle.delete()


@contextmanager
def unchecked() -> Iterator[None]:
    """Disable the checks of results within a block."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def watch_flags() -> None:
    """Make the settings part of the dispatch key."""
    follow_settings(_run_checks(), (*_flags(), jax.no_execution))
    for flag in _flags():
        flag._update_thread_local_hook = hook_before(flag._update_thread_local_hook, _set_posthook)


def _set_posthook() -> None:
    """Set JAX's own hook of the thread, which at the end of a block ignores the global flags."""
    unset = all(flag.get_local() is lib_jax.config.unset for flag in _flags())
    checking = api._nan_check_posthook if any(flag.value for flag in _flags()) else None
    api._post_hook_state.set_local(lib_jax.config.unset if unset else checking)


@dataclass(frozen=True, eq=False)
class JitExecution:
    """A program of `jax.jit` over several processes, compiled and not yet run.

    Attributes:
        name: Name of its function.
        module: Its module.
        devices: Its devices.
        arguments: Abstract values of its arguments: closed-over values first, unused ones left out.
        results: Abstract values of its results.
        in_shardings: Sharding of each argument in the module; None leaves it to the partitioner.
        out_shardings: Sharding of each result, likewise.
        paths: Path of each argument; empty for a closed-over value.
        kept: Position of each argument among the values that a call passes.
        donated: For each argument, True if its buffers may be reused.
        closed_over: The closed-over values among the arguments.
        options: Compiler options.
        ordered_effects: Number of tokens before arguments and results.
    """

    name: str
    module: Any
    devices: tuple[Device, ...]
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    paths: tuple[str, ...]
    kept: tuple[int, ...]
    donated: tuple[bool, ...]
    closed_over: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    ordered_effects: int

    @classmethod
    def of(cls, computation: "pxla.MeshComputation", devices: Sequence[Device]) -> "JitExecution":
        """Return the program of a lowered computation."""
        facts = computation.compile_args
        kept = sorted(facts["kept_var_idx"])
        everything = facts["all_args_info"]
        names = everything.debug_info.safe_arg_names(len(everything.in_avals))
        donated = tuple(computation._donated_invars)
        specified = [
            tuple([None if isinstance(s, UnspecifiedValue) else s for s in facts[side]])
            for side in ("in_shardings", "out_shardings")
        ]
        return cls(
            name=computation._name.removeprefix("jit(").removesuffix(")"),
            module=computation._hlo,
            devices=tuple(devices),
            arguments=tuple(facts["global_in_avals"]),
            results=tuple(facts["global_out_avals"]),
            in_shardings=specified[0],
            out_shardings=specified[1],
            paths=tuple([names[i] or "" for i in kept]),
            kept=tuple(kept),
            donated=tuple([i < len(donated) and bool(donated[i]) for i in kept]),
            closed_over=tuple(computation.const_args),
            options=tuple(computation._compiler_options_kvs),
            ordered_effects=len(facts["ordered_effects"]),
        )


@lru_cache(maxsize=1)
def _first_run_class() -> type:
    """Return the class of the runner of a program that has not run yet.

    A runner turns into JAX's own with the first run.
    """

    class FirstRun(pxla.ExecuteReplicated):
        __slots__ = ()

        def __call__(self, *args: Any) -> Any:
            admit, program = _NOT_YET_RUN[self]
            admit(program, [args[i] for i in program.kept])
            self.__class__ = pxla.ExecuteReplicated
            del _NOT_YET_RUN[self]
            return self(*args)

    return FirstRun


type _Admit = Callable[[JitExecution, Sequence[Any]], None]

_NOT_YET_RUN: weakref.WeakKeyDictionary[Any, tuple[_Admit, JitExecution]] = (
    weakref.WeakKeyDictionary()
)


def watch_first_runs(admit: _Admit) -> None:
    """Call a function before the first run of each program over several processes, from now on.

    JAX's dispatcher takes over after the first run, so repeat calls do not pass through here.

    Args:
        admit: The function, which gets the program and its arguments. An exception of it leaves
            the program as not yet run.
    """
    compile_computation = pxla.MeshComputation.compile
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @wraps(compile_computation)
    def compile_and_watch(self: Any, *args: Any, **kwargs: Any) -> Any:
        executable: Any = compile_computation(self, *args, **kwargs)
        devices = executable._unloaded_executable.device_list
        # A program for devices that only compile has nothing to run.
        if devices.is_fully_addressable or not hasattr(executable.xla_executable, "local_devices"):
            return executable
        run = executable.unsafe_call
        if type(run) is pxla.ExecuteReplicated and run not in seen:
            seen.add(run)
            _NOT_YET_RUN[run] = admit, JitExecution.of(self, devices)
            run.__class__ = _first_run_class()
        return executable

    pxla.MeshComputation.compile = compile_and_watch
