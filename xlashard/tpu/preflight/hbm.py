"""What single HLO instructions read and write in the chip's main memory."""

from collections.abc import Iterator

from xlashard.program.collectives import KINDS
from xlashard.program.hlo import Computation, HloText, Instruction, element_types
from xlashard.tpu.preflight.flops import kernel_estimate, operand_arrays
from xlashard.tpu.preflight.tiles import HBM, PlacedArray, placed_arrays

_FREE_NAMES = """
    add-dependency after-all async-done async-start async-update bitcast call conditional constant
    copy-done domain get-tuple-element iota opt-barrier parameter partition-id replica-id tuple
    while
"""
_FREE = frozenset(_FREE_NAMES.split())
_PASSED_ON = ("bitcast", "reshape", "get-tuple-element", "opt-barrier")
_STARTS, _ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"


def hbm_bytes(module: HloText, computation: Computation, instruction: Instruction) -> int:
    """Bytes of HBM that one run of an instruction reads and writes, padding included.

    What lies in another memory (VMEM, the host's) costs none; of what is sliced, gathered or
    updated in place only the part that is touched counts, inside fusions as well. An operand that
    a fusion reads in several passes counts once.

    Args:
        module: The module.
        computation: The computation that it stands in, which must not be a fusion's.
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
    results = placed_arrays(instruction.type)
    operands = operand_arrays(computation, instruction)
    if opcode in ("send", "recv"):
        # Its own type has what is sent or received, and a context.
        return sum(array.hbm_bytes for array in placed_arrays(element_types(instruction.type)[0]))
    if opcode.endswith("-start"):
        results = _started(instruction, len(operands))
    return _of_operation(opcode.removesuffix("-start"), operands, results)


def _of_operation(
    opcode: str, operands: list[PlacedArray], results: tuple[PlacedArray, ...]
) -> int:
    written = sum(array.hbm_bytes for array in results)
    match opcode:
        case "slice" | "dynamic-slice" | "gather":
            # Of the operand it reads what it gives; the others are indices.
            read = _like(operands[:1], sum(array.nbytes for array in results))
            return read + sum(a.hbm_bytes for a in operands[1:]) + written
        case "dynamic-update-slice" if len(operands) > 1:
            update = operands[1]
            return update.hbm_bytes + _like(list(results), update.nbytes)
        case "scatter" if len(operands) > 2:
            update = operands[-1]
            # What it adds to is read and written again.
            return sum(a.hbm_bytes for a in operands[1:]) + 2 * _like(list(results), update.nbytes)
    return sum(array.hbm_bytes for array in operands) + written


def _like(arrays: list[PlacedArray], nbytes: int) -> int:
    """A part of arrays, if they lie in HBM; not more than they are."""
    return min(nbytes, sum(array.hbm_bytes for array in arrays))


def _started(instruction: Instruction, operands: int) -> tuple[PlacedArray, ...]:
    """The results of what starts and is done later; its type has the operands before or after."""
    if instruction.opcode == "copy-start":
        return placed_arrays(element_types(instruction.type)[0])
    arrays = placed_arrays(instruction.type)
    if instruction.opcode == "all-reduce-start" and len(arrays) == operands:
        return arrays
    return arrays[operands : 2 * operands]


def _of_custom_call(computation: Computation, instruction: Instruction) -> int:
    if instruction.call_target == "AllocateBuffer":
        return 0
    arrays = (*operand_arrays(computation, instruction), *placed_arrays(instruction.type))
    told = kernel_estimate(instruction).get("bytes_accessed")
    return round(told) if told else sum(array.hbm_bytes for array in arrays)


def _fused(module: HloText, fusion: Instruction) -> Computation | None:
    calls = dict(fusion.called())
    return module.computations.get(calls.get("calls", ""))


def _of_fusion(module: HloText, fusion: Instruction, inner: Computation) -> int:
    if _STARTS in inner.targets:
        # Its own type has the operand and the result of the collective first.
        return sum(a.hbm_bytes for a in placed_arrays(fusion.type)[:2])
    read = sum(
        min(_touched(module, inner, parameter), array.nbytes)
        for parameter in inner.instructions.values()
        if parameter.opcode == "parameter"
        for array in placed_arrays(parameter.type)
        if array.space == HBM
    )
    root = inner.root
    if root is None:
        return read
    outputs = _outputs(inner, root)
    types = placed_arrays(fusion.type)
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
    return [inner.instructions.get(name) for name in root.operand_names]


def _touched(module: HloText, inner: Computation, value: Instruction) -> int:
    """Bytes of a fusion's parameter, or of what only passes it on, that the fusion reads."""
    total = 0
    whole = sum(array.nbytes for array in placed_arrays(value.type))
    for user in inner.users.get(value.name, ()):
        total += _read_by(module, inner, value, user)
        if total >= whole:
            return whole
    return total


