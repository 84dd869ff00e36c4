"""Record the programs that JAX and pjit-ed functions compile in this process."""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from xlashard._jax.runtime.tracebacks import script_line
from xlashard._jax.trace import observed_programs
from xlashard._jax.trace.jitted import make_trace
from xlashard._jax.trace.observed_programs import JitLowering, ObservedProgram, Run
from xlashard._jax.trace.tracing import (
    inner_shardings,
    physical_aval,
    shaped,
    source_of,
)
from xlashard._jax.tree_definitions import in_default_registry
from xlashard.analysis.programs import from_jax
from xlashard.analysis.programs.program import Program
from xlashard.core.program import explicit_errors
from xlashard.core.program.wrapper_paths import NnxPaths, call_under_way, equinox_paths
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec
from xlashard.support.formatting import near_line
from xlashard.support.lazily import deferred
from xlashard.support.tracebacks import is_users_file

if TYPE_CHECKING:
    from xlashard.analysis.programs import from_pjit
else:
    # For calls of pjit-ed functions, which have it loaded.
    from_pjit = deferred("xlashard.analysis.programs.from_pjit")


@dataclass(eq=False, repr=False)
class RecordedProgram:
    """A program that was lowered or called while `record_programs` was in effect.

    `explain` and `preflight` accept it without arguments.

    Attributes:
        name: The function's name.
        source: File and line where the function is defined, such as `train.py:41`; empty if no
            Python code defines it, or that of an installed package.
        caller: File and line of the first call, or of `lower`.
        is_operation: True for an operation of JAX outside of `jit`, such as `jnp.add`.
        num_devices: Number of devices of its arguments, mesh, and shardings inside.
        function: Number of the function object; 0 for a program that was only lowered.
        calls: Number of calls. Calls of an executable of `lower().compile()` are not counted.

    Example:
        >>> import jax, xlashard
        >>> with xlashard.record_programs() as programs:
        ...     y = jax.jit(lambda x: x + 1)(jax.numpy.ones((2, 3)))
        >>> programs[-1].name, programs[-1].calls, programs[-1].argument_bytes
        ('<lambda>', 1, 24)
    """

    name: str
    source: str
    caller: str
    is_operation: bool
    num_devices: int
    function: int = 0
    calls: int = 0
    _program: Any = field(default=None)
    _paths: tuple[Sequence[str], Sequence[str]] | None = None

    @property
    def argument_bytes(self) -> int:
        """Return the bytes of the arguments, not counting copies."""
        return sum(map(_nbytes, self._program.jaxpr.in_avals))

    @property
    def result_bytes(self) -> int:
        """Return the bytes of the results, not counting copies."""
        return sum(map(_nbytes, self._program.jaxpr.out_avals))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arguments and results, not counting copies."""
        return self.argument_bytes + self.result_bytes

    @property
    def mesh(self) -> Mesh | None:
        """Return the mesh of its arguments, requested shardings, or shardings inside."""
        meshes = (getattr(sharding, "mesh", None) for sharding in _shardings(self._program))
        return next((m for m in meshes if isinstance(m, Mesh) and not m.empty), None)

    @cached_property
    def program(self) -> Program:
        """Return the program, with the types and shardings of its first call."""
        program = self._program
        if not isinstance(program, JitLowering):
            return from_pjit.read_call(program.function, program.call)
        trace = make_trace(program.jaxpr, program.params, program.types)
        return from_jax.read_trace(trace, paths=self._paths)

    def __repr__(self) -> str:
        place = f" at {self.source}" if self.source else ""
        return f"<RecordedProgram {self.name}{place}, {self.calls} calls>"


def _find_users_paths(jaxpr: Any) -> tuple[Sequence[str], Sequence[str]] | None:
    """Return the user's paths of a program of `nnx.jit` or `eqx.filter_jit` that is under way."""
    debug = jaxpr.debug_info
    own = debug.safe_arg_names(len(jaxpr.in_avals))
    call = call_under_way(own)
    if call is not None:
        return equinox_paths(call, own, debug.safe_result_paths(len(jaxpr.out_avals)))
    trees = observed_programs.trees_under_way(jaxpr)
    if trees is None:
        return None
    ins, outs = map(in_default_registry, trees)
    paths = NnxPaths.of(ins, outs, own)
    return None if paths is None else (paths.arguments, paths.results)


def _nbytes(aval: Any) -> int:
    aval = physical_aval(shaped(aval))
    return int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize


