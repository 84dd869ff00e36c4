"""Bytes that single HLO instructions read and write in HBM, in VMEM and in the host's memory."""

import math
from collections.abc import Sequence

from xlashard.hlo.collective_kinds import KINDS
from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.hlo.shapes import HBM, HOST, VMEM, Shape
from xlashard.predict.costs.gpu.cuda_calls import is_library_product
from xlashard.predict.costs.kernel_work import is_kernel, kernel_work

_FREE_NAMES = """
    add-dependency after-all bitcast constant domain get-tuple-element iota opt-barrier parameter
    partition-id replica-id tuple
"""
FREE_OPCODES = frozenset(_FREE_NAMES.split())
"""Operations that neither compute nor move bytes."""

_CALLS = frozenset(
    ("async-start", "async-update", "call", "call-start", "call-update", "conditional", "while")
)
"""Operations whose bytes the computations that they call count."""

_PASSED_ON = ("bitcast", "reshape", "get-tuple-element", "opt-barrier")
_ON_DEMAND = ("copy", "convert", "pad")
"""Operations that a fusion computes only for the elements that later slices of it need."""

GRANULE = 32
"""Bytes of the smallest access to HBM.

SparseCores of v5p and v6e copy 32 bytes at once, those of tpu7x 64: `dma_granule_size_bytes` in
https://github.com/jax-ml/jax/blob/cec06d1/jax/_src/tpu_info.py.
"""


