"""Rates that the units of a chip reach in practice, each with its source.

`generations` holds what a chip could do; these are the shares of it that published measurements
show. Every constant comes from a chip's page or from a published micro-benchmark, none from a
training run. The sources, by their short names:

- recipes: microbenchmarks of https://github.com/AI-Hypercomputer/tpu-recipes;
- tokamax: device times of operations on v5p, v6e and TPU7x, tokamax/data/autotuning of
  https://github.com/openxla/tokamax;
- Pallas: docs/pallas/tpu/matmul.ipynb of https://github.com/jax-ml/jax;
- marin: https://github.com/marin-community/marin/issues/6736;
- book: How to Scale Your Model, https://jax-ml.github.io/scaling-book.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xlashard.hlo.shapes import dtype_bits, dtype_name, is_floating, padded
from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.tpu.generations import Generation

MATRIX_UNITS = {
    # https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
    "v2": (1, 128),
    "v3": (2, 128),
    "v4": (4, 128),
    "v5e": (4, 128),
    "v5p": (4, 128),
    # No public figure agrees with the peak. libtpu 0.0.50 estimates large products at 434,000 and
    # 422,000 FLOP per cycle, which four units of 256 x 256 can do and two can't.
    "v6e": (4, 256),
    "tpu7x": (4, 256),
}
"""Number of matrix units of a TensorCore, and their rows and columns."""

_MATRIX_SHARES = {
    # The time of the whole products is that of the units, overlapped with that of HBM, from which
    # operands are read again (`product_tiles`).
    # Pallas: 8192 x 8192 x 8192 in bfloat16 by XLA, 181.8 of 197 TFLOP/s.
    "v5e": 0.97,
    # recipes: the same product, 827.5 of 918 TFLOP/s with 64 MiB of scoped VMEM, 754 with 32.
    "v6e": 0.955,
    # recipes: 32768 x 32768 x 32768, 956 of 1153.5 TFLOP/s of a TensorCore.
    "tpu7x": 0.855,
}
_OTHER_MATRIX_SHARE = 0.93
"""Mean of the others, for generations without a published product of this size."""

_HBM_SHARES = {
    # tokamax: softmax and gated products of 0.2 to 34 GB, which wait for HBM alone.
    "v5p": 0.95,
    "v6e": 0.95,
    # recipes: copies of 128 MiB to 8 GiB, 0.861 to 0.870 of 3690 GB/s.
    "tpu7x": 0.87,
}
_OTHER_HBM_SHARE = 0.92
"""Mean of the others, for generations without a published measurement."""

_KERNEL_SHARES = {
    # tokamax: 55 flash attention kernels forward, and 18 backward on TPU7x, of 512 to 16,384 tokens
    # and heads of 64 to 256, fitted as products plus HBM traffic plus steps: median errors of 8, 4
    # and 5 %. Softmax hides behind the products; v5p reaches its peak.
    "v5p": (1.08, 0.7),
    "v6e": (0.94, 0.45),
    "tpu7x": (0.97, 0.25),
}
"""Shares of the rates of products and of HBM that kernels with functions such as exp reach."""

_PRODUCT_KERNEL_SHARES = {
    # tokamax: 79 ragged products, forward and of weight gradients, fitted as XLA's operations:
    # median errors of 6 to 9 %. On v5p they run on one of the two cores, 0.49 of both; kernels
    # whose grid has a parallel dimension run on both (`KernelWork.busy_share`).
    "v5e": (0.91, 1.0),
    "v5p": (0.98, 1.0),
    "tpu7x": (0.87, 0.6),
}
"""The same for kernels of products alone, of which HBM traffic overlaps with the products."""

_LIKE = {"v4": "v5p", "v6e": "tpu7x"}
"""Generations whose kernels are nearest to those without a published measurement."""

LANES = 128
"""Elements of a vector register along the minor dimension."""

_REGISTER = (8, LANES)
"""Shape of a vector register, whose elements an operation of the vector unit takes at once."""

VECTOR_LANES = math.prod(_REGISTER)
"""Elements of a vector register."""


def in_registers(physical: tuple[int, ...]) -> int:
    """Return the elements of an array with the padding to whole vector registers.

    Args:
        physical: Shape, major to minor.

    Example:
        >>> in_registers((3, 100)), in_registers((100,)), in_registers(())
        (1024, 128, 1)
    """
    rank = min(len(physical), len(_REGISTER))
    return math.prod(padded(physical, _REGISTER[len(_REGISTER) - rank :]))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one device.

    By default nothing is lost: shares are 1, latencies 0, memory on the chip is not modelled.

    Attributes:
        cores: TensorCores that a program of the device runs on.
        scoped_vmem_bytes: VMEM that an operation may use.
        first_bytes: Bytes that an operation reads before its arithmetic starts.
        matrix_size: Rows and columns of a matrix unit, to which products are padded.
        matrix_flops: FLOP per second of large matrix products, by operand dtype.
        hbm_bytes: Bytes per second of copies in HBM.
        vmem_bytes: Bytes per second of operations whose values are in VMEM.
        relayout: Share of `hbm_bytes` at which arrays change their layout.
        vector_ops: Elements per second of elementwise operations.
        transcendentals: Elements per second of functions such as exp.
        operation_seconds: Time between the operations of a program.
        hbm_seconds: Latency of an operation that waits for HBM.
        link_share: Share of a link's bandwidth that collectives reach.
        torus_reduction_share: The same for reductions along several dimensions at once.
        hop_seconds: Latency of a hop between neighbours.
        collective_seconds: Time to launch a collective.
        dcn_share: Share of the bandwidth between slices that collectives reach.
        host_bytes: Bytes per second to or from the memory of the host.
        kernel_matrix_share: Share of `matrix_flops` that the products of kernels reach.
        kernel_hbm_share: Share of `hbm_bytes` that the copies of kernels reach.
        product_kernel_matrix_share: The first in Pallas kernels of products alone.
        product_kernel_hbm_share: The second in Pallas kernels of products alone.
        kernel_vector_ops: Elements per second of elementwise operations in kernels.
        kernel_transcendentals: Elements per second of functions such as exp in kernels.
        kernel_step_seconds: Time between the steps of a kernel's grid.
        collective_cores: Share of the cores that a running collective takes.
        kernels: Rates of kernels that were measured apart; None for these.
        reductions: Rates of all-reduces and reduce-scatters that were; None for these.
    """

    cores: int = 1
    scoped_vmem_bytes: float = math.inf
    first_bytes: float = 0.0
    matrix_size: int = 1
    matrix_flops: tuple[tuple[str, float], ...]
    hbm_bytes: float
    vmem_bytes: float = math.inf
    relayout: float = 1.0
    vector_ops: float
    transcendentals: float
    operation_seconds: float
    hbm_seconds: float
    link_share: float = 1.0
    torus_reduction_share: float = 1.0
    hop_seconds: float = 0.0
    collective_seconds: float = 0.0
    dcn_share: float = 1.0
    host_bytes: float
    kernel_matrix_share: float = 1.0
    kernel_hbm_share: float = 1.0
    product_kernel_matrix_share: float = 1.0
    product_kernel_hbm_share: float = 1.0
    kernel_vector_ops: float
    kernel_transcendentals: float
    kernel_step_seconds: float = 0.0
    collective_cores: float = 0.0
    kernels: "Rates | None" = None
    reductions: "Rates | None" = None

    def product_seconds(self, flops: float, dtype: str) -> float:
        """Return the time of matrix products.

        Args:
            flops: FLOP with the padding to whole matrix units.
            dtype: Operand dtype; `bfloat16 x6` takes six passes.
        """
        return product_seconds(flops, dtype, dict(self.matrix_flops))


