"""Error bar of a predicted step time, by cause.

The widths change with the published runs that `benchmarks/truth.py` compares, the time itself with
the published times of operations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from xlashard.hlo.module import HloModule
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.costs.kernel_work import is_kernel, is_ragged
from xlashard.predict.costs.models_by_target import operations_for
from xlashard.predict.costs.rates import Rates, borrowed_rates
from xlashard.predict.costs.schedule import StepSchedule
from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.gpu.gpu_models import GpuModel


@dataclass(frozen=True)
class KernelSpread:
    """Uncertain time of the kernels of a step.

    Attributes:
        faster: Seconds that they take less at the best rates of other chips.
        slower: Seconds that they take more at the worst rates of other chips.
        ragged: Seconds of ragged products.
    """

    faster: float = 0.0
    slower: float = 0.0
    ragged: float = 0.0


def error_bar(parts: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    """Return the error of a predicted time below and above it, as shares of the time.

    Args:
        parts: Those of `error_parts`.

    Returns:
        A negative share, and a positive one.
    """
    below, above = (sum(ends) for ends in zip(*parts.values(), strict=True))
    return max(below, -1.0), above


def error_parts(
    shares: Mapping[str, float],
    *,
    dcn: float = 0.0,
    slowest_slice: float = 0.0,
    kernels: KernelSpread | None = None,
    chip: Chip | None = None,
) -> dict[str, tuple[float, float]]:
    """Return the parts of an error bar by their cause, below and above the time.

    The widths were chosen on the published training runs, of which the whole bar is to hold nine in
    ten. `benchmarks/truth.py` scales them on all models but one, and prints how many of its runs
    the bar then holds; the proportions of the parts have seen every run.

    Args:
        shares: Seconds of a step by the resource that the cores use or wait for.
        dcn: Seconds of transfers between slices, also those that overlap with arithmetic.
        slowest_slice: Seconds of waiting for the slowest slice, which `shares` lacks.
        kernels: Uncertainty of the kernels.
        chip: Figures of the chip; a TPU's bar if None.

    Returns:
        A negative and a positive share of the time by `model`, `waiting`, `hbm`, `dcn`, `slices`,
        `kernels` and `ragged`.
    """
    whole = (sum(shares.values()) + slowest_slice) or 1.0
    kernels = kernels or KernelSpread()
    waiting = (shares.get("ici", 0.0) + shares.get("host", 0.0)) / whole
    hbm = shares.get("hbm", 0.0) / whole
    bar = (
        _GPU_BAR
        if isinstance(chip, GpuModel)
        else _TPU_BARS.get(chip.name if chip else "", _TPU_BAR)
    )
    return {
        "model": bar.model,
        "waiting": (bar.waiting[0] * waiting, bar.waiting[1] * waiting),
        "hbm": (bar.hbm[0] * hbm, bar.hbm[1] * hbm),
        "dcn": (
            shares.get("dcn", 0.0) / whole * (1 / bar.network - 1),
            dcn / whole * (bar.network - 1),
        ),
        "slices": (_SLICES[0] * slowest_slice / whole, _SLICES[1] * slowest_slice / whole),
        "kernels": (-kernels.faster / whole, kernels.slower / whole),
        "ragged": (_RAGGED[0] * kernels.ragged / whole, _RAGGED[1] * kernels.ragged / whole),
    }


@dataclass(frozen=True)
class _Bar:
    """Widths of an error bar, below and above the time.

    Attributes:
        model: Error of a step that neither waits nor moves much through HBM.
        waiting: Error of the share of time in which the cores wait for links or hosts.
        hbm: Error of the share of time of HBM traffic.
        network: Slowest by fastest time of a transfer between slices or nodes.
    """

    model: tuple[float, float]
    waiting: tuple[float, float]
    hbm: tuple[float, float]
    network: float


# Milliseconds of the same reduction over 2 and 8 slices: the README of the v6e benchmarks
# (https://github.com/AI-Hypercomputer/tpu-recipes) gives no other figures between slices.
_DCN_TIMES = 73.7 / 32.2
# Programs of v4, v5e and v5p were published with fewer details, and their chips have fewer
# published operations; what else programs do in HBM the settings of a run express least.
_TPU_BAR = _Bar((-0.09, 0.14), (-0.1, 0.05), (-0.05, 0.3), _DCN_TIMES)
_TPU_BARS = {
    "v6e": _Bar((-0.11, 0.1), (-0.1, 0.05), (-0.05, 0.3), _DCN_TIMES),
    "tpu7x": _Bar((-0.14, 0.13), (-0.1, 0.05), (-0.05, 0.3), _DCN_TIMES),
}
# Shares of a GPU's network interface that collectives between nodes may reach: the published ones
# name no network, and clouds differ by their transport. The model assumes the first. Programs fuse
# what others keep in HBM: a run with its attention there took 28 % less.
_GPU_BAR = _Bar((-0.2, 0.3), (-0.3, 0.2), (-0.15, 0.0), 0.8 / 0.5)

_SLICES = (-0.2, 0.4)
"""Error of the wait for the slowest slice, besides that of a run on one."""

_RAGGED = (-0.2, 0.15)
"""Error of ragged products in a training step, whose router is balanced; without, the number of
rows of each group may change their time by -63 to +20 % (79 products of tokamax)."""


def measure_kernel_spread(
    module: HloModule,
    schedule: StepSchedule,
    chip: Chip,
    kernel_costs: Mapping[str, KernelCost] | None = None,
    rates: Rates | None = None,
) -> KernelSpread:
    """Return the uncertainty of the kernels of a schedule.

    Args:
        module: The program.
        schedule: Its schedule.
        chip: Figures of the chip.
        kernel_costs: Costs of kernels that the caller gives, by name.
        rates: Rates of a device; those of published measurements if None.
    """
    others = [operations_for(module, r, kernel_costs) for r in borrowed_rates(chip, rates)]
    faster = slower = ragged = 0.0
    for operation, runs in schedule:
        call = operation.instruction
        if not is_kernel(call):
            continue
        ragged += runs * operation.seconds * is_ragged(call)
        computation = module.computations[operation.computation]
        times = [other.of(computation, call).seconds for other in others]
        faster += runs * max(operation.seconds - min(times, default=math.inf), 0.0)
        slower += runs * max(max(times, default=0.0) - operation.seconds, 0.0)
    return KernelSpread(faster, slower, ragged)
