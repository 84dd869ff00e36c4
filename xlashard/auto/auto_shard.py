"""`auto_shard`: choose the layout of a function on a mesh, and prove it by compilation."""

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal

from xlashard._jax.trace.observed_programs import unobserved
from xlashard.auto.auto_program import (
    AutoProgram,
    FixedSpecs,
    Target,
    read_larger,
    read_programs,
)
from xlashard.auto.corrections import corrected, lightened
from xlashard.auto.layout_builder import INSIDE
from xlashard.auto.plan.auto_plan import AutoPlan, check_applicable
from xlashard.auto.plan.plan_description import describe_plan, tie_specs
from xlashard.auto.problem import AutoProblem, ProgramLayout
from xlashard.auto.proof import COMPILE_SECONDS, ProvenLayout, ProvenLayouts, Prover
from xlashard.auto.proof import measure as run_programs
from xlashard.auto.search import Search
from xlashard.errors import ArgumentError, CompileError, XlashardWarning
from xlashard.hlo.compiler_log import captured_log
from xlashard.predict.preflight.report.measured import RatesSources
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.consoles import show_progress
from xlashard.support.tracebacks import short_tracebacks
from xlashard.workers.job_pool import TIMED_OUT

PROVEN = 6
"""Number of layouts whose programs are compiled, whatever time that takes."""
PROOF_SECONDS = 60.0
"""CPU seconds of compilation within which further layouts are compiled."""
_FEW_ELEMENTS, _PROVEN_QUICKLY = 32_000_000, 2
"""Elements of the arguments (ten million parameters, their two moments of Adam, and a batch) below
which few layouts are searched and compiled for devices at hand, as a step takes milliseconds, and
number of these layouts that are compiled."""
_CLOSE = 1.03
"""Ties with the best layout are predicted to take at most so many times its time."""
_HOPELESS = 3.0
"""A third layout isn't compiled if its predicted time is so many times that of the best."""
_VARIED = 3
"""Number of the fastest layouts for TPUs that are compiled with other constraints inside."""
_LESS, _LESS_WITHOUT = 0.9, 0.8
"""Largest memory of a search after one, if a layout fits and if none does, as a share of its."""
_MESHES = 2
"""Number of meshes whose programs are compiled."""


