"""Rates that NVIDIA GPUs reach in practice, and the time of one HLO operation at these rates.

XLA's untuned Triton fusions of products count as products of cuBLAS: on a device, autotuning would
choose the faster of both. Sorts, scatters and Fourier transforms have no published times: they
count as one pass over their bytes, and the time of a program with many is a lower bound.

As in `xlashard.predict.costs.rates`, every constant comes from a chip's page or from a published
micro-benchmark, none from a training run. The sources, by their short names:

- azure: https://github.com/Azure/AI-benchmarking-guide/tree/8fd0c6e/Azure_Results: cuBLASLt,
  BabelStream, nvbandwidth and nccl-tests on A100, H100 and H200;
- stas: https://github.com/stas00/ml-engineering/tree/744d01e: products of the best shapes;
- tokamax: device times on H100 and B200, tokamax/data/autotuning of
  https://github.com/openxla/tokamax/tree/783ea95;
- CUDA: throughput of instructions by compute capability, in NVIDIA's CUDA C++ Programming Guide.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.hlo.shapes import Shape, dtype_name
from xlashard.predict.costs.cost_analysis import TRANSCENDENTAL, instruction_flops
from xlashard.predict.costs.gpu.cuda_calls import (
    AttentionCall,
    attention_call,
    contracted_dims,
    convolved,
    is_library_product,
)
from xlashard.predict.costs.kernel_work import cost_of
from xlashard.predict.costs.operation import OperationModel, OperationTime, Work
from xlashard.predict.costs.rates import Rates
from xlashard.predict.targets.gpu.gpu_models import GpuModel

_BEST_PRODUCTS = {
    # stas, bfloat16: 271 of 312, 794.5 of 989, 1745 of 2250 and 1822 of 2500 TFLOP/s.
    "a100": 0.87,
    "h100": 0.80,
    "h200": 0.80,
    "b200": 0.775,
    "gb200": 0.73,
}
"""Share of the peak that the best shapes of products reach, by family of chips."""

_LARGE_PRODUCTS = 0.9
"""Large products beside the best shapes: azure, 8192 x 8192 x 8192 with 253.7 of 271 TFLOP/s on
A100 and 1290 of 1403 in float8 on H100; tokamax, H100, products of up to 0.2 s in the gradient of a
loss with 0.87 to 0.93. Large products draw more power, which lowers the clock."""

_HBM_SHARES = {
    # azure: BabelStream's copy, add and triad, 1700 of 2039, 2970 of 3350, 4150 of 4800 GB/s.
    "a100": 0.85,
    "h100": 0.89,
    "h200": 0.86,
}
_OTHER_HBM_SHARE = 0.87
"""Mean of the others, for chips without a published measurement."""

_HOST_SHARE = 0.82
"""azure: nvbandwidth, host to device, 26.3 of 32 GB/s on A100, 51 and 52 of 63 on H100 and H200."""

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.7), (64, 64, 0.45))
"""Rows and columns of the tiles that cuBLAS gives a multiprocessor, and their relative rates.

No source lists the rates. They and the depth below are closest to azure's products of 1024 and 2048
rows and columns on A100 and H100, and to tokamax's gated products of 384 x 3072 weights."""

_TILE_DEPTH = 96
"""Depth of a product that takes as long as filling and emptying the pipeline of a tile."""

_FUNCTIONS = {
    "exponential": (9, 1),
    "exponential-minus-one": (26, 0),
    "log": (26, 0),
    "log-plus-one": (27, 0),
    "sine": (28, 0),
    "cosine": (29, 0),
    "tan": (28, 1),
    "tanh": (15, 2),
    "logistic": (11, 2),
    "erf": (24, 1),
    "cbrt": (14, 2),
    "power": (72, 1),
    "atan2": (40, 1),
    "rsqrt": (0, 1),
    "sqrt": (8, 1),
}
"""Operations of the float32 lanes and of the special units that a function of float32 takes.

Counted in the PTX that nvcc 13.5 makes of CUDA's `expf`, `logf` and so on for sm_90: what libdevice
has for reducing the range, for the polynomial and for its end, without the branch for sines of huge
arguments. IEEE square roots and divisions are one instruction of PTX and eight of the machine."""

