"""Call graph of a module: calls, trip counts of loops, and users of values."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from xlashard.hlo.module import Computation, HloModule, Instruction, callees_first


@dataclass(frozen=True)
class CallSite:
    """Number of runs of a computation in one execution of the program, and its caller.

    Attributes:
        times: Number of runs, with every branch taken, and one run per loop of unknown trip
            count.
        known: Whether the trip counts of all loops around it are known.
        conditional: Whether it may be skipped by a branch.
        asynchronous: Whether it overlaps with other work, from a start to a done.
        caller: An instruction that calls it; None for the entry.
        site: The computation of that instruction.
    """

    times: int = 1
    known: bool = True
    conditional: bool = False
    asynchronous: bool = False
    caller: Instruction | None = None
    site: str = ""

    def operand_for(self, computation: Computation, parameter: Instruction) -> str:
        """Return the caller's operand that a parameter holds; empty if unknown.

        The state of a loop is its initial one.

        Args:
            computation: The called computation.
            parameter: One of its parameters.
        """
        if self.caller is None:
            return ""
        number = parameter.attributes.parameter_number
        if self.caller.opcode == "conditional":
            # The first operand selects the branch; each branch has its own operand.
            number = 1 + self.caller.calls.index(computation.name)
        names = self.caller.operands
        return names[number] if number < len(names) else ""


def find_call_sites(module: HloModule) -> Mapping[str, CallSite]:
    """Return the call site of each computation that the entry reaches.

    A computation with several callers runs as often as they make it run together.
    """
    cache = module.call_graph
    if find_call_sites not in cache:
        cache[find_call_sites] = _find_call_sites(module)
    return cache[find_call_sites]


def _find_call_sites(module: HloModule) -> dict[str, CallSite]:
    if module.entry not in module.computations:
        return {}
    sites = {module.entry: CallSite()}
    for name, computation in reversed(callees_first(module.entry, module.computations).items()):
        if name not in sites:
            continue
        site = sites[name]
        for callee, call in _calls(module, computation):
            added = _joined(call, site, site.times * call.times)
            before = sites.get(callee)
            sites[callee] = (
                added if before is None else _joined(before, added, before.times + added.times)
            )
    return sites


def _joined(one: CallSite, other: CallSite, times: int) -> CallSite:
    return CallSite(
        times=times,
        known=one.known and other.known,
        conditional=one.conditional or other.conditional,
        asynchronous=one.asynchronous or other.asynchronous,
        caller=one.caller,
        site=one.site,
    )


def _calls(module: HloModule, computation: Computation) -> Iterator[tuple[str, CallSite]]:
    """Yield the computations that a computation calls, with their call sites."""
    for instruction in computation.instructions.values():
        for place, callee in enumerate(instruction.calls):
            if callee in module.computations:
                yield callee, _run(module, computation, instruction, place)


def _run(module: HloModule, site: Computation, caller: Instruction, place: int) -> CallSite:
    trips = trip_count(module, site, caller) if caller.opcode == "while" else 1
    # The condition of a loop runs once more than its body.
    is_condition = caller.opcode == "while" and place == 1
    return CallSite(
        times=1 if trips is None else trips + is_condition,
        known=trips is not None,
        conditional=caller.opcode == "conditional",
        asynchronous=caller.opcode.endswith("-start"),
        caller=caller,
        site=site.name,
    )


_KNOWN = re.compile(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
_PASSED_ON = ("copy", "bitcast", "convert", "reshape")


def trip_count(module: HloModule, caller: Computation, loop: Instruction) -> int | None:
    """Return the trip count of a `while`, or None where the module doesn't determine it.

    The compiler's own annotation is used if there is one. TPU's compiler writes none; the loop is
    then searched for a counter: an element of the loop's state that starts at a constant, grows by
    a constant and is compared with a constant.

    Args:
        module: The module.
        caller: The computation that holds the loop.
        loop: The `while`.
    """
    counts, key = module.call_graph, (caller.name, loop.name)
    if key not in counts:
        counts[key] = _trip_count(module, caller, loop)
    return counts[key]


def _trip_count(module: HloModule, caller: Computation, loop: Instruction) -> int | None:
    if match := _KNOWN.search(loop.attributes.backend_config):
        return int(match[1])
    called = [module.computations.get(name) for name in loop.calls]
    if len(called) != 2 or called[0] is None or called[1] is None:
        return None
    body, condition = called[0], called[1]
    bound = _bound(condition)
    if bound is None:
        return None
    index, direction, limit = bound
    start = _constant(caller, _element(caller, loop.operands, index))
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
    written, operands = root.attributes.direction, root.operands
    if not written or len(operands) != 2:
        return None
    turned = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(written)
    for (state, bound), direction in ((operands, written), (operands[::-1], turned)):
        index, limit = _state_index(condition, state), _constant(condition, bound)
        if index is not None and limit is not None and direction is not None:
            return index, direction, limit
    return None


def _step(body: Computation, index: int) -> int | None:
    """Return the constant increment of an element of the state; None without one."""
    root = body.root
    if root is None or root.opcode != "tuple":
        return None
    names = root.operands
    grown = _origin(body, names[index]) if index < len(names) else None
    if grown is None or grown.opcode not in ("add", "subtract"):
        return None
    operands = grown.operands
    if len(operands) != 2:
        return None
    sign = 1 if grown.opcode == "add" else -1
    for value, step in (operands, operands[::-1])[: 2 if sign == 1 else 1]:
        amount = _constant(body, step)
        if _state_index(body, value) == index and amount is not None:
            return sign * amount
    return None


def _element(caller: Computation, operands: Sequence[str], index: int) -> str:
    """Return the name of the initial value of a loop's state at an index; empty if unknown."""
    state = _origin(caller, operands[0]) if operands else None
    if state is None or state.opcode != "tuple":
        return ""
    names = state.operands
    return names[index] if index < len(names) else ""


