"""Time of one HLO operation on one device, by the unit that it occupies.

An operation keeps several units busy at once: the matrix units, the vector unit, HBM and VMEM, each
at the rate that published measurements show (`rates`). They overlap, though not entirely: the time
is the norm of their times with the exponent 2.5, which of 2, 2.5, 3 and infinity is closest to the
published times of XLA's operations (`benchmarks/operations.py`). Operations of a program run one
after the other, so that their times add up.

A product whose operands do not fit into VMEM computes its result in tiles. Each row of tiles reads
the whole second operand again, each column the whole first one, and what is fused with an operand
is computed again with each read. Tiles grow with the VMEM that an operation may use
(`xla_tpu_scoped_vmem_limit_kib`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.hlo.shapes import HBM, Shape
from xlashard.predict.costs.cost_analysis import (
    ELEMENTWISE,
    TRANSCENDENTAL,
    instruction_flops,
    is_product,
)
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.costs.kernel_count import KernelWork
from xlashard.predict.costs.kernel_work import is_kernel, kernel_work
from xlashard.predict.costs.memory_traffic import FREE_OPCODES, hbm_bytes, vmem_bytes
from xlashard.predict.costs.rates import Rates, in_registers

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


Unit = Literal["matrix", "vector", "hbm", "vmem", "kernel", "launch"]
"""Units that an operation can wait for."""

_VECTOR_NAMES = """
    and convert is-finite not or popcnt reduce-precision shift-left shift-right-arithmetic
    shift-right-logical xor
