"""Report of an automatic layout, and the function that is compiled with it.

Each call of that function is traced, then gets the layout.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import jax

from xlashard._jax.trace import jitted, tracing
from xlashard._jax.trace.jaxprs import without_high_level
from xlashard._jax.trace.tracing import equations
from xlashard._jax.tree_definitions import outline
from xlashard.analysis.programs.from_jax import is_wrapper, unwrap
from xlashard.analysis.programs.program import LoweredModule
from xlashard.analysis.report.cells import Span, join_cell
from xlashard.analysis.report.parts import Section
from xlashard.analysis.report.printable import Part, SerializableReport
from xlashard.auto.auto_program import AutoProgram, Tracing
from xlashard.auto.plan.plan_model import PathRule, PlanFields, path_rules, spec_of_text
from xlashard.auto.plan.plan_text import plan_code, plan_parts
from xlashard.auto.problem import ConstraintSite, ProgramLayout, check_layout, insert_constraints
from xlashard.core.pjit.api import callable_of, pjit
from xlashard.core.pjit.compile import PROGRAMS
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.options import PjitOptions, Selected
from xlashard.core.pjit.shardings.resources import UNSPECIFIED, read_resources
from xlashard.core.pjit.trace import Call
from xlashard.core.sharding import Mesh, NamedSharding
from xlashard.errors import ArgumentError, MeshError, ProgramTooLargeError
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import in_bytes, in_seconds
from xlashard.support.tracebacks import short_tracebacks

_FORMAT = 2


@dataclass(frozen=True, repr=False)
class AutoPlan(SerializableReport, PlanFields):
    """Layout of a function on a mesh. Made by `xlashard.auto_shard`.

    `print(plan)` displays it; `apply` compiles the function with it.

    Attributes:
        name: Name of the function.
        devices: Topology, or number and kind of the devices.
        mesh: Names and sizes of the mesh axes.
        outcome: `fits`, or `out of memory` if no layout fits; then the plan is the layout that
            comes closest.
        memory_bytes: Memory of a device that the program may use.
        inputs: Arguments with their specs.
        outputs: Results with their specs.
        constraints: Sharding constraints inside.
        layouts: Layouts that were considered, the plan's first.
        collectives: Collectives of the compiled program by kind and mesh axes.
        shares: Seconds of a step by the resource that the cores use or wait for.
        fingerprint: Digest of the function's operations.
        arguments: Arguments of the call, whose arrays `inputs` lists.
        axis_rules: Mesh axes of logical axes, if arguments name them.
        unforeseen: Collectives of the compiled program that the search did not foresee, each above
            1 % of a step, most expensive first.
        gap: Share by which a better solution of one mesh axis, given the others, may exist; None if
            unknown. It bounds no choice of all axes together.
        least_seconds: Time of the work alone, each operation split over all axes as is best for it:
            no layout is predicted to take less. None if unknown.
        unknown_primitives: Primitives without a sharding rule, which each device runs whole.
        held: What holds the memory, if no layout fits; largest first.
        smallest_slice: Smallest slice of the same chip that would do; empty if unknown.
        links: Links within a slice or node, for the names of `shares`.
        excerpts: Lines around the source lines of unforeseen collectives and of their callers.
        explicit_axes: Mesh axes that are explicit while the function is traced; empty for a
            function that prescribes nothing by types.
        types: Spec in the type of each argument under explicit axes.
        ignores_constraints: Whether the function's own shardings and constraints are left out.
        wrapper: Library whose function of `jax.jit` the plan was made for; empty for JAX's own.
        beyond_rules: Number of arguments with another spec than one for each logical name, and for
            equal layers, gives them.
        untied_seconds: Time of a step with a spec for each array, if the plan is tied.

    Example:
        >>> import jax, xlashard
        >>> w = jax.ShapeDtypeStruct((256, 64), "float32")
        >>> x = jax.ShapeDtypeStruct((1024, 256), "float32")
        >>> plan = xlashard.auto_shard(lambda w, x: x @ w, w, x, mesh={"data": len(jax.devices())})
        >>> plan.outcome, [value.path for value in plan.inputs]
        ('fits', ['w', 'x'])
    """

    _kind = "auto_shard"
    _footer = "Times by the schedule of the compiled program, before it has run."
    _format = ReportFormat("layout plan", _FORMAT, "xlashard.auto_shard(...).to_json()")
    _program: ClassVar[AutoProgram | None] = None

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan that `to_json` wrote.

        Args:
            text: The JSON.

        Raises:
            ArgumentError: If the text is not JSON, of another format, or of another shape, or if a
                spec or path in it is invalid.
        """
        with short_tracebacks:
            return cls._format.read(cls, text, cls.check)

    def bound_to(self, program: AutoProgram) -> Self:
        """Return the plan itself, after it has got the program that it was made for."""
        object.__setattr__(self, "_program", program)
        return self

    def with_slice(self, topology: str) -> Self:
        """Return the plan with the smallest slice that would do."""
        plan = replace(self, smallest_slice=topology)
        return plan if self._program is None else plan.bound_to(self._program)

    @property
    def layout(self) -> ProgramLayout:
        """The specs at the boundary and inside."""
        chosen = self.chosen
        return ProgramLayout(
            chosen.name,
            tuple(spec_of_text(value.spec) for value in self.inputs),
            tuple(spec_of_text(value.spec) for value in self.outputs),
            tuple(
                (ConstraintSite(c.site, c.kind, c.index), spec_of_text(c.spec))
                for c in self.constraints
            ),
            chosen.predicted_seconds,
            chosen.predicted_bytes,
        )

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """Shardings of the positional arguments, as their trees.

        Raises:
            ArgumentError: If the plan was read from JSON.
        """
        with short_tracebacks:
            program = self._bound("in_shardings")
        mesh = program.tracing.set_axis_types(program.mesh)
        leaves = [NamedSharding(mesh, spec_of_text(v.spec)) for v in self.inputs]
        return outline(program.program.in_tree, leaves)[0]

    @property
    def out_shardings(self) -> Any:
        """Shardings of the results, as their tree.

        Raises:
            ArgumentError: If the plan was read from JSON.
        """
        with short_tracebacks:
            program = self._bound("out_shardings")
        mesh = program.tracing.set_axis_types(program.mesh)
        leaves = [NamedSharding(mesh, spec_of_text(v.spec)) for v in self.outputs]
        return outline(program.program.out_tree, leaves)

    def lower(self) -> Any:
        """Return the program with the layout, lowered for the devices of the plan.

        Returns:
            A stage of `xlashard.pjit` or of `jax.jit`, as the function is.

        Raises:
            ArgumentError: If the plan was read from JSON.
        """
        with short_tracebacks:
            return self.lower_program().stage

    def lower_program(self) -> LoweredModule:
        """Return the program with the layout as reports take it, lowered for the plan's devices.

        Raises:
            ArgumentError: If the plan was read from JSON.
        """
        marks = [
            [value.decided_by != "caller" for value in side] for side in (self.inputs, self.outputs)
        ]
        return self._bound("lower").lower(self.layout, marks=marks)

    def _bound(self, name: str) -> AutoProgram:
        if self._program is None:
            raise ArgumentError(
                f"{name} of a plan that was read from JSON is unknown: it holds paths, not trees; "
                f"write plan.apply({self.name}, mesh=mesh), or plan.rules()"
            )
        return self._program

    def apply(self, fun: Any, mesh: Mesh | None = None, **options: Any) -> Any:
        """Return the function, compiled with the layout.

        Args:
            fun: The function that the plan was made for: a plain one, or one of `pjit`,
                `jax.jit`, `nnx.jit` or `eqx.filter_jit`, whose static and donated arguments it
                keeps; or a partial or bound method of such a one, with its bound values.
            mesh: Mesh of the devices to run on, with the names and sizes of the plan's axes;
                None for the plan's own mesh.
            **options: Options of `pjit` for a plain function, such as `donate_argnums=0`.

        Raises:
            ArgumentError: If the function is another one, or the mesh is missing or has others
                axes.
            ProgramTooLargeError: If the program fits in no layout.
        """
        with short_tracebacks:
            if not self.fits:
                used = self.chosen.best_bytes
                raise ProgramTooLargeError(
                    f"{self.name} fits in no layout: the smallest takes {in_bytes(used)} of "
                    f"{in_bytes(self.memory_bytes)} on each device: {self._remedy()}"
                )
            applied = PlannedProgram(
                name=self.name,
                layout=self.layout,
                arguments=tuple(value.path for value in self.inputs),
                results=tuple(value.path for value in self.outputs),
                fingerprint=self.fingerprint,
                mesh=self._checked_mesh(self._own_mesh if mesh is None else mesh),
                tracing=Tracing(
                    self.explicit_axes,
                    tuple(map(spec_of_text, self.types)),
                    self.ignores_constraints,
                ),
            )
            return planned(fun, applied, options)

    def _remedy(self) -> str:
        if self.smallest_slice:
            return f"use {self.smallest_slice}"
        return "use more devices, smaller batches or jax.checkpoint"

    @property
    def _own_mesh(self) -> Mesh | None:
        program = self._program
        return None if program is None else program.at_hand or program.mesh

    def find_state_shardings(
        self, values: Mapping[str, Any], mesh: Mesh | None
    ) -> dict[str, NamedSharding]:
        """Return the shardings of a state that the planned function takes; see `eval_shape`.

        Args:
            values: Types of the state's arrays, by their paths as a result: `result['w']`. The
                state is one argument of the function, or a tuple of its first ones.
            mesh: Mesh for a plan that was read from JSON.

        Raises:
            ArgumentError: If no argument has these paths and shapes, or the mesh is missing.
        """
        planned = {value.path: value for value in self.inputs}
        roots = [argument.path for argument in self.arguments]
        for names in (*([root] for root in roots), roots):
            inputs = {path: planned.get(_argument_path(path, names)) for path in values}
            named = {path: value for path, value in inputs.items() if value is not None}
            shapes = {path: value.shape for path, value in named.items()}
            if shapes and shapes == {path: tuple(value.shape) for path, value in values.items()}:
                on = self._find_state_mesh(mesh)
                return {p: NamedSharding(on, spec_of_text(v.spec)) for p, v in named.items()}
        path, aval = next(iter(values.items()), ("result", None))
        raise ArgumentError(
            f"shardings is the plan of {self.name}, no argument of which ({', '.join(roots)}) has "
            f"the arrays of the result, such as {path} of shape {getattr(aval, 'shape', ())}: "
            f"return what {self.name} takes, or write shardings=rules, such as plan.rules()"
        )

    def _find_state_mesh(self, mesh: Mesh | None) -> Mesh:
        own = self._own_mesh or mesh
        if own is not None and dict(own.shape) == dict(self.mesh):
            return own
        sizes = dict(self.mesh)
        raise MeshError(
            f"shardings is a plan for the axes {sizes}, read from JSON, and the mesh in force has "
            f"{dict(own.shape) if own else 'none'}: call inside `with jax.set_mesh(jax.make_mesh("
            f"{tuple(sizes.values())}, {tuple(sizes)})):`"
        )

    def _checked_mesh(self, mesh: Mesh | None) -> Mesh:
        sizes = dict(self.mesh)
        if mesh is None:
            raise ArgumentError(
                f"mesh of apply is missing, and the plan was read from JSON: write "
                f"plan.apply({self.name}, mesh=jax.make_mesh({tuple(sizes.values())}, "
                f"{tuple(sizes)}))"
            )
        if dict(mesh.shape) != sizes:
            raise ArgumentError(
                f"mesh of apply has the axes {dict(mesh.shape)}, but the plan was made for "
                f"{sizes}: write mesh=jax.make_mesh({tuple(sizes.values())}, {tuple(sizes)})"
            )
        return Mesh(mesh.devices, mesh.axis_names)

    def rules(self) -> tuple[PathRule, ...]:
        """Return the layout of the arguments as rules; the first that matches a path holds."""
        rules = path_rules({value.path: value.spec for value in self.inputs})
        return tuple(PathRule(pattern, spec_of_text(spec)) for pattern, spec in rules)

    def logical_axis_rules(self) -> dict[str, tuple[str, ...] | None]:
        """Return the mesh axes of each logical axis, as haliax's axis mapping; None for none.

        Its items are the `rules` of `flax.linen.logical_axis_rules`, and of `nnx` metadata.
        """
        return {rule.name: rule.axes or None for rule in self.axis_rules}

    def logical_axis_rules_yaml(self) -> str:
        """Return the mesh axes of each logical axis as `logical_axis_rules` of MaxText's YAML."""
        rules = [json.dumps([rule.name, list(rule.axes)]) for rule in self.axis_rules]
        return "logical_axis_rules: [\n" + "".join(f"  {rule},\n" for rule in rules) + "]\n"

    def code(self) -> str:
        """Return the layout as Python code that imports JAX alone.

        It has the mesh, shardings by rules, and a wrapper that inserts the constraints by line and
        operation; for functions of `nnx.jit` and `eqx.filter_jit` it imports these. The specs of
        explicit axes belong into `out_sharding=` of the lines that the report lists.
        """
        return plan_code(self)

    def __repr__(self) -> str:
        chosen = self.chosen
        time = in_seconds(chosen.best_seconds)
        return f"<AutoPlan of {self.name} on {self.devices}: {self.outcome}, {time}; print it>"

    def parts(self) -> Iterator[Part]:
        """Yield the head and the sections; pages have the code too."""
        yield from plan_parts(self)
        code = join_cell(Span(self.code(), "block"))
        yield Section("code", "Code", summary=code, view="page", is_kept=True)


