"""A predicted step beside a profile of a real one, and constants of a chip from both."""

import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from xlashard.analysis.report.cells import operation_cell
from xlashard.analysis.report.parts import Column, Head, Section
from xlashard.analysis.report.printable import Part, PrintableReport
from xlashard.errors import ArgumentError, check_type, counted
from xlashard.hlo.collective_kinds import REDUCING_KINDS
from xlashard.predict.costs.models_by_target import rates_for
from xlashard.predict.costs.rates import Rates
from xlashard.predict.preflight.render.report_text import error_text, words_of
from xlashard.predict.preflight.report.preflight_model import PreflightFields, TopologyReport
from xlashard.predict.preflight.report.profile_reader import (
    MeasuredOperation,
    Profile,
    read_profile,
)
from xlashard.predict.preflight.report.step_model import (
    CORES,
    FoldedTimeline,
    LineTime,
    Timeline,
    TimelineSpan,
)
from xlashard.predict.targets.chip import Chip
from xlashard.support.documents import read_toml
from xlashard.support.formatting import in_seconds
from xlashard.support.tracebacks import short_tracebacks

KERNEL, REDUCTION = "kernel", "reduction"
"""Kinds of operations with rates of their own, beside the units."""

_LEAST_WAIT = 0.05
"""Least share of a collective's time for which the cores wait, for a duration that is its own."""

_LEAST_SHARE = 1e-6
"""Least share of the step of an operation without a line; a loop's own time is a rounding error."""


@dataclass(frozen=True)
class MeasuredLine:
    """Predicted and measured time of a source line's operations in one execution.

    Attributes:
        line: The prediction.
        seconds: Measured time; None if the profile has none of its operations.
    """

    line: LineTime
    seconds: float | None


@dataclass(frozen=True, repr=False)
class MeasuredStep(PrintableReport):
    """A predicted step beside a measured one.

    Attributes:
        profile: The measurement.
        predicted_seconds: Predicted time of an execution.
        error: Error of the prediction in words.
        lines: Times by source line, the longest prediction first.
        unmatched: Measured operations without a predicted line, with their seconds, longest first.
        topology: Devices of the prediction.
        ratios: Measured by predicted time of single operations, with their measured seconds, by the
            unit that bounds them; those of kernels and of reductions apart.
    """

    profile: Profile
    predicted_seconds: float
    error: str
    lines: tuple[MeasuredLine, ...]
    unmatched: tuple[tuple[str, float], ...]
    topology: TopologyReport
    ratios: dict[str, tuple[tuple[float, float], ...]]

    _kind = "measured step"

    def slowdowns(self) -> dict[str, float]:
        """Return by unit the median of measured by predicted time, weighted by measured time."""
        return {unit: _median(ratios) for unit, ratios in self.ratios.items() if ratios}

    def parts(self) -> Iterator[Part]:
        """Yield the step, the source lines, other operations, and the units."""
        ratio = self.profile.seconds / self.predicted_seconds - 1
        measured = f"{in_seconds(self.profile.seconds)}, {ratio:+.1%} of the prediction"
        facts = [
            ("predicted", f"{in_seconds(self.predicted_seconds)} ({self.error})"),
            ("measured", f"{measured}, mean of {counted(self.profile.executions, 'execution')}"),
        ]
        yield Head(self.profile.module or "profile", [self.profile.path], facts)
        shares = words_of(self.topology).shares
        yield _lines_section(self.lines, shares)
        yield Section(
            "others",
            "Others",
            "operations of the profile that the predicted program lacks, and short ones",
            columns=(
                Column(">measured", lambda each: each[1], "seconds"),
                Column("operation", lambda each: each[0], "code"),
            ),
            rows=self.unmatched,
        )
        names = {**shares, REDUCTION: "reductions over links"}
        yield Section(
            "units",
            "Units",
            "measured by predicted time: the median over operations",
            columns=(
                Column("unit", lambda each: names.get(each[0], each[0]), ""),
                Column(">ratio", lambda each: each[1], "{:.2f}".format),
                Column(">operations", lambda each: len(self.ratios[each[0]]), "{:,}".format),
            ),
            rows=list(self.slowdowns().items()),
            most=100,
        )


