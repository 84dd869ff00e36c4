"""Observe functions that `jax.jit` made: their cache misses, and the first runs of programs.

JAX's dispatcher keeps repeat calls in C++; only a call that misses its cache reaches the functions
that this module wraps, so repeat calls cost what they cost without it.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import jax
from jax._src import core, pjit
from jax._src import dispatch as jax_dispatch
from jax._src.interpreters import pxla
from jax._src.sharding_impls import UnspecifiedValue

from xlashard._jax.runtime.shardings import Device
from xlashard.lazily import dataclass

type Stage = Literal["trace", "lower", "compile"]

_STAGES: dict[str, Stage] = {
    jax_dispatch.JAXPR_TRACE_EVENT: "trace",
    jax_dispatch.JAXPR_TO_MLIR_MODULE_EVENT: "lower",
    jax_dispatch.BACKEND_COMPILE_EVENT: "compile",
}
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True, eq=False)
class JitFunction:
    """A function that `jax.jit` made.

    Attributes:
        fun: The Python function.
        options: The options of `jax.jit`, as JAX keeps them.
    """

    fun: Callable[..., Any]
    options: Any

    @property
    def name(self) -> str:
        """Return the function's name."""
        return pjit.fun_name(self.fun)


@dataclass(eq=False)
class JitCall:
    """A call of a function of `jax.jit` that missed the dispatcher's cache.

    Attributes:
        function: The function.
        arguments: Its arguments as `(args, kwargs)`; None once the call or the trace has ended.
        record: For the observer.
    """

    function: JitFunction
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None
    record: Any = None


type MissObserver = Callable[[JitCall, Stage, float, str | None], None]
"""Receives a call, a stage that it ran, its seconds, and the origin of a compiled executable."""


class _Thread(threading.local):
    """State of one thread.

    Attributes:
        call: The call whose stages run, or ran last.
        traced: Seconds of tracing since the call began.
        hit: True once the persistent cache had the program.
    """

    call: JitCall | None = None
    traced: float = 0.0
    hit: bool = False


_THREAD = _Thread()


def watch_misses(observer: MissObserver) -> None:
    """Report cache misses of functions that `jax.jit` made to an observer, from now on.

    Calls inside another trace are part of the outer program, and JAX's own functions, such as those
    of `jax.numpy`, are left out.

    Args:
        observer: The observer, called in the thread of the call. Its exceptions are dropped: they
            must not break a call.
    """
    infer, run = pjit._infer_params, pjit._run_python_pjit

    def report(call: JitCall, stage: Stage, seconds: float, source: str | None = None) -> None:
        # For instance a deleted argument, about which JAX will raise.
        with suppress(Exception):
            observer(call, stage, seconds, source)

    @functools.wraps(infer)
    def infer_params(fun: Any, options: Any, args: Any, kwargs: Any) -> Any:
        if not core.trace_state_clean() or _is_of_jax(fun):
            return infer(fun, options, args, kwargs)
        _THREAD.call = call = JitCall(JitFunction(fun, options), (args, kwargs))
        _THREAD.traced = 0.0
        try:
            result = infer(fun, options, args, kwargs)
            if _THREAD.traced:
                report(call, "trace", _THREAD.traced)
            return result
        finally:
            call.arguments = None

    @functools.wraps(run)
    def run_python_pjit(params: Any, leaves: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        call = _THREAD.call
        if call is None or call.function.fun is not fun or not core.trace_state_clean():
            return run(params, leaves, fun, args, kwargs)
        call.arguments = args, kwargs
        try:
            return run(params, leaves, fun, args, kwargs)
        finally:
            _THREAD.call = None

    def on_duration(event: str, duration_secs: float, **kwargs: str | int) -> None:
        stage, call = _STAGES.get(event), _THREAD.call
        if stage is None or call is None:
            return
        if stage == "trace":
            # Functions inside the traced one report their own, which are part of its time.
            _THREAD.traced = max(_THREAD.traced, duration_secs)
        elif kwargs.get("fun_name") == f"jit({call.function.name})":
            hit, _THREAD.hit = _THREAD.hit, False
            source = "the persistent cache" if hit else "the compiler"
            report(call, stage, duration_secs, source if stage == "compile" else None)

    def on_event(event: str, **_: Any) -> None:
        if event == _CACHE_HIT:
            _THREAD.hit = True

    pjit._infer_params, pjit._run_python_pjit = infer_params, run_python_pjit
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)


@dataclass(frozen=True, eq=False)
class JitProgram:
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
    donated: tuple[bool, ...]
    closed_over: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    ordered_effects: int

    @classmethod
    def of(cls, computation: pxla.MeshComputation, devices: Sequence[Device]) -> "JitProgram":
        """Return the program of a lowered computation."""
        made = computation.compile_args
        kept = sorted(made["kept_var_idx"])
        everything = made["all_args_info"]
        names = everything.debug_info.safe_arg_names(len(everything.in_avals))
        donated = tuple(computation._donated_invars)
        specified = [
            tuple([None if isinstance(s, UnspecifiedValue) else s for s in made[side]])
            for side in ("in_shardings", "out_shardings")
        ]
        return cls(
            name=computation._name.removeprefix("jit(").removesuffix(")"),
            module=computation._hlo,
            devices=tuple(devices),
            arguments=tuple(made["global_in_avals"]),
            results=tuple(made["global_out_avals"]),
            in_shardings=specified[0],
            out_shardings=specified[1],
            paths=tuple([names[i] or "" for i in kept]),
            donated=tuple([i < len(donated) and bool(donated[i]) for i in kept]),
            closed_over=tuple(computation.const_args),
            options=tuple(computation._compiler_options_kvs),
            ordered_effects=len(made["ordered_effects"]),
        )


class _FirstRun(pxla.ExecuteReplicated):
    """Runner of a program that has not run yet. It turns into JAX's own with the first run."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        admit, program = _NOT_YET_RUN[self]
        admit(program)
        self.__class__ = pxla.ExecuteReplicated
        del _NOT_YET_RUN[self]
        return self(*args)


_NOT_YET_RUN: weakref.WeakKeyDictionary[Any, tuple[Callable[[JitProgram], None], JitProgram]] = (
    weakref.WeakKeyDictionary()
)


def watch_first_runs(admit: Callable[[JitProgram], None]) -> None:
    """Call a function before the first run of each program over several processes, from now on.

    JAX's dispatcher takes over after the first run, so repeat calls do not pass through here.

    Args:
        admit: The function. An exception of it leaves the program as not yet run.
    """
    compile_computation = pxla.MeshComputation.compile
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(compile_computation)
    def compile_and_watch(self: Any, *args: Any, **kwargs: Any) -> Any:
        executable: Any = compile_computation(self, *args, **kwargs)
        devices = executable._unloaded_executable.device_list
        # A program for devices that only compile has nothing to run.
        if devices.is_fully_addressable or not hasattr(executable.xla_executable, "local_devices"):
            return executable
        run = executable.unsafe_call
        if type(run) is pxla.ExecuteReplicated and run not in seen:
            seen.add(run)
            _NOT_YET_RUN[run] = admit, JitProgram.of(self, devices)
            run.__class__ = _FirstRun
        return executable

    pxla.MeshComputation.compile = compile_and_watch


def _is_of_jax(fun: Any) -> bool:
    return str(getattr(fun, "__module__", "")).startswith("jax.")