_SPLITS = (1, 2, 4, 8)
"""Parts of the depth that different multiprocessors sum."""


@dataclass(frozen=True, kw_only=True)
class GpuRates(Rates):
    """Rates of one GPU.

    Attributes:
        processors: Streaming multiprocessors.
        attention_share: Share of `matrix_flops` that the products of cuDNN's attention reach,
            forward. Beside the softmax, they draw less power than large products.
        attention_gradient_share: The same in the backward pass.
        scores: Scores per second of the softmax that does not hide behind the products, forward.
        score_gradients: The same in the backward pass.
        tile_start: Keys per query that take as long as the start and end of a tile of attention.
    """

    processors: int
    attention_share: float
    attention_gradient_share: float
    scores: float
    score_gradients: float
    tile_start: float

    def padding(self, batch: int, rows: int, depth: int, columns: int) -> float:
        """Return the ratio of the work of whole waves of tiles to that of a product.

        A multiprocessor multiplies a tile at a time, all of them a wave; the last wave may leave
        some idle. cuBLAS chooses the tile and the split of the depth that are fastest.

        Args:
            batch: Number of products.
            rows: Rows of a result.
            depth: Contracted dimension.
            columns: Columns of a result.
        """
        work = batch * rows * depth * columns
        if not work:
            return 1.0
        times = []
        for tile_rows, tile_columns, rate in _TILES:
            tiles = batch * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
            for split in _SPLITS:
                if split > 1 and depth // split < 4 * _TILE_DEPTH:
                    break
                waves = tiles * split / self.processors
                # cuBLAS halves the idle time of the last wave by splitting its tiles.
                waves = max((waves + math.ceil(waves)) / 2, 1.0)
                long = math.ceil(depth / split) + _TILE_DEPTH * split
                times.append(waves * long * tile_rows * tile_columns / rate)
        return min(times) * self.processors / work


def gpu_rates(chip: GpuModel) -> GpuRates:
    """Return the rates that a GPU reaches.

    Tiles of GPUs read their operands again from the L2 cache, and XLA keeps no values on the chip
    between kernels. No figure is published for transposes alone; `NcclModel` has the shares and
    latencies of collectives.

    Args:
        chip: Model of the GPU.
    """
    best = _BEST_PRODUCTS.get(chip.family, _BEST_PRODUCTS["h100"])
    cycles = chip.sms * chip.clock_hz
    h100 = 132 * 1.98e9
    return GpuRates(
        matrix_flops=tuple(
            (name, best * _LARGE_PRODUCTS * f) for name, f in chip.device_peak_flops
        ),
        hbm_bytes=_HBM_SHARES.get(chip.family, _OTHER_HBM_SHARE) * chip.device_hbm_bandwidth,
        # CUDA: 128 operations in float32 and 16 functions such as exp per multiprocessor and cycle
        # (64 in float32 on A100).
        vector_ops=chip.fp32_lanes * cycles,
        transcendentals=16 * cycles,
        # tokamax, H100: a gated product of 512 x 384 by 384 x 3072 takes 6.8 microseconds in two
        # kernels, of which 2 are products and bytes.
        operation_seconds=0.7e-6,
        hbm_seconds=0.8e-6,
        host_bytes=_HOST_SHARE * chip.host_bandwidth,
        kernel_vector_ops=chip.fp32_lanes * cycles,
        kernel_transcendentals=16 * cycles,
        processors=chip.sms,
        # tokamax, H100: cuDNN's attention of 512 to 16,384 tokens and heads of 64 to 256, forward,
        # and for its gradient that of Mosaic, which is 4 % slower forward.
        attention_share=1.16,
        attention_gradient_share=1.21,
        scores=6.8e12 * cycles / h100,
        score_gradients=1.0e12 * cycles / h100,
        tile_start=230.0,
        # NCCL takes up to 16 channels on NVLink of H100, each of them a multiprocessor.
        collective_cores=16 / chip.sms,
    )


