"""Operations that a profile of JAX measured on one device."""

import math
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from xlashard.errors import ArgumentError
from xlashard.support.tracebacks import short_tracebacks

_OPERATIONS, _MODULES = "XLA Ops", "XLA Modules"
_STREAM = "Stream #"
"""Begin of the names of a GPU's lines: `Stream #17(Compute)`."""


@dataclass
class MeasuredOperation:
    """Operation of a profile, summed over its runs.

    Attributes:
        name: HLO instruction.
        op_name: JAX name; empty if the profile has none.
        seconds: Time without that of the operations inside of it, in one execution of the program.
        runs: Number of runs in one execution.
        first: Start of each run, in seconds.
        last: End of each run.
    """

    name: str
    op_name: str = ""
    seconds: float = 0.0
    runs: float = 0.0
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Profile:
    """Profile of the program that took most of the time, on one device.

    Attributes:
        path: The file.
        module: Name of the program.
        executions: Number of executions.
        seconds: Mean time of an execution; on CPU, of all operations of one device.
        operations: Its operations, by name.
        on_streams: Whether the operations are kernels on a GPU's streams, where the kernel of an
            asynchronous operation takes as long as the operation.
    """

    path: str
    module: str
    executions: int
    seconds: float
    operations: dict[str, MeasuredOperation]
    on_streams: bool = False


@dataclass(frozen=True)
class _Event:
    name: str
    op_name: str
    start: float
    end: float
    kernel: str = ""


def read_profile(
    path: str | os.PathLike[str], predicted_runs: Mapping[str, float] | None = None
) -> Profile:
    """Read a profile that `jax.profiler` wrote.

    Args:
        path: File `*.xplane.pb`, or a folder of profiles, of which the newest is read.
        predicted_runs: Runs of operations in one execution, by name. A GPU's profile has no events
            of whole executions, whose number follows from these; without them, it is that of the
            operation that ran least often.

    Raises:
        ArgumentError: If there is no profile, or it has no operations of a program.
    """
    with short_tracebacks:
        return _read(path, predicted_runs or {})


def _read(path: str | os.PathLike[str], predicted_runs: Mapping[str, float]) -> Profile:
    # Reports are compared with times that were read before, and without JAX.
    import jax

    file = _newest(Path(path))
    try:
        planes = list(jax.profiler.ProfileData.from_serialized_xspace(file.read_bytes()).planes)
    except (OSError, RuntimeError, ValueError) as error:
        raise ArgumentError(
            f"{path} can't be read as a profile: {error}; expected a file *.xplane.pb of "
            "jax.profiler.trace, or its folder"
        ) from None
    devices = sorted((p for p in planes if p.name.startswith("/device:")), key=lambda p: p.name)
    for plane in devices:
        profile = _from_streams(str(file), plane, predicted_runs) or _of_device(str(file), plane)
        if profile is not None:
            return profile
    host = next((p for p in planes if p.name == "/host:CPU"), None)
    profile = None if host is None else _of_host(str(file), host)
    if profile is None:
        raise ArgumentError(  # no-catalogue: needs a profile without operations
            f"{path} has no operations of a program: profile some steps, "
            "with jax.profiler.trace(folder): step(...)"
        )
    return profile


