"""Predicted step times of published training runs, beside the measured ones.

    python -m benchmarks.truth [NAME ...] [--target tpu|gpu] [--kept] [--page]

Each run of `published_runs.toml` is compiled for its topology without generating code (half a
minute each), and its schedule takes the time of `xlashard.predict.costs`; each line has the CPU
seconds of XLA's process and of this one. NAME is a part of a run's name. The predictions are kept
in `step_times.json`; `--kept` takes them from there. `--page` writes picture and table of all runs
of the target into `docs/tpu/step_times.md` or that of GPUs. Two things of the model for TPUs come
from these runs, which do not test them: the spread of the times of slices, and the widths of the
error bars.
"""

import argparse
import itertools
import json
import math
import os
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._published_runs import PublishedRun, published_runs
from benchmarks._step_picture import Ratio, draw_ratios
from xlashard import preflight
from xlashard.predict.preflight.mesh_mapping import find_topology
from xlashard.train.model.programs import training_step

GOALS = {"tpu": 0.10, "gpu": 0.15}
"""Goal of the median error of the runs by target."""

KEPT = Path(__file__).with_name("step_times.json")
DOCS = Path(__file__).parents[1] / "docs"
_MARKS = ("<!-- step times -->", "<!-- /step times -->")


@dataclass(frozen=True)
class Comparison:
    """Run with its prediction.

    Attributes:
        run: The run.
        seconds: Predicted time of a step.
        below: Error below it, as a negative share.
        above: Error above it, as a share; None for a lower bound.
        fits: Whether the program fits into the memory of its chips; a run of which it doesn't had
            other settings.
        cpu: CPU seconds of the estimate: of the compiler's process, and of this one, which traces
            and lowers the program and makes the report. None for a prediction that was kept.
    """

    run: PublishedRun
    seconds: float
    below: float
    above: float | None
    fits: bool = True
    cpu: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """Return prediction over measurement, less 1."""
        return self.seconds / self.run.seconds - 1

    @property
    def per_token(self) -> tuple[float, float]:
        """Return measured and predicted seconds per token."""
        settings = self.run.settings
        tokens = settings.training.batch * settings.model.length
        return self.run.seconds / tokens, self.seconds / tokens

    @property
    def is_in_bar(self) -> bool:
        """Return whether the error bar contains the measurement."""
        return self.reach <= 1

    @property
    def reach(self) -> float:
        """Return the distance of the measurement by that of the end of the error bar."""
        off = self.run.seconds / self.seconds - 1
        above = math.inf if self.above is None else self.above
        end = self.below if off < 0 else above
        return abs(off / end) if end else math.inf * bool(off)

    @property
    def width(self) -> float:
        """Return the width of the error bar as a share of the time."""
        return math.inf if self.above is None else self.above - self.below

    @property
    def model(self) -> str:
        """Return the model of the run, without its chip and size of the slice."""
        return self.run.name.split("_")[1]


def compare(run: PublishedRun) -> Comparison:
    """Predict the step time of a run.

    Args:
        run: The run.
    """
    settings = run.settings
    place = find_topology(settings.devices.topology, settings.devices.slices)
    mesh = place.mesh(settings.mesh)
    step = training_step(settings, mesh)
    # The recipes for GPUs give XLA's allocator nine tenths of the memory or more.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    began = _measure_cpu()
    with ThreadPoolExecutor(1) as thread:
        # The compiler's process ends with the thread that started it, and counts from then on.
        report = thread.submit(
            preflight,
            step.function,
            *step.args,
            topology=place,
            mesh=mesh,
            compiler_options=run.options,
            estimate=True,
            title=run.name,
        ).result()
    step_time, fits = report.time, report.outcome == "fits"
    compiler, own = (now - before for now, before in zip(_measure_cpu(), began, strict=True))
    return Comparison(
        run, step_time.seconds, step_time.below, step_time.above, fits, (compiler, own)
    )


def _measure_cpu() -> tuple[float, float]:
    """Return the CPU seconds of the processes that this one started and awaited, and its own."""
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    return started.ru_utime + started.ru_stime, time.process_time()


