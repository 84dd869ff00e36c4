"""Time of one HLO operation on one GPU, by the unit that it occupies.

XLA's untuned Triton fusions of products count as products of cuBLAS: on a device, autotuning would
choose the faster of both.
"""

import math
from collections.abc import Mapping

from xlashard.costs.cost_analysis import instruction_flops
from xlashard.costs.gpu.cuda_calls import (
    AttentionCall,
    attention_call,
    contracted_dims,
    convolved,
)
from xlashard.costs.gpu.gpu_rates import GpuRates
from xlashard.costs.kernel_costs import KernelCost
from xlashard.costs.kernel_work import cost_of
from xlashard.costs.operation import OperationModel, OperationTime, Work
from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.hlo.shapes import Shape, dtype_name

_PRECISIONS = {"high": "tensorfloat32 x3", "highest": "float32"}


class GpuOperationModel(OperationModel):
    """Times of the operations of a module on a GPU."""

    def __init__(
        self,
        module: HloModule,
        rates: GpuRates,
        kernel_costs: Mapping[str, KernelCost] | None = None,
    ) -> None:
        """Model the operations of a module.

        Args:
            module: Compiled module.
            rates: Rates of the device.
            kernel_costs: Costs of kernels that the caller gives, by name.
        """
        super().__init__(module, rates, kernel_costs)
        self._gpu = rates

    def _custom_call(
        self, computation: Computation, call: Instruction, nbytes: float
    ) -> OperationTime:
        attention = attention_call(computation, call)
        if attention is None or cost_of(call, self._kernel_costs) is not None:
            return super()._custom_call(computation, call, nbytes)
        return self._attention(attention)

    def _attention(self, call: AttentionCall) -> OperationTime:
        """Return the time of cuDNN's attention: its products, and what shows of its softmax."""
        rates = self._gpu.kernels or self._gpu
        assert isinstance(rates, GpuRates)
        share = rates.attention_gradient_share if call.backward else rates.attention_share
        softmax = rates.score_gradients if call.backward else rates.scores
        started = (call.seen + rates.tile_start) / call.seen
        matrix = rates.product_seconds(call.flops, dtype_name(call.dtype)) / share
        arithmetic = started * (matrix + call.rows * call.seen / softmax)
        # Its copies hide behind the arithmetic of other tiles.
        hbm = call.hbm_bytes / rates.hbm_bytes
        launch = rates.operation_seconds + rates.hbm_seconds
        if hbm > arithmetic:
            return OperationTime(hbm=hbm, launch=launch)
        return OperationTime(arithmetic, launch=launch)

    def _product(self, computation: Computation, instruction: Instruction) -> Work:
        found = instruction_flops(self._module, computation, instruction)
        if not found.matmul_flops:
            return Work()
        dtype, padding = found.dtype, 1.0
        operands = computation.operand_arrays(instruction)
        if operands[0].dtype == operands[1].dtype == "f32":
            # The tensor cores of a GPU take float32 with fewer bits.
            requested = instruction.attributes.precision
            dtype = next((_PRECISIONS[p] for p in _PRECISIONS if p in requested), "tensorfloat32")
        left, right = operands[:2]
        if not convolved(instruction, left, right, instruction.shape.arrays[0]):
            padding = self._padding(operands, instruction)
        return Work({dtype: found.matmul_flops * padding})

    def _padding(self, operands: list[Shape], product: Instruction) -> float:
        left, right = operands[0].size, operands[1].size
        depth = math.prod(operands[0].dims[n] for n in contracted_dims(product))
        result = product.shape.arrays[0].size
        if not (left and right and depth and result):
            return 1.0
        # Of b products, the left operands have b m k elements, the right ones b k n, the results
        # b m n.
        batch = max(round(left * right / (depth * depth * result)), 1)
        rows, columns = left // (batch * depth), right // (batch * depth)
        return self._gpu.padding(batch, rows, depth, columns)

    def _elements(self, arrays: tuple[Shape, ...] | list[Shape]) -> float:
        """Return the elements of arrays; threads need no whole registers."""
        return float(sum(array.size for array in arrays))
