"""Find operations that a released jaxlib compiles to wrong values."""

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from xlashard._jax.runtime import executables
from xlashard._jax.trace.origins import Scope, source_line
from xlashard.analysis.programs.program import Compilation
from xlashard.geometry.groups import ReplicaGroups
from xlashard.hlo.collectives import Collective
from xlashard.hlo.module import HloModule, Instruction


@dataclass(frozen=True)
class KnownFault:
    """An operation that some releases compile to wrong values; a table of `known_faults.toml`.

    Attributes:
        primitive: Name of the primitive.
        operation: Last part of its name in compiled programs.
        pattern: Name of the pattern of the operation that goes wrong.
        jaxlib: The oldest and the newest release in which it was reproduced.
        what: What goes wrong.
        advice: What to write instead.
        source: Where it is documented or reproduced.
    """

    primitive: str
    operation: str
    pattern: str
    jaxlib: tuple[str, str]
    what: str
    advice: str
    source: str

    def affects(self, release: str) -> bool:
        """Return True for a release of jaxlib in which the fault was reproduced."""
        first, last = map(_read_release, self.jaxlib)
        return first <= _read_release(release) <= last


@lru_cache(maxsize=1)
def read_faults() -> tuple[KnownFault, ...]:
    """Return the faults of the table."""
    text = files(__package__ or "").joinpath("known_faults.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text).values()
    return tuple(KnownFault(**{**each, "jaxlib": tuple(each["jaxlib"])}) for each in tables)


def find_known_faults(program: Compilation) -> Iterator[tuple[KnownFault, Any]]:
    """Yield the faults of the installed jaxlib that a program has, each with its equation."""
    release = executables.jaxlib_version()
    faults = [fault for fault in read_faults() if fault.affects(release)]
    if program.jaxpr is None or len(program.devices) == 1:
        return
    sites = Scope.of(program.jaxpr).sites() if faults else ()
    every = [eqn for _, eqn, _, on_shards in sites if not on_shards]
    for fault in faults:
        eqns = [eqn for eqn in every if eqn.primitive.name == fault.primitive]
        for eqn in _PATTERNS[fault.pattern](program, fault, eqns):
            yield fault, eqn


def _find_overlapping_windows(
    program: Compilation, fault: KnownFault, eqns: Sequence[Any]
) -> Iterator[Any]:
    """Yield the operations whose windows overlap, where devices exchange their edges."""
    for eqn in eqns:
        steps = zip(eqn.params["window_dimensions"], eqn.params["window_strides"], strict=True)
        # Shards of a windowed dimension need the edges of their neighbours, others nothing.
        if any(n > step for n, step in steps) and any(
            c.kind == "collective-permute"
            and c.op_name.rpartition("/")[2] == fault.operation
            and _is_from(c, eqn)
            for c in program.collectives
        ):
            yield eqn


def _is_from(collective: Collective, eqn: Any) -> bool:
    """Return True if a collective is of an equation's line, or of an unknown one."""
    lines = [(frame.file, frame.line) for frame in collective.frames]
    return not lines or source_line(eqn) in lines


def _find_sums_of_copies(
    program: Compilation, fault: KnownFault, eqns: Sequence[Any]
) -> Iterator[Any]:
    """Yield the gradients of kernels whose sums over devices cover copies of their operands."""
    del fault
    eqns = list(filter(_is_gradient_of_kernel, eqns))
    if not eqns:
        return
    sums = [
        # XLA drops the lines of convolutions that it rewrites, and leaves that of the sum.
        (collective, collective.groups.size, sizes, count)
        for collective in program.collectives
        if collective.kind in _SUMS and isinstance(collective.groups, ReplicaGroups)
        for sizes, count in _find_summed_convolutions(program.module, collective)
    ]
    for eqn in eqns:
        sizes, line = _list_sizes(eqn.outvars[0].aval.shape), source_line(eqn)
        # Several convolutions of one line may have kernels of one shape.
        gradients = [
            math.prod(other.invars[1].aval.shape)
            for other in eqns
            if source_line(other) == line and _list_sizes(other.outvars[0].aval.shape) == sizes
        ]
        for collective, devices, summed, count in sums:
            if summed != sizes or not count or not _is_from(collective, eqn):
                continue
            shards = [n // count for n in gradients if n % count == 0]
            shards = [n for n in shards if n <= len(program.devices)]
            if shards and max(shards) < devices:
                yield eqn
                break


def _is_gradient_of_kernel(eqn: Any) -> bool:
    """Return True for a convolution that sums over images or their pixels, as their window."""
    params, (window, result) = eqn.params, (eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape)
    numbers = params["dimension_numbers"]
    pixels = math.prod(window[d] for d in numbers.rhs_spec[2:])
    left = math.prod(result[d] for d in numbers.out_spec[2:])
    return params["batch_group_count"] > 1 or pixels > left


def _list_sizes(shape: Iterable[int]) -> list[int]:
    """Return the sizes of an array in any order, without those of 1."""
    return sorted(size for size in shape if size > 1)


def _find_summed_convolutions(
    module: HloModule, collective: Collective
) -> Iterator[tuple[list[int], int]]:
    """Yield the convolutions whose results a collective sums.

    Yields:
        The sizes of the sum, and the number of elements of a convolution's second operand.
    """
    within = module.computations[collective.computation].instructions
    for operand in within[collective.name].operands:
        if operand in within:
            sizes = _list_sizes(within[operand].shape.dims)
            yield from ((sizes, count) for count in _find_convolutions(module, within, operand))


def _find_convolutions(
    module: HloModule, within: Mapping[str, Instruction], name: str
) -> Iterator[int]:
    """Yield the number of elements of the second operands of convolutions behind a value."""
    waiting = [name]
    seen = set[str]()
    while waiting and len(seen) < _MOST_STEPS:
        name = waiting.pop(0)
        if name in seen or name not in within:
            continue
        seen.add(name)
        inside = [module.computations[called].instructions for called in within[name].calls]
        every = [(within, within[name]), *((table, x) for table in inside for x in table.values())]
        convolutions = [(table, x) for table, x in every if x.opcode == "convolution"]
        for table, convolution in convolutions:
            yield math.prod(table[convolution.operands[1]].shape.dims)
        # What other collectives sum is theirs.
        is_end = bool(convolutions) or within[name].opcode.startswith(_COLLECTIVES)
        waiting += () if is_end else within[name].operands


_SUMS = ("all-reduce", "reduce-scatter")
_COLLECTIVES = ("all-", "collective-", "reduce-scatter")
_MOST_STEPS = 30
"""Most instructions between a convolution and the sum of its results."""


_PATTERNS: Mapping[str, Callable[[Compilation, KnownFault, Sequence[Any]], Iterator[Any]]] = {
    "overlapping windows along a sharded dimension": _find_overlapping_windows,
    "sum over copies of a kernel's gradient": _find_sums_of_copies,
}
"""Functions that yield the operations that go wrong, by the name of the pattern."""


def _read_release(text: str) -> tuple[int, ...]:
    """Return the numbers of a release, to compare: `0.12.0.1`."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0]))
