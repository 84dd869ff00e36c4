"""Record the programs that JAX and pjit-ed functions compile in this process."""

import inspect
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

import jax

from xlashard._jax.runtime.stand_in_values import StandInValues, first_line
from xlashard._jax.runtime.tracebacks import script_line
from xlashard._jax.trace import observed_programs
from xlashard._jax.trace.jitted import make_trace
from xlashard._jax.trace.observed_programs import JitLowering, ObservedCall, ObservedProgram
from xlashard._jax.trace.tracing import (
    count_bytes,
    inner_shardings,
    shaped,
    source_of,
)
from xlashard._jax.tree_definitions import in_default_registry
from xlashard.analysis.programs import from_jax
from xlashard.analysis.programs.program import Program
from xlashard.core.program import explicit_errors
from xlashard.core.program.signature import function_name
from xlashard.core.program.wrapper_paths import (
    NnxPaths,
    call_under_way,
    equinox_paths,
    find_code,
    find_users_paths,
    library_call_under_way,
    pmap_call_under_way,
)
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec
from xlashard.errors import counted
from xlashard.support.formatting import in_bytes, near_line
from xlashard.support.lazily import deferred
from xlashard.support.tracebacks import is_users_file

if TYPE_CHECKING:
    from xlashard.analysis.programs import from_pjit
    from xlashard.core.array.array_class import handles
else:
    # For calls of pjit-ed functions, which have both loaded.
    from_pjit = deferred("xlashard.analysis.programs.from_pjit")
    handles = deferred("xlashard.core.array.array_class.handles")


_CONSTANTS_UP_TO = 1 << 26
"""Bytes of closed-over arrays up to which the module of a report has their values."""


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
        calls: Number of calls, those of an executable of `lower().compile()` included.

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
        return sum(count_bytes(shaped(aval)) for aval in self._program.jaxpr.in_avals)

    @property
    def result_bytes(self) -> int:
        """Return the bytes of the results, not counting copies."""
        return sum(count_bytes(shaped(aval)) for aval in self._program.jaxpr.out_avals)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arguments and results, not counting copies."""
        return self.argument_bytes + self.result_bytes

    @property
    def mesh(self) -> Mesh | None:
        """Return the mesh of its devices; None without one."""
        return self.program.mesh

    @cached_property
    def program(self) -> Program:
        """Return the program, with the types and shardings of its first call."""
        program = self._program
        if not isinstance(program, JitLowering):
            return from_pjit.read_call(program.function, program.call)
        return self._read(program, self._paths)

    @property
    def reported_program(self) -> Program:
        """Return the program as it is lowered for a report.

        That is the one that runs, unless the arrays that it closes over are large: their values
        would be written into the module. They are arguments then, replicated as they would be.
        """
        program, own = self.program, self._program
        nbytes = sum(value.nbytes for value in program.constants)
        if nbytes <= _CONSTANTS_UP_TO or not isinstance(own, JitLowering):
            return program
        mesh = program.mesh
        hoisted = own.with_constants_as_arguments(
            None if mesh is None else NamedSharding(mesh, PartitionSpec())
        )
        count = len(hoisted.types) - len(own.types)
        names = [f"closed over [{number}]" for number in range(count)]
        paths = self._paths or ([value.path for value in program.arguments], None)
        results = paths[1] or [value.path for value in program.results]
        return self._read(
            hoisted,
            ([*names, *paths[0]], results),
            f"closed-over arrays as constants: jax.jit puts {in_bytes(nbytes)} into each "
            "device's program, and here they are arguments",
        )

    def _read(
        self,
        program: JitLowering,
        paths: tuple[Sequence[str], Sequence[str]] | None,
        unknown: str = "",
    ) -> Program:
        trace = make_trace(program.jaxpr, program.params, program.types)
        trace = replace(trace, values=program.values)
        return replace(from_jax.read_trace(trace, paths=paths, unknown=unknown), name=self.name)

    def __repr__(self) -> str:
        place = f" at {self.source}" if self.source else ""
        return f"<RecordedProgram {self.name}{place}, {counted(self.calls, 'call')}>"


def _find_users_call(
    jaxpr: Any, arguments: Sequence[Any]
) -> tuple[Any, tuple[Sequence[str], Sequence[str]] | None]:
    """Return the user's function and paths of a program of a wrapper of `jax.jit` under way.

    Args:
        jaxpr: The program's jaxpr.
        arguments: Its arguments; empty if it is not called.
    """
    debug = jaxpr.debug_info
    own = debug.safe_arg_names(len(jaxpr.in_avals))
    results = debug.safe_result_paths(len(jaxpr.out_avals))
    mapped = pmap_call_under_way(own)
    if mapped is not None:
        return mapped[0], (mapped[1], results)
    user, leaves = library_call_under_way()
    call = call_under_way(own)
    if call is not None:
        return user, equinox_paths(call, own, results)
    trees = observed_programs.trees_under_way(jaxpr)
    if trees is not None:
        ins, outs = map(in_default_registry, trees)
        nnx = NnxPaths.of(ins, outs, own)
        if nnx is not None:
            return user, (nnx.arguments, nnx.results)
    if arguments and leaves:
        return user, (find_users_paths(arguments, own, leaves), results)
    return user, None


class ProgramRecorder:
    """Observer that keeps each program once, in the order of their first calls.

    Args:
        programs: List to append to.
        on_call: Function called after each recorded call is counted, before it runs. It returns
            the results of the call, usually `call.run()`.
    """

    def __init__(
        self,
        programs: list[RecordedProgram],
        on_call: Callable[[RecordedProgram, ObservedCall], list[Any]] | None = None,
    ) -> None:
        self._programs = programs
        self._on_call = on_call
        self._by_key: dict[Hashable, RecordedProgram] = {}
        self._lock = threading.Lock()

    def lowered(self, program: ObservedProgram) -> None:
        """Record a program."""
        self._recorded(program, ())

    def failed(self, error: Exception) -> None:
        """Add argument, axes and fix to an error of JAX about explicit mesh axes, as a note."""
        explained = explicit_errors.explained(error)
        if explained is not error:
            error.add_note(f"xlashard: {explained}")

    def called(self, call: ObservedCall) -> list[Any]:
        """Record a program and count its call, and return the call's results."""
        recorded = self._recorded(call.program, call.arguments)
        with self._lock:
            recorded.calls += 1
        return call.run() if self._on_call is None else self._on_call(recorded, call)

    def _recorded(self, program: ObservedProgram, arguments: Sequence[Any]) -> RecordedProgram:
        key = program.key
        with self._lock:
            recorded = self._by_key.get(key)
            if recorded is None:
                recorded = self._by_key[key] = _record(program, arguments)
                self._programs.append(recorded)
        return recorded