def product_seconds(flops: float, dtype: str, rates: Mapping[str, float]) -> float:
    """Return the time of matrix products at given rates.

    Args:
        flops: FLOP of the products.
        dtype: Operand dtype; `bfloat16 x6` takes six passes. A dtype without a rate is multiplied
            as one that has it.
        rates: FLOP per second by operand dtype.
    """
    name, _, passes = dtype.partition(" x")
    family = name.partition("_")[0]
    others = {"uint8": "int8", "int4": "int8", "uint4": "int8"}
    names = (name, family, others.get(family, "bfloat16"), "bfloat16")
    return flops * int(passes or 1) / next(rates[n] for n in names if n in rates)


def multiplied_dtype(left: str, right: str, passes: int = 1) -> str:
    """Return the dtype in which matrix units multiply, as `product_seconds` takes it.

    Args:
        left: HLO dtype of the first operand.
        right: HLO dtype of the second.
        passes: Number of passes in bfloat16 for operands of float32.

    Example:
        >>> multiplied_dtype("s8", "bf16"), multiplied_dtype("f32", "f32", passes=6)
        ('bfloat16', 'bfloat16 x6')
        >>> multiplied_dtype("pred", "s8")
        'int8'
    """
    wider = wider_dtype(left, right)
    if wider not in ("f32", "c64"):
        return dtype_name(wider)
    # The matrix unit multiplies bfloat16; float32 takes several passes.
    return "bfloat16" if passes == 1 else f"bfloat16 x{passes}"


def wider_dtype(left: str, right: str) -> str:
    """Return the HLO dtype of a product's operands that has more bits, floating-point first.

    Args:
        left: HLO dtype of the first operand.
        right: HLO dtype of the second.
    """
    # A bool takes the dtype of the other operand.
    known = [dtype for dtype in (left, right) if dtype != "pred"] or [left]
    return max(known, key=lambda dtype: (is_floating(dtype), dtype_bits(dtype)))


