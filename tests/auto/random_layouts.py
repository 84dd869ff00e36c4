"""Compare random programs under the layouts that a search finds with their results on one device.

`python -m tests.core.pjit.random_programs --layouts --count 1000` runs many.
"""

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

import xlashard
from tests.core.pjit.random_programs.checking import (
    REPLICATED,
    XLA,
    Failure,
    Wrong,
    compare,
    first_line,
    requested_specs,
)
from tests.core.pjit.random_programs.dice import Dice
from tests.core.pjit.random_programs.environment import (
    Library,
    jax_sharded,
    plain,
    scalar,
    xlashard_sharded,
)
from tests.core.pjit.random_programs.running import (
    SMOOTH_CALLS,
    Module,
    make_mesh,
    read_header,
    under,
)
from xlashard._jax.trace.jaxprs import as_function
from xlashard._jax.trace.tracing import bodies
from xlashard.auto import axis_costs, layout_builder, memory_model, search
from xlashard.auto.graph import program_graph
from xlashard.auto.problem import (
    AutoProblem,
    ConstraintSite,
    Machine,
    ProgramLayout,
    insert_constraints,
    machine_of,
)

ODD_LAYOUTS = 3
"""Number of layouts by random costs that a program runs under."""


def find_layout_failure(
    text: str, partitioner: str | None = None, *, under_jit: bool = False
) -> Failure | None:
    """Run a program under layouts, and return the first difference to its values on one device.

    These are all layouts that the search finds, and some that it finds by random costs. The kind is
    `XLA` if `jax.jit` of the same jaxpr with the same shardings fails alike.

    Args:
        text: The program.
        partitioner: Partitioner to use instead of the one in the text.
        under_jit: Run `jax.jit` alone, to see whether it ends the process.
    """
    header = replace(read_header(text), explicit=False)
    with under(partitioner or header.partitioner):
        mesh = make_mesh(header)
        try:
            case = _Case.drawn(text, mesh, xlashard_sharded(mesh, named=True))
        except Exception as error:
            return _untraced(text, mesh, error)
        return case.failure(case.run_under_jit if under_jit else case.run)


def _untraced(text: str, mesh: Any, error: Exception) -> Failure:
    """Return the failure of a program that isn't traced, of kind `XLA` if JAX alone fails alike."""
    message = first_line(error)
    try:
        _Case.drawn(text, mesh, jax_sharded(mesh))
    except Exception as theirs:
        kind = XLA if first_line(theirs) == message else "program"
        return Failure(kind, f"it is not traced: {message}", f"raises {first_line(theirs)}")
    return Failure("program", f"it is not traced: {message}", "right")


