"""Time several implementations of the same work, side by side in one process.

Cores that are shared with other work drift by tens of per cent within seconds, so two medians
taken one after the other compare two moments, not two programs. Here every round times every
candidate once, close together and in changing order, and the reported figure is the median over
the rounds of (candidate ÷ baseline in the same round): a slow moment slows both and cancels out.

Example:
    options = read_options("Addition against multiplication")
    report = Report("arithmetic")
    measured = interleave({"add": lambda: a + b, "mul": lambda: a * b}, rounds=options.rounds)
    report.add("one million floats", measured, baseline="add", goals={"mul": 1.1})
    raise SystemExit(report.finish(options))

A growth table has a line for each size of a row: the same work by JAX and by xlashard, and how fast
each of them grows with the size.

Example:
    for leaves in (1, 10, 100):
        work = {"jax": lambda: theirs(leaves), "xlashard": lambda: ours(leaves)}
        lines.append(compare("a call", work, size=(leaves, "leaves"), rounds=options.rounds))
    report.add_growth("1 device", lines)
"""

import argparse
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xlashard.support.collector import collector_paused

MIN_SAMPLE_SECONDS = 2e-3
"""A sample shorter than this measures the clock and the loop as much as the candidate."""

MAX_INNER = 1 << 20

TABLE_COLUMNS = 132
"""Width of output that is not a terminal's, where rich would break lines at 80 columns."""

FEWEST_ROUNDS = 3

Clock = Callable[[], float]


