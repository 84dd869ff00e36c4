"""Trip counts of loops, from HLO text."""

import re

from xlashard.program.hlo.module import Computation, HloText, Instruction

_KNOWN = re.compile(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
_PASSED_ON = ("copy", "bitcast", "convert", "reshape")


def trip_count(module: HloText, caller: Computation, loop: Instruction) -> int | None:
    """Return the trip count of a `while`, or None where the text doesn't determine it.

    The compiler's own annotation is used if there is one. TPU's compiler writes none; the loop is
    then searched for a counter: an element of the loop's state that starts at a constant, grows by
    a constant and is compared with a constant.

    Args:
        module: The module.
        caller: The computation that holds the loop.
        loop: The `while`.
    """
    counts, key = module.trip_counts, (caller.name, loop.name)
    if key not in counts:
        counts[key] = _trip_count(module, caller, loop)
    return counts[key]


def _trip_count(module: HloText, caller: Computation, loop: Instruction) -> int | None:
    if found := _KNOWN.search(loop.attributes):
        return int(found[1])
    called = dict(loop.called())
    body = module.computations.get(called.get("body", ""))
    condition = module.computations.get(called.get("condition", ""))
    if body is None or condition is None:
        return None
    bound = _bound(condition)
    if bound is None:
        return None
    index, direction, limit = bound
    start = _constant(caller, _element(caller, loop.operand_names, index))
    step = _step(body, index)
    if start is None or step is None:
        return None
    return _steps(start, step, direction, limit)


def _steps(start: int, step: int, direction: str, limit: int) -> int | None:
    if direction in ("LE", "GE"):
        limit += 1 if direction == "LE" else -1
    if direction in ("LT", "LE") and step > 0:
        return max(0, -(-(limit - start) // step))
    if direction in ("GT", "GE") and step < 0:
        return max(0, -(-(start - limit) // -step))
    return None


def _bound(condition: Computation) -> tuple[int, str, int] | None:
    """Return the compared element of the state, the comparison and its constant."""
    root = condition.root
    if root is None or root.opcode != "compare":
        return None
    found = re.search(r"\bdirection=(\w+)", root.attributes)
    operands = root.operand_names
    if found is None or len(operands) != 2:
        return None
    index, limit = _state_index(condition, operands[0]), _constant(condition, operands[1])
    if index is not None and limit is not None:
        return index, found[1], limit
    index, limit = _state_index(condition, operands[1]), _constant(condition, operands[0])
    turned = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(found[1])
    if index is None or limit is None or turned is None:
        return None
    return index, turned, limit


def _step(body: Computation, index: int) -> int | None:
    """Return the constant increment of an element of the state; None without one."""
    root = body.root
    if root is None or root.opcode != "tuple":
        return None
    names = root.operand_names
    grown = _origin(body, names[index]) if index < len(names) else None
    if grown is None or grown.opcode not in ("add", "subtract"):
        return None
    operands = grown.operand_names
    if len(operands) != 2:
        return None
    sign = 1 if grown.opcode == "add" else -1
    for value, step in (operands, operands[::-1])[: 2 if sign == 1 else 1]:
        amount = _constant(body, step)
        if _state_index(body, value) == index and amount is not None:
            return sign * amount
    return None


def _element(caller: Computation, operands: list[str], index: int) -> str:
    """Return the name of the initial value of a loop's state at an index; empty if unknown."""
    state = _origin(caller, operands[0]) if operands else None
    if state is None or state.opcode != "tuple":
        return ""
    names = state.operand_names
    return names[index] if index < len(names) else ""


def _origin(computation: Computation, name: str) -> Instruction | None:
    """Return the instruction that made a value, past those that only pass it on."""
    instruction = computation.instructions.get(name)
    while instruction is not None and instruction.opcode in _PASSED_ON:
        names = instruction.operand_names
        instruction = computation.instructions.get(names[0]) if names else None
    return instruction


def _state_index(computation: Computation, name: str) -> int | None:
    """Return the index of a value in the computation's parameter."""
    instruction = _origin(computation, name)
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    source = computation.instructions.get((instruction.operand_names or [""])[0])
    if source is None or source.opcode != "parameter":
        return None
    return instruction.element


def _constant(computation: Computation, name: str) -> int | None:
    instruction = _origin(computation, name)
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.operands) if re.fullmatch(r"-?\d+", instruction.operands) else None