def auto_shard(
    fun: Any,
    *args: Any,
    mesh: Target | None = None,
    topology: BaseTopology | str | None = None,
    memory: float = 0.9,
    measure: int = 0,
    time_limit: float = 60.0,
    compile_timeout: float = COMPILE_SECONDS,
    fixed: FixedSpecs | None = None,
    rates: RatesSources | None = None,
    ignore_constraints: bool = False,
    tie: Literal["names"] | None = None,
    **kwargs: Any,
) -> AutoPlan:
    """Choose the layout of a function: specs of arguments and results, and constraints inside.

    A search over the traced function proposes layouts, among them data, fully sharded data and
    tensor parallelism. The best are compiled for the mesh, and ranked by the time of their
    programs.

    Args:
        fun: A function of `xlashard.pjit`, `jax.jit` or `nnx.jit`, with its donation and the
            shardings that it prescribes; or a plain function.
        *args: Arguments of a call, or a `jax.ShapeDtypeStruct` per array. How arrays are sharded
            on the mesh now, and by the function's own specs, is one of the layouts that are tried.
        mesh: Mesh, or its axis sizes such as `{"data": 8, "model": 4}`; `"auto"`, or a topology,
            to choose the sizes of the axes `data` and `model`; None for the mesh in force.
        topology: Topology of TPUs or GPUs, or its name: `"v5e-16"`, `"h100-32"`; None for the
            devices of the mesh, or those of this process. Devices at hand that aren't TPUs are
            costed as v5e chips.
        memory: Share of a device's memory that the program may use.
        measure: Number of the fastest programs to run on the devices, with zeros as arguments.
        time_limit: Seconds that a search may take; the plan then names its gap to the best layout.
        compile_timeout: Seconds that the compilation of one layout for a topology may take; the
            plan refuses one that takes longer. 0 for no limit.
        fixed: Specs that the layout must keep, by regular expressions over the paths of arguments
            and results, such as `{"^batch": P("data")}`, or `dict(plan.rules())`; the first that
            matches holds.
        rates: File of the chip's measured rates, as `preflight` takes it.
        ignore_constraints: Leave out the function's own shardings and constraints, and the specs
            of explicit mesh axes, to see whether there is a better layout than its author's.
        tie: `"names"` for one spec for each logical name of flax's boxes and variables or haliax's
            arrays, and for equal layers, so that rules express the layout, which is proved so.
        **kwargs: Keyword arguments of the call.

    Returns:
        The plan. `print(plan)` displays it, `plan.apply(fun)` compiles the function with it.

    Raises:
        ArgumentError: If `fun`, `memory`, `measure`, `compile_timeout`, `fixed`, `rates` or `tie`
            is invalid.
        MeshError: If there is no mesh.
        TopologyError: If the topology is unknown, or the mesh doesn't match it.
        CompileError: If the compiler refuses the program in every layout.

    Example:
        >>> import jax, xlashard
        >>> from xlashard import P
        >>> w = jax.ShapeDtypeStruct((256, 64), "float32")
        >>> x = jax.ShapeDtypeStruct((1024, 256), "float32")
        >>> mesh = {"data": len(jax.devices())}
        >>> plan = auto_shard(lambda w, x: x @ w, w, x, mesh=mesh, fixed={"x": P("data")})
        >>> plan.inputs[1].spec
        "P('data')"
    """
    name = getattr(fun, "__name__", "a program")
    with (
        short_tracebacks,
        unobserved(),
        warnings.catch_warnings(),
        show_progress(f"choosing a layout of {name}"),
    ):
        # Candidates warn of what the plan does not keep.
        warnings.simplefilter("ignore", XlashardWarning)
        _check_options(memory, measure, compile_timeout)
        if tie not in (None, "names"):
            raise ArgumentError(f"tie={tie!r} is invalid: expected 'names' or None")
        check_applicable(fun)
        solved: list[tuple[AutoProgram, AutoProblem, ProvenLayouts]] = []
        programs = read_programs(
            fun, args, kwargs, mesh, topology, ignore_constraints=ignore_constraints
        )
        measured = (program.with_rates(rates) for program in programs)
        for program, problem in _promising(measured, memory, fixed, time_limit):
            _check_devices(program, measure)
            layouts = solve(program, problem, time_limit, timeout=compile_timeout, measure=measure)
            solved.append((program, problem, layouts))
        program, problem, layouts = min(solved, key=lambda each: each[-1].proven[0].rank)
        untied_seconds = None
        if tie:
            untied_seconds = layouts.proven[0].seconds
            specs = tie_specs(program, layouts.proven[0].layout.in_specs, (args, kwargs))
            pairs = zip(problem.in_specs, specs, strict=True)
            kept = tuple(tied if fixed is None else fixed for fixed, tied in pairs)
            tied = replace(problem, in_specs=kept)
            layouts = solve(program, tied, time_limit, timeout=compile_timeout, measure=measure)
        if measure:
            layouts = _measured(program, layouts, measure)
        plan = describe_plan(program, problem, layouts, (args, kwargs), fun, untied_seconds)
        if plan.fits or program.topology is None:
            return plan
        larger = read_larger(fun, args, kwargs, program)
        return plan.with_slice(smallest_slice(larger, memory, fixed, time_limit, compile_timeout))


def _promising(
    programs: Iterable[AutoProgram],
    memory: float,
    fixed: FixedSpecs | None,
    time_limit: float,
) -> list[tuple[AutoProgram, AutoProblem]]:
    """Return a program with its problem, or of several those of the fastest predicted layouts."""
    problems = [(program, program.problem(memory, fixed)) for program in programs]
    if len(problems) == 1:
        return problems
    limit = time_limit / len(problems)
    fastest = {
        id(problem): min(layout.seconds for layout in Search(problem, limit).run())
        for _, problem in problems
    }
    return sorted(problems, key=lambda each: fastest[id(each[1])])[:_MESHES]


