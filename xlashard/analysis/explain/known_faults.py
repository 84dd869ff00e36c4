"""Find operations that a released jaxlib compiles to wrong values."""

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from xlashard._jax.runtime import executables
from xlashard._jax.trace.origins import Scope, source_line
from xlashard.analysis.programs.program import Compilation
from xlashard.geometry.groups import ReplicaGroups
from xlashard.hlo.collectives import Collective
from xlashard.hlo.module import HloModule


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
    for _, eqn, _, on_shards in Scope.of(program.jaxpr).sites() if faults else ():
        for fault in faults:
            is_pattern = eqn.primitive.name == fault.primitive and not on_shards
            if is_pattern and _PATTERNS[fault.pattern](program, fault, eqn):
                yield fault, eqn


def _has_overlapping_windows(program: Compilation, fault: KnownFault, eqn: Any) -> bool:
    """Return True if windows overlap, and devices exchange their edges."""
    params = eqn.params
    strides = params["window_strides"]
    if not any(n > step for n, step in zip(params["window_dimensions"], strides, strict=True)):
        return False
    # Shards of a windowed dimension need the edges of their neighbours, others nothing.
    line = source_line(eqn)
    return any(
        c.kind == "collective-permute"
        and c.op_name.rpartition("/")[2] == fault.operation
        and (not c.frames or line in [(frame.file, frame.line) for frame in c.frames])
        for c in program.collectives
    )


def _sums_replicas(program: Compilation, fault: KnownFault, eqn: Any) -> bool:
    """Return True if the devices' sum of a kernel's gradient covers copies of its operands."""
    if not _is_gradient_of_kernel(eqn):
        return False
    line, shape = source_line(eqn), _list_sizes(eqn.outvars[0].aval.shape)
    # Several convolutions of one line may have kernels of one shape.
    alike = [
        other
        for _, other, _, _ in Scope.of(program.jaxpr).sites()
        if other.primitive.name == fault.primitive and _is_gradient_of_kernel(other)
        if source_line(other) == line and _list_sizes(other.outvars[0].aval.shape) == shape
    ]
    gradients = [math.prod(other.invars[1].aval.shape) for other in alike]
    for collective in program.collectives:
        groups = collective.groups
        if collective.kind not in _SUMS or not isinstance(groups, ReplicaGroups):
            continue
        # XLA drops the lines of convolutions that it rewrites, and leaves that of the sum.
        lines = [(frame.file, frame.line) for frame in collective.frames]
        for size in _find_summed_convolutions(program.module, collective, shape):
            shards = [n // size for n in gradients if size and n % size == 0]
            shards = [n for n in shards if n <= len(program.devices)]
            if shards and max(shards) < groups.size and (line in lines or not lines):
                return True
    return False


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
    module: HloModule, collective: Collective, sizes: list[int]
) -> Iterator[int]:
    """Yield the numbers of elements of the second operands of convolutions that are summed.

    Args:
        module: The module.
        collective: The sum.
        sizes: Sizes of the summed array.
    """
    within = module.computations[collective.computation].instructions
    waiting = [
        name
        for name in within[collective.name].operands
        if name in within and _list_sizes(within[name].shape.dims) == sizes
    ]
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


_PATTERNS: Mapping[str, Callable[[Compilation, KnownFault, Any], bool]] = {
    "overlapping windows along a sharded dimension": _has_overlapping_windows,
    "sum over copies of a kernel's gradient": _sums_replicas,
}
"""Functions that recognize an operation that goes wrong, by the name of the pattern."""


def _read_release(text: str) -> tuple[int, ...]:
    """Return the numbers of a release, to compare: `0.12.0.1`."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0]))