def core_clock(generation: Generation) -> float | None:
    """Return the cycles per second at which a generation reaches its peak, or None if unknown.

    The clock is the bfloat16 peak divided by the FLOP per cycle of the matrix units: 0.70 GHz for
    v2, 0.94 for v3, 1.05 for v4, 1.5 for v5e, 1.75 for v5p and v6e, 2.2 for tpu7x. The compiler
    counts cycles of a megacore for both cores together.
    """
    units = MATRIX_UNITS.get(generation.name)
    peak = dict(generation.peak_flops).get("bfloat16")
    if units is None or peak is None:
        return None
    count, size = units
    return peak / generation.cores_per_chip / (2 * count * size * size)


def rates_of(generation: Generation) -> Rates:
    """Return the rates that a device of a generation reaches.

    Args:
        generation: Generation of the chips.
    """
    kernel_matrix, kernel_hbm = _kernel_shares(generation.name, _KERNEL_SHARES)
    product_matrix, product_hbm = _kernel_shares(generation.name, _PRODUCT_KERNEL_SHARES)
    share = _MATRIX_SHARES.get(generation.name, _OTHER_MATRIX_SHARE)
    cores = generation.cores_per_device
    vectors = (core_clock(generation) or 0.0) * cores * VECTOR_LANES
    vmem = (32 if generation.name in ("v6e", "tpu7x") else 16) * 2.0**20
    return Rates(
        cores=cores,
        scoped_vmem_bytes=vmem,
        # Blocks of operands and results have two buffers each; the first ones of the operands come
        # before everything else. Of half, a quarter and an eighth of VMEM a quarter is closest to
        # recipes' products of 2048 rows on TPU7x, which therefore do not test it.
        first_bytes=vmem / 4,
        matrix_size=MATRIX_UNITS[generation.name][1],
        matrix_flops=tuple((name, share * f) for name, f in generation.device_peak_flops),
        hbm_bytes=_HBM_SHARES.get(generation.name, _OTHER_HBM_SHARE)
        * generation.device_hbm_bandwidth,
        vmem_bytes=generation.device_vmem_bandwidth,
        # tokamax: copies between layouts in attention on v5p, v6e and TPU7x; on v5e, whose HBM is
        # the slowest, those of the operands of ragged products reach the rate of other copies.
        relayout=1.0 if generation.name == "v5e" else 0.6,
        # book: four operations at a time, beside which a transcendental function takes a cycle, as
        # in the softmax of tokamax on v5p, v6e and TPU7x.
        vector_ops=4 * vectors,
        transcendentals=vectors,
        # recipes, TPU7x: a product of 128 x 128 x 128 takes 1.6 microseconds, a copy of 2 MiB 1.7
        # more than its bytes.
        operation_seconds=0.3e-6,
        hbm_seconds=1.0e-6,
        # marin: permutations between neighbours, fitted over their size, 86 and 87 of 100 GB/s on
        # v5p and v6e after 4.6 and 5.4 microseconds, of which one is the hop (book); recipes,
        # TPU7x: gathers of 256 MiB within a 2x2 plane, 0.89.
        link_share=0.88,
        hop_seconds=1.0e-6,
        # recipes, TPU7x: gathers of 1 and 4 MiB take 13.5 microseconds besides their bytes.
        collective_seconds=11.5e-6 if generation.name == "tpu7x" else 4.0e-6,
        # recipes, v6e: an all-reduce of 606 MB over both dimensions of 16x16 at 236 of 400 GB/s,
        # half of it a gather at the share above.
        torus_reduction_share=0.44,
        # recipes, v6e: no figure with a stated number of slices is published; as ICI.
        dcn_share=0.88,
        host_bytes=generation.host_bandwidth,
        kernel_matrix_share=kernel_matrix,
        kernel_hbm_share=kernel_hbm,
        product_kernel_matrix_share=product_matrix,
        product_kernel_hbm_share=product_hbm,
        # Four operations at a time, of which one may be a transcendental function.
        kernel_vector_ops=4 * vectors,
        kernel_transcendentals=vectors,
        kernel_step_seconds=0.35e-6,
    )


def _kernel_shares(name: str, published: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    return published.get(name) or published.get(_LIKE.get(name, ""), published["v5p"])


def borrowed_rates(chip: Chip, rates: Rates | None = None) -> list[Rates]:
    """Return the rates with the kernel shares of each generation that has published ones.

    Args:
        chip: Figures of the chip. Where its own shares are published, the list leaves that kind of
            kernel out; it is empty for GPUs.
        rates: Rates of a device; those of published measurements if None. The list is empty if
            kernels were measured on it.
    """
    if not isinstance(chip, Generation):
        return []
    rates = rates or rates_of(chip)
    if rates.kernels is not None:
        return []
    borrowed = []
    if chip.name not in _KERNEL_SHARES:
        for matrix, hbm in _KERNEL_SHARES.values():
            borrowed.append(replace(rates, kernel_matrix_share=matrix, kernel_hbm_share=hbm))
    if chip.name not in _PRODUCT_KERNEL_SHARES:
        for matrix, hbm in _PRODUCT_KERNEL_SHARES.values():
            borrowed.append(
                replace(rates, product_kernel_matrix_share=matrix, product_kernel_hbm_share=hbm)
            )
    return borrowed