def summary(found: Sequence[Comparison]) -> str:
    """Return the errors of all runs in one line."""
    errors = [abs(one.error) for one in found]
    near = sum(error <= 0.2 for error in errors) / len(errors)
    held = sum(one.is_in_bar for one in found) / len(found)
    on_one = [one.error for one in found if one.run.settings.devices.slices == 1]
    on_several = [one.error for one in found if one.run.settings.devices.slices > 1]
    groups = ((on_one, " on one slice"), (on_several, " on several"))
    bias = ", ".join(
        f"{statistics.median(group):+.1%}{slices if on_several else ''}"
        for group, slices in groups
        if group
    )
    median, goal = statistics.median(errors), max(GOALS[one.run.target] for one in found)
    return (
        f"{len(found)} runs: median error {median:.1%} (goal {goal:.0%}: "
        f"{'met' if median <= goal else 'not met'}), bias {bias}, "
        f"{near:.0%} within 20 %; the error bar holds {held:.0%} of the measurements, "
        f"with a median width of {statistics.median(one.width for one in found):.0%}"
    )


def validate_bars(found: Sequence[Comparison]) -> str:
    """Return how many runs of models that were left out the error bars hold, in one line.

    For each model the bars are scaled to hold nine in ten of the runs of the others.

    Args:
        found: Runs of several models.
    """
    held, widths = 0, []
    for model in {one.model for one in found}:
        others = sorted(one.reach for one in found if one.model != model)
        if not others:
            return "Error bars of a single model are not validated"
        scale = others[math.ceil(0.9 * len(others)) - 1]
        apart = [one for one in found if one.model == model]
        held += sum(one.reach <= scale for one in apart)
        widths += [scale * one.width for one in apart]
    return (
        "Error bars, scaled for each model to hold nine in ten runs of the other models, hold "
        f"{held / len(found):.0%} of its runs, with a median width of "
        f"{statistics.median(widths):.0%}"
    )


def list_refuted(found: Sequence[Comparison]) -> str:
    """Return the runs whose settings do not fit into the memory of their chips, in one line."""
    names = [one.run.name for one in found if not one.fits]
    return f"Settings that do not fit into their chips' memory: {', '.join(names) or 'none'}"


def by_slices(found: Sequence[Comparison]) -> str:
    """Return bias, and share of measurements in the error bar, by number of slices, in one line."""
    groups: dict[int, list[Comparison]] = defaultdict(list)
    for one in found:
        groups[one.run.settings.devices.slices].append(one)
    parts = [
        f"{slices}: {statistics.median(one.error for one in group):+.1%}, "
        f"{sum(one.is_in_bar for one in group)} of {len(group)} in the error bar"
        for slices, group in sorted(groups.items())
    ]
    return f"Bias by number of slices: {'; '.join(parts)}"


def ranking(found: Sequence[Comparison]) -> tuple[int, int]:
    """Count pairs of settings of one model on one slice that the model ranks as measured.

    Pairs whose measured times per token differ by 5 % or less are left out, and equal settings.

    Args:
        found: The runs.

    Returns:
        Number of pairs in the measured order, and of all pairs.
    """
    right = pairs = 0
    for one, other in itertools.combinations(found, 2):
        first, second = one.run, other.run
        equal = first.settings == second.settings and first.options == second.options
        if first.slice_of_model != second.slice_of_model or equal:
            continue
        measured, predicted = zip(one.per_token, other.per_token, strict=True)
        if max(measured) > 1.05 * min(measured):
            pairs += 1
            right += (measured[0] < measured[1]) == (predicted[0] < predicted[1])
    return right, pairs


def ranking_text(found: Sequence[Comparison]) -> str:
    """Return the ranking in one line."""
    right, pairs = ranking(found)
    return (
        f"{right} of {pairs} pairs of runs with different settings of one model on one slice, "
        "which differ by more than 5 % per token, are in the measured order"
    )


def table(found: Sequence[Comparison]) -> str:
    """Return the runs as a Markdown table, with the settings that they lack."""
    lines = ["| run | measured | predicted | error | bar | fits | not expressed |"]
    lines.append("|---|---|---|---|---|---|---|")
    for one in sorted(found, key=lambda c: c.run.name):
        run, lacks = one.run, "; ".join(one.run.lacks)
        above = "" if one.above is None else f" … {one.above:+.0%}"
        lines.append(
            f"| {run.name} | {run.seconds:.3g} s | {one.seconds:.3g} s | {one.error:+.0%} "
            f"| {one.below:+.0%}{above} | {'yes' if one.fits else 'no'} | {lacks} |"
        )
    return "\n".join(lines)


