"""Custom calls of XLA to NVIDIA's libraries: cuBLAS's products, cuDNN's convolutions, attention."""

import re
from dataclasses import dataclass

from xlashard.hlo.module import Computation, Instruction
from xlashard.hlo.shapes import HBM, Shape

_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")
_CONVOLUTION = "__cudnn$conv"
_CUDNN = "__cudnn$fmha"
_KERNELS = (
    *(_CUDNN, "__gpu$xla.gpu.triton", "mosaic_gpu", "triton_kernel_call", "te_"),
    *("cusolver_", "__cusolver$", "__cublas$triangularSolve"),
)
"""Kernels by target: cuDNN's attention, Pallas, jax_triton, Transformer Engine, and of solvers."""
_TILE = 128
"""Queries and keys of a tile of attention; those of the diagonal are computed as a whole."""


def is_library_product(call: Instruction) -> bool:
    """Return whether an instruction is a product by cuBLAS, or a convolution by cuDNN."""
    targets = (*_CUBLAS, _CONVOLUTION)
    return call.opcode == "custom-call" and call.attributes.call_target.startswith(targets)


def convolved(
    call: Instruction, left: Shape, right: Shape, result: Shape
) -> tuple[Shape, Shape, Shape] | None:
    """Return the input, filter and output of a convolution; None for matrix products.

    The dimension labels of cuDNN's gradients are those of the convolution in the forward pass.

    Args:
        call: A convolution, or a call to cuBLAS or cuDNN.
        left: First operand.
        right: Second operand.
        result: First result.
    """
    target = call.attributes.call_target
    if target == f"{_CONVOLUTION}BackwardInput":
        return result, right, left
    if target == f"{_CONVOLUTION}BackwardFilter":
        return left, result, right
    is_forward = call.opcode == "convolution" or target.startswith(_CONVOLUTION)
    return (left, right, result) if is_forward else None


def is_gpu_kernel(call: Instruction) -> bool:
    """Return whether an instruction runs a kernel of a GPU that does not only move bytes."""
    return call.opcode == "custom-call" and call.attributes.call_target.startswith(_KERNELS)


def contracted_dims(product: Instruction) -> tuple[int, ...]:
    """Return the contracted dimensions of the left operand of a product.

    Args:
        product: A `dot`, or a call to cuBLAS.
    """
    if product.opcode == "dot":
        return product.attributes.contracting_dims
    match = _CONTRACTED.search(product.attributes.backend_config)
    return tuple(int(n) for n in re.findall(r"\d+", match[1])) if match else ()


_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')


@dataclass(frozen=True)
class AttentionCall:
    """Attention of one call to cuDNN.

    Attributes:
        rows: Queries of all sequences and heads.
        keys: Keys of a sequence.
        key_size: Features of queries and keys.
        value_size: Features of values.
        dtype: HLO dtype of the queries.
        causal: Whether a query sees the keys up to its position alone.
        window: Number of last keys that a query sees; 0: all.
        backward: Whether the call computes the gradients.
        hbm_bytes: Bytes of its operands and results.
    """

    rows: int
    keys: int
    key_size: int
    value_size: int
    dtype: str
    causal: bool
    window: int
    backward: bool
    hbm_bytes: int

    @property
    def seen(self) -> float:
        """Keys that a query meets, in whole tiles; the mean over the queries."""
        if not self.causal:
            return float(self.keys)
        mean = self.keys / 2
        if 0 < self.window < self.keys:
            mean = self.window * (1 - self.window / self.keys / 2)
        return min(mean + _TILE / 2, float(self.keys))

    @property
    def flops(self) -> float:
        """FLOP of its products: two in the forward pass, five in the backward pass."""
        keys, values = (3, 2) if self.backward else (1, 1)
        return 2.0 * self.rows * self.seen * (keys * self.key_size + values * self.value_size)


def attention_call(computation: Computation, call: Instruction) -> AttentionCall | None:
    """Return the attention of a call to cuDNN; None for other calls.

    Args:
        computation: Computation of the call.
        call: The call.
    """
    if call.opcode != "custom-call" or not call.attributes.call_target.startswith(_CUDNN):
        return None
    arrays = computation.operand_arrays(call)
    config = call.attributes.backend_config
    scores = [int(n) for n in re.findall(r"\d+", _first_group(_SCORES, config))]
    if len(arrays) < 3 or len(scores) != 4:
        return None
    batch, heads, queries, keys = scores
    query, _, value = arrays[:3]
    results = [a for a in call.shape.arrays if a.dtype != "u8"]
    return AttentionCall(
        rows=batch * heads * queries,
        keys=keys,
        key_size=query.dims[-1],
        value_size=value.dims[-1],
        dtype=query.dtype,
        causal="CAUSAL" in _first_group(_MASK, config),
        window=int(_first_group(_WINDOW, config) or 0),
        backward="Backward" in call.attributes.call_target,
        hbm_bytes=sum(array.bytes_in(HBM) for array in [*arrays, *results]),
    )


_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]')
_MASK = re.compile(r'"mask_type":\s*"(\w+)"')
_WINDOW = re.compile(r'"sliding_window_length":\s*"?(\d+)')


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
