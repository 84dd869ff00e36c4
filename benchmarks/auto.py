"""Automatic shardings beside the layouts that an expert writes by hand.

    python -m benchmarks.auto [--programs NAME ...] [--topologies NAME ...] [--hand-only]
        [--kinds] [--set NAME=VALUE ...] [--cache FOLDER] [--json PATH] [--memory SHARE]

Each layout of each program is compiled for TPU topologies, without generating code. The figures are
the calibrated time of a step and the memory of a device, as `xlashard preflight` reports them.

`--kinds` prints what each kind of start, of constraints inside and of correction is worth at most:
how much slower the best of the other layouts that were compiled is. `--set _VARIED=0` gives a
constant of `xlashard.auto` another value, to compare the results.
"""

import argparse
import hashlib
import importlib.metadata
import json
import re
import resource
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

import xlashard
from benchmarks._auto_program import BenchmarkProgram
from benchmarks._auto_programs import PROGRAMS
from xlashard import tpu
from xlashard.auto.auto_program import OWN_LAYOUT
from xlashard.auto.layout_builder import INSIDE
from xlashard.errors import UnevenShardingWarning, XlashardError
from xlashard.support.formatting import in_bytes, in_seconds

ROOT = Path(__file__).resolve().parent.parent
GOAL = 1.03
"""Largest ratio of the time of an automatic layout to that of the best layout by hand."""
MORE_SENT = 1.2
"""Ratio of the bytes sent above which the reason is printed."""
LEAST_WORTH = 0.005
"""Share of a step that a kind of layout has to save somewhere to be worth its lines."""
_LINKS = ("ici", "dcn")
_REPEAT = r", (lighter|corrected)\b"


@dataclass(frozen=True)
class Candidate:
    """Layout that was compiled for a plan.

    Attributes:
        name: Its name.
        predicted_seconds: Time of a step as predicted.
        seconds: The same as compiled.
        predicted_bytes: Memory of a device as predicted.
        memory_bytes: The same as compiled.
        fits: Whether the memory suffices.
    """

    name: str
    predicted_seconds: float
    seconds: float
    predicted_bytes: int
    memory_bytes: int
    fits: bool = True

    @property
    def kinds(self) -> frozenset[str]:
        """Start of its search, its constraints inside, and its corrections, in words."""
        start, _, inside = self.name.partition(INSIDE)
        repeats = re.findall(_REPEAT, start)
        start = re.sub(_REPEAT, "", start)
        # By which spec, over which axes, and in which order is not of the kind.
        start = re.sub(r"^argument .*", "an argument", start)
        start = re.sub(r"\(.*\)| over \w+|\b\w+: ", "", start)
        words = [f"start: {start}", f"inside: {inside or 'everything'}"]
        return frozenset([*words, *map("corrected: {}".format, repeats)])