@dataclass(frozen=True)
class Measurement:
    """Timing of one candidate: seconds per call, one sample per round.

    Attributes:
        name: The candidate.
        inner: Calls per sample.
        samples: Seconds per call, or a quantity of another unit.
        unit: Unit of the samples: `"s"`, `"bytes"` or `"objects"`.
    """

    name: str
    inner: int
    samples: tuple[float, ...]
    unit: str = "s"

    @property
    def median(self) -> float:
        """Return the median seconds per call."""
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the first and third quartile of the seconds per call."""
        return _quartiles(self.samples)

    @property
    def iqr(self) -> float:
        """Return the interquartile range, in seconds."""
        low, high = self.quartiles
        return high - low

    def ratios_to(self, baseline: "Measurement") -> tuple[float, ...]:
        """Return this candidate's time over the baseline's, round by round."""
        if len(self.samples) != len(baseline.samples):
            raise ValueError(
                f"{self.name!r} has {len(self.samples)} rounds and {baseline.name!r} "
                f"{len(baseline.samples)}; only measurements of one interleave() call pair up"
            )
        return tuple(
            mine / theirs for mine, theirs in zip(self.samples, baseline.samples, strict=True)
        )

    def ratio_to(self, baseline: "Measurement") -> float:
        """Return the median of the paired ratios: the figure to report."""
        return statistics.median(self.ratios_to(baseline))

    def extra_over(self, baseline: "Measurement") -> float:
        """Return the median of the paired differences, in seconds."""
        if len(self.samples) != len(baseline.samples):
            raise ValueError(f"{self.name!r} and {baseline.name!r} were not measured together")
        pairs = zip(self.samples, baseline.samples, strict=True)
        return statistics.median(mine - theirs for mine, theirs in pairs)


@dataclass(frozen=True)
class RatioGoal:
    """Goal of at most `limit` times the baseline."""

    limit: float

    def met(self, measured: Measurement, baseline: Measurement) -> bool:
        """Return whether the paired ratio is within the limit."""
        return measured.ratio_to(baseline) <= self.limit

    def __str__(self) -> str:
        return f"≤ {self.limit:.2f} ×"


@dataclass(frozen=True)
class TimeGoal:
    """Goal of at most `seconds` per call, independent of the baseline."""

    seconds: float

    def met(self, measured: Measurement, baseline: Measurement) -> bool:
        """Return whether the median is within the limit."""
        return measured.median <= self.seconds

    def __str__(self) -> str:
        return f"≤ {format_seconds(self.seconds)}"


@dataclass(frozen=True)
class ExtraGoal:
    """Goal of at most `seconds` per call more than the baseline."""

    seconds: float

    def met(self, measured: Measurement, baseline: Measurement) -> bool:
        """Return whether the paired difference is within the limit."""
        return measured.extra_over(baseline) <= self.seconds

    def __str__(self) -> str:
        return f"≤ {format_seconds(self.seconds)} more"


Goal = RatioGoal | TimeGoal | ExtraGoal


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    inner: int | None = None,
    warmup: int = 3,
    clock: Clock = time.perf_counter,
    seconds: float = math.inf,
) -> dict[str, Measurement]:
    """Time all candidates in one process, with a sample of each in every round.

    A candidate must itself wait for the work it starts (`block_until_ready`), or only its dispatch
    is timed. Successive rounds begin with another candidate, and every second sweep runs
    backwards, so that no candidate always follows the same neighbour.

    Args:
        candidates: Name to a function of no arguments.
        rounds: Samples per candidate.
        inner: Calls per sample; by default as many as make a sample last two milliseconds,
            counted for each candidate by itself.
        warmup: Calls of each candidate before anything is timed.
        clock: Returns the time in seconds.
        seconds: Time after which no more than three rounds are run.

    Returns:
        One measurement for each candidate, in the order given.

    Raises:
        ValueError: No candidates, or counts below one.
    """
    if not candidates:
        raise ValueError("interleave() needs at least one candidate: {'name': function}")
    if rounds < 1 or (inner is not None and inner < 1):
        raise ValueError(f"rounds and inner must be at least 1, got {rounds=} and {inner=}")

    names = list(candidates)
    for call in candidates.values():
        for _ in range(warmup):
            call()
    counts = {
        name: inner if inner is not None else _calls_per_sample(call, clock)
        for name, call in candidates.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    started = time.perf_counter()
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.perf_counter() - started > seconds:
            break
        gc.collect(1)  # Garbage of a round is young; a full sweep would outlast the round.
        with collector_paused():
            for name in _order(names, number):
                samples[name].append(_sample(candidates[name], counts[name], clock))
    return {name: Measurement(name, counts[name], tuple(samples[name])) for name in names}


def _order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of round `number`: rotated by one each round, each second sweep reversed."""
    start = number % len(names)
    rotated = [*names[start:], *names[:start]]
    backwards = (number // len(names)) % 2 == 1
    return rotated[::-1] if backwards else rotated


def _sample(call: Callable[[], object], count: int, clock: Clock) -> float:
    """Return the seconds per call over `count` calls."""
    started = clock()
    for _ in range(count):
        call()
    return (clock() - started) / count


def _calls_per_sample(call: Callable[[], object], clock: Clock) -> int:
    count = 1
    while count < MAX_INNER and _sample(call, count, clock) * count < MIN_SAMPLE_SECONDS:
        count *= 2
    return count


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) == 1:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def format_seconds(seconds: float) -> str:
    """Format a time with a suitable unit: `1.234 s`, `56.7 ms`, `8.90 µs`, `12 ns`."""
    magnitude = abs(seconds)
    if magnitude >= 1:
        return f"{seconds:.3f} s"
    if magnitude >= 1e-3:
        return f"{seconds * 1e3:.4g} ms"
    if magnitude >= 1e-6:
        return f"{seconds * 1e6:.4g} µs"
    return f"{seconds * 1e9:.3g} ns"


def format_quantity(value: float, unit: str) -> str:
    """Format a time (unit `s`), a number of bytes, or a count."""
    if unit == "s":
        return format_seconds(value)
    if unit != "bytes":
        return f"{value:,.0f} {unit}"
    return f"{value / 2**20:,.1f} MiB" if value >= 2**20 else f"{value / 2**10:,.1f} KiB"


@dataclass(frozen=True)
class Comparison:
    """Candidate with the baseline that was timed beside it.

    Attributes:
        measured: The candidate.
        baseline: The denominator of its ratio.
        goal: Its goal, if any.
        floor: A candidate that does the least work possible, if there is one.
    """

    measured: Measurement
    baseline: Measurement
    goal: Goal | None
    floor: Measurement | None = None

    @property
    def name(self) -> str:
        """Return the candidate's name."""
        return self.measured.name

    @property
    def is_baseline(self) -> bool:
        """Return whether this row is the baseline."""
        return self.measured is self.baseline

    @property
    def ok(self) -> bool | None:
        """Return whether the goal is met; `None` without a goal."""
        return None if self.goal is None else self.goal.met(self.measured, self.baseline)

    def as_json(self) -> dict[str, object]:
        """Return the row as plain values; times in seconds."""
        low, high = self.measured.quartiles
        ratio_low, ratio_high = _quartiles(self.measured.ratios_to(self.baseline))
        return {
            "name": self.measured.name,
            "median_s": self.measured.median,
            "quartiles_s": [low, high],
            "rounds": len(self.measured.samples),
            "calls_per_sample": self.measured.inner,
            "baseline": self.baseline.name,
            "ratio": self.measured.ratio_to(self.baseline),
            "ratio_quartiles": [ratio_low, ratio_high],
            "floor": None if self.floor is None else self.floor.name,
            "floor_ratio": None if self.floor is None else self.measured.ratio_to(self.floor),
            "goal": None if self.goal is None else str(self.goal),
            "ok": self.ok,
        }


