"""Work of kernels: operations of a compiled program that are not XLA code.

Its sources are the caller (`KernelCost`), the cost estimate of the kernel's author, and the Mosaic
module in the call's configuration.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from xlashard.hlo.call_graph import constant_of
from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.hlo.shapes import Shape, dtype_name
from xlashard.predict.costs.gpu.cuda_calls import attention_call, is_gpu_kernel
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.costs.kernel_count import KernelWork, count_kernel
from xlashard.support.kernel_module import KernelModule
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard._jax import mosaic
else:
    # JAX's MLIR reads kernels; programs without one are counted without JAX.
    mosaic = deferred("xlashard._jax.mosaic")


def is_kernel(call: Instruction) -> bool:
    """Return whether an instruction runs a kernel of Pallas, Mosaic or cuDNN."""
    if call.opcode != "custom-call":
        return False
    return call.attributes.call_target == "tpu_custom_call" or is_gpu_kernel(call)


def is_ragged(call: Instruction) -> bool:
    """Return whether a kernel is a ragged product of XLA or of JAX's megablox."""
    return _is_xla_ragged(call) or not _MEGABLOX.isdisjoint(_names(call))


_MEGABLOX = frozenset(("gmm", "tgmm"))
"""Kernels of JAX's megablox, which visit the groups in order."""


def _is_xla_ragged(call: Instruction) -> bool:
    return "ragged_dot_tiling" in call.attributes.frontend


def kernel_name(call: Instruction) -> str:
    """Return the name of a kernel, which reports show and `kernel_costs` takes.

    It is the last part of the op name: `splash_mha_dq` for
    `step/transpose(jvp(attention))/splash_mha_dq/pallas_call`.
    """
    if call.attributes.call_target.startswith("__cudnn$fmha"):
        backward = call.attributes.call_target.endswith("Backward")
        return "cudnn_attention_backward" if backward else "cudnn_attention"
    parts = [part for part in call.op_name.split("/") if part not in ("", "pallas_call")]
    named = _WRAPPED.sub("", parts[-1]).rstrip(")") if parts else ""
    return named or _without_number(call.name)


_WRAPPED = re.compile(r"^(?:[\w.]+\()+")
_NUMBERED = re.compile(r"(?:\.(?:\d+|clone|remat\d*))+$")


def _without_number(name: str) -> str:
    return _NUMBERED.sub("", name)


def kernel_work(
    module: HloModule,
    computation: Computation,
    call: Instruction,
    costs: Mapping[str, KernelCost] | None = None,
) -> KernelWork | None:
    """Return the work of one run of a kernel, or None if it is unknown.

    The caller's figures come first. A count in the kernel's module is next where it is exact: an
    author's estimate mostly leaves out that a causal mask skips blocks, and that blocks are read
    again. Where the count is an upper bound, a lower estimate of the author replaces it.

    Args:
        module: The module.
        computation: Computation of the call.
        call: Custom call of the kernel.
        costs: Costs by kernel name or op name.
    """
    cost = cost_of(call, costs or {})
    if cost is not None:
        return KernelWork(
            {cost.dtype: cost.flops} if cost.flops else {},
            cost.transcendentals,
            cost.vector_ops,
            cost.hbm_bytes,
            origin="given",
            seconds=cost.seconds,
        )
    attention = attention_call(computation, call)
    if attention is not None:
        return KernelWork(
            {dtype_name(attention.dtype): attention.flops},
            attention.rows * attention.seen,
            hbm_bytes=attention.hbm_bytes,
        )
    counted = _counted(module, computation, call)
    estimate = kernel_estimate(call)
    if counted is None:
        return _estimated(estimate) if estimate else None
    if _is_xla_ragged(call):
        return _ragged(computation, call, counted)
    work = _smaller(counted, estimate)
    # Megablox masks a block that reaches over the end of a dimension or that several groups share,
    # and multiplies all of it each time.
    return replace(work, products=counted.products) if is_ragged(call) else work


_ESTIMATE = re.compile(r'"cost_estimate":\s*\{([^}]*)\}')
_ESTIMATED = re.compile(r'"(flops|transcendentals|bytes_accessed)":\s*"?([\d.eE+]+)')


def kernel_estimate(call: Instruction) -> dict[str, float]:
    """Return the author's cost estimate of a kernel, or an empty dict.

    Args:
        call: Custom call of a Pallas kernel.
    """
    match = _ESTIMATE.search(call.attributes.backend_config)
    return {name: float(n) for name, n in _ESTIMATED.findall(match[1])} if match else {}


def cost_of(call: Instruction, costs: Mapping[str, KernelCost]) -> KernelCost | None:
    """Return the caller's cost of a kernel.

    Args:
        call: Custom call of the kernel.
        costs: Costs by kernel name, op name or name of the instruction.
    """
    return next((costs[name] for name in _names(call) if name in costs), None)


