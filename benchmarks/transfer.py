"""Transfers between host and devices and between shardings: beside JAX and beside a plain copy.

The eight emulated devices use host memory, so the least cost of a transfer is one copy of the
value into fresh memory: the third candidate of every table. Both libraries make the same call, on
equivalent shardings.

    python -m benchmarks.transfer [--mb N ...] [--memory-gb N] [--rounds N] [--json PATH] [--strict]
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks._devices import emulated

os.environ.update(emulated(8))

import jax
import numpy as np

import xlashard
from benchmarks._measure import Options, Report, interleave, read_options
from xlashard import Array, Mesh, NamedSharding, P

COLUMNS = 1024
MEGABYTES = (256, 2048)
LEAVES = 2000
LEAF_SHAPES = ((64,), (64, 64), (8, 128))
FEW_ROUNDS = 3
COPY = "plain copy"

type Call = Callable[[], object]
type Candidates = dict[str, Call]


@dataclass(frozen=True)
class Row:
    """Table: the same transfer done in several ways.

    Attributes:
        title: Source and target of the transfer.
        candidates: The candidates, among them `"jax"`, `"xlashard"` and a plain copy.
        goal: Upper limit of xlashard's time, in multiples of JAX's.
        identity_goal: Upper limit in multiples of the compiled identity, where it is a candidate.
        inner: Calls per sample; None for as many as make a sample long enough to be timed.
    """

    title: str
    candidates: Candidates
    goal: float
    identity_goal: float | None = None
    inner: int | None = 1


@dataclass(frozen=True)
class Setting:
    """Mesh that all rows share, with three shardings of a matrix over it."""

    mesh: Mesh

    def of(self, *spec: str | None) -> NamedSharding:
        """Return a sharding over the mesh."""
        return NamedSharding(self.mesh, P(*spec))

    @property
    def ways(self) -> dict[str, NamedSharding]:
        """Return shardings by name: rows, columns, replicated."""
        return {"rows": self.of("d"), "columns": self.of(None, "d"), "replicated": self.of()}


def as_matrix(megabytes: int, *, aligned: bool = False) -> np.ndarray:
    """Return a float32 matrix of the size with 1,024 columns.

    Args:
        megabytes: Its size.
        aligned: Whether it begins at a multiple of 64 bytes, where a CPU device can alias it.
            Large NumPy arrays begin 16 bytes after such a multiple.
    """
    rows = max(8, megabytes * 2**20 // 4 // COLUMNS // 8 * 8)
    block = np.empty(rows * COLUMNS + 32, np.float32)
    start = -block.ctypes.data % 64 // 4 + (0 if aligned else 4)
    value = block[start : start + rows * COLUMNS].reshape(rows, COLUMNS)
    return np.random.default_rng(0).random(dtype=np.float32, out=value)


def as_tree() -> dict[str, list[np.ndarray]]:
    """Return small float32 arrays, like the parameters of a model."""
    dice = np.random.default_rng(0)
    shapes = [LEAF_SHAPES[number % len(LEAF_SHAPES)] for number in range(LEAVES)]
    return {"layers": [dice.random(shape, np.float32) for shape in shapes]}


def waited(x: object) -> object:
    """Wait for a value and return it."""
    return jax.block_until_ready(x)


def bare(handle: jax.Array) -> jax.Array:
    """Return another handle over the same buffers, without a cached value."""
    return handle.clone()  # pyright: ignore[reportAttributeAccessIssue]


def fresh(handle: jax.Array) -> Array:
    """Return an Array over the same buffers, without a cached value."""
    return Array.from_jax(bare(handle))


def from_host(value: np.ndarray, setting: Setting, title: str, goal: float) -> Row:
    """Compare transfers of a matrix from the host to devices."""
    sharding = setting.ways[title]
    jax_sharding = sharding.jax_sharding()
    return Row(
        f"host → {title}",
        {
            "jax": lambda: waited(jax.device_put(value, jax_sharding)),
            "xlashard": lambda: waited(xlashard.device_put(value, sharding)),
            COPY: lambda: np.array(value),
        },
        goal,
    )


def as_it_is(value: np.ndarray, setting: Setting) -> Row:
    """Compare transfers of an aligned matrix that the caller promises not to change.

    JAX assumes the promise wherever memory is aligned; xlashard requires it explicitly.
    """
    sharding = setting.ways["rows"]
    jax_sharding = sharding.jax_sharding()
    return Row(
        "aligned host → rows, may_alias=True",
        {
            "jax": lambda: waited(jax.device_put(value, jax_sharding)),
            "xlashard": lambda: waited(xlashard.device_put(value, sharding, may_alias=True)),
            COPY: lambda: np.array(value),
        },
        1.0,
    )


def from_callback(value: np.ndarray, setting: Setting, title: str) -> Row:
    """Compare constructors of a matrix from a callback that returns its shards."""
    sharding = setting.ways[title]
    jax_sharding = sharding.jax_sharding()
    shape = value.shape
    return Row(
        f"make_array_from_callback → {title}",
        {
            "jax": lambda: waited(
                jax.make_array_from_callback(shape, jax_sharding, value.__getitem__)
            ),
            "xlashard": lambda: waited(
                xlashard.make_array_from_callback(shape, sharding, value.__getitem__)
            ),
            COPY: lambda: np.array(value),
        },
        0.8,
    )


def to_host(value: np.ndarray, setting: Setting, title: str) -> Row:
    """Compare transfers of a matrix from devices to the host."""
    handle = computed(value, setting.ways[title])
    copies = title != "replicated"
    count = 20 if copies else 10_000
    theirs, ours = (unread(lambda m=make: m(handle), count) for make in (bare, fresh))
    return Row(
        f"{title} → host",
        {
            "jax": lambda: np.asarray(theirs()),
            "xlashard": lambda: np.asarray(ours()),
            COPY: lambda: np.array(value),
        },
        1.0,
        inner=1 if copies else None,
    )


def unread(make: Callable[[], object], count: int) -> Callable[[], object]:
    """Return a callable that hands out unread arrays, all made before timing starts."""
    ready = [make() for _ in range(count)]
    return lambda: ready.pop() if ready else make()


def between(value: np.ndarray, setting: Setting, title: str, goal: float) -> Row:
    """Compare reshards of a matrix, from rows to another sharding of the same devices."""
    source = computed(value, setting.ways["rows"])
    sharding = setting.ways[title]
    jax_sharding = sharding.jax_sharding()
    candidates: Candidates = {
        "jax": lambda: waited(jax.device_put(bare(source), jax_sharding)),
        "xlashard": lambda: waited(xlashard.device_put(fresh(source), sharding)),
        COPY: lambda: np.array(value),
    }
    if title != "replicated":
        return Row(f"rows → {title}", candidates, goal)
    identity = jax.jit(lambda x: x, out_shardings=jax_sharding)
    candidates["compiled identity"] = lambda: waited(identity(source))
    return Row(f"rows → {title}", candidates, goal, identity_goal=1.0)


def computed(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return the value as a program's output, with no cached copy on the host."""
    placed = jax.device_put(value, sharding.jax_sharding())
    return jax.block_until_ready(jax.jit(lambda x: x * 1)(placed))


