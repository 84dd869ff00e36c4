"""Predicted times of single operations, beside the published ones.

    python -m benchmarks.operations [WORD ...] [--each]

Each row of `published_operations.toml` is compiled for the smallest slice of its chip, or for GPUs
(`pip install 'xlashard[gpu-target]'`), without generating code, and its schedule takes the time of
`xlashard.predict.costs`. WORD is a part of a group's name, such as v6e or attention. Where today's
compiler makes another program than that of the publication, which the memory shows, the times
don't compare: such rows don't count. The constants of the cost model come from these rows and from
pages of chips.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._operation_programs import PROGRAMS
from xlashard import NamedSharding, P, PreflightReport, preflight
from xlashard.predict.preflight.mesh_mapping import find_topology
from xlashard.support.documents import read_toml

TABLE = Path(__file__).with_name("published_operations.toml")
_DTYPES = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "f8e4m3": jnp.float8_e4m3fn,
    "s32": jnp.int32,
}
GOAL = 0.10
"""Goal of the median of the groups' median errors."""


@dataclass(frozen=True)
class PublishedOperation:
    """Operation with a published device time.

    Attributes:
        group: Chip and program, of which the benchmark prints the median error.
        program: Name in `PROGRAMS`.
        arrays: Dtypes and shapes of the program's arrays.
        topology: The smallest slice of the chip, or that of a collective; nodes and GPUs per node.
        ring: Devices along which a collective runs; 1 for other programs.
        microseconds: Published time.
        megabytes: Published memory, or None.
        options: Compiler options.
        source: Repository and commit, or address.
    """

    group: str
    program: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    topology: str
    ring: int
    microseconds: float
    megabytes: float | None
    options: Mapping[str, Any]
    source: str

    def is_program_of(self, report: PreflightReport) -> bool:
        """Return whether a compiled program takes the published memory, within 2 %.

        Args:
            report: Its preflight.
        """
        if self.megabytes is None:
            return True
        return abs(report.memory.total_bytes / self.megabytes / 1e6 - 1) < 0.02


def published_operations() -> Iterator[PublishedOperation]:
    """Read all published operations."""
    for group in read_toml(TABLE)["groups"]:
        for arrays, microseconds, *megabytes in group["rows"]:
            yield PublishedOperation(
                group=f"{group['chip']} {group['program'].removeprefix('causal ')}",
                program=group["program"],
                arrays=tuple(_array(text) for text in arrays.split()),
                topology=f"{group['chip']}:{group['slice']}",
                ring=group.get("ring", 1),
                microseconds=microseconds,
                megabytes=megabytes[0] if megabytes else None,
                options=group.get("options", {}),
                source=group["source"],
            )


def _array(text: str) -> tuple[str, tuple[int, ...]]:
    """Read an array, such as bf16[8,128]."""
    dtype, _, dims = text.removesuffix("]").partition("[")
    return dtype, tuple(int(size) for size in dims.split(","))


def predict(operation: PublishedOperation) -> PreflightReport:
    """Return the preflight of an operation.

    Args:
        operation: The operation.
    """
    place = find_topology(operation.topology, 1)
    mesh = place.mesh({"ring": operation.ring, "rest": place.num_devices // operation.ring})
    sharding = NamedSharding(mesh, P("ring") if operation.ring > 1 else P())
    arrays = [
        jax.ShapeDtypeStruct(dims, _DTYPES[dtype], sharding=sharding)
        for dtype, dims in operation.arrays
    ]
    return preflight(
        PROGRAMS[operation.program],
        *arrays,
        topology=place,
        mesh=mesh,
        compiler_options=operation.options,
        estimate=True,
    )


def summary(errors: Mapping[str, Sequence[float]]) -> str:
    """Return the median errors of groups as lines, and the median of all groups.

    Args:
        errors: Predicted over published times less 1, by group.
    """
    medians = {name: statistics.median(map(abs, found)) for name, found in errors.items()}
    lines = [
        f"{name:30} {len(found):3} rows, median error {medians[name]:6.1%}, from "
        f"{min(found):+7.1%} to {max(found):+7.1%}"
        for name, found in errors.items()
    ]
    rows = sum(map(len, errors.values()))
    median = statistics.median(medians.values())
    lines.append(
        f"{rows} rows in {len(errors)} groups: median of the groups' median errors {median:.1%}, "
        f"goal {GOAL:.0%}: {'met' if median <= GOAL else 'not met'}"
    )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of the names of groups")
    parser.add_argument("--each", action="store_true", help="print each row")
    options = parser.parse_args(words)
    errors: dict[str, list[float]] = defaultdict(list)
    others = 0
    for operation in published_operations():
        if options.words and not any(word in operation.group for word in options.words):
            continue
        report = predict(operation)
        found = report.time.seconds * 1e6
        same = operation.is_program_of(report)
        others += not same
        if same:
            errors[operation.group].append(found / operation.microseconds - 1)
        if options.each:
            arrays = " ".join(f"{dtype}{list(dims)}" for dtype, dims in operation.arrays)
            print(
                f"{operation.microseconds:12.1f} us {found:12.1f} us "
                f"{found / operation.microseconds - 1:+7.1%}  {operation.group} {arrays}"
                f"{'' if same else '  another program'}",
                flush=True,
            )
    if not errors:
        parser.error(f"no group has a name with {' or '.join(options.words)}")
    print(summary(errors))
    if others:
        print(f"{others} rows don't count: today's compiler makes other programs of them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
