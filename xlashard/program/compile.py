"""From an annotated module to a program that runs."""

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xlashard._jax import compiling, modules
from xlashard._jax.lowering import LoweredBody
from xlashard.errors import CompileError, DonationError, DonationWarning
from xlashard.program.annotate import is_open
from xlashard.program.donation import Donation, unusable_text
from xlashard.program.emit import write_main
from xlashard.program.execute import Program, ProgramParts
from xlashard.program.plan import ProgramPlan, ValuePlan
from xlashard.sharding import SingleDeviceSharding, XLACompatibleSharding, from_hlo


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """An annotated module, ready for the compiler.

    Attributes:
        plan: What it was made by.
        body: The module and what it keeps alive.
        donation: What became of the donated arguments.
    """

    plan: ProgramPlan
    body: LoweredBody
    donation: Donation

    def as_text(self, *, debug_info: bool = False) -> str:
        """The StableHLO module with its annotations."""
        return modules.to_text(self.body.module, debug_info=debug_info)

    def report_donation(self, mode: str, function: str) -> None:
        """Says which donated arguments no result can reuse; once per program.

        Args:
            mode: `"warn"` or `"strict"`.
            function: The function's name.

        Raises:
            DonationError: Under `"strict"`.
        """
        if not self.donation.unusable:
            return
        text = unusable_text(self.plan, self.donation, function)
        if mode == "strict":
            raise DonationError(text)
        if self not in _REPORTED:
            _REPORTED.add(self)
            warnings.warn(text, DonationWarning, stacklevel=4)


# Programs whose unusable donations were reported.
_REPORTED: weakref.WeakSet[LoweredProgram] = weakref.WeakSet()


def lower_program(plan: ProgramPlan, body: LoweredBody) -> LoweredProgram:
    """Annotates a lowered body; the body's module becomes the program's."""
    donation = write_main(body.module, plan, tokens=len(body.ordered_effects))
    return LoweredProgram(plan, body, donation)


def compile_program(
    lowered: LoweredProgram,
    avals: tuple[Sequence[Any], Sequence[Any]],
    *,
    committed: bool,
    options: Sequence[tuple[str, Any]] = (),
) -> Program:
    """Compiles an annotated module and reads back what the partitioner chose.

    Args:
        lowered: The annotated module.
        avals: The abstract values of arguments and results.
        committed: Whether the results are bound to their devices.
        options: Options of the compiler, past those of the plan.

    Raises:
        CompileError: If XLA refuses the module.
    """
    plan, body = lowered.plan, lowered.body
    tokens = len(body.ordered_effects)
    multi = len(plan.devices) > 1
    free_args = [False] * tokens + [multi and v.sharding is None for v in plan.args]
    free_results = [False] * tokens + [multi and is_open(v.sharding) for v in plan.results]
    executable = compiling.compile_module(
        body.module,
        plan.devices,
        (free_args, free_results or [False]),
        (*plan.options, *options),
        body.host_callbacks,
    )
    args = _resolve(executable, "parameters", plan, plan.args, tokens)
    results = _resolve(executable, "outputs", plan, plan.results, tokens)
    parts = ProgramParts(
        plan=plan,
        in_shardings=args,
        out_shardings=results,
        in_avals=tuple(avals[0]),
        out_avals=tuple(avals[1]),
        committed=committed,
        body=body,
    )
    return Program(executable, parts)


def _resolve(
    executable: compiling.Executable,
    of: str,
    plan: ProgramPlan,
    values: Sequence[ValuePlan],
    tokens: int,
) -> tuple[XLACompatibleSharding, ...]:
    """The sharding of every value: the one asked for, else the one that was chosen."""
    kinds = _memory_kinds(executable, of, values, tokens)
    if len(plan.devices) == 1:
        return tuple(
            v.sharding or SingleDeviceSharding(plan.devices[0], memory_kind=k)
            for v, k in zip(values, kinds, strict=True)
        )
    if all(v.sharding is not None and not is_open(v.sharding) for v in values):
        return tuple(v.sharding for v in values if v.sharding is not None)
    reported = compiling.reported_shardings(executable, of, len(values) + tokens)
    if reported is None:
        raise CompileError(
            f"the compiler does not report how it dealt out the {of} of {plan.name}: give them "
            "explicit shardings"
        )
    chosen = compiling.sharding_texts(reported[tokens:])
    found = []
    for value, text, kind in zip(values, chosen, kinds, strict=True):
        if value.sharding is not None and not is_open(value.sharding):
            found.append(value.sharding)
            continue
        found.append(_from_text(text, plan, value, kind))
    return tuple(found)


def _memory_kinds(
    executable: compiling.Executable, of: str, values: Sequence[ValuePlan], tokens: int
) -> list[str | None]:
    if of == "parameters":
        return [v.memory_kind for v in values]
    return compiling.output_memory_kinds(executable, len(values) + tokens)[tokens:]


def _from_text(
    text: str, plan: ProgramPlan, value: ValuePlan, kind: str | None
) -> XLACompatibleSharding:
    sharding = from_hlo(text, plan.devices, plan.mesh, kind)
    if value.trailing:
        sharding = from_hlo(_without_trailing(sharding, value), plan.devices, plan.mesh, kind)
    return sharding


def _without_trailing(sharding: XLACompatibleSharding, value: ValuePlan) -> str:
    tiling = sharding.rank_tiling(value.physical_ndim)
    logical = replace(tiling, counts=tiling.counts[: len(value.shape)])
    return logical.to_tile_assignment().to_text()


def with_options(plan: ProgramPlan, options: Sequence[tuple[str, Any]]) -> ProgramPlan:
    """The plan with more compiler options; later ones win."""
    merged = dict(plan.options) | dict(options)
    return replace(plan, options=tuple(sorted(merged.items())))
