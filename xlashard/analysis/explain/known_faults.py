"""Find operations that a released jaxlib compiles to wrong values."""

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
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
    del fault
    params, gradients = eqn.params, math.prod(eqn.invars[1].aval.shape)
    kernel = params["dimension_numbers"].rhs_spec
    window = [eqn.invars[1].aval.shape[d] for d in kernel[2:]]
    result = [eqn.outvars[0].aval.shape[d] for d in params["dimension_numbers"].out_spec[2:]]
    # A kernel's gradient has the other operand's pixels as its window, and is smaller than that.
    if params["batch_group_count"] == 1 and math.prod(window) <= math.prod(result):
        return False
    line = source_line(eqn)
    for collective in program.collectives:
        groups = collective.groups
        if collective.kind not in _SUMS or not isinstance(groups, ReplicaGroups):
            continue
        for convolution, operands in _find_summed_convolutions(program.module, collective):
            # XLA drops the line of a convolution that it rewrites, and leaves that of the sum.
            frames = convolution.frames or collective.frames
            if frames and line not in [(frame.file, frame.line) for frame in frames]:
                continue
            # The images may have their neighbours' edges; the other operand is cut evenly, unless
            # the convolution is another one of this line.
            shards, rest = divmod(gradients, operands[1])
            if not rest and shards <= len(program.devices) and shards < groups.size:
                return True
    return False


def _find_summed_convolutions(
    module: HloModule, collective: Collective
) -> Iterator[tuple[Instruction, list[int]]]:
    """Yield the convolutions that a collective sums, with the sizes of their operands."""
    within = module.computations[collective.computation].instructions
    waiting, seen = [collective.name], set[str]()
    while waiting and len(seen) < _MOST_STEPS:
        name = waiting.pop(0)
        if name in seen or name not in within:
            continue
        seen.add(name)
        inside = [module.computations[called].instructions for called in within[name].calls]
        every = [(within, within[name]), *((table, x) for table in inside for x in table.values())]
        convolutions = [(table, x) for table, x in every if x.opcode == "convolution"]
        for table, convolution in convolutions:
            sizes = [math.prod(table[operand].shape.dims) for operand in convolution.operands]
            yield convolution, sizes
        waiting += () if convolutions else within[name].operands


_SUMS = ("all-reduce", "reduce-scatter")
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
