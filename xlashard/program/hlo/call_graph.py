"""Call graph of a module, with the number of runs of each computation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from xlashard.program.hlo.module import Computation, HloText, Instruction
from xlashard.program.hlo.while_loops import trip_count

BRANCH_ATTRIBUTES = ("branch_computations", "true_computation", "false_computation")
"""Attributes of a `conditional` with the names of its branches."""


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
        number = parameter.parameter_number
        if self.caller.opcode == "conditional":
            # The first operand selects the branch; each branch has its own operand.
            branches = [
                name for attribute, name in self.caller.called() if attribute in BRANCH_ATTRIBUTES
            ]
            number = 1 + branches.index(computation.name)
        names = self.caller.operand_names
        return names[number] if number < len(names) else ""


def find_call_sites(module: HloText) -> dict[str, CallSite]:
    """Return the call site of each computation that the entry reaches.

    A computation with several callers runs as often as they make it run together.
    """
    if module.entry not in module.computations:
        return {}
    sites = {module.entry: CallSite()}
    calls = {name: list(_calls(module, c)) for name, c in module.computations.items()}
    for name in _callers_first(module.entry, calls):
        site = sites[name]
        for callee, call in calls[name]:
            added = replace(
                call,
                times=site.times * call.times,
                known=site.known and call.known,
                conditional=site.conditional or call.conditional,
                asynchronous=site.asynchronous or call.asynchronous,
            )
            sites[callee] = _together(sites[callee], added) if callee in sites else added
    return sites


def _together(one: CallSite, other: CallSite) -> CallSite:
    return replace(
        one,
        times=one.times + other.times,
        known=one.known and other.known,
        conditional=one.conditional or other.conditional,
        asynchronous=one.asynchronous or other.asynchronous,
    )


def _callers_first(entry: str, calls: dict[str, list[tuple[str, CallSite]]]) -> list[str]:
    """Return the computations that the entry leads to, each before all that it calls."""
    order: list[str] = []
    seen: set[str] = set()
    waiting = [(entry, False)]
    while waiting:
        name, has_callees = waiting.pop()
        if has_callees:
            order.append(name)
        elif name not in seen:
            seen.add(name)
            waiting.append((name, True))
            waiting += [(callee, False) for callee, _ in calls[name]]
    return order[::-1]


def _calls(module: HloText, computation: Computation) -> Iterator[tuple[str, CallSite]]:
    """Yield the computations that a computation calls, with their call sites."""
    for instruction in computation.instructions.values():
        if instruction.opcode.endswith(("-update", "-done")):
            # The start of the asynchronous call names the computation.
            continue
        for attribute, callee in instruction.called():
            if callee in module.computations:
                yield callee, _run(module, computation, instruction, attribute)


def _run(module: HloText, site: Computation, caller: Instruction, attribute: str) -> CallSite:
    run = CallSite(caller=caller, site=site.name)
    if attribute in BRANCH_ATTRIBUTES:
        return replace(run, conditional=True)
    if caller.opcode != "while":
        return replace(run, asynchronous=caller.opcode.endswith("-start"))
    trips = trip_count(module, site, caller)
    if trips is None:
        return replace(run, known=False)
    # The condition runs once more than the body.
    return replace(run, times=trips + (attribute == "condition"))