@dataclass(frozen=True)
class Outcome:
    """Compilation of a layout.

    Attributes:
        layout: Name of the layout.
        seconds: Calibrated time of a step.
        memory_bytes: Memory of a device.
        fits: Whether the memory suffices.
        cpu_seconds: CPU time to plan the layout, if it is automatic, and to compile it.
        error: Error, if the layout is refused; empty otherwise.
        host_bytes: Peak memory so far of this process and of its largest worker.
        sent_bytes: Bytes that a device sends in a step.
        waiting_seconds: Part of the step in which the cores wait for links.
        candidates: Layouts that were compiled for the plan.
    """

    layout: str
    seconds: float
    memory_bytes: int
    fits: bool
    cpu_seconds: float
    error: str = ""
    host_bytes: int = 0
    sent_bytes: int = 0
    waiting_seconds: float = 0.0
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Layouts of a program on a topology.

    Attributes:
        program: Name of the program.
        topology: Name of the topology.
        mesh: Sizes of the mesh axes.
        hand: Layouts by hand.
        auto: The automatic layout; None if it was left out.
    """

    program: str
    topology: str
    mesh: dict[str, int]
    hand: tuple[Outcome, ...]
    auto: Outcome | None

    @property
    def best(self) -> Outcome | None:
        """The fastest layout by hand that fits; None if no layout fits."""
        return min((x for x in self.hand if x.fits), key=lambda x: x.seconds, default=None)

    @property
    def ratio(self) -> float | None:
        """Time of the automatic layout over that of the best by hand, if both fit."""
        if self.best is None or self.auto is None or not self.auto.fits:
            return None
        return self.auto.seconds / self.best.seconds

    @property
    def sent_ratio(self) -> float | None:
        """Bytes that the automatic layout sends over those of the best by hand, if known."""
        if self.ratio is None or not (self.best and self.auto and self.best.sent_bytes):
            return None
        return self.auto.sent_bytes / self.best.sent_bytes


@dataclass(frozen=True)
class Options:
    """Options of a comparison.

    Attributes:
        memory: Share of a device's memory that a program may use.
        hand_only: Whether the automatic layout is left out.
        cache: Folder of the results of layouts by hand; None to compile them all.
    """

    memory: float
    hand_only: bool
    cache: Path | None


def compare(name: str, topology: str, options: Options) -> Comparison:
    """Compile the layouts of a program for a topology.

    Args:
        name: Name of the program.
        topology: Name of a topology that the program has a mesh for.
        options: Options.
    """
    program = PROGRAMS[name]
    sizes = dict(program.meshes[topology])
    mesh = tpu.topology(topology).mesh(sizes)
    hand = []
    for layout, shardings in program.layouts(mesh).items():
        kept = result_file(options, name, topology, layout)
        if kept is not None and kept.exists():
            outcome = Outcome(**json.loads(kept.read_text(encoding="utf-8")))
        else:
            step = program.hand_step(shardings, mesh)
            outcome = _compile(layout, step, program, topology, options.memory)
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        hand.append(outcome)
    auto = None if options.hand_only else _plan(program, topology, options.memory)
    return Comparison(name, topology, sizes, tuple(hand), auto)


def _compile(
    layout: str, step: Any, program: BenchmarkProgram, topology: str, memory: float
) -> Outcome:
    began = _cpu_seconds()
    try:
        report = xlashard.preflight(step, *program.arguments(), topology=topology, estimate=True)
    except XlashardError as error:
        return _refused(layout, began, error)
    used = report.memory.total_bytes
    fits = report.fits and used <= memory * report.memory.available_bytes
    return Outcome(
        layout,
        report.time.seconds,
        used,
        fits,
        _cpu_seconds() - began,
        sent_bytes=sum(each.sent_bytes for each in report.time.traffic),
        waiting_seconds=sum(dict(report.time.shares).get(link, 0.0) for link in _LINKS),
    )


def _refused(layout: str, began: float, error: XlashardError) -> Outcome:
    words = f"{type(error).__name__}: {error}"
    return Outcome(layout, float("inf"), 0, False, _cpu_seconds() - began, words)


def _plan(program: BenchmarkProgram, topology: str, memory: float) -> Outcome:
    """Plan a layout and compile it; its figures are those of the compilation."""
    began = _cpu_seconds()
    step = xlashard.pjit(program.step, donate_argnums=program.donate)
    sizes = dict(program.meshes[topology])
    try:
        plan = xlashard.auto_shard(
            step, *program.arguments(), mesh=sizes, topology=topology, memory=memory
        )
        applied = plan.apply(step)
    except XlashardError as error:
        return _refused("auto", began, error)
    spent = _cpu_seconds() - began
    outcome = _compile(f"auto: {plan.chosen.name}", applied, program, topology, memory)
    candidates = tuple(
        Candidate(
            each.name,
            each.predicted_seconds,
            each.seconds,
            each.predicted_bytes,
            each.total_bytes,
            each.outcome == "fits",
        )
        for each in plan.layouts
        if each.seconds is not None and each.total_bytes is not None and each.name != OWN_LAYOUT
    )
    return replace(outcome, cpu_seconds=spent, host_bytes=_peak_bytes(), candidates=candidates)


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its workers that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _peak_bytes() -> int:
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return 1024 * sum(resource.getrusage(who).ru_maxrss for who in whose)


def result_file(options: Options, *names: str) -> Path | None:
    """Return the file of a result; its name depends on all sources that decide the result."""
    if options.cache is None:
        return None
    words = hashlib.sha256()
    rooms = "analysis", "core", "hlo", "predict"
    modules = [path for room in rooms for path in (ROOT / "xlashard" / room).rglob("*.py")]
    for path in sorted([*modules, *(ROOT / "benchmarks").glob("_auto_*.py")]):
        words.update(path.read_bytes())
    versions = [importlib.metadata.version(package) for package in ("jax", "jaxlib", "libtpu")]
    words.update(json.dumps([names, versions, options.memory]).encode())
    return options.cache / f"{'-'.join(names[:2])}-{words.hexdigest()[:24]}.json"


def describe(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of a comparison."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in comparison.mesh.items())
    title = PROGRAMS[comparison.program].title
    yield f"{comparison.program} on {comparison.topology}, {mesh}: {title}"
    for outcome in comparison.hand:
        yield _line(outcome, "best by hand" if outcome is comparison.best else "")
    if comparison.auto is not None:
        auto = comparison.auto
        note = f"planned in {auto.cpu_seconds:.0f} s of CPU and {in_bytes(auto.host_bytes)}"
        if comparison.ratio is not None and comparison.best is not None:
            note = f"{comparison.ratio:.3f} x {comparison.best.layout}, {note}"
        yield _line(auto, note)
        best, sent = comparison.best, comparison.sent_ratio
        if sent is not None and best is not None:
            line = f"  sends {in_bytes(auto.sent_bytes)}, {sent:.2f} x the best by hand"
            if sent > MORE_SENT:
                waits = [in_seconds(each.waiting_seconds) for each in (auto, best)]
                line += f": its cores wait {waits[0]} for links, by hand {waits[1]}"
            yield line
        if auto.candidates:
            yield f"  {_describe_errors([auto.candidates])}"


def _describe_errors(plans: Sequence[Sequence[Candidate]]) -> str:
    """Return the median errors of the search over compiled layouts, and the rank correlation."""
    every = [c for candidates in plans for c in candidates if min(c.seconds, c.memory_bytes) > 0]
    times = statistics.median(abs(c.predicted_seconds / c.seconds - 1) for c in every)
    memory = statistics.median(abs(c.predicted_bytes / c.memory_bytes - 1) for c in every)
    words = f"{len(every)} compiled: median error of time {times:.0%}, of memory {memory:.0%}"
    correlations = []
    for candidates in plans:
        predicted = [each.predicted_seconds for each in candidates]
        seconds = [each.seconds for each in candidates]
        if min(len(set(predicted)), len(set(seconds))) > 1:
            correlations.append(statistics.correlation(predicted, seconds, method="ranked"))
    if correlations:
        words += f"; rank correlation {statistics.median(correlations):.2f}"
    return words


def _line(outcome: Outcome, note: str) -> str:
    if outcome.error:
        return f"  {outcome.layout:32} {outcome.error.splitlines()[0]}"
    note = note if outcome.fits else ", ".join(filter(None, ("does not fit", note)))
    time_and_memory = f"{in_seconds(outcome.seconds):>9} {in_bytes(outcome.memory_bytes):>10}"
    return f"  {outcome.layout:32} {time_and_memory}  {note}".rstrip()


def summarize(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield the lines of the table of all comparisons, and of their counts."""
    yield (
        f"{'program':15} {'topology':9} {'best by hand':26} {'seconds':>9} "
        f"{'auto':>9} {'ratio':>6} {'sent':>6} {'CPU':>6} {'host':>9}"
    )
    for one in comparisons:
        best, auto = one.best, one.auto
        name = "no layout fits" if best is None else best.layout
        hand = "" if best is None else f"{best.seconds:.4f}"
        mine = "" if auto is None else f"{auto.seconds:.4f}" if auto.fits else "no fit"
        ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
        sent = "" if one.sent_ratio is None else f"{one.sent_ratio:.2f}"
        cpu = "" if auto is None else f"{auto.cpu_seconds:.0f} s"
        host = "" if auto is None else in_bytes(auto.host_bytes)
        line = (
            f"{one.program:15} {one.topology:9} {name:26} {hand:>9} {mine:>9} {ratio:>6} {sent:>6} "
            f"{cpu:>6} {host:>9}"
        )
        yield line.rstrip()
    planned = [one for one in comparisons if one.auto is not None]
    if not planned:
        return
    could = [one for one in planned if one.best is not None]
    ratios = [one.ratio for one in could if one.ratio is not None]
    within = sum(ratio <= GOAL for ratio in ratios)
    better = sum(ratio < 1 for ratio in ratios)
    missed = [f"{one.program} on {one.topology}" for one in could if one.ratio is None]
    plans = [one.auto.candidates for one in planned if one.auto and one.auto.candidates]
    if plans:
        yield _describe_errors(plans)
    yield f"within {GOAL} of the best by hand: {within} of {len(could)}"
    yield f"better than the best by hand: {better} of {len(could)}"
    yield f"does not fit where a layout by hand does: {', '.join(missed) or 'never'}"


