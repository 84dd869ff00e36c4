"""Errors of programs that need more memory than their devices have."""

import re

from xlashard.program.ir.donation import bytes_of
from xlashard.program.ir.plan import ProgramPlan
from xlashard.wording import in_bytes

_SIZE = r"([\d.]+)([KMGT]?)B?"
_FIGURES = (
    re.compile(rf"\bUsed {_SIZE} of {_SIZE} (?:hbm|HBM)"),
    re.compile(rf"\({_SIZE}\) exceeds available (?:hbm|HBM) \({_SIZE}\)"),
)
_EXCESS = re.compile(rf"\bExceeded (?:hbm|HBM) capacity by {_SIZE}")
_STATUS = re.compile(r"^(?:[A-Z_]+:\s+)?(?:[A-Z]\d+:\s+)?(?:\w+:\s+)?")
"""Prefix of an error of XLA: its class, number and name."""


def oom_text(plan: ProgramPlan, message: str) -> str:
    """Return the needed and available memory of a program, and suggestions.

    Args:
        plan: Plan of the program.
        message: The compiler's error. Its memory figures are used if it has any, else its first
            line.
    """
    name, device = plan.name.removeprefix("pjit_"), plan.devices[0]
    figures = next((found for p in _FIGURES if (found := p.search(message))), None)
    if figures is None:
        line = _STATUS.sub("", message).partition("\n")[0].rstrip(" .-")
        return f"{name} needs more memory than a {device.device_kind} has: {line}"
    needed, available = _text(*figures.groups()[:2]), _text(*figures.groups()[2:])
    excess = _EXCESS.search(message)
    more = f", {_text(*excess.groups())} more than fits" if excess is not None else ""
    return (
        f"{name} does not fit: it needs {needed} of the memory of each {device.device_kind}"
        f"{_of_arguments(plan)}, and may use {available}{more}. Inspect it by "
        f"xlashard.preflight({name}, ..., topology=...); then shard arguments over more devices, "
        "donate those that results replace, or recompute in the backward pass with jax.checkpoint"
    )


def _text(number: str, unit: str) -> str:
    return f"{number} {unit}iB" if unit else f"{number} B"


def _of_arguments(plan: ProgramPlan) -> str:
    """Return the part of the memory that arguments take, without the padding of layouts."""
    sizes = [bytes_of(value) for value in plan.args]
    known = sum(size for size in sizes if isinstance(size, int))
    return f", {in_bytes(known)} of it for arguments" if known else ""
