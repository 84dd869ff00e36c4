"""Constants of a chip from measurements: files that preflights take."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.costs.gpu.gpu_rates import GpuRates
from xlashard.costs.rates import Rates
from xlashard.costs.targets import rates_for
from xlashard.documents import read_toml
from xlashard.errors import ArgumentError
from xlashard.hardware.chip import Chip
from xlashard.preflights.report.measured import KERNEL, REDUCTION, MeasuredStep

_UNITS: Mapping[str, tuple[str, ...]] = {
    "matrix": ("matrix_flops",),
    "vector": ("vector_ops", "transcendentals"),
    "hbm": ("hbm_bytes",),
    "vmem": ("vmem_bytes",),
    "ici": ("link_share", "torus_reduction_share"),
    "dcn": ("dcn_share",),
    "host": ("host_bytes",),
}
"""Rates that the slowdown of a unit divides."""

_APART: Mapping[str, tuple[str, ...]] = {
    KERNEL: ("matrix_flops", "hbm_bytes", "kernel_vector_ops", "kernel_transcendentals"),
    REDUCTION: ("link_share", "torus_reduction_share"),
}
"""The same of kinds of operations whose rates differ from those of others on the same unit."""

_SCORES = ("scores", "score_gradients")
"""Rates of kernels that GPUs have besides."""


@dataclass(frozen=True)
class Calibration:
    """Measured by predicted time of a chip's operations.

    Attributes:
        chip: Name of the chip: `v6e`, `h100`.
        slowdown: Measured by predicted time by unit, or by kind of operation: `kernel`, and
            `reduction` for all-reduces and reduce-scatters.
    """

    chip: str
    slowdown: Mapping[str, float]

    def rates(self, chip: Chip) -> Rates:
        """Return the rates of a device, corrected by the measurements.

        Kernels and reductions without a slowdown of their own have that of their units; other
        collectives have that of reductions, which take the same links.

        Args:
            chip: Figures of the chip.
        """
        usual = found = rates_for(chip)
        slowdown = dict(self.slowdown)
        kernel, reduction = slowdown.pop(KERNEL, None), slowdown.pop(REDUCTION, None)
        if reduction is not None:
            slowdown.setdefault("ici", reduction)
        for unit, ratio in slowdown.items():
            found = _slower(found, _UNITS[unit], ratio)
        if kernel is not None:
            names = (*_APART[KERNEL], *(_SCORES if isinstance(usual, GpuRates) else ()))
            apart = _slower(usual, names, kernel)
            step = usual.kernel_step_seconds * kernel
            found = replace(found, kernels=replace(apart, kernel_step_seconds=step))
        if reduction is not None:
            # Between slices, reductions take the network as others do.
            apart = _slower(usual, _APART[REDUCTION], reduction)
            found = replace(found, reductions=replace(apart, dcn_share=found.dcn_share))
        return found

    def __str__(self) -> str:
        """Return the slowdowns as text: `matrix 1.2 ici 2`."""
        return " ".join(f"{unit} {ratio:.3g}" for unit, ratio in self.slowdown.items())


type RatesSource = str | os.PathLike[str] | Mapping[str, Any] | Calibration
"""File that `xlashard preflight --calibrate` wrote, or its content."""

type RatesSources = RatesSource | Sequence[RatesSource]
"""Files of one or several chips."""


def calibration_text(step: MeasuredStep, chip: str) -> str:
    """Return the text of a file of rates.

    Args:
        step: The prediction, made without such a file, and the measurement.
        chip: Generation of the chips: `v6e`.
    """
    known = (*_UNITS, *_APART)
    found = {unit: ratio for unit, ratio in step.slowdowns().items() if unit in known}
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


def read_calibrations(
    sources: RatesSources | None, chips: Iterable[Chip]
) -> dict[str, Calibration]:
    """Return the calibrations of chips, by their names.

    Args:
        sources: Files that `xlashard preflight --calibrate` wrote, or their content, one per chip.
        chips: Chips to predict for.

    Raises:
        ArgumentError: If a file is invalid, of none of the chips, or of the same as another.
    """
    if sources is None:
        return {}
    with short_tracebacks:
        several = [sources] if isinstance(sources, _ONE) else list(sources)
        names = list(dict.fromkeys(chip.name for chip in chips))
        found: dict[str, Calibration] = {}
        for source in several:
            calibration = _read(source)
            if calibration.chip not in names:
                raise ArgumentError(
                    f"{_path(source)} is of {calibration.chip}, but the topology has "
                    f"{' or '.join(names)}: pass the file of that chip"
                )
            if calibration.chip in found:
                raise ArgumentError(
                    f"{_path(source)} is the second of {calibration.chip}: pass one for each chip"
                )
            found[calibration.chip] = calibration
        return found


_ONE = (str, os.PathLike, Mapping, Calibration)


def _path(source: RatesSource) -> str:
    return f"rates={os.fspath(source) if isinstance(source, os.PathLike) else source!r}"


def _read(source: RatesSource) -> Calibration:
    if isinstance(source, Calibration):
        return source
    path = _path(source)
    try:
        found = source if isinstance(source, Mapping) else read_toml(Path(source))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} can't be read: {error}") from None
    slowdown = found.get("slowdown")
    if not isinstance(slowdown, Mapping) or "chip" not in found:
        raise ArgumentError(
            f"{path} has no chip and [slowdown]: write the file with xlashard preflight "
            "--measured PROFILE --calibrate FILE"
        )
    units = (*_UNITS, *_APART)
    for unit, ratio in slowdown.items():
        if unit not in units or not isinstance(ratio, int | float) or not 0.01 < ratio < 100:
            raise ArgumentError(
                f"slowdown.{unit} = {ratio!r} in {path} is invalid: expected a number from 0.01 to "
                f"100 for one of {', '.join(units)}"
            )
    return Calibration(str(found["chip"]), {str(u): float(r) for u, r in slowdown.items()})


def _slower(rates: Rates, names: Iterable[str], ratio: float) -> Rates:
    changed: dict[str, Any] = {}
    for name in names:
        rate = getattr(rates, name)
        if name == "matrix_flops":
            changed[name] = tuple((dtype, flops / ratio) for dtype, flops in rate)
        else:
            changed[name] = rate / ratio
    return replace(rates, **changed)