def _names(call: Instruction) -> tuple[str, ...]:
    return kernel_name(call), call.op_name, call.name, _without_number(call.name)


def unmatched_costs(module: HloModule, costs: Mapping[str, KernelCost]) -> tuple[str, ...]:
    """Return the names of costs that no kernel of a module has.

    Args:
        module: The module.
        costs: Costs by name, as `cost_of` takes them.
    """
    names = {
        name
        for computation in module.computations.values()
        for call in computation.instructions.values()
        if is_kernel(call)
        for name in _names(call)
    }
    return tuple(sorted(set(costs) - names))


def _counted(module: HloModule, computation: Computation, call: Instruction) -> KernelWork | None:
    body = _body(call.attributes.backend_config)
    kernel = _read(body) if body else None
    if kernel is None:
        return None
    # The sizes of dimensions of the grid that are known at run time precede the other operands.
    first = kernel.grid.count(None)
    scalars = call.operands[first:][: kernel.scalar_prefetch]
    prefetched = tuple(_constant(module, computation, name) for name in scalars)
    arrays = computation.operand_arrays(call)[first + kernel.scalar_prefetch :]
    is_sorted = _is_xla_ragged(call) or kernel_name(call) in _MEGABLOX
    return _count(body, prefetched, (*arrays, *call.shape.arrays), is_sorted)


@lru_cache(maxsize=256)
def _count(
    body: str,
    prefetched: tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...],
    arrays: tuple[Shape, ...],
    is_sorted: bool,
) -> KernelWork:
    """Count a kernel once for all calls, bounds and rates; its grid may have 100,000 steps."""
    kernel = _read(body)
    assert kernel is not None
    constants = [
        None if known is None else np.array(known[1], np.int64).reshape(known[0])
        for known in prefetched
    ]
    return count_kernel(kernel, constants, arrays, sorted_blocks=is_sorted)


@lru_cache(maxsize=256)
def _body(configuration: str) -> str:
    match = _BODY.search(configuration)
    return match[1] if match else ""


_BODY = re.compile(r'"body":\s*"([A-Za-z0-9+/=\\]+)"')


@lru_cache(maxsize=256)
def _read(body: str) -> KernelModule | None:
    try:
        return mosaic.read_kernel(base64.b64decode(body.replace("\\", "")))
    except binascii.Error:
        return None


def _constant(
    module: HloModule, computation: Computation, name: str
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shape and the integers of a constant; None for another value."""
    constant = constant_of(module, computation, name)
    if constant is None:
        return None
    shape, integers = constant.shape, constant.attributes.integers
    return (shape.dims, tuple(integers)) if len(integers) == shape.size else None


def _estimated(estimate: Mapping[str, float]) -> KernelWork:
    """Return the work that an author estimates; it has no dtype, mostly that is bfloat16."""
    flops = estimate.get("flops", 0.0)
    return KernelWork(
        {"bfloat16": flops} if flops else {},
        estimate.get("transcendentals", 0.0),
        hbm_bytes=estimate.get("bytes_accessed", 0.0),
        origin="estimate",
    )


def _smaller(count: KernelWork, estimate: Mapping[str, float]) -> KernelWork:
    """Return a count, scaled to an author's estimate if that is below an upper bound."""
    flops = count.matmul_flops
    total, estimated = sum(flops.values()), estimate.get("flops", 0.0)
    nbytes = estimate.get("bytes_accessed", 0.0)
    bounded = count.upper_bound or count.unknown_loops
    below = bool(bounded and estimated and (estimated < total or count.unknown_loops))
    part = estimated / total if below and total else 1.0
    if below and not total:
        flops = {"bfloat16": estimated}
    fewer = bool(bounded and nbytes and (nbytes < count.hbm_bytes or count.unknown_loops))
    return replace(
        count,
        matmul_flops={dtype: n * part for dtype, n in flops.items()},
        transcendentals=count.transcendentals * part,
        vector_ops=count.vector_ops * part,
        hbm_bytes=nbytes if fewer else count.hbm_bytes,
        origin="estimate" if below or fewer else "module",
        products={product: runs * part for product, runs in count.products.items()},
        upper_bound=count.upper_bound and not below,
    )


def _ragged(computation: Computation, call: Instruction, count: KernelWork) -> KernelWork:
    """Return the work of XLA's ragged product, whose FLOP follow from the shapes.

    Rows `[m, k]` times groups `[g, k, n]`, or times `[m, n]` where the contraction is ragged. The
    kernel multiplies a block of rows once for each group in it: these are the products.
    """
    rows = computation.operand_arrays(call)[-2]
    flops = 2.0 * rows.size * call.shape.arrays[0].dims[-1]
    return replace(
        count,
        matmul_flops={dtype_name(rows.dtype): flops},
        upper_bound=False,
        unknown_loops=0,
        by_xla=True,
    )
