"""Repeated work of products whose operands do not fit into VMEM.

A product computes its result in tiles. Each row of tiles reads the whole second operand again,
each column the whole first one, and what is fused with an operand is computed again with each read.
Tiles grow with the VMEM that an operation may use (`xla_tpu_scoped_vmem_limit_kib`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from xlashard.hlo.module import Computation, Instruction
from xlashard.hlo.shapes import HBM, Shape

_TILE_SHARE = 1 / 6
"""Share of the scoped VMEM that a square tile of the result takes, and an operand that stays.

tokamax: products of the loss from float32 to 128,256 ... 201,088 logits on v6e and TPU7x take as
long as with tiles of 1,100 to 1,280 rows and columns.
"""


@dataclass(frozen=True)
class ProductSize:
    """Size of a product.

    Attributes:
        rows: Rows of the result in one batch.
        columns: Columns of the result.
        element_bytes: Bytes of an element of the result.
    """

    rows: int
    columns: int
    element_bytes: float

    @classmethod
    def of(
        cls, kernel: Shape, result: Shape, kernel_labels: str, result_labels: str
    ) -> "ProductSize":
        """Return the size of a convolution that multiplies matrices.

        Args:
            kernel: Its second operand.
            result: Its result.
            kernel_labels: Labels of the dimensions of the second operand, such as `io`.
            result_labels: Labels of those of the result, such as `bf`.
        """
        columns = result.dims[result_labels.index("f")]
        # A batch of products is a convolution over a window as large as the batch.
        batch = math.prod(
            size for label, size in zip(kernel_labels, kernel.dims, strict=True) if label.isdigit()
        )
        rows = max(result.size // max(columns * batch, 1), 1)
        return cls(rows, columns, result.bits / 8)

    def reads(self, scoped_vmem: float) -> tuple[float, float]:
        """Return how often the first and the second operand are read.

        Args:
            scoped_vmem: Bytes of VMEM that an operation may use.

        Example:
            >>> ProductSize(rows=4096, columns=512, element_bytes=2).reads(12 * 2**20)
            (1.0, 2.0)
        """
        elements = scoped_vmem * _TILE_SHARE / self.element_bytes
        rows = min(self.rows, math.sqrt(elements))
        columns = min(self.columns, elements / rows)
        rows = min(self.rows, elements / columns)
        return self.columns / columns, self.rows / rows


def stays(nbytes: float, scoped_vmem: float) -> bool:
    """Return whether an operand stays in VMEM.

    Args:
        nbytes: Its bytes.
        scoped_vmem: Bytes of VMEM that an operation may use.
    """
    return nbytes <= scoped_vmem * _TILE_SHARE


def source_of(computation: Computation, name: str) -> tuple[float, Instruction | None]:
    """Return the HBM bytes from which a fusion makes an operand of a product.

    Args:
        computation: Computation of the product.
        name: Name of the operand.

    Returns:
        Bytes of the largest array, and the fusion that computes the operand from it, if any.
    """
    value = computation.instructions.get(name)
    if value is None:
        return 0.0, None
    sources = [i for i in _ancestors(computation, value) if i.opcode == "parameter"]
    largest = max(sources, key=lambda i: i.shape.size, default=value)
    arrays = largest.shape.arrays
    in_hbm = bool(arrays) and arrays[0].memory_space == HBM
    # A slice of a larger array reads its own elements.
    size = min(largest.shape.size, value.shape.size) if arrays else 0
    nbytes = size * arrays[0].bits / 8 if in_hbm else 0.0
    return nbytes, value if value.opcode == "fusion" else None


def _ancestors(computation: Computation, value: Instruction) -> Iterator[Instruction]:
    seen, left = {value.name}, [value]
    while left:
        one = left.pop()
        yield one
        for name in one.operands:
            if name not in seen and name in computation.instructions:
                seen.add(name)
                left.append(computation.instructions[name])