def draw(found: Sequence[Comparison]) -> str:
    """Return the picture of the runs as SVG."""
    groups: dict[str, list[Ratio]] = defaultdict(list)
    for one in found:
        ratio = one.error + 1
        high = None if one.above is None else ratio * (1 + one.above)
        groups[one.run.chip].append(Ratio(one.run.name, ratio, ratio * (1 + one.below), high))
    title = "Predicted by measured step time of published runs, with error bars"
    return draw_ratios(dict(sorted(groups.items())), title)


def write_page(target: str, found: Sequence[Comparison], docs: Path = DOCS) -> None:
    """Write the picture of the runs of a target, and its page: picture, summary, folded table.

    Args:
        target: `tpu` or `gpu`.
        found: All of its runs.
        docs: Folder of the pages.
    """
    picture = f"pictures/step_times_{target}.svg"
    (docs / picture).write_text(draw(found), encoding="utf-8")
    page = docs / target / "step_times.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(_MARKS[0])
    after = rest.partition(_MARKS[1])[2]
    shown = f"![Predicted by measured step times, by chip](../{picture})"
    lines = [shown, *describe(found)]
    names = {one.run.name for one in found}
    lacking = [n for n, r in published_runs().items() if r.target == target and n not in names]
    if lacking:
        lines.append(f"Not counted, as no prediction is kept: {', '.join(lacking)}.")
    rows = table(found).replace("\n", "\n    ")
    folded = f'??? note "All runs"\n\n    {rows}'
    body = "\n\n".join((*lines, folded))
    page.write_text(f"{before}{_MARKS[0]}\n{body}\n{_MARKS[1]}{after}", encoding="utf-8")


def describe(found: Sequence[Comparison]) -> list[str]:
    """Return the sentences about some runs."""
    lines = [summary(found), validate_bars(found), ranking_text(found), list_refuted(found)]
    if any(one.run.settings.devices.slices > 1 for one in found):
        lines.insert(1, by_slices(found))
    return [f"{line}." for line in lines]


def read_kept() -> dict[str, Comparison]:
    """Return the predictions that earlier calls kept, by run."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    return {n: Comparison(run, **kept[n]) for n, run in published_runs().items() if n in kept}


def write_kept(found: Mapping[str, Comparison]) -> None:
    """Keep predictions, one run a line."""
    lines = (
        f'"{name}": {json.dumps({key: getattr(one, key) for key in _KEPT})}'
        for name, one in sorted(found.items())
    )
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


_KEPT = ("seconds", "below", "above", "fits")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of the names of runs")
    parser.add_argument("--target", choices=GOALS, help="runs on these chips alone")
    parser.add_argument("--kept", action="store_true", help="compile none: predictions as kept")
    parser.add_argument("--page", action="store_true", help="write pictures and pages")
    options = parser.parse_args(words)
    kept, found = read_kept(), list[Comparison]()
    made: dict[str, Comparison] = {}
    for name, run in published_runs().items():
        if options.names and not any(part in name for part in options.names):
            continue
        if options.target not in (None, run.target):
            continue
        if options.kept and name not in kept:
            print(f"{name:36} no prediction is kept")
            continue
        settings = f"{run.settings} {sorted(run.options.items())}"
        if options.kept:
            one = kept[name]
        else:
            # Runs of the same settings are measured with other software.
            one = made[settings] = replace(made.get(settings) or compare(run), run=run)
        kept[name] = one
        found.append(one)
        # After each: a call for all runs takes an hour, and may be interrupted.
        write_kept(kept)
        print(
            f"{name:36} {run.seconds:8.3f} s  {one.seconds:8.3f} s  {one.error:+7.1%}"
            f"{'' if one.cpu is None else '  CPU {:.1f} s of XLA, {:.1f} of this'.format(*one.cpu)}"
            f"{'' if one.fits else '  does not fit'}",
            flush=True,
        )
    if not found:
        parser.error(f"no run has a name with {' or '.join(options.names)}")
    for target in sorted({one.run.target for one in found}):
        of_target = [one for one in found if one.run.target == target]
        print("\n".join(f"{target}: {line}" for line in describe(of_target)))
        if options.page:
            write_page(target, [one for one in kept.values() if one.run.target == target])
    return 0


if __name__ == "__main__":
    sys.exit(main())
