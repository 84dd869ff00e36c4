"""Constants of a chip from measurements: a file that preflights take."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from xlashard.costs.rates import Rates
from xlashard.costs.targets import rates_for
from xlashard.documents import read_toml
from xlashard.errors import ArgumentError
from xlashard.hardware.chip import Chip
from xlashard.preflights.report.measured import MeasuredStep

_UNITS: Mapping[str, tuple[str, ...]] = {
    "matrix": ("matrix_flops",),
    "vector": ("vector_ops", "transcendentals"),
    "hbm": ("hbm_bytes",),
    "ici": ("link_share", "torus_reduction_share"),
    "dcn": ("dcn_share",),
    "host": ("host_bytes",),
}
"""Rates that the slowdown of a unit divides."""

type Calibration = Mapping[str, float]
"""Slowdown of each unit: its measured time by its predicted one."""


def calibration_text(step: MeasuredStep, chip: str) -> str:
    """Return the text of a file of rates.

    Args:
        step: The prediction, made without such a file, and the measurement.
        chip: Generation of the chips: `v6e`.
    """
    found = {unit: ratio for unit, ratio in step.slowdowns().items() if unit in _UNITS}
    lines = [
        "# Measured by predicted time: the median over the operations that each unit bounds.",
        f"# xlashard preflight --rates takes it. From {step.profile.module}, "
        f"{step.profile.executions} executions.",
        f'chip = "{chip}"',
        "",
        "[slowdown]",
        *(f"{unit} = {ratio:.3f}  # {len(step.ratios[unit])}" for unit, ratio in found.items()),
    ]
    return "\n".join(lines) + "\n"


def read_rates(path: str | os.PathLike[str], chip: Chip) -> Rates:
    """Return the rates of a chip, corrected by measurements.

    Args:
        path: File that `xlashard preflight --calibrate` wrote.
        chip: Figures of the chip.

    Raises:
        ArgumentError: If the file is invalid, or of another chip.
    """
    try:
        found = read_toml(Path(path))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"rates={os.fspath(path)!r} can't be read: {error}") from None
    slowdown = found.get("slowdown")
    if not isinstance(slowdown, dict) or "chip" not in found:
        raise ArgumentError(
            f"rates={os.fspath(path)!r} has no chip and [slowdown]: write the file with xlashard "
            "preflight --measured PROFILE --calibrate FILE"
        )
    if found["chip"] != chip.name:
        raise ArgumentError(  # no-catalogue: needs a file of rates
            f"rates={os.fspath(path)!r} is of {found['chip']}, but the topology has "
            f"{chip.name}: pass the file of that chip"
        )
    rates = rates_for(chip)
    for unit, ratio in slowdown.items():
        if unit not in _UNITS or not isinstance(ratio, int | float) or not 0.01 < ratio < 100:
            raise ArgumentError(  # no-catalogue: needs a file of rates
                f"slowdown.{unit} = {ratio!r} in rates={os.fspath(path)!r} is invalid: expected a "
                f"number from 0.01 to 100 for one of {', '.join(_UNITS)}"
            )
        rates = _slower(rates, unit, float(ratio))
    return rates


def _slower(rates: Rates, unit: str, ratio: float) -> Rates:
    if unit == "matrix":
        flops = tuple((dtype, rate / ratio) for dtype, rate in rates.matrix_flops)
        return replace(rates, matrix_flops=flops)
    return replace(rates, **{name: getattr(rates, name) / ratio for name in _UNITS[unit]})
