"""Our modules beside those of `jax.jit`, compiled for TPUs: is what the chips would run the same?

    python -m benchmarks._tpu_modules [--topology NAME ...] [--program NAME ...] [--page PATH]

Twelve programs are compiled for five topologies, by `pjit` and by `jax.jit`, shardings alike.
Their optimised HLO is compared without what names source lines, and where it differs, what the
compiler says of it: its estimates of time, the bytes that it moves and the memory at its peak. It
needs libtpu and no TPU. The exit status is 1 if one of ours is worse.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from rich.console import Console
from rich.table import Table

from benchmarks._measure import environment
from benchmarks._tpu_programs import PROGRAMS, TpuProgram, program
from xlashard import pjit
from xlashard.tpu import Topology, topology

TARGETS = {
    "v4:4x4x4": {"data": 16, "model": 4},
    "v5e:16x16": {"data": 16, "model": 16},
    "v5p:16x16x24": {"data": 768, "model": 8},
    "v6e:4x4, 2 slices": {"data": 8, "model": 4},
    "tpu7x:4x4x8": {"data": 32, "model": 8},
}
"""By topology the mesh."""

_TABLES = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*\n", re.M)
_METADATA = re.compile(r',? ?metadata=\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\}')
_NAME = re.compile(r"%[\w.-]+")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Figures:
    """What the compiler says of a program, per device.

    Attributes:
        cycles: Its estimate, all operations together, bodies of loops once.
        seconds: XLA's `optimal_seconds`; not above 0 where it has none.
        accessed: Bytes that its operations read and write.
        peak: Bytes of arguments, results and temporaries.
    """

    cycles: int
    seconds: float
    accessed: float
    peak: int


@dataclass(frozen=True)
class Outcome:
    """One program on one topology.

    Attributes:
        program: Its name.
        topology: Its name.
        devices: How many.
        hlo: `identical`, `other names` if only instructions are called otherwise, or `differs`.
        ours: Figures of ours.
        theirs: Figures of JAX's.
        seconds: How long both took to compile.
    """

    program: str
    topology: str
    devices: int
    hlo: str
    ours: Figures
    theirs: Figures
    seconds: float

    @property
    def worse(self) -> list[str]:
        """The figures in which ours is worse."""
        both = zip(asdict(self.ours).items(), asdict(self.theirs).values(), strict=True)
        return [name for (name, mine), other in both if mine > other * (1 + 1e-6) > 0]


def compare(name: str, where: str, found: Topology, axes: dict[str, int]) -> Outcome:
    """Compiles a program both ways."""
    made = program(name, found.mesh(axes))
    started = time.perf_counter()
    ours, theirs = (_compiled(made, compiler) for compiler in (pjit, jax.jit))
    seconds = time.perf_counter() - started
    hlo = how_alike(ours.as_text(), theirs.as_text())
    return Outcome(name, where, found.num_devices, hlo, _figures(ours), _figures(theirs), seconds)


def how_alike(ours: str, theirs: str) -> str:
    """Compares optimised HLO: `identical`, `other names` or `differs`."""
    bare = _bare(ours), _bare(theirs)
    if bare[0] == bare[1]:
        return "identical"
    return "other names" if _renamed(bare[0]) == _renamed(bare[1]) else "differs"


def _compiled(made: TpuProgram, compiler: Any) -> Any:
    return compiler(made.fun, **made.options).lower(*made.arguments).compile()


def _bare(text: str) -> str:
    """HLO without its own name and what tells of source lines."""
    _, _, rest = text.partition(",")
    return _METADATA.sub("", _TABLES.sub("", rest))


def _renamed(text: str) -> str:
    """HLO whose values are numbered as they come."""
    numbers: dict[str, str] = {}
    return _NAME.sub(lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), text)


def _figures(compiled: Any) -> Figures:
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return Figures(
        cycles=sum(map(int, _CYCLES.findall(compiled.as_text()))),
        seconds=cost.get("optimal_seconds", 0.0),
        accessed=cost.get("bytes accessed", 0.0),
        peak=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
    )


def outcomes(targets: Sequence[str], programs: Sequence[str]) -> Iterator[Outcome]:
    """Every program on every topology."""
    for where in targets:
        name, _, slices = where.partition(", ")
        found = topology(name, int(slices.partition(" ")[0] or 1))
        for each in programs:
            yield compare(each, where, found, TARGETS[where])


def as_table(found: Sequence[Outcome]) -> Table:
    """A row for each program, a column for each topology."""
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
    """The same as a table of Markdown."""
    columns = {o.topology: o.devices for o in found}
    head = [f"`{where}` ({count:,})" for where, count in columns.items()]
    lines = [f"| program | {' | '.join(head)} |", "|---|" + "---|" * len(head)]
    for name in dict.fromkeys(outcome.program for outcome in found):
        cells = [_cell(o) for o in found if o.program == name]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


_MARKS = "<!-- modules -->", "<!-- /modules -->"


def write_page(path: Path, found: Sequence[Outcome]) -> None:
    """Puts the table between the marks that the page has for it."""
    before, _, rest = path.read_text(encoding="utf-8").partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    text = f"{before}{_MARKS[0]}\n{as_markdown(found)}\n{_MARKS[1]}{after}"
    path.write_text(text, encoding="utf-8")


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    every = ("topology", TARGETS), ("program", PROGRAMS)
    for name, known in every:
        parser.add_argument(
            f"--{name}",
            nargs="+",
            choices=known,
            default=list(known),
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
    """Compares, prints the table, and gives the exit status."""
    options = _read(argv)
    found = []
    for outcome in outcomes(options.topology, options.program):
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
        said = {"benchmark": "_tpu_modules", "environment": environment(), "programs": rows}
        options.json.write_text(json.dumps(said, indent=1), encoding="utf-8")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
