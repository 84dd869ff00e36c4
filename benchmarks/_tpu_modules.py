"""Modules of `pjit` and of `jax.jit`, compiled for TPUs or GPUs and compared.

    python -m benchmarks._tpu_modules [--target tpu|gpu] [--topology NAME ...] [--program NAME ...]
        [--page PATH]

Twelve programs are compiled for the topologies of a target, by `pjit` and by `jax.jit`, with equal
shardings. Their optimised HLO is compared without source lines; where it differs, so are their
estimated times, bytes accessed and peak memory. `explain` and `preflight` report the
collectives of each program for GPUs, which have to be the same. The benchmark needs libtpu or JAX's
CUDA plugin, and no device. The exit status is 1 if one of ours is worse.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from rich.console import Console
from rich.table import Table

from benchmarks._measure import environment
from benchmarks._tpu_programs import PROGRAMS, TpuProgram, program
from xlashard import Mesh, explain, gpu, pjit, preflight, tpu
from xlashard.gpu import GpuTopology
from xlashard.tpu import Topology

TARGETS = {
    "tpu": {
        "v4:4x4x4": {"data": 16, "model": 4},
        "v5e:16x16": {"data": 16, "model": 16},
        "v5p:16x16x24": {"data": 768, "model": 8},
        "v6e:4x4, 2 slices": {"data": 8, "model": 4},
        "tpu7x:4x4x8": {"data": 32, "model": 8},
    },
    "gpu": {
        "h100:1x8": {"data": 2, "model": 4},
        "h100:4x8": {"data": 4, "model": 8},
        "h100:32x8": {"data": 32, "model": 8},
        "gb200-nvl72": {"data": 9, "model": 8},
    },
}
"""Mesh axes, by target and topology."""

_MESHES = {where: axes for targets in TARGETS.values() for where, axes in targets.items()}

_TABLES = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*\n", re.M)
_METADATA = re.compile(r',? ?metadata=\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\}')
_NAME = re.compile(r"%[\w.-]+")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# A digest of XLA's compiler for GPUs, of the module with its name.
_DIGEST = re.compile(r'fingerprint_before_lhs="\w*"')


@dataclass(frozen=True)
class Figures:
    """Estimates of a program, per device.

    Attributes:
        cycles: Estimate of libtpu, summed over all operations, loop bodies once; 0 on GPUs.
        seconds: XLA's `optimal_seconds`, not above 0 where it has none; on GPUs the time of a
            preflight.
        accessed: Bytes that its operations read and write; on GPUs those of a preflight.
        peak: Bytes of arguments, results and temporaries.
    """

    cycles: int
    seconds: float
    accessed: float
    peak: int


@dataclass(frozen=True)
class Outcome:
    """Comparison of one program on one topology.

    Attributes:
        program: Its name.
        topology: Its name.
        devices: Number of devices.
        hlo: `identical`, `other names` if only instruction names differ, or `differs`.
        ours: Figures of ours.
        theirs: Figures of JAX's.
        seconds: Compile time of both.
        collectives: Kinds and mesh axes of the collectives that `explain` lists for ours; it is
            not called on TPUs.
        traffic: Kinds and mesh axes of the collectives that `preflight` lists.
    """

    program: str
    topology: str
    devices: int
    hlo: str
    ours: Figures
    theirs: Figures
    seconds: float
    collectives: tuple[str, ...] = ()
    traffic: tuple[str, ...] = ()

    @property
    def worse(self) -> list[str]:
        """Return the figures in which ours is worse."""
        both = zip(asdict(self.ours).items(), asdict(self.theirs).values(), strict=True)
        figures = [name for (name, mine), other in both if mine > other * (1 + 1e-6) > 0]
        return [*figures, *["collectives"] * (self.collectives != self.traffic)]


def compare(name: str, where: str, found: Topology | GpuTopology, axes: dict[str, int]) -> Outcome:
    """Compile a program with both libraries and compare the results."""
    mesh = found.mesh(axes)
    made = program(name, mesh)
    started = time.perf_counter()
    ours, theirs = (_compiled(made, compiler) for compiler in (pjit, jax.jit))
    seconds = time.perf_counter() - started
    outcome = Outcome(
        program=name,
        topology=where,
        devices=found.num_devices,
        hlo=how_alike(ours.as_text(), theirs.as_text()),
        ours=_figures(ours, found, mesh),
        theirs=_figures(theirs, found, mesh),
        seconds=seconds,
    )
    if not isinstance(found, GpuTopology):
        # Across slices, libtpu uses collectives that its modules do not show.
        return outcome
    listed = explain(ours).collectives
    sent = preflight(ours, topology=found, mesh=mesh).traffic
    both = [tuple(sorted(f"{c.kind} {c.along}" for c in these)) for these in (listed, sent)]
    return replace(outcome, collectives=both[0], traffic=both[1])


def how_alike(ours: str, theirs: str) -> str:
    """Compare optimised HLO: `identical`, `other names` or `differs`."""
    bare = _bare(ours), _bare(theirs)
    if bare[0] == bare[1]:
        return "identical"
    return "other names" if _renamed(bare[0]) == _renamed(bare[1]) else "differs"


def _compiled(made: TpuProgram, compiler: Any) -> Any:
    return compiler(made.fun, **made.options).lower(*made.arguments).compile()


def _bare(text: str) -> str:
    """Return HLO without the module name and source locations."""
    _, _, rest = text.partition(",")
    return _DIGEST.sub("", _METADATA.sub("", _TABLES.sub("", rest)))


def _renamed(text: str) -> str:
    """Return HLO with values numbered in order of appearance."""
    numbers: dict[str, str] = {}
    return _NAME.sub(lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), text)


def _figures(compiled: Any, found: Topology | GpuTopology, mesh: Mesh) -> Figures:
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    if isinstance(found, GpuTopology):
        # XLA's compiler for GPUs has no analysis of costs.
        spent = preflight(compiled, topology=found, mesh=mesh).time
        return Figures(0, spent.seconds, spent.hbm_bytes, peak)
    cost = compiled.cost_analysis()
    return Figures(
        cycles=sum(map(int, _CYCLES.findall(compiled.as_text()))),
        seconds=cost.get("optimal_seconds", 0.0),
        accessed=cost.get("bytes accessed", 0.0),
        peak=peak,
    )


def found_topology(where: str) -> Topology | GpuTopology:
    """Return the topology of a column."""
    name, _, slices = where.partition(", ")
    if where in TARGETS["gpu"]:
        return gpu.topology(name)
    return tpu.topology(name, int(slices.partition(" ")[0] or 1))


def outcomes(targets: Sequence[str], programs: Sequence[str]) -> Iterator[Outcome]:
    """Compile and compare every program on every topology."""
    for where in targets:
        found = found_topology(where)
        for each in programs:
            yield compare(each, where, found, _MESHES[where])


def as_table(found: Sequence[Outcome]) -> Table:
    """Return a row for each program, with a column for each topology."""
    columns = list(dict.fromkeys(outcome.topology for outcome in found))
    table = Table("program", *columns, title="The optimised HLO beside jax.jit's")
    for name in dict.fromkeys(outcome.program for outcome in found):
        cells = {o.topology: _cell(o) for o in found if o.program == name}
        table.add_row(name, *(cells.get(column, "") for column in columns))
    devices = {o.topology: f"{o.devices:,} devices" for o in found}
    table.caption = " · ".join(f"{where}: {count}" for where, count in devices.items())
    return table


def _cell(outcome: Outcome) -> str:
    if not outcome.worse:
        return outcome.hlo
    return f"{outcome.hlo}, worse: {', '.join(outcome.worse)}"


def as_markdown(found: Sequence[Outcome]) -> str:
    """Return the results as a Markdown table."""
    columns = {o.topology: o.devices for o in found}
    head = [f"`{where}` ({count:,})" for where, count in columns.items()]
    lines = [f"| program | {' | '.join(head)} |", "|---|" + "---|" * len(head)]
    for name in dict.fromkeys(outcome.program for outcome in found):
        cells = [_cell(o) for o in found if o.program == name]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


_MARKS = "<!-- modules -->", "<!-- /modules -->"


def write_page(path: Path, found: Sequence[Outcome]) -> None:
    """Write the table between the page's markers."""
    before, _, rest = path.read_text(encoding="utf-8").partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    text = f"{before}{_MARKS[0]}\n{as_markdown(found)}\n{_MARKS[1]}{after}"
    path.write_text(text, encoding="utf-8")


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, default="tpu", help="of its topologies all")
    every = ("topology", _MESHES), ("program", PROGRAMS)
    for name, known in every:
        parser.add_argument(
            f"--{name}",
            nargs="+",
            choices=known,
            metavar="NAME",
            help=f"of {', '.join(map(repr, known))}",
        )
    parser.add_argument("--page", type=Path, metavar="PATH", help="put the table into this page")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    unused = "as other benchmarks have it; nothing is timed here, and each that is worse fails"
    parser.add_argument("--rounds", type=int, help=unused)
    parser.add_argument("--strict", action="store_true", help=unused)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the table, and return the exit status."""
    options = _read(argv)
    found = []
    where = options.topology or list(TARGETS[options.target])
    for outcome in outcomes(where, options.program or list(PROGRAMS)):
        found.append(outcome)
        print(
            f"{outcome.topology}: {outcome.program}: {_cell(outcome)} ({outcome.seconds:.1f} s)",
            flush=True,
        )
    Console().print(as_table(found))
    worse = [outcome for outcome in found if outcome.worse]
    for outcome in worse:
        print(f"{outcome.program} on {outcome.topology}: {outcome.ours} beside {outcome.theirs}")
    if options.page:
        write_page(options.page, found)
    if options.json:
        rows = [{**asdict(o), "worse": o.worse} for o in found]
        results = {"benchmark": "_tpu_modules", "environment": environment(), "programs": rows}
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
