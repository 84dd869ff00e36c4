"""Find work that every device of a mesh repeats, and the argument to shard."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from xlashard._jax.trace.jaxprs import product_flops
from xlashard._jax.trace.origins import (
    Line,
    Origin,
    Scope,
    is_variable,
    origins,
    source_line,
)
from xlashard._jax.trace.primitive_names import (
    CONSTRAINTS,
    CUMULATIVE,
    ELEMENTWISE,
    LINEAR_ALGEBRA,
    PRODUCTS,
    RANDOM,
    REDUCTIONS,
    SCATTERS,
    SORTS,
)
from xlashard.analysis.explain.model import RepeatedReport
from xlashard.analysis.explain.unmet_requests import equation_line, fitting_axes
from xlashard.analysis.programs.program import Compilation, ProgramValue
from xlashard.core.sharding import Mesh, PartitionSpec
from xlashard.hlo.collective_kinds import KINDS
from xlashard.hlo.hlo_program import HloProgram
from xlashard.hlo.module import Computation, Instruction
from xlashard.support.formatting import typed

# Share of all work of its kind below which work is not listed: without it a step takes as long.
_LEAST_SHARE = 0.01
# Bytes of other work than products and FFTs, below which it is not listed.
_LEAST_BYTES = 2**16

type _Kind = Literal["product", "elementwise", "random", "gather", "scatter", "update", "other"]
type _Sizes = tuple[int, ...]
type _Remedy = tuple[str, str]
"""Path of an argument, and its sharding to try."""

_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys((*REDUCTIONS, *CUMULATIVE, *SORTS, *LINEAR_ALGEBRA, "fft"), "other"),
    **dict.fromkeys(("reduce_window", "reduce_window_max", "reduce_window_sum"), "other"),
    **dict.fromkeys(ELEMENTWISE, "elementwise"),
    **dict.fromkeys(PRODUCTS, "product"),
    **dict.fromkeys(SCATTERS, "scatter"),
    **dict.fromkeys(RANDOM, "random"),
    **{"dynamic_update_slice": "update", "gather": "gather"},
}
"""Primitives that take time, by what is compared with the compiled operation."""

_OPCODES = {"gather": "gather", "scatter": "scatter", "update": "dynamic-update-slice"}
_NAMES_IN_MODULE = {"argmax": "reduce", "argmin": "reduce", "qr": "geqrf"}
"""Names in the module of operations that JAX lowers as another one."""
_CALL_OPCODES = ("async-start", "call", "call-start", "conditional", "while")
_CUTS = ("slice", "dynamic-slice", "gather")
_MOVE_NAMES = """
    bitcast broadcast call concatenate conditional constant copy dynamic-slice fusion gather
    get-tuple-element iota opt-barrier pad parameter partition-id reshape reverse slice transpose
    tuple while