def _read_by(module: HloText, inner: Computation, value: Instruction, user: Instruction) -> int:
    names = user.operand_names
    is_first = names[0] == value.name
    opcode = user.opcode.removesuffix("-start")
    if opcode == "tuple" or _is_part_of_collective(inner, user):
        return 0
    if opcode in _PASSED_ON:
        return _touched(module, inner, user)
    if is_first and opcode in ("slice", "dynamic-slice", "gather"):
        return sum(array.nbytes for array in placed_arrays(user.type))
    if is_first and opcode == "dynamic-update-slice":
        return 0
    if is_first and opcode == "scatter":
        update = inner.instructions.get(names[-1])
        return sum(a.nbytes for a in placed_arrays(update.type)) if update is not None else 0
    if opcode == "fusion" and (nested := _fused(module, user)) is not None:
        if _only_passes_on(nested):
            return _touched(module, inner, user)
        return sum(
            _touched(module, nested, parameter)
            for name, parameter in zip(names, _parameters(nested), strict=False)
            if name == value.name
        )
    return sum(array.nbytes for array in placed_arrays(value.type))


def _only_passes_on(fusion: Computation) -> bool:
    """Whether a fusion gives what it was given: then its users are the ones who read it."""
    value = fusion.root
    while value is not None and value.opcode in _PASSED_ON and value.operand_names:
        value = fusion.instructions.get(value.operand_names[0])
    return value is not None and value.opcode == "parameter"


def _is_part_of_collective(inner: Computation, user: Instruction) -> bool:
    """Whether it pushes on or ends a collective that TPU's compiler has spread over fusions.

    The one that starts it counts for all of them.
    """
    spread = inner.name.startswith("async_collective_fusion") or _ENDS in inner.targets
    return spread and (user.opcode in KINDS or user.opcode == "custom-call")


def _parameters(computation: Computation) -> Iterator[Instruction]:
    """The parameters of a computation by their numbers."""
    found = [i for i in computation.instructions.values() if i.opcode == "parameter"]
    return iter(sorted(found, key=lambda i: int(i.operands or 0)))


def _written(
    module: HloText, inner: Computation, output: Instruction | None, array: PlacedArray
) -> int:
    """Bytes that a fusion writes for one of its results."""
    while output is not None and output.opcode in _PASSED_ON and output.operand_names:
        output = inner.instructions.get(output.operand_names[0])
    if output is None:
        return array.nbytes
    if output.opcode == "parameter" or _is_part_of_collective(inner, output):
        return 0
    names = output.operand_names
    if output.opcode in ("dynamic-update-slice", "scatter"):
        place = 1 if output.opcode == "dynamic-update-slice" else len(names) - 1
        update = inner.instructions.get(names[place])
        return sum(a.nbytes for a in placed_arrays(update.type)) if update else array.nbytes
    if output.opcode == "fusion" and (nested := _fused(module, output)) is not None:
        roots = _outputs(nested, nested.root) if nested.root is not None else []
        return _written(module, nested, roots[0], array) if len(roots) == 1 else array.nbytes
    return array.nbytes