class ProgramRecorder:
    """Observer that keeps each program once, in the order of their first calls.

    Args:
        programs: List to append to.
        on_call: Function called after each recorded call is counted, before it runs. It returns
            the results of the call, usually `run()`.
    """

    def __init__(
        self,
        programs: list[RecordedProgram],
        on_call: Callable[[RecordedProgram, ObservedProgram, Run], list[Any]] | None = None,
    ) -> None:
        self._programs = programs
        self._on_call = on_call
        self._by_key: dict[Hashable, RecordedProgram] = {}
        self._lock = threading.Lock()

    def lowered(self, program: ObservedProgram) -> None:
        """Record a program."""
        self._recorded(program)

    def failed(self, error: Exception) -> None:
        """Add argument, axes and fix to an error of JAX about explicit mesh axes, as a note."""
        explained = explicit_errors.explained(error)
        if explained is not error:
            error.add_note(f"xlashard: {explained}")

    def called(self, program: ObservedProgram, run: Run) -> list[Any]:
        """Record a program and count its call, and return the call's results."""
        recorded = self._recorded(program)
        with self._lock:
            recorded.calls += 1
        return run() if self._on_call is None else self._on_call(recorded, program, run)

    def _recorded(self, program: ObservedProgram) -> RecordedProgram:
        key = program.key
        with self._lock:
            recorded = self._by_key.get(key)
            if recorded is None:
                recorded = self._by_key[key] = _record(program)
                self._programs.append(recorded)
        return recorded


def _record(program: ObservedProgram) -> RecordedProgram:
    values = program.values
    kept, paths = program, None
    if isinstance(program, JitLowering):
        paths = _find_users_paths(program.jaxpr)
    else:
        # Without the arrays, which the program may donate.
        own: Any = program
        kept = replace(own, call=own.call.on(values))
    _, at, source = source_of(program.jaxpr).rpartition(" at ")
    # A wrapper such as that of equinox is no place of the user's function.
    is_own = is_users_file(source.rpartition(":")[0])
    file, line = script_line()
    return RecordedProgram(
        name=program.name,
        source=near_line(*source.rsplit(":", 1)) if at and ":" in source and is_own else "",
        caller=near_line(file, line),
        is_operation=observed_programs.is_operation(program.jaxpr),
        function=_number_function(program),
        num_devices=max([1, *(getattr(s, "num_devices", 1) for s in _shardings(program))]),
        _program=kept,
        _paths=paths,
    )


def _number_function(program: ObservedProgram) -> int:
    if isinstance(program, JitLowering):
        return observed_programs.function_under_way(program.jaxpr)
    own: Any = program
    return observed_programs.number_function(own.function)


def _shardings(program: ObservedProgram) -> Iterator[Any]:
    """Return shardings, and the mesh in force, by which a program names its devices."""
    yield from (value.sharding for value in program.values)
    if isinstance(program, JitLowering):
        yield from (*program.params["in_shardings"], *program.params["out_shardings"])
        mesh = program.params["ctx_mesh"]
    else:
        own: Any = program
        call = own.call
        yield from (*call.in_shardings, *call.out_shardings)
        mesh = call.mesh
    yield from inner_shardings(program.jaxpr)
    if isinstance(mesh, Mesh) and not mesh.empty:
        yield NamedSharding(mesh, PartitionSpec())


@contextmanager
def record_programs() -> Iterator[list[RecordedProgram]]:
    """Record each program that JAX or a pjit-ed function lowers or calls inside the block.

    All threads of the process are recorded. While the block runs, calls go through JAX's Python
    code instead of its C++ dispatcher, which takes some 100 µs more for each.

    Returns:
        The list of programs, which grows while the block runs. `explain` and `preflight` accept
        each of them.

    Example:
        >>> import jax, xlashard
        >>> import jax.numpy as jnp
        >>> @jax.jit
        ... def double(x):
        ...     return x * 2
        >>> with xlashard.record_programs() as programs:
        ...     y = double(double(jnp.ones(4)))
        >>> [(p.name, p.calls) for p in programs if not p.is_operation]
        [('double', 2)]
        >>> xlashard.explain(programs[-1]).inputs[0].type
        'float32[4]'
    """
    programs: list[RecordedProgram] = []
    end = observed_programs.observe(ProgramRecorder(programs))
    try:
        yield programs
    finally:
        end()
