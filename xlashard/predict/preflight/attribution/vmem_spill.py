"""Attention scores that leave VMEM: product, softmax, product, with the scores in HBM between."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.hlo.hlo_program import HloProgram
from xlashard.hlo.module import Computation, Instruction
from xlashard.hlo.shapes import HBM, Shape
from xlashard.predict.costs.cost_analysis import instruction_flops
from xlashard.predict.preflight.report.step_model import SpillReport
from xlashard.predict.targets.chip import MIB
from xlashard.predict.targets.tpu.generations import Generation

_VMEM_BYTES = {
    # jax/_src/tpu_info.py of https://github.com/jax-ml/jax, by TensorCore.
    "v4": 16 * MIB,
    "v5e": 128 * MIB,
    "v5p": 64 * MIB,
    "v6e": 128 * MIB,
    "tpu7x": 64 * MIB,
}

_DEEPEST = 256
"""Largest contracted dimension of scores: that of a head. Logits contract the model's width."""

_SHARE = 4
"""Part of VMEM for a block of scores; the rest holds operands and what is loaded meanwhile."""

_LEAST_BLOCK = 128
_PRODUCTS = ("convolution", "dot")
_LONGEST_WAY = 24


@dataclass(frozen=True, eq=False)
class SpillFinder:
    """Search for attention scores that leave VMEM.

    Attributes:
        module: The compiled module.
        generation: Generation of the chips.
        sources: Filter for lines of user code.
    """

    module: HloProgram
    generation: Generation
    sources: SourceLocator

    def find(self) -> tuple[SpillReport, ...]:
        """Return the scores by source line, the largest first."""
        vmem = _VMEM_BYTES.get(self.generation.name, 0) * self.generation.cores_per_device
        spills: dict[tuple[object, str], SpillReport] = {}
        for name, site in self.module.call_sites.items() if vmem else ():
            computation = self.module.computations[name]
            for instruction in computation.instructions.values():
                for report in self._of(computation, instruction, vmem):
                    key = report.source, report.type
                    runs = site.times + (spills[key].runs if key in spills else 0)
                    spills[key] = replace(report, runs=runs)
        return tuple(sorted(spills.values(), key=lambda r: -r.device_bytes))

    def _of(
        self, computation: Computation, instruction: Instruction, vmem: int
    ) -> Iterator[SpillReport]:
        scores = [
            array
            for array in instruction.shape.arrays
            if array.memory_space == HBM and array.padded_bytes > vmem
        ]
        product = self._product(computation, instruction) if scores else None
        if product is None or not self._reaches_product(computation, instruction):
            return
        array, nbytes = scores[0], scores[0].padded_bytes
        yield SpillReport(
            type=str(array),
            device_bytes=nbytes,
            vmem_bytes=vmem,
            runs=0,
            block=_block(array, nbytes, vmem),
            op_name=product.op_name or instruction.op_name,
            source=self.sources.line(product.frames or instruction.frames),
        )

    def _product(self, computation: Computation, instruction: Instruction) -> Instruction | None:
        """Return the product of scores that an instruction is or fuses."""
        for home, inner in self.module.inside(computation, instruction):
            if inner.opcode in _PRODUCTS:
                flops = instruction_flops(self.module, home, inner).matmul_flops
                size = math.prod(inner.shape.arrays[0].dims) if inner.shape.arrays else 0
                if 0 < flops <= 2 * _DEEPEST * size:
                    return inner
        return None

    def _reaches_product(self, computation: Computation, start: Instruction) -> bool:
        """Return whether scores pass an exponential on their way to another product."""
        waiting = deque([(start, self._has(computation, start, ("exponential",)), 0)])
        seen: set[tuple[str, bool]] = set()
        while waiting:
            instruction, exponential, steps = waiting.popleft()
            for user in computation.users.get(instruction.name, []):
                passed = exponential or self._has(computation, user, ("exponential",))
                if passed and self._has(computation, user, _PRODUCTS):
                    return True
                if steps < _LONGEST_WAY and (user.name, passed) not in seen:
                    seen.add((user.name, passed))
                    waiting.append((user, passed, steps + 1))
        return False

    def _has(
        self, computation: Computation, instruction: Instruction, opcodes: Sequence[str]
    ) -> bool:
        return any(i.opcode in opcodes for _, i in self.module.inside(computation, instruction))


def _block(array: Shape, nbytes: int, vmem: int) -> int:
    """Return the block of queries and keys whose scores stay in VMEM: a power of two."""
    *_, short, long = sorted((1, 1, *array.dims))
    block = _LEAST_BLOCK
    while (
        2 * block <= long
        and nbytes / short / long * (min(2 * block, short) * 2 * block) <= vmem / _SHARE
    ):
        block *= 2
    return block