@dataclass(frozen=True)
class _Case:
    """Program with the problem that was drawn for it.

    Attributes:
        dice: Source of the choices.
        mesh: The mesh.
        problem: The problem.
        arguments: The arguments, flat.
        wanted: The results on one device, flat.
        exact: For each result, whether its bits are the same under each order of operations.
    """

    dice: Dice
    mesh: Any
    problem: AutoProblem
    arguments: list[Any]
    wanted: list[Any]
    exact: tuple[bool, ...]

    @classmethod
    def drawn(cls, text: str, mesh: Any, around: Library) -> "_Case":
        dice = Dice(int(re.findall(r"\d+", text.splitlines()[0])[0]))
        library = replace(around, place=lambda spec: around.place(_reduced(spec)))
        module = Module.read(text, library)
        derived = module.call in SMOOTH_CALLS
        arguments, tree = jax.tree.flatten(module.arguments)
        function = _flat(module, tree, derived)
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        function = _flat(Module.read(text, plain()), tree, derived)
        wanted = jax.tree.leaves(jax.jit(function)(*arguments))
        ins = _fixed(module.options.get("in_shardings", ()), module.arguments, dice)
        outs = [None] * len(wanted)
        if not derived:
            outs = _fixed(module.options["out_shardings"], shapes, dice)
        tied = _ties(dice, arguments, wanted, ins, outs)
        donated = {argument for argument, _ in tied if dice.chance(0.7)}
        problem = AutoProblem(
            jaxpr=traced,
            machine=_machine(dice, mesh),
            in_specs=tuple(ins),
            out_specs=tuple(outs),
            tied=tied,
            donated=tuple(k in donated for k in range(len(arguments))),
            memory_bytes=dice.pick([math.inf, 1e6, 1e4, 1e3]),
        )
        exact = () if derived else module.exact
        return cls(dice, mesh, problem, arguments, wanted, exact or (False,) * len(wanted))

    def failure(self, run: Callable[[ProgramLayout], Failure | None]) -> Failure | None:
        """Return the first failure of the layouts."""
        try:
            layouts = self._layouts()
        except Exception as error:
            return Failure(f"search raises {type(error).__name__}", _place(error))
        for layout in layouts:
            try:
                check_layout(self.problem, layout)
            except Wrong as wrong:
                return wrong.failure
            failure = run(layout)
            if failure is not None:
                return replace(failure, message=f"{layout}: {failure.message}")
        return None

    def _layouts(self) -> list[ProgramLayout]:
        plain = search.Search(self.problem, 60.0)
        found, least = plain.run(), plain.least_seconds()
        assert all(layout.seconds >= least * (1 - 1e-9) for layout in found)
        sums = [x for usual in found for x in plain.thinned(usual) if x.name.endswith("whole sums")]
        with _odd_costs(self.dice):
            odd = search.Search(self.problem, 60.0).run()
        distinct = {_key(layout): layout for layout in (*found, *sums, *odd)}
        usual = {_key(layout) for layout in found}
        odd = [layout for key, layout in distinct.items() if key not in usual]
        return [*(distinct[key] for key in usual), *self.dice.sample(odd, ODD_LAYOUTS)]

    def run_under_jit(self, layout: ProgramLayout) -> None:
        """Run a layout under `jax.jit` alone."""
        jaxpr = insert_constraints(self.problem.jaxpr, self.mesh, layout.constraints)
        self._outcome(jax.jit, jax.sharding.NamedSharding, jaxpr, layout)

    def run(self, layout: ProgramLayout) -> Failure | None:
        """Run a layout under `pjit`, and where that fails under `jax.jit` too."""
        try:
            jaxpr = insert_constraints(self.problem.jaxpr, self.mesh, layout.constraints)
        except Exception as error:
            return Failure(f"insertion raises {type(error).__name__}", _place(error))
        ours = self._outcome(xlashard.pjit, xlashard.NamedSharding, jaxpr, layout)
        failure = self._difference(ours)
        if failure is None:
            return None
        theirs = self._outcome(jax.jit, jax.sharding.NamedSharding, jaxpr, layout)
        outcome = self._difference(theirs)
        if outcome is None:
            return replace(failure, jax="right")
        error = f"raises {jax.errors.JaxRuntimeError.__name__}"
        alike = outcome.kind in (failure.kind, error if "CompileError" in failure.kind else "")
        if failure.kind == "values":
            alike = outcome.message == failure.message
        return Failure(XLA if alike else failure.kind, failure.message, str(outcome.message))

    def _outcome(self, jit: Any, named: Any, jaxpr: Any, layout: ProgramLayout) -> Any:
        """Return the results under a layout, or an error."""
        try:
            ins = tuple(named(self.mesh, spec) for spec in layout.in_specs)
            outs = [named(self.mesh, spec) for spec in layout.out_specs]
            donated = tuple(k for k, flag in enumerate(self.problem.donated) if flag)
            compiled = jit(
                as_function(jaxpr), in_shardings=ins, out_shardings=outs, donate_argnums=donated
            )
            arguments = [
                xlashard.device_put(jnp.copy(x), s) if flag else x
                for x, s, flag in zip(self.arguments, ins, self.problem.donated, strict=True)
            ]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                return jax.block_until_ready(list(compiled(*arguments)))
        except Exception as error:
            return error

    def _difference(self, outcome: Any) -> Failure | None:
        """Return the difference of results, or an error, to the results on one device."""
        if isinstance(outcome, Exception):
            return Failure(f"raises {type(outcome).__name__}", str(outcome)[:1000])
        try:
            compare(outcome, self.wanted)
        except Wrong as wrong:
            return wrong.failure
        for k, (mine, right) in enumerate(zip(outcome, self.wanted, strict=True)):
            if self.exact[k] and not _is_same(mine, right):
                return Failure("bits", f"result[{k}] {right.dtype}{list(right.shape)}")
        return None


def check_layout(problem: AutoProblem, layout: ProgramLayout) -> None:
    """Check that a layout keeps fixed and tied specs, and that its specs divide.

    Raises:
        Wrong: If not.
    """
    jaxpr = problem.jaxpr
    sizes = {axis.name: axis.size for axis in problem.machine.axes}
    sides = (
        ("in_specs", layout.in_specs, problem.in_specs, jaxpr.in_avals),
        ("out_specs", layout.out_specs, problem.out_specs, jaxpr.out_avals),
    )
    for name, specs, fixed, avals in sides:
        for k, (spec, kept, aval) in enumerate(zip(specs, fixed, avals, strict=True)):
            shape = getattr(aval, "shape", ())
            if kept is not None and _axes(spec, shape, sizes) != _axes(kept, shape, sizes):
                raise Wrong("fixed", f"{layout.name}: {name}[{k}] is {spec} instead of {kept}")
            _check_pieces(f"{layout.name}: {name}[{k}]", spec, shape, sizes)
    for site, spec in layout.constraints:
        _check_pieces(f"{layout.name}: {site}", spec, _shape_at(jaxpr, site), sizes, padding=4 / 3)
    for argument, result in problem.tied:
        if layout.in_specs[argument] != layout.out_specs[result]:
            specs = layout.in_specs[argument], layout.out_specs[result]
            raise Wrong("tied", f"{layout.name}: {argument} and {result} are {specs}")


