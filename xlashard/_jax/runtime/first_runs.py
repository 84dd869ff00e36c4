"""Observe the first run of each program of `jax.jit` over several processes."""

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

from xlashard._jax.private import pxla
from xlashard._jax.runtime.shardings import Device, UnspecifiedValue
from xlashard.support.lazily import dataclass


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