def _argument_path(path: str, names: Sequence[str]) -> str:
    """Return the path of a result as one of an argument, or of the arguments of its first parts."""
    rest = path.removeprefix("result")
    if len(names) == 1:
        return names[0] + rest
    number, _, below = rest.removeprefix("[").partition("]")
    is_argument = number.isdecimal() and int(number) < len(names)
    return names[int(number)] + below if is_argument else path


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
        tracing: How the function is traced.
        by_users_paths: Whether the function has its arguments by these paths; a wrapper has others.
    """

    name: str
    layout: ProgramLayout
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    fingerprint: str
    mesh: Mesh
    tracing: Tracing
    by_users_paths: bool = True

    def place(self, call: Call) -> Call:
        """Return a traced call with the layout.

        Raises:
            ArgumentError: If the call is one of another program.
        """
        jaxpr, tracing = call.traced.jaxpr, self.tracing
        if not (self.layout.constraints or tracing.explicit_axes or tracing.ignores_constraints):
            self._check(call, jaxpr)
            return self._with_shardings(call, jaxpr)
        # One jaxpr for all calls: its programs are kept by it.
        inside = PROGRAMS.cached(jaxpr, ("plan", self), lambda: self._constrained(call))
        return self._with_shardings(call, inside)

    def _with_shardings(self, call: Call, jaxpr: Any) -> Call:
        ins, outs = (
            tuple([NamedSharding(self.tracing.set_axis_types(self.mesh), spec) for spec in side])
            for side in (self.layout.in_specs, self.layout.out_specs)
        )
        return replace(
            call,
            traced=call.traced._replace(jaxpr=jaxpr, in_avals=tuple(jaxpr.in_avals), shared={}),
            mesh=self.mesh,
            in_shardings=ins,
            out_shardings=outs,
        )

    def _constrained(self, call: Call) -> Any:
        jaxpr = self.tracing.release(call.traced.jaxpr, self.mesh)
        self._check(call, jaxpr)
        try:
            check_layout(jaxpr, self.mesh, self.layout)
        except (IndexError, ValueError) as error:
            raise ArgumentError(
                f"the plan of {self.name} is not one of this program ({error}): make a plan for "
                f"it, xlashard.auto_shard({self.name}, ..., mesh=mesh)"
            ) from None
        return insert_constraints(jaxpr, self.mesh, self.layout.constraints)

    def _check(self, call: Call, jaxpr: Any) -> None:
        traced = call.traced
        differs = next((p for p in traced.arg_names if p not in self.arguments), None)
        # A parameter may have another name: its arrays keep their positions and keys.
        names, own = (list(map(_keys_below, side)) for side in (traced.arg_names, self.arguments))
        same = names == own and traced.result_paths == self.results
        if not self.by_users_paths:
            counts = len(traced.arg_names), len(traced.result_paths)
            differs, same = None, counts == (len(self.arguments), len(self.results))
        if not same or fingerprint_of(jaxpr) != self.fingerprint:
            what = "other operations" if differs is None else f"the argument {differs}"
            raise ArgumentError(
                f"{traced.name} has {what}, which the plan of {self.name} doesn't know: make a "
                f"plan for it, xlashard.auto_shard({traced.name}, ..., mesh=mesh)"
            )


def _keys_below(path: str) -> str:
    """Return the path of an array below the function's parameter."""
    return re.sub(r"^\w+", "", path)


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
        program = self._program
        leaves, tree = jax.tree.flatten((args, kwargs))
        bare_args, bare_kwargs = tree.unflatten(program.tracing.place(leaves, program.mesh))
        with jax.set_mesh(program.tracing.set_axis_types(program.mesh)):
            call = super().trace(bare_args, bare_kwargs)
        values = self.parameters.flatten_call(args, kwargs)[0]
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
    fun, values, named = unwrap(fun, (), {})
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
        ArgumentError: As for `_find_held_function`.
    """
    held = _find_held_function(wrapper, f"fun of apply, {program.name}, is")
    rewrapped, compiled = copy.copy(wrapper), getattr(wrapper, held)
    body = copy.copy(compiled._fun)
    for name, value in vars(body).items():
        if value is wrapper:
            # Both share the identities of modules during a call.
            object.__setattr__(body, name, rewrapped)
    inner = pjit(body, **jitted.options_of(compiled))
    object.__setattr__(rewrapped, held, planned(inner, replace(program, by_users_paths=False), {}))
    return rewrapped


def check_applicable(fun: Any) -> None:
    """Check that a plan could be applied to a function, before it is searched.

    Args:
        fun: The function.

    Raises:
        ArgumentError: If it isn't known where a wrapper keeps its function.
    """
    fun = unwrap(fun, (), {})[0]
    is_own = isinstance(getattr(fun, "_function", None), Function)
    if is_wrapper(fun) and not is_own and not jitted.is_jitted(fun):
        _find_held_function(fun, "auto_shard takes")


def _find_held_function(wrapper: Any, subject: str) -> str:
    """Return the name of the attribute by which a wrapper holds its function of `jax.jit`.

    Raises:
        ArgumentError: If it isn't known.
    """
    held = [name for name, value in vars(wrapper).items() if jitted.is_jitted(value)]
    if len(held) != 1:
        raise ArgumentError(
            f"{subject} a {type(wrapper).__name__} with a method lower, which holds no function of "
            "jax.jit that could get the layout: write the function inside it, as a function of "
            "pytrees"
        )
    return held[0]