def _origin(computation: Computation, name: str) -> Instruction | None:
    """Return the instruction that made a value, past those that only pass it on."""
    instruction = computation.instructions.get(name)
    while instruction is not None and instruction.opcode in _PASSED_ON:
        names = instruction.operands
        instruction = computation.instructions.get(names[0]) if names else None
    return instruction


def _state_index(computation: Computation, name: str) -> int | None:
    """Return the index of a value in the computation's parameter."""
    instruction = _origin(computation, name)
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    source = computation.instructions.get((instruction.operands or ("",))[0])
    if source is None or source.opcode != "parameter":
        return None
    return instruction.attributes.tuple_index


def _constant(computation: Computation, name: str) -> int | None:
    instruction = _origin(computation, name)
    if instruction is None or instruction.opcode != "constant":
        return None
    return instruction.attributes.integer


_COPIED = (*_PASSED_ON, "copy-start", "copy-done", "opt-barrier")


def constant_of(module: HloModule, computation: Computation, name: str) -> Instruction | None:
    """Return the constant that a value is a copy of, also through state that loops pass on.

    Args:
        module: The module.
        computation: The computation that holds the value.
        name: Name of the value.
    """
    element: int | None = None
    seen: set[tuple[str, str]] = set()
    while (computation.name, name) not in seen:
        seen.add((computation.name, name))
        instruction = computation.instructions.get(name)
        if instruction is None:
            return None
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "constant":
            return instruction if element is None else None
        if opcode == "parameter":
            site = find_call_sites(module).get(computation.name, CallSite())
            if site.caller is None or not _keeps(module, site.caller, element):
                return None
            name = site.operand_for(computation, instruction)
            computation = module.computations[site.site]
        elif opcode == "get-tuple-element" and element is None and operands:
            element, name = instruction.attributes.tuple_index, operands[0]
        elif opcode == "tuple" and element is not None and element < len(operands):
            element, name = None, operands[element]
        elif (opcode in _COPIED and operands) or (
            opcode == "while" and operands and _keeps(module, instruction, element)
        ):
            name = operands[0]
        else:
            return None
    return None


def _keeps(module: HloModule, caller: Instruction, element: int | None) -> bool:
    """Return whether a called computation sees the same element of its operand in each run."""
    if caller.opcode != "while":
        return caller.opcode in ("call", "conditional")
    body = module.callee(caller)
    if body is None or body.root is None or body.root.opcode != "tuple" or element is None:
        return False
    names = body.root.operands
    return element < len(names) and _state_index(body, names[element]) == element


def nearest_user(computation: Computation, instruction: Instruction) -> Instruction | None:
    """Return the nearest instruction that uses a value, over others if need be, and that has lines.

    Args:
        computation: Computation of the value.
        instruction: Instruction that makes it.
    """
    users = computation.users
    others = _breadth_first(instruction, lambda i: users.get(i.name, ()))
    return next((user for user in others if user.frames), None)


def makers(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """Yield the operands of an instruction, and those of its operands, nearest first.

    Args:
        computation: Computation of the instruction.
        instruction: The instruction.
    """
    named = computation.instructions

    def operands(user: Instruction) -> Iterator[Instruction]:
        return (named[name] for name in user.operands if name in named)

    return _breadth_first(instruction, operands)


def _breadth_first(
    start: Instruction, neighbours: Callable[[Instruction], Iterable[Instruction]]
) -> Iterator[Instruction]:
    """Yield the instructions that are reached from another one, nearest first."""
    reached = {start.name}
    waiting = deque([start])
    while waiting:
        for instruction in neighbours(waiting.popleft()):
            if instruction.name not in reached:
                reached.add(instruction.name)
                waiting.append(instruction)
                yield instruction