def _check_options(memory: float, measure: int, timeout: float) -> None:
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory <= 1:
        raise ArgumentError(
            f"memory={memory!r} is invalid: expected a share of a device's memory, such as 0.9"
        )
    if isinstance(measure, bool) or not isinstance(measure, int) or measure < 0:
        raise ArgumentError(
            f"measure={measure!r} is invalid: expected a number of programs to run, such as 3"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise ArgumentError(
            f"compile_timeout={timeout!r} is invalid: expected the seconds that one compilation "
            "may take, such as 300.0, or 0 for no limit"
        )


def _check_devices(program: AutoProgram, measure: int) -> None:
    if measure and program.at_hand is None:
        raise ArgumentError(
            f"measure={measure} runs programs, but {program.topology} has no devices at hand: "
            "leave measure out, or pass the mesh of your devices"
        )


def _measured(program: AutoProgram, layouts: ProvenLayouts, count: int) -> ProvenLayouts:
    """Return the layouts after the fastest were run."""
    fitting = [p for p in layouts.proven if p.fits][:count]
    mesh = program.at_hand
    assert mesh is not None
    seconds = run_programs(program, [p.layout for p in fitting], mesh)
    timed = [replace(p, measured_seconds=s) for p, s in zip(fitting, seconds, strict=True)]
    rest = [p for p in layouts.proven if p not in fitting]
    return replace(layouts, proven=tuple(sorted((*timed, *rest), key=lambda p: p.rank)))


def solve(
    program: AutoProgram,
    problem: AutoProblem,
    time_limit: float = 60.0,
    count: int = PROVEN,
    seconds: float = PROOF_SECONDS,
    timeout: float = COMPILE_SECONDS,
    measure: int = 0,
) -> ProvenLayouts:
    """Search for layouts and compile the most promising.

    While none of them fits, or faster ones need more memory than predicted, the search is repeated
    with less memory.

    Args:
        program: The program.
        problem: The problem of its layout.
        time_limit: Seconds that a search may take.
        count: Number of programs to compile per search, whatever time that takes; fewer if the
            program is small and its devices are at hand.
        seconds: CPU seconds of compilation per search within which further programs are compiled.
        timeout: Seconds that one compilation for a topology may take; 0 for no limit.
        measure: Number of programs that are to be run.

    Raises:
        CompileError: If the compiler refuses all.
    """
    proven: list[ProvenLayout] = []
    others: dict[str, ProgramLayout] = {}
    limit = problem.memory_bytes
    elements = sum(math.prod(aval.shape) for aval in problem.jaxpr.in_avals)
    is_here = program.topology is None
    is_quick = is_here and elements < _FEW_ELEMENTS
    if is_quick:
        count, seconds = max(_PROVEN_QUICKLY, measure), 0.0
    # Warnings about candidates are of no program that the user has; workers keep theirs.
    log = captured_log(hides_warnings=True) if is_here else nullcontext()
    with log, Prover(program, problem.memory_bytes, timeout) as prover:
        while True:
            search = Search(replace(problem, memory_bytes=limit), time_limit, restarts=not is_quick)
            layouts = sorted(search.run(), key=lambda layout: layout.seconds)
            ordered = _proof_order(layouts)
            latest = prover.prove(ordered, count, seconds)
            # The compiler may be known to get all of the few wrong.
            if is_quick and all(each.is_wrong for each in latest):
                latest = prover.prove(ordered, len(ordered))
            if program.topology is not None:
                by_name = {layout.name: layout for layout in layouts}
                right = _fastest((p for p in latest if not p.is_wrong), by_name)[:_VARIED]
                # Other constraints may lead the partitioner around its fault.
                wrong = _fastest((p for p in latest if p.is_wrong), by_name)[:_VARIED]
                for each in (*right, *wrong):
                    variants = search.thinned(each)
                    latest += prover.prove(variants, len(variants))
                fastest = min((p.seconds for p in proven if p.fits), default=math.inf)
                latest += lightened(latest, prover, search, fastest)
                latest += corrected(latest, prover, search, fastest)
            proven += latest
            others |= {layout.name: layout for layout in reversed(layouts)}
            fastest = min((p.seconds for p in proven if p.fits), default=math.inf)
            unpredicted = [
                p.memory_bytes - p.layout.memory_bytes
                for p in proven
                if p.compilation is not None and not p.fits and p.seconds < fastest
                # The search takes a layout into account that it knows to be over the memory.
                if math.isinf(fastest) or p.layout.memory_bytes <= limit
            ]
            # Half of the memory that is there is the least to plan for.
            if not unpredicted or limit < problem.memory_bytes / 2:
                break
            step = _LESS_WITHOUT if math.isinf(fastest) else _LESS
            limit = min(step * limit, problem.memory_bytes - min(unpredicted))
        # Last, so that a search's layout with the same program keeps the collectives it foresaw.
        proven += prover.prove_own(program.read_own_layout(problem))
    # A layout of a later search replaces a worse one of its name.
    named = {p.layout.name: p for p in sorted(proven, key=lambda p: p.rank, reverse=True)}
    proven = sorted(named.values(), key=lambda p: p.rank)
    if proven[0].compilation is None:
        reason = proven[0].reason
        verb = "is known to get wrong" if proven[0].is_wrong else "refuses"
        # no-catalogue: needs a program that the compiler refuses
        raise CompileError(
            f"the compiler {verb} {program.program.name} in {len(proven)} layouts: "
            f"{reason}{'; raise compile_timeout' if TIMED_OUT in reason else ''}"
        )
    known = {p.layout.name for p in proven}
    left = [layout for name, layout in others.items() if name not in known]
    left.sort(key=lambda layout: layout.seconds)
    return ProvenLayouts(tuple(proven), tuple(left), search.gap, search.least_seconds())


def _proof_order(layouts: Sequence[ProgramLayout]) -> list[ProgramLayout]:
    """Return the layouts that may be the fastest, in the order in which they are compiled.

    First come ties with the best prediction, one of each boundary. Their others take turns with
    the other boundaries: the model errs by more than similar layouts differ.

    Args:
        layouts: Layouts, the fastest by prediction first.
    """
    best, seen = layouts[0].seconds, set[object]()
    groups: dict[tuple[bool, bool], list[ProgramLayout]] = defaultdict(list)
    for layout in layouts:
        # A plan names the second best, and how much slower it is.
        if len(seen) < 2 or layout.seconds <= _HOPELESS * best:
            boundary = layout.in_specs, layout.out_specs
            groups[layout.seconds <= _CLOSE * best, boundary not in seen].append(layout)
            seen.add(boundary)
    turns = zip_longest(groups[True, False], groups[False, True])
    return [
        *groups[True, True],
        *(layout for pair in turns for layout in pair if layout is not None),
        *groups[False, False],
    ]


def _fastest(
    proven: Iterable[ProvenLayout], layouts: Mapping[str, ProgramLayout]
) -> list[ProgramLayout]:
    """Return the layouts of a search whose programs, in any variant, are the fastest."""
    ranked = sorted(proven, key=lambda p: p.rank)
    names = dict.fromkeys(p.layout.name.partition(INSIDE)[0] for p in ranked)
    return [layouts[name] for name in names if name in layouts]


def smallest_slice(
    larger: Iterable[AutoProgram],
    memory: float,
    fixed: FixedSpecs | None,
    time_limit: float,
    timeout: float = COMPILE_SECONDS,
) -> str:
    """Return the smallest topology on which a layout fits; empty without one.

    Args:
        larger: The program on larger topologies, smallest first.
        memory: Share of a device's memory that the program may use.
        fixed: Specs that the layout must keep.
        time_limit: Seconds that a search may take.
        timeout: Seconds that one compilation may take; 0 for no limit.
    """
    for program in larger:
        problem = program.problem(memory, fixed)
        layouts = Search(problem, time_limit).run()
        smallest = sorted(layouts, key=lambda layout: layout.memory_bytes)
        if smallest[0].memory_bytes > problem.memory_bytes:
            continue
        with Prover(program, problem.memory_bytes, timeout) as prover:
            if any(proven.fits for proven in prover.prove(smallest, 2)):
                return str(program.topology)
    return ""