ABOVE_FLOOR = 1.03
"""Factor of a floor that is a goal: what repeated measurements of one call differ by."""

FASTER_GROWTH = 0.1
"""By how much our exponent may exceed JAX's: a tenth is a factor of 1.26 from 1 to 10."""


@dataclass(frozen=True)
class Line:
    """Line of a growth table: the same work by JAX and by xlashard, of one size.

    Attributes:
        row: The work.
        theirs: JAX's measurement.
        ours: xlashard's, of the same rounds.
        goal: Limit of the ratio.
        size: Size of the work with its noun, such as `(512, "devices")`.
        growth_limit: Largest exponent of our growth with the size; by default JAX's, or that of
            the floors if it is larger.
        growth: Exponents of JAX's growth and of ours, in a row's last line.
        floor: Measurement of the least work, if the goal comes from one.
    """

    row: str
    theirs: Measurement
    ours: Measurement
    goal: RatioGoal
    size: tuple[int, str] | None = None
    growth_limit: float | None = None
    growth: tuple[float, float] | None = None
    floor: Measurement | None = None

    @property
    def floor_ratio(self) -> float | None:
        """Return the ratio of the floor to JAX."""
        return None if self.floor is None else self.floor.ratio_to(self.theirs)

    @property
    def name(self) -> str:
        """Return the work with its size."""
        return self.row if self.size is None else f"{self.row}, {self.size_text}"

    @property
    def size_text(self) -> str:
        """Return the size with its noun: `1 device`, `512 devices`."""
        if self.size is None:
            return ""
        count, noun = self.size
        if count == 1:
            noun = "leaf" if noun == "leaves" else noun.removesuffix("s")
        return f"{count:,} {noun}"

    @property
    def is_faster_growth(self) -> bool:
        """Return whether our cost grows faster than it may."""
        if self.growth is None:
            return False
        theirs, ours = self.growth
        limit = theirs if self.growth_limit is None else self.growth_limit
        return ours > limit + FASTER_GROWTH

    @property
    def ok(self) -> bool:
        """Return whether the ratio is within the goal, and our cost grows no faster than it may."""
        return self.goal.met(self.ours, self.theirs) and not self.is_faster_growth

    def as_json(self) -> dict[str, object]:
        """Return the line as plain values."""
        low, high = _quartiles(self.ours.ratios_to(self.theirs))
        theirs, ours = self.growth or (None, None)
        return {
            "name": self.name,
            "row": self.row,
            "size": self.size_text,
            "unit": self.ours.unit,
            "median_s": self.ours.median,
            "rounds": len(self.ours.samples),
            "calls_per_sample": self.ours.inner,
            "baseline": self.theirs.name,
            "baseline_median_s": self.theirs.median,
            "ratio": self.ours.ratio_to(self.theirs),
            "ratio_quartiles": [low, high],
            "floor_ratio": self.floor_ratio,
            "growth": ours,
            "baseline_growth": theirs,
            "goal": str(self.goal),
            "ok": self.ok,
        }


def compare(
    row: str,
    work: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    size: tuple[int, str] | None = None,
    goal: float = 1.10,
    inner: int | None = None,
    warmup: int = 3,
    clock: Clock = time.thread_time,
    seconds: float = 2.0,
) -> Line:
    """Time work of JAX and of xlashard in turn, and return a line of a growth table.

    Args:
        row: The work.
        work: Its two implementations, JAX's first; a floor may come third, whose ratio is the goal
            if it is larger.
        rounds: Samples of each.
        size: Size of the work with its noun.
        goal: Limit of the ratio.
        inner: Calls per sample, as for `interleave`.
        warmup: Calls before anything is timed.
        clock: CPU time of the calling thread by default: a dispatch of microseconds is not
            measurable in wall time on a shared machine.
        seconds: Time after which no more than three rounds are run.
    """
    measured = interleave(
        work, rounds=rounds, inner=inner, warmup=warmup, clock=clock, seconds=seconds
    )
    theirs, ours, *floors = measured.values()
    limit = max([goal, *(ABOVE_FLOOR * floor.ratio_to(theirs) for floor in floors)])
    return Line(row, theirs, ours, RatioGoal(limit), size, floor=next(iter(floors), None))


