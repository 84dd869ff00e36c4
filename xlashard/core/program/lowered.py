"""Lowered programs: annotated modules, and what is known of them before compilation."""

import threading
import warnings
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.lowering import LoweredBody
from xlashard.core.program.annotate import write_main
from xlashard.core.program.donation import (
    NO_USE,
    Donation,
    UnusedDonation,
    find_refusals,
    report_text,
)
from xlashard.core.program.plan import ProgramPlan, ValuePlan
from xlashard.errors import DonationError, DonationWarning
from xlashard.support.lazily import dataclass

if TYPE_CHECKING:
    from xlashard.core.program.consistency.fingerprint import ClosedOver

# A warning names the line of the caller of this package.
_OWN_FILES = str(Path(__file__).parents[2])


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """An annotated module, ready for the compiler.

    Attributes:
        plan: Its plan.
        body: The module, and objects that it keeps alive.
        donation: Plan for the donated arguments.
        source: Source location of its function. Programs of one function with equal modules share
            an executable; None for a program that shares none.
        in_avals: The abstract values of its arguments: the hoisted values, then the arguments of
            the call that it takes.
        out_avals: The abstract values of its results.
        kept: For each argument of a call, True if the program takes it.
        unused: Donated arguments that the function does not use, and that the program lacks.
        consts: The hoisted values.
        written: See `CompiledProgram`.
        stateful: See `CompiledProgram`.
        closed: The values that the function closes over.
    """

    plan: ProgramPlan
    body: LoweredBody
    donation: Donation
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    kept: tuple[bool, ...]
    source: str | None = None
    unused: tuple[ValuePlan, ...] = ()
    consts: tuple[Any, ...] = ()
    written: tuple[Any, ...] = ()
    stateful: bool = False
    closed: "ClosedOver | None" = None
    _reported: set[str] = field(default_factory=set, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def as_text(self, *, debug_info: bool = False) -> str:
        """Return the StableHLO module with its annotations."""
        return modules.to_text(self.body.module, debug_info=debug_info)

    def report_donation(
        self, mode: str, function: str, refusals: Sequence[UnusedDonation] | None = None
    ) -> None:
        """Warn about donated arguments that no result can reuse; once per program.

        Args:
            mode: `"warn"` or `"strict"`.
            function: The function's name.
            refusals: Donations that the compiler left unused; None for those that it can't use.

        Raises:
            DonationError: Under `"strict"`, every time.
        """
        if refusals is None:
            refusals = self.find_useless_donations()
        if not refusals:
            return
        text = report_text(refusals, function)
        if mode == "strict":
            raise DonationError(text)
        with self._lock:
            if text in self._reported:
                return
            self._reported.add(text)
        warnings.warn(text, DonationWarning, skip_file_prefixes=(_OWN_FILES,))

    def find_useless_donations(self) -> list[UnusedDonation]:
        """Return the refusals of donated arguments that are known before compilation."""
        takers = dict.fromkeys(self.plan.aliased) | {j: i for i, j in self.donation.pairs.items()}
        refusals = find_refusals(self.plan, self.donation.unusable, takers)
        return refusals + [UnusedDonation(value, NO_USE) for value in self.unused]


def lower_program(
    plan: ProgramPlan,
    body: LoweredBody,
    avals: tuple[Sequence[Any], Sequence[Any]],
    source: str | None = None,
) -> LoweredProgram:
    """Annotate a lowered body; the body's module becomes the program's.

    Args:
        plan: The plan.
        body: The lowered body.
        avals: The abstract values of arguments and of results.
        source: Source location of its function, to share the executable with programs of the same
            function.

    Raises:
        ModuleError: If the module has no entry function, or does not verify.
        PlanError: If the plan and the entry function disagree.
    """
    tokens = len(body.ordered_effects)
    plan = _with_whole_results(plan, body.module, tokens)
    donation = write_main(body.module, plan, tokens=tokens)
    kept = (True,) * len(plan.args)
    return LoweredProgram(plan, body, donation, tuple(avals[0]), tuple(avals[1]), kept, source)


def _with_whole_results(plan: ProgramPlan, module: Any, tokens: int) -> ProgramPlan:
    """Return the plan with results replicated that only one of several devices would hold."""
    main = modules.main_function(module)
    if main is None or len(plan.devices) == 1:
        return plan
    of_one = modules.single_device_results(main)[tokens:]
    if not any(of_one) or len(of_one) != len(plan.results):
        return plan
    results = [
        replace(value, sharding=plan.replicated(value.memory_kind))
        if one and value.sharding is None and not value.annotated
        else value
        for one, value in zip(of_one, plan.results, strict=True)
    ]
    return replace(plan, results=tuple(results))
