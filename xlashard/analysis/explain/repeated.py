"""Find products that every device of a mesh computes whole, and the argument to shard."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlashard._jax.trace.jaxprs import product_flops
from xlashard._jax.trace.origins import (
    Line,
    Origin,
    Scope,
    is_variable,
    origins,
    source_frames,
    source_line,
)
from xlashard._jax.trace.primitive_names import CONSTRAINTS, PRODUCTS
from xlashard.analysis.explain.model import RepeatedReport, SourceLine
from xlashard.analysis.explain.replication import fitting_axes
from xlashard.analysis.explain.source_lines import SourceLocator
from xlashard.analysis.programs.program import Compilation, ProgramValue
from xlashard.core.sharding import Mesh, PartitionSpec
from xlashard.hlo.hlo_program import HloProgram
from xlashard.hlo.module import Computation, Frame, Instruction
from xlashard.support.formatting import typed

_LEAST_SHARE = 0.01


type _Remedy = tuple[str, str]
"""Path of an argument, and its sharding to try."""


@dataclass(frozen=True, eq=False)
class _Product:
    """Product or convolution of a jaxpr.

    Attributes:
        scope: The scope of its equation.
        eqn: The equation.
    """

    scope: Scope
    eqn: Any

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the elements of its operands, in ascending order, and of its result."""
        ins = sorted(math.prod(v.aval.shape) for v in self.eqn.invars[:2])
        return (*ins, math.prod(self.eqn.outvars[0].aval.shape))

    @property
    def flops(self) -> int:
        """Return the FLOP of one execution on whole operands."""
        return round(product_flops(self.eqn))

    def dims(self) -> Iterator[tuple[Any, int]]:
        """Yield operands with their dimensions that can be sharded."""
        left, right = self.eqn.invars[:2]
        if self.eqn.primitive.name == "dot_general":
            yield from ((value, d) for value in (left, right) for d in range(value.aval.ndim))
        else:
            numbers = self.eqn.params["dimension_numbers"]
            yield from ((left, numbers.lhs_spec[0]), (right, numbers.rhs_spec[0]))


def describe_repeated(program: Compilation) -> tuple[RepeatedReport, ...]:
    """Describe the products that every device computes whole, most FLOP first.

    A product of the compiled program is whole if its operands and its result have as many elements
    as those of an equation of its line. Work inside of `shard_map` is that of one shard.
    """
    mesh = program.mesh
    if program.jaxpr is None or mesh is None or len(program.devices) == 1:
        return ()
    products: dict[tuple[Line | None, tuple[int, ...]], _Product] = {}
    scope = Scope.of(program.jaxpr)
    for product in _products(scope):
        products.setdefault((source_line(product.eqn), product.sizes), product)
        # XLA loses the line of some convolutions.
        products.setdefault((None, product.sizes), product)
    for product in _products(scope, on_shards=True):
        products.pop((None, product.sizes), None)
    if not products:
        return ()
    total, runs = 0, defaultdict[_Product, list[int]](list)
    for module in program.modules:
        for computation, instruction, times in _instructions(module):
            sizes = _sizes(computation, instruction)
            frames = instruction.frames
            line = (frames[0].file, frames[0].line) if frames else None
            product = products.get((line, sizes))
            if product is None:
                total += times * _flops(computation, instruction)
            else:
                total += times * product.flops
                runs[product].append(times)
    remedies = {product: _remedies(product, program, mesh) for product in runs}
    # An argument that many products come from is the one to shard.
    shared: Counter[_Remedy] = Counter()
    for product, times in runs.items():
        shared.update(dict.fromkeys(remedies[product][0], product.flops * sum(times)))
    reports = []
    for product, times in runs.items():
        arguments, constraint = remedies[product]
        remedy = max(arguments, key=lambda each: shared[each], default=("", ""))
        at = None if remedy[0] else constraint
        reports.append(_report(product, times, total, program, (remedy[0], remedy[1], at)))
    return tuple(sorted((r for r in reports if r.share >= _LEAST_SHARE), key=lambda r: -r.flops))