def many_small(setting: Setting, title: str) -> Row:
    """Compare transfers of a tree of small arrays from the host to devices, in one call."""
    tree = as_tree()
    sharding = setting.of("d") if title == "sharded" else setting.of()
    jax_sharding = sharding.jax_sharding()
    return Row(
        f"{LEAVES:,} small arrays → {title}",
        {
            "jax": lambda: waited(jax.device_put(tree, jax_sharding)),
            "xlashard": lambda: waited(xlashard.device_put(tree, sharding)),
            COPY: lambda: [np.array(leaf) for leaf in tree["layers"]],
        },
        0.7,
    )


def rows_of_size(megabytes: int, setting: Setting, memory_gb: float) -> Iterator[tuple[Row, int]]:
    """Yield all transfers of one matrix, with its size in MB; no array outlives its row.

    JAX fills a replicated array's memory once for each device, so where eight copies and the value
    itself would not fit into the allowed memory, these rows take a smaller matrix.
    """
    value = as_matrix(megabytes)
    for title in ("rows", "columns"):
        yield from_host(value, setting, title, 0.6), megabytes
    yield from_callback(value, setting, "rows"), megabytes
    yield between(value, setting, "columns", 0.9), megabytes
    for title in ("rows", "columns"):
        yield to_host(value, setting, title), megabytes
    smaller = replicable(megabytes, memory_gb)
    value = value if smaller == megabytes else as_matrix(smaller)
    yield from_host(value, setting, "replicated", 0.5), smaller
    yield from_callback(value, setting, "replicated"), smaller
    yield between(value, setting, "replicated", 0.25), smaller
    yield to_host(value, setting, "replicated"), smaller


def replicable(megabytes: int, memory_gb: float) -> int:
    """Return the largest half, quarter, ... of a size of which eleven copies fit."""
    while megabytes * 11 > memory_gb * 1024 and megabytes > 1:
        megabytes //= 2
    return megabytes


def measure(report: Report, row: Row, note: str, rounds: int) -> None:
    """Time one transfer and add its tables to the report."""
    measured = interleave(row.candidates, rounds=rounds, inner=row.inner, warmup=1)
    beside_jax = {name: m for name, m in measured.items() if name != "compiled identity"}
    title = f"{row.title}{note}"
    report.add(title, beside_jax, baseline="jax", floor=COPY, goals={"xlashard": row.goal})
    if row.identity_goal is not None:
        beside_identity = {n: measured[n] for n in ("compiled identity", "xlashard", COPY)}
        report.add(
            f"{title}, beside the compiled identity",
            beside_identity,
            baseline="compiled identity",
            floor=COPY,
            goals={"xlashard": row.identity_goal},
        )


def read_arguments() -> tuple[argparse.Namespace, Options]:
    """Read the arguments of this benchmark, and those that all benchmarks share."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument(
        "--mb",
        type=int,
        action="append",
        help=f"size of the matrix in MB; may be repeated ({' and '.join(map(str, MEGABYTES))})",
    )
    own.add_argument(
        "--memory-gb",
        type=float,
        default=14,
        help="what may be used; limits the rows of which JAX keeps eight copies (14)",
    )
    options = read_options((__doc__ or "").splitlines()[0], rounds=9, own=own)
    return own.parse_known_args()[0], options


def main() -> int:
    """Run all comparisons; the exit status is 1 with `--strict` and a missed goal."""
    arguments, options = read_arguments()
    setting = Setting(Mesh(np.array(jax.devices()), ("d",)))
    report = Report("transfer")
    for title in ("sharded", "replicated"):
        measure(report, many_small(setting, title), "", options.rounds)
    aligned = as_matrix(MEGABYTES[0], aligned=True)
    measure(report, as_it_is(aligned, setting), f", {MEGABYTES[0]:,} MB", options.rounds)
    del aligned
    for size in arguments.mb or MEGABYTES:
        rounds = options.rounds if size <= MEGABYTES[0] else min(options.rounds, FEW_ROUNDS)
        for row, megabytes in rows_of_size(size, setting, arguments.memory_gb):
            measure(report, row, f", {megabytes:,} MB", rounds)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