_UNRATED = frozenset(("sort", "scatter", "select-and-scatter", "fft"))
"""Operations that take several passes over memory, or atomic additions to a few addresses."""

_WIDE = ("f64", "c128")


def find_unrated(module: HloModule, computation: Computation, instruction: Instruction) -> str:
    """Return the opcode for which no time on GPUs is published, of an operation or inside a fusion.

    The model counts one pass over its bytes, which is the least that it takes. The result is empty
    for other operations.

    Args:
        module: The module.
        computation: Computation of the instruction.
        instruction: The instruction.
    """
    for _, inner in module.inside(computation, instruction):
        # Special units have no float64: such functions are programs of some tens of operations.
        is_wide = inner.opcode in TRANSCENDENTAL and inner.shape.arrays[0].dtype in _WIDE
        if inner.opcode in _UNRATED or is_wide:
            return f"{inner.opcode} in float64" if is_wide else inner.opcode
    return ""


def find_multipliers(
    module: HloModule, computation: Computation, instruction: Instruction
) -> Iterator[str]:
    """Yield what runs each product of an operation: `cublas`, `cudnn` or `triton`.

    Args:
        module: The module.
        computation: Computation of the instruction, not that of a fusion.
        instruction: The instruction.
    """
    for _, inner in module.inside(computation, instruction):
        if is_library_product(inner):
            target = inner.attributes.call_target
            yield "cudnn" if target.startswith("__cudnn") else "cublas"
        elif inner.opcode == "dot":
            yield "triton"


class GpuOperationModel(OperationModel[GpuRates]):
    """Times of the operations of a module on a GPU."""

    def of(self, computation: Computation, instruction: Instruction) -> OperationTime:
        """Return the time of one run of an operation that is not asynchronous."""
        time = super().of(computation, instruction)
        if find_unrated(self._module, computation, instruction):
            return replace(time, known=False)
        return time

    def _custom_call(
        self, computation: Computation, call: Instruction, nbytes: float
    ) -> OperationTime:
        attention = attention_call(computation, call)
        if attention is None or cost_of(call, self._kernel_costs) is not None:
            return super()._custom_call(computation, call, nbytes)
        return self._attention(attention)

    def _attention(self, call: AttentionCall) -> OperationTime:
        """Return the time of cuDNN's attention: its products, and what shows of its softmax."""
        rates = self._rates.kernels or self._rates
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
        flops = instruction_flops(self._module, computation, instruction, on_gpu=True)
        if not flops.matmul_flops:
            return Work()
        padding = 1.0
        operands = computation.operand_arrays(instruction)
        left, right = operands[:2]
        if not convolved(instruction, left, right, instruction.shape.arrays[0]):
            padding = self._padding(operands, instruction)
        return Work({flops.dtype: flops.matmul_flops * padding})

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
        return self._rates.padding(batch, rows, depth, columns)

    def _work(self, computation: Computation, instruction: Instruction) -> Work:
        if instruction.opcode not in TRANSCENDENTAL:
            return super()._work(computation, instruction)
        lanes, special = _FUNCTIONS.get(instruction.opcode, _FUNCTIONS["sine"])
        elements = self._elements(instruction.shape.arrays)
        return Work(vector_ops=lanes * elements, transcendentals=special * elements)

    def _elements(self, arrays: tuple[Shape, ...] | list[Shape]) -> float:
        """Return the elements of arrays; threads need no whole registers.

        There are half as many lanes of float64 as of float32: 32 beside 64 in a multiprocessor of
        A100, 64 beside 128 of H100, and half the peak of B200, by the chips' papers.
        """
        return float(sum(array.size * (1 + (array.dtype in _WIDE)) for array in arrays))
