"""The stages of a pjit-ed function: traced, lowered, compiled."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from xlashard._jax import analysis, compiling, dispatch
from xlashard._jax.tracing import Tracer
from xlashard.array import wrap_tree
from xlashard.array.handles import is_handle, wrap_result
from xlashard.errors import ArgumentError
from xlashard.pjit.arguments import check_concrete, check_values, describe_arguments
from xlashard.pjit.checks import check_place, check_type
from xlashard.pjit.function import Call, Function
from xlashard.pjit.options import compiler_option_items
from xlashard.pjit.prepare import PROGRAMS, Interface, Order, Prepared, compile_prepared
from xlashard.pjit.run import (
    are_laid_out,
    check_donated_once,
    fast_path,
    mark_donated,
    run_prepared,
)
from xlashard.pjit.step import BoundStep, bind_step
from xlashard.program import LoweredProgram
from xlashard.sharding import XLACompatibleSharding


def trace_call(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Traced":
    """Traces a function for arguments, which may be `jax.ShapeDtypeStruct`s."""
    return Traced(function, function.trace(args, kwargs))


def lower_call(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Lowered":
    """Traces and lowers a function for arguments."""
    return trace_call(function, args, kwargs).lower()


@dataclass(frozen=True, eq=False)
class Traced:
    """A function after tracing, before any place is chosen."""

    _function: Function
    _call: Call

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr of the body."""
        return self._call.traced.jaxpr

    @property
    def fun_name(self) -> str:
        """The function's name."""
        return self._call.traced.name

    @property
    def in_avals(self) -> Any:
        """The abstract values of `(args, kwargs)`, as their tree."""
        return self._call.traced.in_tree.unflatten(self._call.traced.in_avals)

    @property
    def in_tree(self) -> Any:
        """The tree of `(args, kwargs)`."""
        return self._call.traced.in_tree

    @property
    def out_tree(self) -> Any:
        """The tree of the result."""
        return self._call.traced.out_tree

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the result, as its tree of `jax.ShapeDtypeStruct`."""
        traced = self._call.traced
        return traced.out_tree.unflatten([_struct(a) for a in traced.jaxpr.out_avals])

    def lower(self) -> "Lowered":
        """Chooses the place and writes the module.

        Raises:
            DeviceMismatchError: If the arguments live on different devices.
            ResourceError: If a sharding does not fit its argument or result.
        """
        order = self._function.order(self._call, self._function.arguments(self._call))
        interface, lowered = PROGRAMS.lowered(self._call.traced.jaxpr, order)
        return Lowered(self, order, interface, lowered)


def _struct(aval: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


@dataclass(frozen=True, eq=False)
class Lowered:
    """A module with its annotations, not compiled yet."""

    _traced: Traced
    _order: Order
    _interface: Interface
    _program: LoweredProgram

    @property
    def in_avals(self) -> Any:
        """The abstract values of `(args, kwargs)`, as their tree."""
        return self._traced.in_avals

    @property
    def in_tree(self) -> Any:
        """The tree of `(args, kwargs)`."""
        return self._traced.in_tree

    @property
    def out_tree(self) -> Any:
        """The tree of the result."""
        return self._traced.out_tree

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the result, as its tree."""
        return self._traced.out_info

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated arguments."""
        return self._traced._function.parameters.donate_argnums

    @property
    def args_info(self) -> Any:
        """For each argument its abstract value and whether it is donated, as their tree."""
        call = self._traced._call
        infos = map(ArgInfo, call.traced.in_avals, call.donated)
        return call.traced.in_tree.unflatten(list(infos))

    def as_text(self, dialect: str = "stablehlo", *, debug_info: bool = False) -> str:
        """The module as text.

        Args:
            dialect: `"stablehlo"` or `"hlo"`.
            debug_info: Include the source locations.
        """
        if dialect == "stablehlo":
            return self._program.as_text(debug_info=debug_info)
        if dialect == "hlo":
            return analysis.hlo_text(self._program.body.module)
        raise ArgumentError(f"dialect must be 'stablehlo' or 'hlo', not {dialect!r}")

    def compiler_ir(self, dialect: str = "stablehlo") -> Any:
        """The MLIR module itself."""
        if dialect != "stablehlo":
            raise ArgumentError(
                f"dialect must be 'stablehlo', not {dialect!r}: for text write "
                "as_text(dialect='hlo')"
            )
        return self._program.body.module

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimates before optimisation: FLOP, bytes accessed."""
        client = compiling.client_of(self._order.placement.devices[0])
        return analysis.lowered_cost(client, self._program.body.module)

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> "Compiled":
        """Compiles the module.

        Args:
            compiler_options: Options of XLA for this compilation only.
        """
        function = self._traced._function
        self._program.report_donation(function.options.donation, function.name)
        if compiler_options:
            options = compiler_option_items(compiler_options)
            prepared = compile_prepared(self._interface, self._program, options)
            prepared = prepared.said_as(self._order.placement)
        else:
            prepared = PROGRAMS.prepared(self._traced.jaxpr, self._order)
        return Compiled(self, prepared)


def _other_structure(name: str, compiled: Any, called: Any) -> str:
    """Why arguments are not of the structure that a program was compiled for."""
    wanted, given = _parts(compiled), _parts(called)
    if wanted.keys() != given.keys():
        return (
            f"{name} was compiled for arguments of the structure ({', '.join(wanted)}), but was "
            f"called with ({', '.join(given)}); static arguments are part of the program already"
        )
    part = next(part for part in wanted if wanted[part] != given[part])
    return (
        f"{name} was compiled for {part} of the structure {wanted[part]}, but was called with "
        f"{given[part]}: {_OTHERWISE.format(name)}"
    )