def fit_exponents(lines: Sequence[Line]) -> list[Line]:
    """Return the lines, with the exponents of growth in each row's last one."""
    rows: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        rows.setdefault(line.row, []).append(number)
    fitted = list(lines)
    for numbers in rows.values():
        sized = [lines[number] for number in numbers if lines[number].size is not None]
        if len(sized) > 1:
            last = lines[numbers[-1]]
            growth = _exponent(sized, "theirs"), _exponent(sized, "ours")
            limit = last.growth_limit
            if all(line.floor is not None for line in sized):
                limit = max(growth[0], _exponent(sized, "floor"))
            fitted[numbers[-1]] = replace(last, growth=growth, growth_limit=limit)
    return fitted


def _exponent(lines: Sequence[Line], side: str) -> float:
    """Return the slope of the logarithm of the cost over the logarithm of the size."""
    sizes = [math.log(line.size[0]) for line in lines if line.size is not None]
    costs = [math.log(max(getattr(line, side).median, 1e-12)) for line in lines]
    return statistics.linear_regression(sizes, costs).slope


@dataclass(frozen=True)
class Options:
    """Command-line options of all benchmarks."""

    rounds: int
    json: Path | None
    strict: bool


def read_options(
    description: str,
    *,
    rounds: int = 31,
    argv: Sequence[str] | None = None,
    own: argparse.ArgumentParser | None = None,
) -> Options:
    """Read `--rounds N`, `--json PATH` and `--strict`.

    Args:
        description: First line of `--help`.
        rounds: How many rounds to run by default.
        argv: Arguments to read instead of the process's own.
        own: A parser of arguments that only this benchmark has, made with `add_help=False`; the
            caller reads these arguments with its `parse_known_args`.
    """
    if argv is None:
        sys.excepthook = _report_end
    parents = [] if own is None else [own]
    parser = argparse.ArgumentParser(description=description, parents=parents)
    parser.add_argument("--rounds", type=int, default=rounds, help="samples of each candidate")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    parsed = parser.parse_args(argv)
    if parsed.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {parsed.rounds}")
    return Options(parsed.rounds, parsed.json, parsed.strict)


def _report_end(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the error that ends a benchmark; of Ctrl-C a line."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C: figures are kept at the end alone", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)


@dataclass
class Report:
    """Collects the tables of one benchmark, prints each at once and writes all as JSON."""

    name: str
    console: Console = field(default_factory=_make_console)
    tables: dict[str, Sequence[Comparison | Line]] = field(default_factory=dict)

    def add(
        self,
        title: str,
        measurements: Mapping[str, Measurement],
        *,
        baseline: str,
        floor: str | None = None,
        goals: Mapping[str, Goal | float] | None = None,
    ) -> list[Comparison]:
        """Print one table and keep it.

        Args:
            title: What was measured; no two tables of a report share a title.
            measurements: The result of one `interleave` call.
            baseline: The candidate that the others are compared with.
            floor: A candidate that does the least work possible; a column shows the ratio of each
                candidate to it.
            goals: Candidate to its goal; a plain number is a `RatioGoal`.

        Returns:
            The rows.

        Raises:
            ValueError: A baseline or goal names no candidate, or the title is used already.
        """
        goals = goals or {}
        named = {baseline, *goals} | ({floor} if floor else set())
        unknown = sorted(named - set(measurements))
        if unknown:
            raise ValueError(f"{unknown} not among the candidates {sorted(measurements)}")
        rows = [
            Comparison(
                measured,
                measurements[baseline],
                _as_goal(goals.get(name)),
                measurements[floor] if floor else None,
            )
            for name, measured in measurements.items()
        ]
        self._keep(title, rows, _as_table(title, rows))
        return rows

    def add_growth(self, title: str, lines: Sequence[Line]) -> None:
        """Print a growth table and keep it.

        Args:
            title: What the rows have in common; no two tables of a report share a title.
            lines: Its lines; those of a row follow each other, the largest size last.

        Raises:
            ValueError: The title is used already.
        """
        fitted = fit_exponents(lines)
        self._keep(title, fitted, _as_growth_table(title, fitted))

    def _keep(self, title: str, rows: Sequence[Comparison | Line], table: Table) -> None:
        if title in self.tables:
            raise ValueError(f"the report has a table {title!r} already")
        self.tables[title] = rows
        self.console.print(table)

    def missed(self) -> list[str]:
        """Return `table: candidate` for every missed goal."""
        return [
            f"{title}: {row.name}"
            for title, rows in self.tables.items()
            for row in rows
            if row.ok is False
        ]

    def as_json(self) -> dict[str, object]:
        """Return all measurements, with the versions they were measured on."""
        return {
            "benchmark": self.name,
            "environment": environment(),
            "tables": [
                {"title": title, "rows": [row.as_json() for row in rows]}
                for title, rows in self.tables.items()
            ],
        }

    def finish(self, options: Options) -> int:
        """Write the JSON file if requested, and print the missed goals.

        Returns:
            The exit status: 1 with `--strict` and a missed goal, otherwise 0.
        """
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        goals = sum(row.goal is not None for rows in self.tables.values() for row in rows)
        missed = self.missed()
        self.console.print(f"{self.name}: {goals - len(missed)} of {goals} goals met")
        for line in missed:
            self.console.print(f"  missed: {line}", style="red", markup=False)
        return 1 if missed and options.strict else 0


