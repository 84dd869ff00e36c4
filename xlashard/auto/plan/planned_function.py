"""A function compiled with the layout of a plan: each call is traced, then gets the layout."""

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from xlashard._jax.trace import jitted, tracing
from xlashard._jax.trace.jaxprs import without_high_level
from xlashard._jax.trace.tracing import equations
from xlashard.auto.auto_program import unplaced
from xlashard.auto.problem import ProgramLayout, insert_constraints
from xlashard.auto.proof import call_with_layout
from xlashard.errors import ArgumentError
from xlashard.pjit.api import callable_of, pjit
from xlashard.pjit.compile import PROGRAMS
from xlashard.pjit.function import Function
from xlashard.pjit.options import PjitOptions, Selected
from xlashard.pjit.shardings.resources import UNSPECIFIED, read_resources
from xlashard.pjit.stages.from_jax import unwrapped
from xlashard.pjit.trace import Call
from xlashard.sharding import Mesh


def fingerprint_of(jaxpr: Any) -> str:
    """Return a digest of the operations of a jaxpr, in order; sizes don't matter.

    Args:
        jaxpr: The closed jaxpr.
    """
    names = " ".join(eqn.primitive.name for eqn in equations(without_high_level(jaxpr)))
    return hashlib.sha256(names.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class PlannedProgram:
    """Layout of one program, with the paths of its arguments and results.

    Attributes:
        name: Name of the function.
        layout: The layout.
        arguments: Path of each argument.
        results: Path of each result.
        fingerprint: Digest of its operations.
        mesh: Mesh of the devices.
        by_users_paths: Whether the function has its arguments by these paths; a wrapper has others.
    """

    name: str
    layout: ProgramLayout
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    fingerprint: str
    mesh: Mesh
    by_users_paths: bool = True

    def place(self, call: Call) -> Call:
        """Return a traced call with the layout.

        Raises:
            ArgumentError: If the call is one of another program.
        """
        jaxpr = call.traced.jaxpr
        if not self.layout.constraints:
            self._check(call)
            return call_with_layout(call, self.layout, self.mesh, jaxpr)
        # One jaxpr for all calls: its programs are kept by it.
        inside = PROGRAMS.cached(jaxpr, ("plan", self), lambda: self._constrained(call))
        return call_with_layout(call, self.layout, self.mesh, inside)

    def _constrained(self, call: Call) -> Any:
        self._check(call)
        jaxpr = without_high_level(call.traced.jaxpr)
        return insert_constraints(jaxpr, self.mesh, self.layout.constraints)

    def _check(self, call: Call) -> None:
        traced = call.traced
        differs = next((p for p in traced.arg_names if p not in self.arguments), None)
        same = traced.arg_names == self.arguments and traced.result_paths == self.results
        if not self.by_users_paths:
            counts = len(traced.arg_names), len(traced.result_paths)
            differs, same = None, counts == (len(self.arguments), len(self.results))
        if not same or fingerprint_of(traced.jaxpr) != self.fingerprint:
            what = "other operations" if differs is None else f"the argument {differs}"
            raise ArgumentError(
                f"{traced.name} has {what}, which the plan of {self.name} doesn't know: make a "
                f"plan for it, xlashard.auto_shard({traced.name}, ..., mesh=mesh)"
            )


class PlannedFunction(Function):
    """Function whose calls get the layout of a plan.

    Args:
        fun: The Python function.
        options: Its options, without shardings.
        static: Its static arguments.
        program: The layout.
    """

    def __init__(
        self, fun: Any, options: PjitOptions, static: Selected, program: PlannedProgram
    ) -> None:
        super().__init__(fun, options, static)
        self._program = program

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.fun, self.options, self.static, self._program)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Trace for the arguments of a call, and give the call the layout."""
        if not tracing.is_top_level():
            return self._program.place(super().trace(args, kwargs))
        # Where arguments are now is no part of the program's types.
        bare_args, bare_kwargs = jax.tree.map(unplaced, (args, kwargs))
        with jax.set_mesh(self._program.mesh):
            call = super().trace(bare_args, bare_kwargs)
        values = self.parameters.leaves(args, kwargs)
        return self._program.place(replace(call, values=tuple(values)))


def planned(fun: Any, program: PlannedProgram, options: Mapping[str, Any]) -> Any:
    """Return a function compiled with a layout.

    Args:
        fun: A plain function, one of `pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit`, or a partial
            or bound method of one.
        program: The layout.
        options: Options of `pjit` for a plain function.

    Raises:
        ArgumentError: If it is another wrapper of a compiled function.
    """
    fun, values, named = unwrapped(fun, (), {})
    if values or named:
        # The plan holds bound values as arguments.
        return partial(planned(fun, program, options), *values, **named)
    if jitted.is_jitted(fun):
        fun = pjit(fun._fun, **jitted.options_of(fun))
    if not isinstance(getattr(fun, "_function", None), Function):
        if hasattr(fun, "lower") or hasattr(fun, "trace"):
            return _rewrapped(fun, program)
        fun = pjit(fun, **options)
    function = fun._function
    nowhere = replace(
        function.options,
        in_resources=read_resources(UNSPECIFIED, "in_shardings"),
        out_resources=read_resources(UNSPECIFIED, "out_shardings"),
    )
    return callable_of(PlannedFunction(function.fun, nowhere, function.static, program))


def _rewrapped(wrapper: Any, program: PlannedProgram) -> Any:
    """Return a wrapper such as that of `nnx.jit` around its function, compiled with a layout.

    Raises:
        ArgumentError: If it isn't known where the wrapper keeps its function.
    """
    inside = [name for name, value in vars(wrapper).items() if jitted.is_jitted(value)]
    if len(inside) != 1:
        raise ArgumentError(
            f"fun of apply, {program.name}, is a {type(wrapper).__name__} with a method lower, but "
            "holds no function of jax.jit that could get the layout: use plan.rules() for its "
            "arguments, or a pure function of pytrees"
        )
    made, compiled = copy.copy(wrapper), getattr(wrapper, inside[0])
    body = copy.copy(compiled._fun)
    for name, value in vars(body).items():
        if value is wrapper:
            # Both share the identities of modules during a call.
            object.__setattr__(body, name, made)
    inner = pjit(body, **jitted.options_of(compiled))
    object.__setattr__(made, inside[0], planned(inner, replace(program, by_users_paths=False), {}))
    return made
