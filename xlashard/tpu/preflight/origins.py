"""Why a collective is there, whether anyone asked for it, and what would remove it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xlashard._jax.dataflow import Line, Scope, is_variable, source_line
from xlashard.geometry import MeshGrid
from xlashard.geometry.groups import DevicePairs
from xlashard.pjit.report.communication import Sources
from xlashard.program.collectives import Collective
from xlashard.program.hlo import Frame
from xlashard.sharding import NamedSharding
from xlashard.tpu.preflight.cases import Case, fits
from xlashard.tpu.preflight.flow import Flow
from xlashard.tpu.preflight.layouts import Axes, Layouts, Source, axes_of, local_shape, spec_of
from xlashard.tpu.preflight.parts import Origin

_EXPLICIT_NAMES = """
    all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pmax pmean pmin
    ppermute psum psum2 psum_invariant psum_scatter ragged_all_to_all reduce_scatter
"""
_EXPLICIT = frozenset(_EXPLICIT_NAMES.split())
_PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True)
class Judgement:
    """What is known of a collective's reason.

    Attributes:
        origin: Why it is there.
        asked_for: Whether the program or the caller's shardings ask for it.
        remedy: What to write to be rid of it, where nobody did.
    """

    origin: Origin
    asked_for: bool = True
    remedy: str = ""


@dataclass(frozen=True, eq=False)
class Judge:
    """Finds the reasons of a program's collectives.

    Attributes:
        flow: The ways of values through the compiled module.
        layouts: What the program says of its values.
        grid: Its mesh.
        sources: Which lines of a stack are the user's.
        results: For each result whether the caller said how it is to be dealt out.
        collectives: All of them.
    """

    flow: Flow
    layouts: Layouts
    grid: MeshGrid
    sources: Sources
    results: tuple[bool, ...]
    collectives: tuple[Collective, ...]

    def judge(self, collective: Collective) -> Judgement:
        """The reason of a collective."""
        if _operation(collective.op_name) in _EXPLICIT:
            return Judgement("explicit")
        case = self._case(collective)
        before = self._reduction_before(case)
        if before is not None:
            return self.judge(before)
        if case.reduces:
            return Judgement("gradient" if self._is_gradient(case) else "reduction")
        if self._is_constrained(case):
            return Judgement("constraint")
        if case.argument and case.gathers:
            return Judgement("argument")
        result = self.flow.results.get(collective.name)
        if result is not None and self.results[result : result + 1] == (True,):
            return Judgement("result")
        return Judgement("resharding", False, Remedies(self, case).text())

    def _case(self, collective: Collective) -> Case:
        home = self.flow.module.computations[collective.computation]
        instruction = home.instructions[collective.name]
        axes = frozenset(part.name for part in collective.axes(self.grid) or ())
        named = {path for path, _ in self.layouts.arguments}
        argument = collective.op_name if collective.op_name in named else ""
        if not argument:
            names = instruction.operand_names
            # What a send takes besides is a token.
            names = names[:1] if instruction.opcode == "send" else names
            found = {self.flow.argument(home, name) for name in names}
            argument = found.pop() if len(found) == 1 else ""
        windowed = next(filter(None, map(self.flow.windowed, self.flow.sites(home))), "")
        moves = collective.kind == "collective-permute"
        if moves and not windowed and self._is_of_ring(collective):
            windowed = self.flow.unrolled(home, instruction)
        return Case(
            collective,
            home,
            instruction,
            axes,
            argument if argument in named else "",
            reduces=collective.kind in ("all-reduce", "reduce-scatter")
            or (moves and windowed == "scatter"),
            gathers=collective.kind in ("all-gather", "collective-broadcast")
            or (moves and windowed == "gather"),
        )

    def _is_of_ring(self, collective: Collective) -> bool:
        """Whether a product's devices pass something on, each to the next along some axes."""
        if not isinstance(collective.groups, DevicePairs):
            return False
        size = math.prod(part.size for part in collective.axes(self.grid) or ())
        return (
            collective.groups.ring_size == size > 1
            and _operation(collective.op_name) == "dot_general"
        )

    def _reduction_before(self, case: Case) -> Collective | None:
        """The sum of which a collective is a part: one over slices, or a sum that is put together.

        A sum over several slices is first scattered inside each, then added up between them, then
        gathered again.
        """
        if case.collective.kind == "reduce-scatter" or not case.instruction.operand_names:
            return None
        name = self.flow.collective_before(case.home, case.instruction.operand_names[0])
        before = self._by_name.get(name)
        is_scatter = before is not None and before.kind == "reduce-scatter"
        return before if is_scatter else None

    @cached_property
    def _by_name(self) -> dict[str, Collective]:
        return {collective.name: collective for collective in self.collectives}

    def _is_gradient(self, case: Case) -> bool:
        """Whether it adds up an argument's gradient over devices that have parts of a batch."""
        collective = case.collective
        op_name = collective.op_name
        if not op_name:
            maker = self.flow.told_maker(case.home, case.instruction)
            op_name = "" if maker is None else self.flow.module.op_name(maker)
        if "transpose(" not in op_name:
            return False
        arrays = collective.operands
        if collective.kind == "collective-permute":
            # What goes round is a part of the result.
            without: frozenset[str] = frozenset()
        else:
            without = case.axes
        shapes = {array.dims for array in arrays}
        return any(fits(dims, local) for local in self._argument_shapes(without) for dims in shapes)

    def _argument_shapes(self, without: frozenset[str]) -> Iterator[tuple[int, ...]]:
        """The shapes of arguments on a device, and of the layers that lie in them in a stack."""
        for shape, sharding in self._placed:
            local = local_shape(shape, sharding, without)
            yield local
            if len(local) > 1:
                yield local[1:]

    @cached_property
    def _placed(self) -> frozenset[tuple[tuple[int, ...], NamedSharding]]:
        avals = self.layouts.jaxpr.in_avals
        return frozenset(
            (tuple(aval.shape), sharding)
            for aval, (_, sharding) in zip(avals, self.layouts.arguments, strict=False)
            if isinstance(sharding, NamedSharding) and aval.shape and aval.dtype.kind not in "biu"
        )

    def _is_constrained(self, case: Case) -> bool:
        """Whether a constraint wants it."""
        collective = case.collective
        lines = {*self._lines(collective.frames), *self._lines(collective.needed_by_frames)}
        own = set(self._lines(collective.frames))
        for change in self.layouts.changes:
            reach = change.closed if case.gathers else change.moved | change.used
            if not case.axes <= reach or not case.axes & change.moved:
                continue
            if own & change.lines or (not own and lines & change.lines):
                return True
            if case.argument in change.arguments and case.argument:
                return True
        # A constrained value that a product wants whole: what comes in is cut on purpose.
        return (
            case.gathers
            and not case.argument
            and _operation(collective.needed_by or collective.op_name) in _PRODUCTS
            and not self._could_add_up(case)
            and any(
                case.axes <= {a for dim in axes_of(said, eqn.invars[0].aval.ndim) for a in dim}
                for scope, eqn, said in self._constraints_of(case)
            )
        )

    def _could_add_up(self, case: Case) -> bool:
        """Whether a product sums over a dimension that both operands have cut alike.

        Then nothing but the sums has to be sent, and no constraint asks for more.
        """
        for scope, eqn in self.equations(case):
            if eqn.primitive.name != "dot_general":
                continue
            contracted = eqn.params["dimension_numbers"][0]
            cut = [
                {a for dim in dims for s in self.layouts.sources(scope, v)[dim] for a in s.axes}
                for v, dims in zip(eqn.invars, contracted, strict=True)
            ]
            if all(case.axes <= axes for axes in cut):
                return True
        return False

    def _constraints_of(self, case: Case) -> Iterator[tuple[Scope, Any, NamedSharding]]:
        """The constraints from which the value of a collective comes."""
        lines = {s.line for each in self._values(case) for dim in each for s in dim if s.line}
        for scope, eqn, said in self.layouts.constraints:
            if lines & self._line_of(eqn):
                yield scope, eqn, said

    def _line_of(self, eqn: Any) -> frozenset[Line]:
        return frozenset(line for line, found in self._by_equation.get(id(eqn), ()) if found is eqn)

    @cached_property
    def _by_equation(self) -> dict[int, list[tuple[Line, Any]]]:
        found: dict[int, list[tuple[Line, Any]]] = {}
        for line, equations in self.layouts.equations.items():
            for _, eqn in equations:
                found.setdefault(id(eqn), []).append((line, eqn))
        return found

    def _values(self, case: Case) -> Iterator[list[list[Source]]]:
        """What says how the value is dealt out that a collective deals with."""
        for scope, eqn in self.equations(case):
            for value in (*eqn.invars, *eqn.outvars):
                if is_variable(value):
                    yield self.layouts.sources(scope, value)

    def equations(self, case: Case) -> list[tuple[Scope, Any]]:
        """The equations of the operation that a collective belongs to, else that needs it."""
        collective = case.collective
        told = [
            (collective.op_name, collective.frames),
            (collective.needed_by, collective.needed_by_frames),
        ]
        if case.gathers:
            # A gather is there for whoever wants the whole.
            told.reverse()
        for op_name, frames in told:
            operation = _operation(op_name)
            for line in self._lines(frames):
                found = [
                    (scope, eqn)
                    for scope, eqn in self.layouts.equations.get(line, ())
                    if eqn.primitive.name == operation
                ]
                if found:
                    return found
        return []

    def _lines(self, frames: Sequence[Frame]) -> list[Line]:
        return [(frame.file, frame.line) for frame in frames]

    def place(self, frames: Sequence[Frame]) -> str:
        """The user's line of a stack: `model.py:57`."""
        line = self.sources.line(frames)
        return "" if line is None else f"{Path(line.file).name}:{line.line}"