"""
_MOVES = frozenset(_MOVE_NAMES.split())
"""Operations that compute nothing; the partitioner gives its own ones the names of others."""


@dataclass(frozen=True, eq=False)
class _Operation:
    """Operation of a jaxpr that takes time.

    Attributes:
        scope: The scope of its equation.
        eqn: The equation.
        site: The equation that has its source line: itself, or a call of one of JAX's functions.
    """

    scope: Scope
    eqn: Any
    site: Any

    @property
    def name(self) -> str:
        """Return the name of its primitive."""
        return self.eqn.primitive.name

    @property
    def line(self) -> Line | None:
        """Return its source line."""
        return source_line(self.site)

    @property
    def kind(self) -> _Kind:
        """Return the kind of its primitive."""
        return _KINDS[self.name]

    @cached_property
    def sizes(self) -> _Sizes:
        """Return the elements of whole operands and results, as `_select_sizes` does."""
        sides = self.eqn.invars, self.eqn.outvars
        ins, outs = ([math.prod(getattr(v.aval, "shape", ())) for v in side] for side in sides)
        return _select_sizes(self.kind, ins, outs)

    @cached_property
    def flops(self) -> int:
        """Return the FLOP of a product or FFT on whole operands; 0 for other operations."""
        if self.name == "fft":
            return _count_fft_flops(self.sizes, self.eqn.params["fft_lengths"])
        return round(product_flops(self.eqn))

    def dims(self) -> Iterator[tuple[Any, int]]:
        """Yield operands with their dimensions that can be sharded."""
        values, params = list(self.eqn.invars), self.eqn.params
        if self.name == "conv_general_dilated":
            numbers = params["dimension_numbers"]
            yield from ((values[0], numbers.lhs_spec[0]), (values[1], numbers.rhs_spec[0]))
            return
        whole = {params.get("axis"), params.get("dimension"), *params.get("axes", ())}
        if self.name in REDUCTIONS or self.kind in (*_OPCODES, "random"):
            values = values[: self.name in REDUCTIONS]
        for value in values:
            ndim = value.aval.ndim
            if self.name == "fft":
                ndim -= len(params["fft_lengths"])
            elif self.name in LINEAR_ALGEBRA:
                ndim -= 2
            yield from ((value, d) for d in range(ndim) if d not in whole)


def _select_sizes(kind: _Kind, ins: Sequence[int], outs: Sequence[int]) -> _Sizes:
    """Return the sizes by which an operation of a kind is whole on a device."""
    match kind:
        case "product":
            return (*sorted(ins[:2]), *outs[:1])
        case "elementwise" | "random":
            return (max(outs, default=0),)
        case "gather":
            return (*ins[:1], *outs[:1])
        case "update":
            return tuple(ins[:2])
        case "scatter":
            return (*ins[:1], *ins[-1:])
    return max(ins, default=0), max(outs, default=0)


def _count_fft_flops(sizes: _Sizes, lengths: Sequence[int]) -> int:
    return round(5 * max(sizes) * math.log2(max(math.prod(lengths), 2)))


@dataclass
class _Work:
    """Work that compiled instructions repeat.

    Attributes:
        operations: Its operations, the first one's operands are shown.
        times: Executions of each instruction.
        nbytes: Bytes that a device reads and writes.
    """

    operations: dict[_Operation, None] = field(default_factory=dict)
    times: list[int] = field(default_factory=list)
    nbytes: int = 0

    @property
    def first(self) -> _Operation:
        """Return the operation of most elements."""
        return max(self.operations, key=lambda each: max(each.sizes))

    @property
    def flops(self) -> int:
        """Return the FLOP of all executions, of a product or FFT."""
        return sum(self.times) * self.first.flops


def describe_repeated(program: Compilation) -> tuple[RepeatedReport, ...]:
    """Describe the work that every device repeats on whole values, the largest share first.

    An operation of the compiled program is whole if its operands and its result have as many
    elements as those of an equation of its line. Work inside of `shard_map` is that of one shard.
    Products and FFTs weigh by their FLOP, other operations by the bytes that they read and write.
    """
    mesh = program.mesh
    if program.jaxpr is None or mesh is None or len(program.devices) == 1:
        return ()
    finder = _WholeOperations(Scope.of(program.jaxpr), mesh)
    works: dict[Any, _Work] = defaultdict(_Work)
    flops, nbytes = 0, 0
    for module in program.modules if finder.places else ():
        for computation, instruction, times in _list_instructions(module):
            moved = times * _count_traffic(module, computation, instruction)
            nbytes += moved
            operations: dict[_Operation, None] = {}
            for inner, each in _list_computed(module, computation, instruction):
                whole = finder.find(inner, each)
                if whole is not None and whole.flops:
                    works[whole].operations[whole] = None
                    works[whole].times.append(times)
                    flops += times * whole.flops
                elif whole is not None:
                    operations[whole] = None
                else:
                    flops += times * _count_compiled_flops(inner, each)
            if operations:
                # A chain of elementwise operations is one row for each line.
                first = next(iter(operations))
                chain = first.kind in ("elementwise", "random")
                work = works[equation_line(first.site, program) if chain else first]
                work.operations |= operations
                work.times.append(times)
                work.nbytes += moved
    return _describe_works(list(works.values()), (flops, nbytes), program, mesh)


class _WholeOperations:
    """Operations of a jaxpr, found by compiled instructions that compute them whole."""

    def __init__(self, scope: Scope, mesh: Mesh) -> None:
        """Index the operations of a program.

        Args:
            scope: The scope of its jaxpr.
            mesh: The mesh, whose axes divide the sizes of shards.
        """
        self.places: dict[tuple[Line | None, str], list[_Operation]] = defaultdict(list)
        self._devices = mesh.size
        self._results: set[int] = set()
        self._on_shards: dict[tuple[Line | None, str], set[_Sizes]] = defaultdict(set)
        for inner, eqn, site, on_shards in scope.sites():
            if eqn.primitive.name in _KINDS:
                operation = _Operation(inner, eqn, site)
                self._results |= {math.prod(v.aval.shape) for v in eqn.outvars}
                for place in self._list_places(operation):
                    if on_shards:
                        self._on_shards[place].add(operation.sizes)
                    else:
                        self.places[place].append(operation)

    def _list_places(self, operation: _Operation) -> Iterator[tuple[Line | None, str]]:
        line, name, kind = operation.line, operation.name, operation.kind
        # XLA gives products other names, and loses the lines of some convolutions and scans.
        yield line, kind if kind in ("product", "random") else _NAMES_IN_MODULE.get(name, name)
        if kind == "product" or name in CUMULATIVE:
            yield None, "product" if kind == "product" else "reduce-window"

    def find(self, computation: Computation, instruction: Instruction) -> _Operation | None:
        """Return the operation that an instruction computes whole; None without one."""
        opcode, results = instruction.opcode, instruction.shape.arrays
        is_move = opcode in _MOVES and opcode != "gather"
        if is_move or not any(array.size in self._results for array in results):
            return None  # before its names are read
        frames = instruction.frames
        line = (frames[0].file, frames[0].line) if frames else None
        name = instruction.op_name.rpartition("/")[2]
        names = [name, "random"] if line is not None else [opcode]
        names = ["product"] if _is_product(instruction) else names
        ins, outs = _count_elements(computation, instruction)
        match = None
        for place in [(line, name) for name in names]:
            for operation in self.places.get(place, ()):
                if opcode != _OPCODES.get(operation.kind, opcode):
                    continue
                sizes = _select_sizes(operation.kind, ins, outs)
                if sizes == operation.sizes and max(sizes) > 1:
                    match = match or operation
                elif self._is_shard(sizes, operation.sizes):
                    return None
                if sizes in self._on_shards.get(place, ()):
                    return None
        return match

    def _is_shard(self, sizes: _Sizes, whole: _Sizes) -> bool:
        """Return True if sizes may be those of a shard of a whole operation."""
        return len(sizes) == len(whole) and all(
            size and every % size == 0 and self._devices % (every // size or 1) == 0
            for size, every in zip(sizes, whole, strict=True)
        )


def _list_instructions(module: HloProgram) -> Iterator[tuple[Computation, Instruction, int]]:
    """Yield the instructions outside of fusions, with the number of their executions."""
    for name, site in module.call_sites.items():
        if site.caller is not None and site.caller.opcode not in _CALL_OPCODES:
            continue
        for instruction in module.computations[name].instructions.values():
            is_other = instruction.opcode.startswith(KINDS) or instruction.opcode in _MOVES
            if not is_other or instruction.opcode in ("fusion", "copy", "concatenate", *_CUTS):
                yield module.computations[name], instruction, site.times


def _list_computed(
    module: HloProgram, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yield an instruction, or those that a fusion computes on all of their elements."""
    inner = module.callee(instruction) if instruction.opcode == "fusion" else None
    if inner is None or inner.root is None:
        yield computation, instruction
        return
    waiting, seen = [inner.root], set[str]()
    while waiting:
        at = waiting.pop()
        if at.name in seen:
            continue
        seen.add(at.name)
        yield inner, at
        if at.opcode not in _CUTS:
            # An update in place computes what is written.
            names = at.operands[at.opcode == "dynamic-update-slice" :]
            waiting += [inner.instructions[name] for name in names if name in inner.instructions]