def hbm_bytes(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    """Return the HBM bytes that one run of an instruction reads and writes, including padding.

    Values in another memory (VMEM, host) count nothing. Slices, gathers and in-place updates count
    only the bytes that they touch, also inside fusions; each slice of a gather counts in whole
    granules. An operand that a fusion reads several times counts once. Asynchronous calls, such as
    those of SparseCores, count nothing: the computations that they call do.

    Args:
        module: The module.
        computation: Computation of the instruction, not that of a fusion.
        instruction: The instruction.
    """
    if instruction.opcode == "custom-call":
        return _of_custom_call(module, computation, instruction)
    key, known = (computation.name, instruction.name), module.hbm_bytes
    if key not in known:
        known[key] = _bytes_in(HBM, module, computation, instruction)
    return known[key]


def vmem_bytes(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    r"""Return the VMEM bytes that one run of an instruction reads and writes, including padding.

    Values that the compiler placed in VMEM count as those in HBM do in `hbm_bytes`. Asynchronous
    copies count nothing, for they wait for the other memory; neither do kernels and other custom
    calls.

    Args:
        module: The module.
        computation: Computation of the instruction, not that of a fusion.
        instruction: The instruction.

    Example:
        >>> from xlashard.hlo import read
        >>> module = read(
        ...     "HloModule m\nENTRY main {\n"
        ...     "p = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)\n"
        ...     "ROOT r = f32[8,128]{1,0:T(8,128)} negate(p)\n}\n"
        ... )
        >>> main = module.computations["main"]
        >>> vmem_bytes(module, main, main.root), hbm_bytes(module, main, main.root)
        (4096, 4096)
    """
    if instruction.opcode == "custom-call" or instruction.opcode.endswith("-start"):
        return 0
    return _bytes_in(VMEM, module, computation, instruction)


def _bytes_in(
    memory: int, module: HloModule, computation: Computation, instruction: Instruction
) -> int:
    opcode = instruction.opcode
    if opcode in FREE_OPCODES or opcode in _CALLS or opcode.endswith("-done"):
        return 0
    if opcode in ("fusion", "fusion-start"):
        inner = module.callee(instruction)
        return 0 if inner is None else _of_fusion(memory, module, instruction, inner)
    results = instruction.shape.arrays
    operands = computation.operand_arrays(instruction)
    if opcode in ("send", "recv"):
        # The type holds the transferred value and a context.
        return _whole(memory, instruction.shape.parts[0].arrays)
    if opcode.endswith("-start"):
        results = _started(instruction, len(operands))
    return _of_operation(memory, instruction, operands, results)


def _whole(memory: int, arrays: Sequence[Shape]) -> int:
    """Return the bytes of the arrays in a memory."""
    return sum(array.bytes_in(memory) for array in arrays)


_HOST_CALLS = ("MoveToHost", "MoveToDevice")
_SLICES = ("slice", "dynamic-slice", "copy")


def host_bytes(computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that one run of an instruction moves between a device and its host.

    Args:
        computation: Computation of the instruction.
        instruction: The instruction; of an asynchronous one, the start counts.
    """
    opcode = instruction.opcode.removesuffix("-start")
    operands = computation.operand_arrays(instruction)
    results = instruction.shape.arrays
    moves = opcode == "custom-call" and instruction.attributes.call_target in _HOST_CALLS
    if moves or opcode == "infeed":
        return sum(array.padded_bytes for array in results)
    if opcode == "outfeed":
        return sum(array.padded_bytes for array in operands)
    if instruction.opcode.endswith("-start"):
        results = _started(instruction, len(operands))
    if not operands or not results:
        return 0
    if opcode in _SLICES:
        moved, other = results[0], operands[0]
    elif opcode == "dynamic-update-slice" and len(operands) > 1:
        moved, other = operands[1], results[0]
    else:
        return 0
    crosses = (moved.memory_space == HOST) != (other.memory_space == HOST)
    return moved.padded_bytes if crosses else 0


def _of_operation(
    memory: int, instruction: Instruction, operands: Sequence[Shape], results: Sequence[Shape]
) -> int:
    written = _whole(memory, results)
    match instruction.opcode.removesuffix("-start"):
        case "slice" | "dynamic-slice":
            # Reads as many bytes of the operand as the result has; other operands are indices.
            read = _like(memory, operands[:1], sum(array.padded_bytes for array in results))
            return read + _whole(memory, operands[1:]) + written
        case "gather" if operands:
            table = operands[0]
            read = _gathered(instruction, table) if table.memory_space == memory else 0
            return read + _whole(memory, operands[1:]) + written
        case "dynamic-update-slice" if len(operands) > 1:
            update = operands[1]
            return _whole(memory, [update]) + _like(memory, results, update.padded_bytes)
        case "scatter" if len(operands) > 2:
            # Reads and writes the updated slices.
            slices = _scattered(instruction, results[0], operands[-1])
            touched = slices if results[0].memory_space == memory else 0
            return _whole(memory, operands[1:]) + 2 * touched
    return _whole(memory, operands) + written


def _like(memory: int, arrays: Sequence[Shape], nbytes: int) -> int:
    """Return `nbytes`, limited by the bytes of the arrays in a memory."""
    return min(nbytes, _whole(memory, arrays))


def _started(instruction: Instruction, operands: int) -> tuple[Shape, ...]:
    """Return the results of an asynchronous start, whose type includes its operands."""
    if instruction.opcode == "copy-start":
        return instruction.shape.parts[0].arrays
    arrays = instruction.shape.arrays
    if instruction.opcode == "all-reduce-start" and len(arrays) == operands:
        return arrays
    return arrays[operands : 2 * operands]


def _of_custom_call(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    if instruction.attributes.call_target == "AllocateBuffer":
        return 0
    work = kernel_work(module, computation, instruction) if is_kernel(instruction) else None
    if work is not None:
        return round(work.hbm_bytes)
    results = instruction.shape.arrays
    if is_library_product(instruction):
        # The second result is the workspace of cuBLAS.
        results = results[:1]
    arrays = (*computation.operand_arrays(instruction), *results)
    return _whole(HBM, arrays)


def _gathered(gather: Instruction, table: Shape) -> int:
    """Return the bytes of a table that a gather reads."""
    result = gather.shape.arrays[0]
    sizes = gather.attributes.slice_sizes
    if len(sizes) != len(table.dims) or not math.prod(sizes):
        return min(result.padded_bytes, table.padded_bytes)
    return result.size // math.prod(sizes) * slice_bytes(table, sizes)


def _scattered(scatter: Instruction, table: Shape, updates: Shape) -> int:
    """Return the bytes of a table that a scatter updates."""
    attributes = scatter.attributes
    window = [updates.dims[n] for n in attributes.window_dims if n < len(updates.dims)]
    sizes = [1] * len(table.dims)
    others = [n for n in range(len(sizes)) if n not in attributes.inserted_dims]
    if len(others) != len(window) or not math.prod(window):
        return min(updates.padded_bytes, table.padded_bytes)
    for n, size in zip(others, window, strict=True):
        sizes[n] = size
    return updates.size // math.prod(window) * slice_bytes(table, sizes)


def slice_bytes(array: Shape, sizes: Sequence[int]) -> int:
    """Return the bytes in HBM that an access to a slice of an array touches.

    In a tiled layout, a row of 128 elements is contiguous; two rows of bfloat16 are interleaved,
    and an access to one touches both.

    Args:
        array: Type of the array, with its layout.
        sizes: Sizes of the slice, by dimension.

    Example:
        >>> from xlashard.hlo.text_reader import read_shape
        >>> table = read_shape("bf16[1000,256]{1,0:T(8,128)(2,1)}")
        >>> slice_bytes(table, (1, 256)), slice_bytes(table, (1, 1)), slice_bytes(table, (8, 256))
        (1024, 32, 4096)
    """
    order = array.major_to_minor
    physical = [sizes[n] for n in order]
    runs = length = 1
    if len(order) > 1 and array.tiles and len(array.tiles[0]) > 1:
        lanes = array.tiles[0][-1]
        together = array.tiles[1][0] if len(array.tiles) > 1 else 1
        *others, rows, columns = physical
        runs = math.prod(others) * -(-rows // together) * -(-columns // lanes)
        length = min(columns, lanes) * together
    else:
        joined = True
        for n in reversed(order):
            if joined:
                length *= sizes[n]
            else:
                runs *= sizes[n]
            joined &= sizes[n] == array.dims[n]
    nbytes = -(-length * array.bits // 8)
    return runs * -(-nbytes // GRANULE) * GRANULE


def _of_fusion(memory: int, module: HloModule, fusion: Instruction, inner: Computation) -> int:
    if inner.starts_collective:
        # The type starts with the operand and the result of the collective.
        return _whole(memory, fusion.shape.arrays[:2])
    read = sum(
        _touched(module, inner, parameter)
        for parameter in inner.parameters
        if any(array.memory_space == memory for array in parameter.shape.arrays)
    )
    root = inner.root
    if root is None:
        return read
    outputs = _outputs(inner, root)
    types = fusion.shape.arrays
    if fusion.opcode == "fusion-start":
        types = fusion.shape.parts[1].arrays
    if len(outputs) != len(types):
        return read + _whole(memory, types)
    written = sum(
        _like(memory, [array], _written(module, inner, output, array))
        for output, array in zip(outputs, types, strict=True)
        if array.memory_space == memory
    )
    return read + written


def _outputs(inner: Computation, root: Instruction) -> list[Instruction | None]:
    if root.opcode != "tuple":
        return [root]
    return [inner.instructions.get(name) for name in root.operands]


def _touched(module: HloModule, inner: Computation, value: Instruction) -> int:
    """Return the bytes of a fusion's parameter that the fusion reads."""
    users = inner.users.get(value.name, ())
    read = [_read_by(module, inner, value, user) for user in users]
    whole = sum(array.padded_bytes for array in value.shape.arrays)
    # A gather may read a slice many times.
    gathers = [n for n, user in zip(read, users, strict=True) if user.opcode == "gather"]
    return min(sum(read), max([whole, *gathers]))


def _read_by(module: HloModule, inner: Computation, value: Instruction, user: Instruction) -> int:
    names = user.operands
    is_first = names[0] == value.name
    opcode = user.opcode.removesuffix("-start")
    if opcode == "tuple" or _is_part_of_collective(inner, user):
        return 0
    if opcode in _PASSED_ON or (opcode in _ON_DEMAND and not _is_result(inner, user)):
        wider = sum(a.nbytes for a in user.shape.arrays) * value.shape.size
        narrower = sum(a.nbytes for a in value.shape.arrays) * user.shape.size
        scale = narrower / wider if opcode == "convert" and wider else 1.0
        return round(scale * _touched(module, inner, user))
    if is_first and opcode in ("slice", "dynamic-slice"):
        return sum(array.padded_bytes for array in user.shape.arrays)
    if is_first and opcode == "gather":
        return _gathered(user, value.shape.arrays[0])
    if is_first and opcode == "dynamic-update-slice":
        return 0
    if is_first and opcode == "scatter":
        update = inner.instructions.get(names[-1])
        return 0 if update is None else _scattered(user, value.shape.arrays[0], update.shape)
    if opcode == "fusion" and (nested := module.callee(user)) is not None:
        if _only_passes_on(nested) and not _is_result(inner, user):
            return _touched(module, inner, user)
        return sum(
            _touched(module, nested, parameter)
            for name, parameter in zip(names, nested.parameters, strict=False)
            if name == value.name
        )
    return sum(array.padded_bytes for array in value.shape.arrays)


def _only_passes_on(fusion: Computation) -> bool:
    """Return whether a fusion returns its operand, so that its users read it."""
    value = fusion.root
    while value is not None and value.opcode in (*_PASSED_ON, "copy") and value.operands:
        value = fusion.instructions.get(value.operands[0])
    return value is not None and value.opcode == "parameter"


def _is_result(inner: Computation, value: Instruction) -> bool:
    """Return whether a fusion writes a value."""
    root = inner.root
    return root is not None and any(
        output is value for output in _outputs(inner, root) if output is not None
    )


def _is_part_of_collective(inner: Computation, user: Instruction) -> bool:
    """Return whether an instruction continues or ends a collective spread over fusions.

    The start of the collective counts its bytes.
    """
    is_part = user.opcode in KINDS or user.opcode == "custom-call"
    return is_part and inner.continues_collective


def _written(
    module: HloModule, inner: Computation, output: Instruction | None, array: Shape
) -> int:
    """Return the bytes that a fusion writes for one of its results."""
    index = None
    while output is not None and output.opcode in _PASSED_ON and output.operands:
        index = output.attributes.tuple_index
        output = inner.instructions.get(output.operands[0])
    if output is not None and index and is_library_product(output):
        return 0
    if output is None:
        return array.padded_bytes
    if output.opcode == "parameter" or _is_part_of_collective(inner, output):
        return 0
    names = output.operands
    if output.opcode in ("dynamic-update-slice", "scatter"):
        place = 1 if output.opcode == "dynamic-update-slice" else len(names) - 1
        update = inner.instructions.get(names[place])
        if update is None:
            return array.padded_bytes
        if output.opcode == "scatter":
            return _scattered(output, array, update.shape)
        return sum(a.padded_bytes for a in update.shape.arrays)
    if output.opcode == "fusion" and (nested := module.callee(output)) is not None:
        roots = _outputs(nested, nested.root) if nested.root is not None else []
        return _written(module, nested, roots[0], array) if len(roots) == 1 else array.padded_bytes
    return array.padded_bytes