def rate_kinds(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield what each kind of layout is worth at most, and where.

    Other starts may find its layouts too, and other layouts would be compiled in their place.
    """
    worth: dict[str, tuple[float, str]] = {}
    for one in comparisons:
        fitting = [] if one.auto is None else [c for c in one.auto.candidates if c.fits]
        for kind in sorted({kind for c in fitting for kind in c.kinds}):
            others = [c.seconds for c in fitting if kind not in c.kinds]
            if others:
                saved = min(others) / min(c.seconds for c in fitting) - 1
                where = f"{one.program} on {one.topology}"
                worth[kind] = max(worth.get(kind, (-1.0, "")), (saved, where))
    yield f"{'without':40} {'slower':>8}"
    for kind, (saved, where) in sorted(worth.items()):
        note = where if saved >= LEAST_WORTH else f"less than {LEAST_WORTH:.1%} everywhere"
        yield f"{kind:40} {saved:>8.1%}  {note}"


def _set_constant(text: str) -> None:
    """Give a constant of `xlashard.auto` a value, in all modules that read it: `_VARIED=0`."""
    name, _, value = text.partition("=")
    loaded = [m for key, m in sys.modules.items() if key.startswith("xlashard.auto.")]
    holders = [module for module in loaded if name in vars(module)]
    if not holders:
        raise SystemExit(f"--set {text}: xlashard.auto has no constant {name}")
    for module in holders:
        setattr(module, name, type(getattr(module, name))(float(value)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the chosen programs on the chosen topologies."""
    parser = argparse.ArgumentParser(description="Automatic shardings beside those by hand")
    topologies = sorted({name for program in PROGRAMS.values() for name in program.meshes})
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--topologies", nargs="+", choices=topologies, default=topologies)
    parser.add_argument("--hand-only", action="store_true", help="leave out automatic shardings")
    parser.add_argument("--kinds", action="store_true", help="print what each kind is worth")
    parser.add_argument("--set", nargs="+", default=[], help="constants: _VARIED=0")
    parser.add_argument("--cache", type=Path, help="folder that keeps results of layouts by hand")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--memory", type=float, default=0.9, help="usable share of the memory")
    given = parser.parse_args(arguments)
    for text in given.set:
        _set_constant(text)
    # Experts shard rows of images that don't divide, too.
    warnings.simplefilter("ignore", UnevenShardingWarning)
    options = Options(given.memory, given.hand_only, given.cache)
    comparisons = []
    for name in given.programs:
        for topology in PROGRAMS[name].meshes:
            if topology in given.topologies:
                comparisons.append(compare(name, topology, options))
                print("\n".join(describe(comparisons[-1])), flush=True)
        # Traces and lowered modules of one program are of no use to the next.
        jax.clear_caches()
    print("\n".join(["", *summarize(comparisons)]))
    if given.kinds:
        print("\n".join(["", *rate_kinds(comparisons)]))
    if given.json is not None:
        results = [asdict(one) for one in comparisons]
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