def _lines_section(
    lines: Sequence[MeasuredLine], shares: Mapping[str, str]
) -> Section[MeasuredLine]:
    def ratio(each: MeasuredLine) -> float | None:
        return None if each.seconds is None else each.seconds / each.line.seconds

    return Section(
        "lines",
        "Predicted and measured",
        "by source line",
        columns=(
            Column(">predicted", "line.seconds", "seconds"),
            Column(
                ">measured", lambda each: "–" if each.seconds is None else each.seconds, "seconds"
            ),
            Column(">ratio", ratio, "{:.2f}".format),
            Column("what", "line.kind", "kind"),
            Column("bound by", lambda each: shares[each.line.bound], ""),
            Column("line", "line.source", "line"),
            Column("operation", lambda each: operation_cell(each.line.op_name)),
        ),
        rows=lines,
        printed=">predicted | >measured | >ratio | what | bound by | of={line: }{operation}",
    )


def compare_with_profile(report: PreflightFields, path: str | os.PathLike[str]) -> MeasuredStep:
    """Return a predicted step beside a measured one.

    Operations are matched by the names of their instructions, which equal compilers give alike,
    else by their JAX names.

    Args:
        report: The prediction.
        path: File `*.xplane.pb` of `jax.profiler.trace`, or a folder of profiles, of which the
            newest is read.

    Raises:
        ArgumentError: If there is no profile, it is of another program, or the report has no
            schedule.
    """
    timeline = report.time.timeline
    profile = read_profile(path, None if timeline is None else _count_runs(timeline))
    if timeline is None:
        # no-catalogue: as for a trace
        raise ArgumentError(f"the report of {report.name} has no schedule: make it again")
    lines = report.time.lines
    places = {s.name: s.line for block in timeline.blocks for s in block.spans if s.track == CORES}
    by_op_name: dict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(lines):
        by_op_name[line.op_name].append(number)
    sums: dict[int, float] = defaultdict(float)
    unmatched: dict[str, float] = {}
    for operation in profile.operations.values():
        place = _place(operation, places, by_op_name)
        if place >= 0:
            sums[place] += operation.seconds
        elif operation.seconds > _LEAST_SHARE * profile.seconds:
            unmatched[operation.name] = operation.seconds
    if not sums:
        raise ArgumentError(  # no-catalogue: needs a profile
            f"{profile.path} has no operation of {report.name}, but those of {profile.module}: "
            "profile the program that the report is of"
        )
    return MeasuredStep(
        profile,
        report.time.seconds,
        error_text(report.time),
        tuple(MeasuredLine(line, sums.get(n)) for n, line in enumerate(lines)),
        tuple(sorted(unmatched.items(), key=lambda item: -item[1])),
        report.topology,
        _ratios(timeline, lines, profile),
    )


def _count_runs(timeline: Timeline) -> dict[str, float]:
    """Return the predicted runs of operations in one execution, by name."""
    runs: dict[str, float] = defaultdict(float)
    for folded in FoldedTimeline(timeline).spans():
        # An operation may have several spans: that of its work, and that of a wait.
        if folded.span.block < 0:
            runs[folded.span.name] = max(runs[folded.span.name], folded.runs)
    return runs


def _place(
    operation: MeasuredOperation, places: dict[str, int], by_op_name: dict[str, list[int]]
) -> int:
    by_name = places.get(operation.name, -1)
    candidates = by_op_name.get(operation.op_name, []) if operation.op_name else []
    return by_name if by_name in candidates or not candidates else candidates[0]