def _newest(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ArgumentError(
            f"{path} has no profile: expected files *.xplane.pb, as jax.profiler.trace writes them"
        )
    return files[-1]


def _of_device(path: str, plane: Any) -> Profile | None:
    """Return the profile of an accelerator, whose operations are on a line of their own."""
    lines = {line.name: line for line in plane.lines}
    if _OPERATIONS not in lines:
        return None
    modules: dict[str, list[_Event]] = defaultdict(list)
    for event in _events(lines[_MODULES].events if _MODULES in lines else ()):
        modules[event.name.partition("(")[0]].append(event)
    events = sorted(_events(lines[_OPERATIONS].events), key=lambda e: (e.start, -e.end))
    if not events:
        return None
    if not modules:
        whole = _Event("", "", events[0].start, max(e.end for e in events))
        modules[""] = [whole]
    name = max(modules, key=lambda n: sum(e.end - e.start for e in modules[n]))
    runs = modules[name]
    inside = _inside(events, runs)
    seconds = sum(run.end - run.start for run in runs) / len(runs)
    return Profile(path, name, len(runs), seconds, _sums([inside], len(runs)))


def _inside(events: Sequence[_Event], runs: Sequence[_Event]) -> list[_Event]:
    """Return the events that start during one of the runs of a program."""
    runs = sorted(runs, key=lambda run: run.start)
    starts = [run.start for run in runs]
    inside = []
    for event in events:
        before = bisect_right(starts, event.start)
        if before and event.start <= runs[before - 1].end:
            inside.append(event)
    return inside


def _from_streams(path: str, plane: Any, predicted_runs: Mapping[str, float]) -> Profile | None:
    """Return the profile of a GPU, whose kernels have their operation and program as stats."""
    programs: dict[tuple[str, Any], list[_Event]] = defaultdict(list)
    for line in plane.lines:
        for event in line.events if line.name.startswith(_STREAM) else ():
            stats = dict(event.stats)
            if stats.get("hlo_op"):
                program = str(stats.get("hlo_module", "")), stats.get("program_id")
                programs[program].append(_event(event, stats))
    if not programs:
        return None
    program = max(programs, key=lambda each: sum(e.end - e.start for e in programs[each]))
    events = sorted(programs[program], key=lambda e: e.start)
    counts = Counter((e.name, e.kernel) for e in events)
    # An operation of several kernels runs as often as the rarest of them.
    runs = {name: math.inf for name, _ in counts}
    for (name, _), count in counts.items():
        runs[name] = min(runs[name], count)
    ratios = [runs[name] / predicted_runs[name] for name in runs if predicted_runs.get(name)]
    executions = max(round(median(ratios) if ratios else min(runs.values())), 1)
    operations: dict[str, MeasuredOperation] = {}
    for event in events:
        operation = operations.setdefault(event.name, MeasuredOperation(event.name, event.op_name))
        operation.seconds += (event.end - event.start) / executions
        operation.runs = runs[event.name] / executions
        operation.first.append(event.start)
        operation.last.append(event.end)
    seconds = _mean_span(events, counts, executions)
    return Profile(path, program[0], executions, seconds, operations, on_streams=True)


def _mean_span(
    events: Sequence[_Event], counts: Mapping[tuple[str, str], int], executions: int
) -> float:
    """Return the mean time from the first kernel of an execution to the end of its last."""
    # Each execution begins with the same kernel, also if that runs several times in a loop.
    begin = next((k for e in events if counts[k := (e.name, e.kernel)] % executions == 0), None)
    if begin is None:
        return sum(e.end - e.start for e in events) / executions
    starts = [e.start for e in events if (e.name, e.kernel) == begin]
    starts = starts[:: len(starts) // executions]
    ends = [0.0] * executions
    for event in events:
        place = max(bisect_right(starts, event.start) - 1, 0)
        ends[place] = max(ends[place], event.end)
    starts[0] = events[0].start
    return sum(end - start for start, end in zip(starts, ends, strict=True)) / executions


def _of_host(path: str, plane: Any) -> Profile | None:
    """Return the profile of the CPU's first device, whose operations are on several threads."""
    events_by_module: dict[str, dict[int, list[_Event]]] = defaultdict(lambda: defaultdict(list))
    executions: dict[str, set[Any]] = defaultdict(set)
    for number, line in enumerate(plane.lines):
        for event in line.events:
            stats = dict(event.stats)
            if stats.get("hlo_op") and not stats.get("device_ordinal"):
                module = str(stats.get("hlo_module", ""))
                events_by_module[module][number].append(_event(event, stats))
                executions[module].add(stats.get("run_id"))
    if not events_by_module:
        return None

    def length(module: str) -> float:
        return sum(e.end - e.start for events in events_by_module[module].values() for e in events)

    name = max(events_by_module, key=length)
    # Operations nest within a thread only.
    threads = [
        sorted(part, key=lambda e: (e.start, -e.end)) for part in events_by_module[name].values()
    ]
    runs = len(executions[name])
    operations = _sums(threads, runs)
    return Profile(path, name, runs, sum(o.seconds for o in operations.values()), operations)


def _events(events: Any) -> Iterator[_Event]:
    for event in events:
        yield _event(event, dict(event.stats))


def _event(event: Any, stats: dict[str, Any]) -> _Event:
    # TPU's events are named by the instruction as text: `%fusion.3 = bf16[...] fusion(...)`.
    name = str(stats.get("hlo_op") or event.name).partition(" = ")[0].removeprefix("%")
    op_name = str(stats.get("tf_op", "")).removesuffix(":")
    start = event.start_ns * 1e-9
    return _Event(name, op_name, start, start + event.duration_ns * 1e-9, event.name)


def _sums(threads: Sequence[Sequence[_Event]], executions: int) -> dict[str, MeasuredOperation]:
    """Return operations with the time that is theirs alone, from the events of each thread."""
    operations: dict[str, MeasuredOperation] = {}
    for events in threads:
        around: list[_Event] = []
        for event in events:
            # Neighbours may overlap by a rounding error; what is inside of another is so wholly.
            while around and around[-1].end <= (event.start + event.end) / 2:
                around.pop()
            seconds = (event.end - event.start) / executions
            if around:
                inside = min(event.end, around[-1].end) - event.start
                operations[around[-1].name].seconds -= inside / executions
            around.append(event)
            operation = operations.setdefault(
                event.name, MeasuredOperation(event.name, event.op_name)
            )
            operation.seconds += seconds
            operation.runs += 1 / executions
            operation.first.append(event.start)
            operation.last.append(event.end)
    return operations
