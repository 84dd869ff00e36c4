"""HBM bytes that single HLO instructions read and write."""

from collections.abc import Sequence

from xlashard.hlo.collectives import KINDS
from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.hlo.shapes import HBM, Shape
from xlashard.tpu.cost.flops import kernel_estimate, operand_arrays

_FREE_NAMES = """
    add-dependency after-all async-done async-start async-update bitcast call conditional constant
    copy-done domain get-tuple-element iota opt-barrier parameter partition-id replica-id tuple
    while
"""
_FREE = frozenset(_FREE_NAMES.split())
_PASSED_ON = ("bitcast", "reshape", "get-tuple-element", "opt-barrier")
_STARTS, _ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"


def hbm_bytes(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    """Return the HBM bytes that one run of an instruction reads and writes, including padding.

    Values in another memory (VMEM, host) count nothing. Slices, gathers and in-place updates count
    only the bytes that they touch, also inside fusions. An operand that a fusion reads several
    times counts once.

    Args:
        module: The module.
        computation: Computation of the instruction, not that of a fusion.
        instruction: The instruction.
    """
    opcode = instruction.opcode
    if opcode in _FREE or (opcode.endswith("-done") and opcode != "copy-done"):
        return 0
    if opcode == "custom-call":
        return _of_custom_call(computation, instruction)
    if opcode == "fusion":
        inner = _fused(module, instruction)
        return 0 if inner is None else _of_fusion(module, instruction, inner)
    results = instruction.shape.arrays
    operands = operand_arrays(computation, instruction)
    if opcode in ("send", "recv"):
        # The type holds the transferred value and a context.
        return sum(array.hbm_bytes for array in instruction.shape.parts[0].arrays)
    if opcode.endswith("-start"):
        results = _started(instruction, len(operands))
    return _of_operation(opcode.removesuffix("-start"), operands, results)


def _of_operation(opcode: str, operands: Sequence[Shape], results: Sequence[Shape]) -> int:
    written = sum(array.hbm_bytes for array in results)
    match opcode:
        case "slice" | "dynamic-slice" | "gather":
            # Reads as many bytes of the operand as the result has; other operands are indices.
            read = _like(operands[:1], sum(array.padded_bytes for array in results))
            return read + sum(a.hbm_bytes for a in operands[1:]) + written
        case "dynamic-update-slice" if len(operands) > 1:
            update = operands[1]
            return update.hbm_bytes + _like(results, update.padded_bytes)
        case "scatter" if len(operands) > 2:
            update = operands[-1]
            # Reads and writes the updated region.
            return sum(a.hbm_bytes for a in operands[1:]) + 2 * _like(results, update.padded_bytes)
    return sum(array.hbm_bytes for array in operands) + written


def _like(arrays: Sequence[Shape], nbytes: int) -> int:
    """Return `nbytes`, limited by the bytes of the arrays in HBM."""
    return min(nbytes, sum(array.hbm_bytes for array in arrays))


def _started(instruction: Instruction, operands: int) -> tuple[Shape, ...]:
    """Return the results of an asynchronous start, whose type includes its operands."""
    if instruction.opcode == "copy-start":
        return instruction.shape.parts[0].arrays
    arrays = instruction.shape.arrays
    if instruction.opcode == "all-reduce-start" and len(arrays) == operands:
        return arrays
    return arrays[operands : 2 * operands]


def _of_custom_call(computation: Computation, instruction: Instruction) -> int:
    if instruction.attributes.call_target == "AllocateBuffer":
        return 0
    arrays = (*operand_arrays(computation, instruction), *instruction.shape.arrays)
    estimated = kernel_estimate(instruction).get("bytes_accessed")
    return round(estimated) if estimated else sum(array.hbm_bytes for array in arrays)


def _fused(module: HloModule, fusion: Instruction) -> Computation | None:
    return module.computations.get(fusion.calls[0]) if fusion.calls else None


def _of_fusion(module: HloModule, fusion: Instruction, inner: Computation) -> int:
    if _STARTS in inner.targets:
        # The type starts with the operand and the result of the collective.
        return sum(a.hbm_bytes for a in fusion.shape.arrays[:2])
    read = sum(
        min(_touched(module, inner, parameter), array.padded_bytes)
        for parameter in inner.parameters
        for array in parameter.shape.arrays
        if array.memory_space == HBM
    )
    root = inner.root
    if root is None:
        return read
    outputs = _outputs(inner, root)
    types = fusion.shape.arrays
    if len(outputs) != len(types):
        return read + sum(array.hbm_bytes for array in types)
    written = sum(
        _like([array], _written(module, inner, output, array))
        for output, array in zip(outputs, types, strict=True)
    )
    return read + written


def _outputs(inner: Computation, root: Instruction) -> list[Instruction | None]:
    if root.opcode != "tuple":
        return [root]
    return [inner.instructions.get(name) for name in root.operands]


def _touched(module: HloModule, inner: Computation, value: Instruction) -> int:
    """Return the bytes of a fusion's parameter that the fusion reads."""
    total = 0
    whole = sum(array.padded_bytes for array in value.shape.arrays)
    for user in inner.users.get(value.name, ()):
        total += _read_by(module, inner, value, user)
        if total >= whole:
            return whole
    return total


def _read_by(module: HloModule, inner: Computation, value: Instruction, user: Instruction) -> int:
    names = user.operands
    is_first = names[0] == value.name
    opcode = user.opcode.removesuffix("-start")
    if opcode == "tuple" or _is_part_of_collective(inner, user):
        return 0
    if opcode in _PASSED_ON:
        return _touched(module, inner, user)
    if is_first and opcode in ("slice", "dynamic-slice", "gather"):
        return sum(array.padded_bytes for array in user.shape.arrays)
    if is_first and opcode == "dynamic-update-slice":
        return 0
    if is_first and opcode == "scatter":
        update = inner.instructions.get(names[-1])
        return sum(a.padded_bytes for a in update.shape.arrays) if update is not None else 0
    if opcode == "fusion" and (nested := _fused(module, user)) is not None:
        if _only_passes_on(nested):
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
    while value is not None and value.opcode in _PASSED_ON and value.operands:
        value = fusion.instructions.get(value.operands[0])
    return value is not None and value.opcode == "parameter"


def _is_part_of_collective(inner: Computation, user: Instruction) -> bool:
    """Return whether an instruction continues or ends a collective spread over fusions.

    The start of the collective counts its bytes.
    """
    spread = inner.name.startswith("async_collective_fusion") or _ENDS in inner.targets
    return spread and (user.opcode in KINDS or user.opcode == "custom-call")


def _written(
    module: HloModule, inner: Computation, output: Instruction | None, array: Shape
) -> int:
    """Return the bytes that a fusion writes for one of its results."""
    while output is not None and output.opcode in _PASSED_ON and output.operands:
        output = inner.instructions.get(output.operands[0])
    if output is None:
        return array.padded_bytes
    if output.opcode == "parameter" or _is_part_of_collective(inner, output):
        return 0
    names = output.operands
    if output.opcode in ("dynamic-update-slice", "scatter"):
        place = 1 if output.opcode == "dynamic-update-slice" else len(names) - 1
        update = inner.instructions.get(names[place])
        return sum(a.padded_bytes for a in update.shape.arrays) if update else array.padded_bytes
    if output.opcode == "fusion" and (nested := _fused(module, output)) is not None:
        roots = _outputs(nested, nested.root) if nested.root is not None else []
        return _written(module, nested, roots[0], array) if len(roots) == 1 else array.padded_bytes
    return array.padded_bytes