def _ratios(
    timeline: Timeline, lines: Sequence[LineTime], profile: Profile
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return measured by predicted time of the operations that both have by name."""
    by_unit: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for block in timeline.blocks:
        waited = {span.name for span in block.spans if span.track == CORES}
        for span in block.spans:
            if span.block >= 0 or not span.seconds:
                continue
            is_network = span.resource in ("ici", "dcn")
            # Of collectives the transfers count, of other operations the work of the cores.
            if is_network == (span.track == CORES) or span.name.startswith("copy-done"):
                continue
            seconds = _duration(span.name, waited, profile)
            if seconds is not None and seconds > 0:
                by_unit[_kind(span, lines)].append((seconds / span.seconds, seconds))
    return {unit: tuple(ratios) for unit, ratios in by_unit.items()}


def _kind(span: TimelineSpan, lines: Sequence[LineTime]) -> str:
    """Return the unit that bounds an operation, or its kind if that has rates of its own."""
    kind = lines[span.line].kind if span.line >= 0 else ""
    if kind == "kernel" and span.resource in ("matrix", "vector", "hbm"):
        return KERNEL
    return REDUCTION if kind in REDUCING_KINDS and span.resource == "ici" else span.resource


def _duration(name: str, waited: set[str], profile: Profile) -> float | None:
    """Return the time of an operation; of a collective only if the cores wait for its end."""
    start = profile.operations.get(name)
    if start is None:
        return None
    if name in waited or profile.on_streams:
        return start.seconds / start.runs
    end = profile.operations.get(name.replace("-start", "-done"))
    if end is None or end is start or len(end.last) != len(start.first):
        return None
    whole = [last - first for first, last in zip(start.first, end.last, strict=True)]
    waits = [last - first for first, last in zip(end.first, end.last, strict=True)]
    own = [w for w, wait in zip(whole, waits, strict=True) if wait > _LEAST_WAIT * w > 0]
    return sum(own) / len(own) if own else None


def _median(ratios: tuple[tuple[float, float], ...]) -> float:
    """Return the weighted median of values."""
    values, weights = zip(*sorted(ratios), strict=True)
    return values[bisect_left(list(accumulate(weights)), sum(weights) / 2)]


_RATES: Mapping[str, tuple[str, ...]] = {
    "matrix": ("matrix_flops",),
    "vector": ("vector_ops", "transcendentals"),
    "hbm": ("hbm_bytes",),
    "vmem": ("vmem_bytes",),
    "ici": ("link_share", "torus_reduction_share"),
    "dcn": ("dcn_share",),
    "host": ("host_bytes",),
    "launch": ("operation_seconds", "hbm_seconds"),
    KERNEL: (
        *("matrix_flops", "hbm_bytes", "kernel_vector_ops", "kernel_transcendentals"),
        *("scores", "score_gradients"),  # of GPUs
        "kernel_step_seconds",
    ),
    REDUCTION: ("link_share", "torus_reduction_share"),
}
"""Rates that the slowdown of a unit divides, or of a kind of operations with rates of its own; it
multiplies their seconds."""


@dataclass(frozen=True)
class Calibration:
    """Measured by predicted time of a chip's operations.

    Attributes:
        chip: Name of the chip: `v6e`, `h100`.
        slowdown: Measured by predicted time by unit, or by kind of operation: `kernel`, and
            `reduction` for all-reduces and reduce-scatters.
    """

    chip: str
    slowdown: Mapping[str, float]

    def rates(self, chip: Chip) -> Rates:
        """Return the rates of a device, corrected by the measurements.

        Kernels and reductions without a slowdown of their own have that of their units; other
        collectives have that of reductions, which take the same links.

        Args:
            chip: Figures of the chip.
        """
        usual = corrected = rates_for(chip)
        slowdown = dict(self.slowdown)
        kernel, reduction = slowdown.pop(KERNEL, None), slowdown.pop(REDUCTION, None)
        if reduction is not None:
            slowdown.setdefault("ici", reduction)
        for unit, ratio in slowdown.items():
            corrected = _slower(corrected, _RATES[unit], ratio)
        if kernel is not None:
            apart = _slower(usual, _RATES[KERNEL], kernel)
            corrected = replace(corrected, kernels=apart)
        if reduction is not None:
            # Between slices, reductions take the network as others do.
            apart = _slower(usual, _RATES[REDUCTION], reduction)
            corrected = replace(corrected, reductions=replace(apart, dcn_share=corrected.dcn_share))
        return corrected

    def __str__(self) -> str:
        return " ".join(f"{unit} {ratio:.3g}" for unit, ratio in self.slowdown.items())


type RatesSource = str | os.PathLike[str] | Mapping[str, Any] | Calibration
"""File that `xlashard preflight --calibrate` wrote, or its content."""

type RatesSources = RatesSource | Sequence[RatesSource]
"""Files of one or several chips."""


def calibration_text(step: MeasuredStep, chip: str) -> str:
    """Return the text of a file of rates.

    Args:
        step: The prediction, made without such a file, and the measurement.
        chip: Generation of the chips: `v6e`.
    """
    slowdowns = {unit: ratio for unit, ratio in step.slowdowns().items() if unit in _RATES}
    lines = [
        "# Measured by predicted time: the median over the operations that each unit bounds.",
        f"# xlashard preflight --rates takes it. From {step.profile.module}, "
        f"{step.profile.executions} executions.",
        f'chip = "{chip}"',
        "",
        "[slowdown]",
        *(f"{unit} = {ratio:.3f}  # {len(step.ratios[unit])}" for unit, ratio in slowdowns.items()),
    ]
    return "\n".join(lines) + "\n"


def read_calibrations(
    sources: RatesSources | None, chips: Iterable[Chip]
) -> dict[str, Calibration]:
    """Return the calibrations of chips, by their names.

    Args:
        sources: Files that `xlashard preflight --calibrate` wrote, or their content, one per chip.
        chips: Chips to predict for.

    Raises:
        ArgumentError: If a file is invalid, of none of the chips, or of the same as another.
    """
    if sources is None:
        return {}
    with short_tracebacks:
        several: Sequence[Any] = sources if isinstance(sources, list | tuple) else [sources]
        names = list(dict.fromkeys(chip.name for chip in chips))
        calibrations: dict[str, Calibration] = {}
        for source in several:
            calibration = _read(source)
            if calibration.chip not in names:
                raise ArgumentError(
                    f"{_path(source)} is of {calibration.chip}, but the topology has "
                    f"{' or '.join(names)}: pass the file of that chip"
                )
            if calibration.chip in calibrations:
                raise ArgumentError(
                    f"{_path(source)} is the second of {calibration.chip}: pass one for each chip"
                )
            calibrations[calibration.chip] = calibration
        return calibrations


def _path(source: RatesSource) -> str:
    return f"rates={os.fspath(source) if isinstance(source, os.PathLike) else source!r}"


def _read(source: RatesSource) -> Calibration:
    if isinstance(source, Calibration):
        return source
    expected = "a file that xlashard preflight --calibrate wrote, or its content"
    check_type("rates", source, (str, os.PathLike, Mapping), expected)
    path = _path(source)
    try:
        document = source if isinstance(source, Mapping) else read_toml(Path(source))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} can't be read: {error}") from None
    slowdown = document.get("slowdown")
    if not isinstance(slowdown, Mapping) or "chip" not in document:
        raise ArgumentError(
            f"{path} has no chip and [slowdown]: write the file with xlashard preflight "
            "--measured PROFILE --calibrate FILE"
        )
    for unit, ratio in slowdown.items():
        if unit not in _RATES or not isinstance(ratio, int | float) or not 0.01 < ratio < 100:
            raise ArgumentError(
                f"slowdown.{unit} = {ratio!r} in {path} is invalid: expected a number from 0.01 to "
                f"100 for one of {', '.join(_RATES)}"
            )
    return Calibration(str(document["chip"]), {str(u): float(r) for u, r in slowdown.items()})


def _slower(rates: Rates, names: Iterable[str], ratio: float) -> Rates:
    """Return rates of which those that the chip has by these names are slower."""
    changed: dict[str, Any] = {}
    # Names of GPUs' rates that TPUs lack, and the reverse.
    for name in {field.name for field in fields(rates)}.intersection(names):
        rate = getattr(rates, name)
        if name == "matrix_flops":
            changed[name] = tuple((dtype, flops / ratio) for dtype, flops in rate)
        elif name.endswith("_seconds"):
            changed[name] = rate * ratio
        else:
            changed[name] = rate / ratio
    return replace(rates, **changed)