_OTHERWISE = "lower and compile it for that too, or call the pjit-ed function {} itself"


def _parts(in_tree: Any) -> dict[str, Any]:
    """The tree of each argument."""
    args, kwargs = in_tree.children()
    names = kwargs.node_data()[1]
    parts = {f"args[{i}]": tree for i, tree in enumerate(args.children())}
    return parts | {f"{n}=": t for n, t in zip(names, kwargs.children(), strict=True)}


@dataclass(frozen=True)
class ArgInfo:
    """An argument of a lowered function.

    Attributes:
        aval: Its abstract value.
        donated: Whether its buffers may be reused.
    """

    aval: Any
    donated: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        return self.aval.dtype


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program that takes arguments of one structure, shape and place."""

    _lowered: Lowered
    _prepared: Prepared

    @property
    def in_tree(self) -> Any:
        """The tree of `(args, kwargs)`."""
        return self._lowered.in_tree

    @property
    def out_tree(self) -> Any:
        """The tree of the result."""
        return self._lowered.out_tree

    @property
    def in_avals(self) -> Any:
        """The abstract values of `(args, kwargs)`, as their tree."""
        return self._lowered.in_avals

    @property
    def out_info(self) -> Any:
        """Shapes, dtypes and shardings of the result, as its tree."""
        avals = self._lowered._traced._call.traced.jaxpr.out_avals
        twins = self._prepared.program.out_twins
        return self.out_tree.unflatten([_struct(a, s) for a, s in zip(avals, twins, strict=True)])

    @property
    def input_shardings(self) -> Any:
        """The shardings of `(args, kwargs)`, as their tree; None for an unused argument."""
        used = iter(self._prepared.program.parts.in_shardings[len(self._prepared.consts) :])
        flat = [next(used) if kept else None for kept in self._prepared.kept]
        return self.in_tree.unflatten(flat)

    @property
    def output_shardings(self) -> Any:
        """The shardings of the result, as its tree."""
        return self.out_tree.unflatten(self._prepared.program.parts.out_shardings)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated arguments."""
        return self._lowered.donate_argnums

    def as_text(self) -> str:
        """The optimised HLO, after partitioning."""
        return analysis.compiled_text(self.runtime_executable())

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimates for the optimised program, per device: FLOP, bytes accessed."""
        return analysis.compiled_cost(self.runtime_executable())

    def memory_analysis(self) -> Any:
        """Bytes per device: arguments, results, aliases, temporaries, code."""
        return analysis.compiled_memory(self.runtime_executable())

    def runtime_executable(self) -> Any:
        """PJRT's loaded executable."""
        return self._prepared.program.executable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program.

        Raises:
            ArgumentError: If the arguments have another structure, shape or dtype.
            ResourceError: If a committed argument is elsewhere.
        """
        try:
            return self._dispatcher(*args, **kwargs)
        except jax.errors.JaxRuntimeError:
            call = self._lowered._traced._call
            values = jax.tree_util.tree_leaves((args, kwargs))
            check_donated_once(values, call.donated, call.traced.arg_names, call.traced.name)
            raise

    @cached_property
    def _dispatcher(self) -> Any:
        name = self._lowered._traced.fun_name
        return dispatch.new_dispatcher(name, None, self._miss, ((), ()), name)

    def _miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        values = self._check(args, kwargs)
        repeatable = are_laid_out(self._prepared, values)
        handles = run_prepared(self._prepared, values)
        call = self._lowered._traced._call
        mark_donated(values, call.donated, self._lowered._traced.fun_name)
        if all(map(is_handle, handles)):
            out = wrap_tree(self.out_tree, handles)
        else:
            out = self.out_tree.unflatten([wrap_result(h) for h in handles])
        path = fast_path(self._prepared, self.out_tree, handles) if repeatable else None
        return out, path, False

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flat arguments, if they are what was compiled for."""
        traced = self._lowered._traced._call.traced
        values, tree = jax.tree_util.tree_flatten((args, kwargs))
        name = traced.name
        if tree != traced.in_tree:
            raise ArgumentError(_other_structure(name, traced.in_tree, tree))
        check_values(values, traced.arg_names, static=False)
        for value, path, aval in zip(values, traced.arg_names, traced.in_avals, strict=True):
            if isinstance(value, Tracer):
                raise ArgumentError(
                    f"{path} is a tracer: a compiled program can't be part of another one; call "
                    f"the pjit-ed function {name} itself there"
                )
            text = f"{name} was compiled for {{}}, but was called with {{}}"
            check_type(value, path, aval, text, _OTHERWISE.format(name))
        check_concrete(values, traced.arg_names)
        self._check_places(values)
        return values

    def _check_places(self, values: list[Any]) -> None:
        traced = self._lowered._traced._call.traced
        arguments = describe_arguments(values, traced.arg_names, traced.in_avals)
        wanted = iter(self._prepared.program.parts.in_shardings[len(self._prepared.consts) :])
        for argument, kept in zip(arguments, self._prepared.kept, strict=True):
            if not kept:
                continue
            sharding: XLACompatibleSharding = next(wanted)
            check_place(argument, sharding, f"{traced.name} was compiled for {{}}")

    def bind(self, state: Any, *, argnum: int = 0) -> BoundStep:
        """A handle for a loop `state, out = step(state, ...)` that keeps the state's buffers.

        Args:
            state: The first state, an argument of this program.
            argnum: Its position.

        Returns:
            A callable of the other arguments; its `state` gives the state as a pytree of Arrays.

        Raises:
            ArgumentError: If the program's result does not begin with a new state.
        """
        traced = self._lowered._traced
        return bind_step(self._prepared, traced._call, state, argnum)