def _products(scope: Scope, *, on_shards: bool = False) -> Iterator[_Product]:
    """Yield the products of a jaxpr and its inner jaxprs, or those inside of `shard_map` alone."""
    for position, eqn in enumerate(scope.jaxpr.eqns):
        name, bodies = eqn.primitive.name, scope.inner.get(position, ())
        if name == "shard_map":
            for inner in bodies if on_shards else ():
                yield from _products(inner)
        elif name in PRODUCTS:
            if not on_shards:
                yield _Product(scope, eqn)
        else:
            for inner in bodies:
                yield from _products(inner, on_shards=on_shards)


def _instructions(module: HloProgram) -> Iterator[tuple[Computation, Instruction, int]]:
    """Yield the products of a module, with the number of their executions."""
    for name, site in module.call_sites.items():
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            is_call = instruction.opcode == "custom-call"
            named = is_call and instruction.op_name.rpartition("/")[2] in PRODUCTS
            if (named or instruction.opcode in ("dot", "convolution")) and len(
                instruction.operands
            ) >= 2:
                yield computation, instruction, site.times


def _shapes(computation: Computation, instruction: Instruction) -> list[tuple[int, ...]]:
    """Return the shapes of the first two operands and of the result; empty if unknown."""
    makers = [computation.instructions.get(name) for name in instruction.operands[:2]]
    candidates = [*(maker.shape for maker in makers if maker is not None), instruction.shape]
    shapes = [shape.arrays[0].dims for shape in candidates if shape.arrays]
    return shapes if len(shapes) == 3 else []


def _sizes(computation: Computation, instruction: Instruction) -> tuple[int, ...]:
    shapes = _shapes(computation, instruction)
    sizes = [math.prod(shape) for shape in shapes]
    return (*sorted(sizes[:2]), *sizes[2:])


def _flops(computation: Computation, instruction: Instruction) -> int:
    """Return the FLOP of a product without a batch of its own."""
    shapes = _shapes(computation, instruction)
    if not shapes or not all(map(math.prod, shapes)):
        return 0
    left, right, result = map(math.prod, shapes)
    return 2 * result * math.isqrt(left * right // result)


def _report(
    product: _Product,
    times: Sequence[int],
    total: int,
    program: Compilation,
    remedy: tuple[str, str, Any],
) -> RepeatedReport:
    eqn, (argument, spec, constraint) = product.eqn, remedy
    flops = sum(times) * product.flops
    left, right, result = (v.aval for v in (*eqn.invars[:2], eqn.outvars[0]))
    return RepeatedReport(
        operation=eqn.primitive.name,
        operands=(typed(left.dtype, left.shape), typed(right.dtype, right.shape)),
        result=typed(result.dtype, result.shape),
        devices=len(program.devices),
        count=len(times),
        times=sum(times),
        flops=flops,
        share=flops / total if total else 0.0,
        argument=argument,
        spec=spec,
        constraint=_source(constraint, program.sources),
        source=_source(eqn, program.sources),
    )


def _source(eqn: Any, sources: SourceLocator) -> SourceLine | None:
    frames = () if eqn is None else source_frames(eqn)
    return sources.line([Frame(*frame) for frame in frames])


def _remedies(product: _Product, program: Compilation, mesh: Mesh) -> tuple[list[_Remedy], Any]:
    """Return the arguments to shard, and the equation of a constraint that makes an operand."""
    assert program.jaxpr is not None
    variables = program.jaxpr.invars
    by_variable = dict(zip(variables, program.arguments, strict=True))
    remedies: dict[_Remedy, None] = {}
    constraint = None
    for value, dim in product.dims():
        if not is_variable(value):
            continue
        for origin in origins(product.scope, value, dim, CONSTRAINTS):
            if origin.eqn is not None:
                constraint = constraint or origin.eqn
                continue
            spec = _spec(origin, by_variable, mesh)
            if spec:
                remedies[by_variable[origin.variable].path, spec] = None
    return list(remedies), constraint


def _spec(origin: Origin, arguments: Mapping[Any, ProgramValue], mesh: Mesh) -> str:
    """Return the spec of an argument that shards the dimension of an origin; empty without one."""
    argument = arguments.get(origin.variable)
    if argument is None or argument.sharding is None:
        return ""
    if not argument.sharding.rank_tiling(argument.aval.ndim).is_replicated:
        return ""
    names = fitting_axes(argument.aval.shape[origin.dim], mesh.shape)
    entry = names[0] if len(names) == 1 else tuple(names)
    return f"{PartitionSpec(*[None] * origin.dim, entry)}" if names else ""