"""
_ON_VECTORS = ELEMENTWISE.union(_VECTOR_NAMES.split())
"""Operations of the vector unit, without functions such as exp."""

_MOVES = ("copy", "transpose")
_OVERLAP = 2.5


@dataclass
class Work:
    """Work of an operation, with everything that it fuses.

    Attributes:
        products: FLOP of matrix products with the padding to whole matrix units, by dtype.
        vector_ops: Elements of elementwise operations and reductions, in whole registers.
        transcendentals: Elements of functions such as exp, in whole registers.
        changes_layout: Whether it reorders elements in memory.
        hbm_bytes: HBM traffic of operands that it reads again.
    """

    products: dict[str, float] = field(default_factory=dict)
    vector_ops: float = 0.0
    transcendentals: float = 0.0
    changes_layout: bool = False
    hbm_bytes: float = 0.0

    def add(self, other: "Work", times: float = 1.0) -> None:
        """Add the work of another operation, some times."""
        for dtype, flops in other.products.items():
            self.products[dtype] = self.products.get(dtype, 0.0) + times * flops
        self.vector_ops += times * other.vector_ops
        self.transcendentals += times * other.transcendentals
        self.changes_layout |= other.changes_layout
        self.hbm_bytes += times * other.hbm_bytes


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Time of one run of an operation.

    Attributes:
        matrix: Seconds of the matrix units.
        vector: Seconds of the vector unit.
        hbm: Seconds of HBM traffic.
        vmem: Seconds of the traffic of values that the compiler placed in VMEM.
        kernel: Seconds of a kernel beside those of the units: of the steps of its grid, or all that
            the caller gave.
        launch: Seconds to start it.
        known: False for a kernel of unknown cost.
        waits_for_hbm: Whether HBM traffic does not overlap with arithmetic, as in kernels.
        first_share: Share of the HBM traffic that nothing overlaps with: the arithmetic starts when
            the first block of the operands is there.
    """

    matrix: float = 0.0
    vector: float = 0.0
    hbm: float = 0.0
    vmem: float = 0.0
    kernel: float = 0.0
    launch: float = 0.0
    known: bool = True
    waits_for_hbm: bool = False
    first_share: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of the units, which overlap, and of the launch."""
        if self.waits_for_hbm:
            return max(self.matrix, self.vector) + self.hbm + self.kernel + self.launch
        return self._overlapped() + self.kernel + self.launch

    def _overlapped(self) -> float:
        first = self.first_share * self.hbm
        units = (self.matrix, self.vector, self.hbm - first, self.vmem)
        # Scaled, so that the powers of microseconds keep their digits.
        longest = max(units)
        if not longest:
            return first
        sum_of_powers = sum((unit / longest) ** _OVERLAP for unit in units)
        return first + longest * sum_of_powers ** (1 / _OVERLAP)

    @property
    def bound(self) -> Unit:
        """Unit that determines the time."""
        return max(get_args(Unit), key=lambda unit: getattr(self, unit))


NO_TIME = OperationTime()


class OperationModel[R: Rates]:
    """Times of the operations of a module."""

    def __init__(
        self,
        module: HloModule,
        rates: R,
        kernel_costs: Mapping[str, KernelCost] | None = None,
    ) -> None:
        """Model the operations of a module.

        Args:
            module: Compiled module.
            rates: Rates of the device.
            kernel_costs: Costs of kernels that the caller gives, by name.
        """
        self._module = module
        self._rates = rates
        self._kernel_costs = dict(kernel_costs or {})
        self._fused: dict[str, Work] = {}

    def of(self, computation: Computation, instruction: Instruction) -> OperationTime:
        """Return the time of one run of an operation that is not asynchronous.

        Args:
            computation: Computation of the instruction, not that of a fusion.
            instruction: The instruction, neither a call nor a loop nor a collective.
        """
        if instruction.opcode in FREE_OPCODES:
            return NO_TIME
        nbytes = hbm_bytes(self._module, computation, instruction)
        if instruction.opcode == "custom-call":
            return self._custom_call(computation, instruction, nbytes)
        in_vmem = vmem_bytes(self._module, computation, instruction)
        return self._time(self._work(computation, instruction), nbytes, in_vmem)

    def _time(self, work: Work, nbytes: float, in_vmem: float = 0.0) -> OperationTime:
        rates = self._rates
        # A product reads its operands in any order.
        reorders = work.changes_layout and not work.products
        bandwidth = rates.hbm_bytes * (rates.relayout if reorders else 1.0)
        hbm = (nbytes + work.hbm_bytes) / bandwidth
        return OperationTime(
            sum(rates.product_seconds(flops, dtype) for dtype, flops in work.products.items()),
            work.vector_ops / rates.vector_ops + work.transcendentals / rates.transcendentals,
            hbm,
            in_vmem / rates.vmem_bytes,
            launch=rates.operation_seconds + (rates.hbm_seconds if nbytes else 0.0),
            first_share=min(rates.first_bytes / nbytes, 1.0) if nbytes else 0.0,
        )

    def _custom_call(
        self, computation: Computation, call: Instruction, nbytes: float
    ) -> OperationTime:
        if not is_kernel(call):
            return self._time(self._work(computation, call), nbytes) if nbytes else NO_TIME
        work = kernel_work(self._module, computation, call, self._kernel_costs)
        if work is None:
            return OperationTime(hbm=nbytes / self._rates.hbm_bytes, known=False)
        return self._kernel_time(work)

    def _kernel_time(self, work: KernelWork) -> OperationTime:
        rates = self._rates.kernels or self._rates
        if work.seconds is not None:
            return OperationTime(kernel=work.seconds)
        vector = work.vector_ops / rates.kernel_vector_ops
        vector += work.transcendentals / rates.kernel_transcendentals
        # Without a parallel dimension of the grid, the other cores of the device are idle.
        busy = work.busy_share(rates.cores)
        matrix_share, hbm_share = busy * rates.kernel_matrix_share, rates.kernel_hbm_share
        steps = work.steps * rates.kernel_step_seconds
        only_products = bool(work.products) and not work.transcendentals
        if work.by_xla:
            matrix_share = hbm_share = 1.0
            steps /= rates.cores
        elif only_products:
            matrix_share = busy * rates.product_kernel_matrix_share
            hbm_share = rates.product_kernel_hbm_share
            steps /= busy * rates.cores
        return OperationTime(
            # Copies go on between the steps.
            self._kernel_products(work) / matrix_share + (steps if only_products else 0.0),
            # Softmax hides behind the products: the shares above hold what shows of it.
            0.0 if work.products else vector,
            work.hbm_bytes / rates.hbm_bytes / hbm_share,
            kernel=0.0 if only_products else steps,
            launch=rates.hbm_seconds,
            known=not work.unknown_loops,
            waits_for_hbm=not only_products,
        )

    def _kernel_products(self, work: KernelWork) -> float:
        rates = self._rates.kernels or self._rates
        counted = sum(work.matmul_flops.values())
        seconds = sum(rates.product_seconds(f, dtype) for dtype, f in work.matmul_flops.items())
        if not work.products or not counted:
            return seconds
        # Blocks that only a part of a ragged product fills are multiplied as a whole.
        size = rates.matrix_size
        return sum(
            rates.product_seconds(2.0 * runs * depth * rows * columns, dtype)
            * padding(rows, depth, columns, size, turned=False)
            for (dtype, rows, depth, columns), runs in work.products.items()
        )

    def _work(self, computation: Computation, instruction: Instruction) -> Work:
        """Return the work of an operation, with that of the computations that it fuses."""
        opcode = instruction.opcode
        if opcode in ("fusion", "fusion-start", "map", "async-start"):
            work = Work()
            for name in instruction.calls:
                if name in self._module.computations:
                    work.add(self._fusion(name))
            return work
        if is_product(instruction):
            return self._product(computation, instruction)
        if opcode in TRANSCENDENTAL:
            return Work(transcendentals=self._elements(instruction.shape.arrays))
        if opcode in _ON_VECTORS:
            return Work(vector_ops=self._elements(instruction.shape.arrays[:1]))
        if opcode in ("reduce", "reduce-window"):
            operands = computation.operand_arrays(instruction)
            return Work(vector_ops=self._elements(operands[: max(len(operands) // 2, 1)]))
        if opcode in _MOVES:
            return Work(changes_layout=_changes_layout(computation, instruction))
        return Work()

    def _fusion(self, name: str) -> Work:
        if name not in self._fused:
            work = Work()
            computation = self._module.computations[name]
            for instruction in computation.instructions.values():
                work.add(self._work(computation, instruction))
            self._fused[name] = work
        return self._fused[name]

    def _product(self, computation: Computation, instruction: Instruction) -> Work:
        flops = instruction_flops(self._module, computation, instruction)
        if not flops.matmul_flops:
            return Work()
        operands = computation.operand_arrays(instruction)
        labels = instruction.attributes.convolution_labels
        if len(operands) < 2 or labels is None or not instruction.shape.arrays:
            return Work({flops.dtype: flops.matmul_flops})
        _, kernel, result = labels
        out = instruction.shape.arrays[0]
        depth = operands[1].dims[kernel.index("i")]
        rows, columns = out.dims[result.index("b")], out.dims[result.index("f")]
        if not (depth and rows and columns):
            return Work({flops.dtype: flops.matmul_flops})
        ratio = padding(rows, depth, columns, self._rates.matrix_size)
        work = Work({flops.dtype: flops.matmul_flops * ratio})
        work.add(self._repeated(computation, instruction, (kernel, result)))
        return work

    def _repeated(
        self, computation: Computation, product: Instruction, labels: tuple[str, str]
    ) -> Work:
        """Return the work of a product with operands that it reads again."""
        work, vmem = Work(), self._rates.scoped_vmem_bytes
        operands = computation.operand_arrays(product)
        size = ProductSize.of(operands[1], product.shape.arrays[0], *labels)
        for name, array, reads in zip(product.operands, operands, size.reads(vmem), strict=False):
            if reads > 1 and not stays(array.nbytes, vmem):
                nbytes, producer = source_of(computation, name)
                work.hbm_bytes += (reads - 1) * nbytes
                if producer is not None:
                    work.add(self._work(computation, producer), reads - 1)
        return work

    def _elements(self, arrays: tuple[Shape, ...] | list[Shape]) -> float:
        """Return the elements of arrays, with the padding to whole vector registers."""
        physical = [tuple(a.dims[n] for n in a.major_to_minor) for a in arrays if a.dims]
        return float(sum(map(in_registers, physical)))


def _changes_layout(computation: Computation, instruction: Instruction) -> bool:
    if instruction.opcode == "transpose":
        return True
    operands = computation.operand_arrays(instruction)
    return bool(operands) and operands[0].minor_to_major != instruction.shape.minor_to_major


def padding(rows: int, depth: int, columns: int, size: int, *, turned: bool = True) -> float:
    """Return the ratio of a product's FLOP in whole matrix units to its FLOP.

    One operand stays in the units, cut into squares; the rows of the other pass by, eight at a
    time. XLA chooses the better of both ways.

    Args:
        rows: Rows of the result.
        depth: Contracted dimension.
        columns: Columns of the result.
        size: Rows and columns of a matrix unit.
        turned: Whether the first operand may stay in the units; in kernels it is the second.
    """
    waste = _up(columns, size) / columns * _up(rows, 8) / rows
    if turned:
        waste = min(waste, _up(rows, size) / rows * _up(columns, 8) / columns)
    return _up(depth, size) / depth * waste


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