def environment() -> dict[str, object]:
    """Return what determines the figures: versions, processor count, devices of JAX if loaded."""
    versions = {name: _version(name) for name in ("jax", "jaxlib", "numpy", "xlashard")}
    jax = sys.modules.get("jax")
    devices = jax.devices() if jax is not None else []
    return {
        "python": platform.python_version(),
        **versions,
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "devices": len(devices),
        "platform": devices[0].platform if devices else None,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_goal(goal: Goal | float | None) -> Goal | None:
    return RatioGoal(float(goal)) if isinstance(goal, int | float) else goal


def _as_factor(ratio: float) -> str:
    return f"{ratio:.3f} ×" if ratio >= 0.1 else f"{ratio:.2g} ×"


def _as_table(title: str, rows: Sequence[Comparison]) -> Table:
    table = Table(title=title, title_justify="left")
    floor = next((row.floor for row in rows if row.floor is not None), None)
    table.add_column("candidate")
    floors = [] if floor is None else [f"to {floor.name}"]
    for heading in ("median", "IQR", "ratio", *floors, "goal", "ok?"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.measured.name,
            format_seconds(row.measured.median),
            format_seconds(row.measured.iqr) if len(row.measured.samples) > 1 else "",
            "baseline" if row.is_baseline else _as_factor(row.measured.ratio_to(row.baseline)),
            *([] if row.floor is None else [_as_factor(row.measured.ratio_to(row.floor))]),
            "" if row.goal is None else str(row.goal),
            {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row.ok],
        )
    return table


def _as_growth_table(title: str, lines: Sequence[Line]) -> Table:
    table = Table(title=title, title_justify="left")
    theirs = lines[0].theirs.name
    for heading in ("row", "size"):
        table.add_column(heading)
    has_floor = any(line.floor is not None for line in lines)
    floors = ["floor"] if has_floor else []
    for heading in (theirs, lines[0].ours.name, "ratio", *floors, "growth", f"{theirs}'s", "goal"):
        table.add_column(heading, justify="right")
    table.add_column("ok?", justify="right")
    shown = None
    for line in lines:
        growth = (
            ("", "") if line.growth is None else (f"{line.growth[1]:.2f}", f"{line.growth[0]:.2f}")
        )
        missed = "[red]grows[/]" if line.is_faster_growth else "[red]no[/]"
        table.add_row(
            "" if line.row == shown else escape(line.row),
            line.size_text,
            format_quantity(line.theirs.median, line.theirs.unit),
            format_quantity(line.ours.median, line.ours.unit),
            _as_factor(line.ours.ratio_to(line.theirs)),
            *(["" if line.floor_ratio is None else _as_factor(line.floor_ratio)] * has_floor),
            *growth,
            str(line.goal),
            "[green]yes[/]" if line.ok else missed,
        )
        shown = line.row
    return table