def _record(program: ObservedProgram, arguments: Sequence[Any]) -> RecordedProgram:
    values = program.values
    kept, paths, user = program, None, None
    is_operation = observed_programs.is_operation(program.jaxpr)
    if not isinstance(program, JitLowering):
        # Without the arrays, which the program may donate.
        own: Any = program
        kept = replace(own, call=own.call.on(values))
    elif not is_operation:
        user, paths = _find_users_call(program.jaxpr, arguments)
    _, at, source = source_of(program.jaxpr).rpartition(" at ")
    # A wrapper such as that of equinox is no place of the user's function.
    is_own = at and ":" in source and is_users_file(source.rpartition(":")[0])
    name, place = program.name, near_line(*source.rsplit(":", 1)) if is_own else ""
    if not is_own and user is not None:
        name, code = function_name(inspect.unwrap(user)), find_code(user)
        if code is not None and is_users_file(code.co_filename):
            place = near_line(code.co_filename, code.co_firstlineno)
    file, line = script_line()
    return RecordedProgram(
        name=name,
        source=place,
        caller=near_line(file, line),
        is_operation=is_operation,
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
    if isinstance(program, JitLowering):
        used = program.used
        yield from compress([value.sharding for value in program.values], used)
        yield from compress(program.params["in_shardings"], used)
        yield from program.params["out_shardings"]
        mesh = program.params["ctx_mesh"]
    else:
        yield from (value.sharding for value in program.values)
        own: Any = program
        call = own.call
        yield from (*call.in_shardings, *call.out_shardings)
        mesh = call.mesh
    yield from inner_shardings(program.jaxpr)
    if isinstance(mesh, Mesh) and not mesh.empty:
        yield NamedSharding(mesh, PartitionSpec())


def run_or_stand_in(
    values: StandInValues, recorded: RecordedProgram, call: ObservedCall
) -> list[Any]:
    """Run a call; arrays stand in for the results of one with kernels for other devices.

    Args:
        values: The arrays that stand in.
        recorded: The program.
        call: The call.
    """
    if donates(call.program):
        values.settle_all()
    try:
        return call.run()
    except Exception as error:
        if not observed_programs.runs_kernels(call.program.jaxpr):
            raise
        shardings, reason = assume_shardings(recorded, call.program), first_line(error)
        return stand_in_results(values, recorded, call, shardings, is_run=False, reason=reason)


def donates(program: ObservedProgram) -> bool:
    """Return True if the buffers of an argument may be reused for results."""
    if isinstance(program, JitLowering):
        return any(program.params["donated_invars"])
    own: Any = program
    return any(own.call.donated)


def stand_in_results(
    values: StandInValues,
    recorded: RecordedProgram,
    call: ObservedCall,
    shardings: Sequence[Any],
    *,
    is_run: bool,
    reason: str = "",
) -> list[Any]:
    """Return arrays that stand in for the results of a call.

    Args:
        values: The arrays that stand in.
        recorded: The program.
        call: The call.
        shardings: Shardings of the results.
        is_run: Whether to run the program once a value of its results is read.
        reason: Why the CPU can't run it.
    """
    jaxpr = call.program.jaxpr
    types = map(with_sharding, jaxpr.out_avals, shardings)
    results = [values.zeros(t, t.sharding, is_shared=not is_run) for t in types]
    arguments = (*call.arguments, *jaxpr.consts)
    values.defer(recorded, call.run if is_run else None, arguments, results, reason)
    if isinstance(call.program, JitLowering):
        return results
    return list(map(handles.wrap_result, results))


def with_sharding(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Return the type of a value with a sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def assume_shardings(recorded: RecordedProgram, program: ObservedProgram) -> list[Any]:
    """Return shardings for the results of a program that can't be compiled.

    They are those requested, those of Explicit mesh axes, and replicated ones for others.
    """
    count, mesh = len(program.jaxpr.out_avals), recorded.mesh
    is_jit = isinstance(program, JitLowering)
    requested = program.params["out_shardings"] if is_jit else [None] * count

    def assume(sharding: Any, aval: Any) -> Any:
        if hasattr(sharding, "device_set"):
            return sharding
        if mesh is None:
            return jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(
            mesh, getattr(getattr(aval, "sharding", None), "spec", PartitionSpec())
        )

    return list(map(assume, requested, program.jaxpr.out_avals))


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