@dataclass(frozen=True, eq=False)
class Remedies:
    """What would remove a collective that nobody asked for.

    Attributes:
        judge: Who knows the program.
        case: The collective.
    """

    judge: Judge
    case: Case

    def text(self) -> str:
        """What to write; at least where to look."""
        found = self._by_equations() or self._by_argument(self.case.argument)
        if not found and not self.case.collective.frames:
            made_from = self.judge.flow.arguments(self.case.home, self.case.instruction)
            found = self._by_argument(min(made_from)) if len(made_from) == 1 else ""
        return found or self._where()

    def _by_equations(self) -> str:
        """The source of the value, dealt out as the operation wants it."""
        for scope, eqn in self.judge.equations(self.case):
            values = [v for v in eqn.invars if is_variable(v) and v.aval.shape]
            values.sort(key=lambda v: not self._is_made_there(scope, v))
            sources = [self.judge.layouts.sources(scope, v) for v in values]
            for index, mine in enumerate(sources):
                others = [s for i, s in enumerate(sources) if i != index]
                moved = [s for dim in mine for s in dim if self.case.axes & set(s.axes)]
                if not moved or not self._is_meant(moved):
                    continue
                wanted = self._wanted(eqn, values[index], mine, others)
                return self._written(moved[0], mine, wanted)
        return ""

    def _is_meant(self, moved: Sequence[Source]) -> bool:
        """Whether these are of the value that the collective moves, if it is an argument."""
        return not self.case.argument or any(s.path == self.case.argument for s in moved)

    def _is_made_there(self, scope: Scope, value: Any) -> bool:
        """Whether a value is made at the line of what the collective takes."""
        made = scope.makers.get(value) if is_variable(value) else None
        line = None if made is None else source_line(made[1])
        return line is not None and line in self._maker_lines

    @cached_property
    def _maker_lines(self) -> frozenset[Line]:
        flow = self.judge.flow
        told = flow.told_maker(self.case.home, self.case.instruction)
        frames = () if told is None else flow.module.frames(told)
        return frozenset((frame.file, frame.line) for frame in frames)

    def _wanted(
        self, eqn: Any, value: Any, mine: list[list[Source]], others: list[list[list[Source]]]
    ) -> list[Axes]:
        """The axes that an operation wants to cut each dimension of a value."""
        now = [_cut(dim) for dim in mine]
        shape = value.aval.shape
        name = eqn.primitive.name
        free = [tuple(a for a in axes if a not in self.case.axes) for axes in now]
        if name == "dot_general":
            return self._for_product(eqn, value, now, free, others)
        if shape == getattr(eqn.outvars[0].aval, "shape", None):
            for other in others:
                theirs = [_cut(dim) for dim in other]
                if len(theirs) == len(now) and any(theirs) and theirs != now:
                    return theirs
        return free if name in _PRODUCTS else self._elsewhere(shape, now, free)

    def _for_product(
        self,
        eqn: Any,
        value: Any,
        now: list[Axes],
        free: list[Axes],
        others: list[list[list[Source]]],
    ) -> list[Axes]:
        """Dimensions that are summed up, or go along, cut as those of the other operand are."""
        mine, theirs = zip(*eqn.params["dimension_numbers"], strict=True)
        if value is not eqn.invars[0]:
            mine, theirs = theirs, mine
        wanted = list(free)
        for other in others:
            for dim, their_dim in zip(sum(mine, ()), sum(theirs, ()), strict=True):
                cut = _cut(other[their_dim])
                elsewhere = {a for i, axes in enumerate(free) if i != dim for a in axes}
                if now[dim] != free[dim] and cut and not elsewhere & set(cut):
                    wanted[dim] = cut
        return wanted

    def _elsewhere(self, shape: Sequence[int], now: list[Axes], free: list[Axes]) -> list[Axes]:
        """The moved axes on another dimension, or on none if no other has room for them."""
        sizes = self.judge.grid.shape
        moved = tuple(a for axes in now for a in axes if a in self.case.axes)
        count = math.prod(sizes[a] for a in moved)
        for dim, size in enumerate(shape):
            if not now[dim] and size % count == 0:
                return [moved if i == dim else a for i, a in enumerate(free)]
        return free

    def _written(self, source: Source, mine: list[list[Source]], wanted: list[Axes]) -> str:
        """The source of a value, so that the value is dealt out as wanted."""
        dims = axes_of(source.sharding, len(source.shape))
        for dim, each in enumerate(mine):
            for s in each:
                if (s.path, s.line) == (source.path, source.line):
                    dims[s.dim] = wanted[dim]
        used: set[str] = set()
        for dim, axes in enumerate(dims):
            dims[dim] = tuple(a for a in axes if a not in used)
            used |= set(axes)
        spec = spec_of(dims)
        if source.path:
            return f"give in_shardings {spec} for {source.path}"
        file, line = source.line or ("", 0)
        return f"constrain the value at {Path(file).name}:{line} to {spec}"

    def _by_argument(self, path: str) -> str:
        """An argument that is dealt out otherwise from the start."""
        layouts = self.judge.layouts
        for (name, sharding), aval in zip(layouts.arguments, layouts.jaxpr.in_avals, strict=False):
            if name == path and isinstance(sharding, NamedSharding):
                now = axes_of(sharding, len(aval.shape))
                free = [tuple(a for a in axes if a not in self.case.axes) for axes in now]
                spec = self._elsewhere(aval.shape, now, free)
                if spec != now:
                    return f"give in_shardings {spec_of(spec)} for {path}"
        return ""

    def _where(self) -> str:
        """Where to constrain, if not to what."""
        collective, along = self.case.collective, " and ".join(sorted(self.case.axes))
        judge = self.judge
        maker = judge.place(collective.frames)
        if not maker:
            told = judge.flow.told_maker(self.case.home, self.case.instruction)
            maker = "" if told is None else judge.place(judge.flow.module.frames(told))
        user = judge.place(collective.needed_by_frames)
        if maker and user and maker != user:
            return (
                f"the value of {maker} lies otherwise than {user} wants it along {along}: "
                "constrain both to one spec"
            )
        if maker or user:
            return (
                f"constrain the operands and the result of {maker or user} to specs that "
                f"cut the same dimensions by {along}"
            )
        return (
            f"constrain what is computed along {along}: the compiler doesn't say which line it is"
        )


def _operation(op_name: str) -> str:
    """The primitive of an operation that JAX called `f/jvp()/while/body/dot_general`."""
    return op_name.rpartition("/")[2]


def _cut(sources: Sequence[Source]) -> Axes:
    """The axes that cut a dimension, by the first of its sources that is cut."""
    return next((s.axes for s in sources if s.axes), ())