def _check_pieces(
    name: str, spec: Any, shape: Sequence[int], sizes: dict[str, int], padding: float = 1.0
) -> None:
    """Check that a spec shards each dimension into no empty pieces, with no more padding."""
    axes = _axes(spec, shape, sizes)
    tiles = [math.prod(sizes[axis] for axis in each) for each in axes]
    used = [axis for each in axes for axis in each]
    if len(tiles) > len(shape) or any(
        n % t and (t > n or math.ceil(n / t) * t > padding * n)
        for n, t in zip(shape, tiles, strict=True)
    ):
        raise Wrong("uneven", f"{name} is {spec} for {shape}")
    if len(set(used)) < len(used):
        raise Wrong("repeated", f"{name} is {spec}")


def _shape_at(jaxpr: Any, site: ConstraintSite) -> Sequence[int]:
    """Return the shape of the value at a site."""
    eqn = None
    for k, number in enumerate(site.path):
        if k % 2:
            jaxpr = list(bodies(eqn))[number]
        else:
            eqn = jaxpr.eqns[number]
    sides: dict[str, Any] = {"parameter": jaxpr.invars}
    if eqn is not None:
        sides |= {"operand": eqn.invars, "result": eqn.outvars}
    return sides[site.kind][site.index].aval.shape


def _axes(spec: Any, shape: Sequence[int], sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """Return the axes of each dimension, without those of size 1."""
    entries = [*spec, *(None,) * (len(shape) - len(spec))]
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]
    return [tuple(axis for axis in axes if sizes[axis] > 1) for axes in entries]


def _reduced(spec: Any) -> Any:
    """Return a spec without partial sums, which explicit axes alone have."""
    return xlashard.P() if spec is not None and spec.unreduced else spec


def _key(layout: ProgramLayout) -> Any:
    return layout.in_specs, layout.out_specs, layout.constraints


def _place(error: Exception) -> str:
    """Return an error with the line that raised it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    code = "" if frame is None else f" at {frame.tb_frame.f_code.co_qualname}:{frame.tb_lineno}"
    return f"{first_line(error)}{code}"


def _is_same(mine: Any, right: Any) -> bool:
    if jax.dtypes.issubdtype(right.dtype, jax.dtypes.prng_key):
        mine, right = jax.random.key_data(mine), jax.random.key_data(right)
    return np.array_equal(np.asarray(mine), np.asarray(right), equal_nan=right.dtype.kind in "fc")


def _flat(module: Module, tree: Any, derived: bool) -> Callable[..., Any]:
    """Return the function of a program, or its derivative, of flat arguments."""

    def values(*leaves: Any) -> Any:
        return module.f(*jax.tree.unflatten(tree, leaves))

    def derivative(*leaves: Any) -> Any:
        def loss(*floats: Any) -> jax.Array:
            full = list(leaves)
            for k, value in zip(module.floats, floats, strict=True):
                full[k] = value
            found = values(*full)
            return scalar(*[x for x in jax.tree.leaves(found) if jnp.isrealobj(x)])

        floats = [leaves[k] for k in module.floats]
        loss = jax.checkpoint(loss) if module.call == "remat" else loss
        return jax.value_and_grad(loss, argnums=tuple(range(len(floats))))(*floats)

    return derivative if derived else values


def _fixed(resources: Any, tree: Any, dice: Dice) -> list[Any]:
    """Return the spec of each leaf that is fixed: half of those in the program."""
    found = []
    for spec in requested_specs(resources, tree):
        spec = xlashard.P() if spec == REPLICATED else spec
        kept = spec is not None and dice.chance(0.5)
        found.append(spec if kept else None)
    return found


def _ties(
    dice: Dice, arguments: list[Any], results: list[Any], ins: list[Any], outs: list[Any]
) -> tuple[tuple[int, int], ...]:
    """Draw pairs of arguments and results of one type, of which at most one is fixed."""
    ties, taken = [], set()
    for i, x in enumerate(arguments):
        for k, y in enumerate(results):
            free = k not in taken and (ins[i] is None or outs[k] is None)
            fits = jax.typeof(x).shape == y.shape and jax.typeof(x).dtype == y.dtype
            if free and fits and dice.chance(0.6):
                ties.append((i, k))
                taken.add(k)
                break
    return tuple(ties)


def _machine(dice: Dice, mesh: Any) -> Machine:
    """Return a machine with random links."""
    machine = machine_of(mesh)
    axes = tuple(
        replace(
            axis,
            bytes_per_second=10.0 ** dice.between(7, 12),
            latency=10.0 ** -dice.between(4, 9),
        )
        for axis in machine.axes
    )
    return replace(machine, axes=axes)


@contextlib.contextmanager
def _odd_costs(dice: Dice) -> Iterator[None]:
    """Search by random costs, for values of any size, within a block."""

    class Costs(axis_costs.CostModel):
        def share(self, number: int, factor: int) -> float:
            return super().share(number, factor) * (0.1 + dice.between(0, 20) / 10)

        def conversion(self, *change: int) -> float:
            return super().conversion(*change) * dice.between(0, 3)

    with (
        patch.object(search, "CostModel", Costs),
        patch.object(memory_model, "SMALL_BYTES", 0),
        patch.object(layout_builder, "SMALL_BYTES", 0),
        patch.object(program_graph, "_SMALL_BYTES", dice.pick([0, 1 << 21])),
        patch.object(axis_costs, "NEGLIGIBLE_BYTES", 0),
    ):
        yield