def _count_traffic(module: HloProgram, computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that an instruction reads and writes; of cut operands those of the cuts."""
    inner = module.callee(instruction) if instruction.opcode == "fusion" else None
    if inner is None:
        arrays = computation.operand_arrays(instruction)
        return sum(array.nbytes for array in (*arrays, *instruction.shape.arrays))
    total = 0
    for parameter in inner.parameters:
        users, whole = inner.users.get(parameter.name, []), _count_bytes(parameter)
        if users and all(user.opcode in _CUTS for user in users):
            whole = min(whole, sum(map(_count_bytes, users)))
        elif all(_is_updated(parameter, user) for user in users):
            whole = 0
        total += whole
    root = inner.root
    if root is not None and root.opcode == "dynamic-update-slice":
        return total + _count_bytes(inner.instructions[root.operands[1]])
    return total + _count_bytes(instruction)


def _is_updated(value: Instruction, user: Instruction) -> bool:
    return user.opcode == "dynamic-update-slice" and value.name not in user.operands[1:]


def _count_bytes(instruction: Instruction) -> int:
    return sum(array.nbytes for array in instruction.shape.arrays)


def _count_elements(
    computation: Computation, instruction: Instruction
) -> tuple[list[int], list[int]]:
    """Return the elements of each operand and of each result."""
    operands, results = computation.operand_arrays(instruction), instruction.shape.arrays
    return [array.size for array in operands], [array.size for array in results]


def _is_product(instruction: Instruction) -> bool:
    is_call = instruction.opcode == "custom-call"
    is_named = is_call and instruction.op_name.rpartition("/")[2] in PRODUCTS
    return is_named or instruction.opcode in ("dot", "convolution")


def _count_compiled_flops(computation: Computation, instruction: Instruction) -> int:
    """Return the FLOP of a product without a batch of its own, or of an FFT."""
    ins, outs = _count_elements(computation, instruction)
    if instruction.opcode == "fft":
        return _count_fft_flops((*ins, *outs), instruction.attributes.fft_length)
    sizes = (*ins[:2], *outs[:1])
    if not _is_product(instruction) or len(sizes) != 3:
        return 0
    left, right, result = sizes
    return 2 * result * math.isqrt(left * right // result) if all(sizes) else 0


def _describe_works(
    works: Sequence[_Work], totals: tuple[int, int], program: Compilation, mesh: Mesh
) -> tuple[RepeatedReport, ...]:
    """Return the reports of works of some weight.

    Args:
        works: The works.
        totals: FLOP of all products and FFTs, and bytes that all operations read and write.
        program: The program.
        mesh: Its mesh.
    """
    remedies = [_find_remedies(work.first, program, mesh) for work in works]
    # An argument that much work comes from is the one to shard.
    shared: Counter[_Remedy] = Counter()
    for work, (arguments, _) in zip(works, remedies, strict=True):
        shared.update(dict.fromkeys(arguments, work.flops or work.nbytes))
    reports = []
    for work, (arguments, constraint) in zip(works, remedies, strict=True):
        share = work.flops / totals[0] if work.flops else work.nbytes / max(totals[1], 1)
        if share < _LEAST_SHARE or (not work.flops and work.nbytes < _LEAST_BYTES):
            continue
        argument, spec = max(arguments, key=lambda each: shared[each], default=("", ""))
        eqn, names = work.first.eqn, dict.fromkeys(each.name for each in work.operations)
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        arrays = [v.aval for v in eqn.invars if getattr(v.aval, "ndim", 0)]
        reports.append(
            RepeatedReport(
                operation=f"{work.first.name}{others}",
                operands=tuple(typed(aval.dtype, aval.shape) for aval in arrays),
                result=typed(eqn.outvars[0].aval.dtype, eqn.outvars[0].aval.shape),
                devices=len(program.devices),
                count=len(work.times),
                times=sum(work.times),
                flops=work.flops,
                nbytes=0 if work.flops else work.nbytes,
                share=share,
                argument=argument,
                spec=spec,
                constraint=None if argument else equation_line(constraint, program),
                source=equation_line(work.first.site, program),
            )
        )
    return tuple(sorted(reports, key=lambda r: (-r.share, -r.flops)))


def _find_remedies(op: _Operation, program: Compilation, mesh: Mesh) -> tuple[list[_Remedy], Any]:
    """Return the arguments to shard, and the equation of a constraint that makes an operand."""
    assert program.jaxpr is not None
    by_variable = dict(zip(program.jaxpr.invars, program.arguments, strict=True))
    remedies: dict[_Remedy, bool] = {}
    constraint = None
    for value, dim in op.dims():
        if not is_variable(value):
            continue
        for origin in origins(op.scope, value, dim, CONSTRAINTS):
            if origin.eqn is not None:
                constraint = constraint or origin.eqn
                continue
            argument = by_variable.get(origin.variable)
            spec = _suggest_spec(origin, argument, mesh)
            if argument is not None and spec:
                remedies[argument.path, spec] = _is_sharded(argument)
    # To move the shards of an argument, such as a batch, repeats other work in its place.
    unsharded = [remedy for remedy, is_sharded in remedies.items() if not is_sharded]
    return unsharded or list(remedies if op.kind != "product" else ()), constraint


def _is_sharded(argument: ProgramValue) -> bool:
    sharding = argument.sharding
    return sharding is not None and not sharding.rank_tiling(argument.aval.ndim).is_replicated


def _suggest_spec(origin: Origin, argument: ProgramValue | None, mesh: Mesh) -> str:
    """Return the spec of an argument that shards the dimension of an origin; empty without one."""
    if argument is None or argument.sharding is None:
        return ""
    if argument.sharding.rank_tiling(argument.aval.ndim).counts[origin.dim] > 1:
        return ""
    names = fitting_axes(argument.aval.shape[origin.dim], mesh.shape)
    entry = names[0] if len(names) == 1 else tuple(names)
    return f"{PartitionSpec(*[None] * origin.dim, entry)}" if names else ""
