"""How fast the cores of a TPU tick, for the compiler's estimates, which it gives in cycles."""

from dataclasses import dataclass

from xlashard.tpu.generations import Generation


@dataclass(frozen=True)
class MatrixUnits:
    """What a device multiplies in a cycle.

    Attributes:
        flops_per_cycle: FLOP of bfloat16 of one TensorCore.
        source: Where that is from.
    """

    flops_per_cycle: int
    source: str


def _arrays(count: int, size: int, source: str) -> MatrixUnits:
    return MatrixUnits(2 * count * size * size, source)


_DOCS = "https://cloud.google.com/tpu/docs/system-architecture-tpu-vm"
_DERIVED = (
    "no public figure of the units agrees with the peak; libtpu 0.0.50 estimates large products at "
    "{} FLOP for each cycle, which four units of 256 x 256 can do and two can't"
)
_UNITS = {
    "v2": _arrays(1, 128, f"one unit of 128 x 128: {_DOCS}"),
    "v3": _arrays(2, 128, f"two units of 128 x 128: {_DOCS}"),
    "v4": _arrays(4, 128, f"four units of 128 x 128: {_DOCS}"),
    "v5e": _arrays(4, 128, f"four units of 128 x 128: {_DOCS}"),
    "v5p": _arrays(4, 128, f"four units of 128 x 128: {_DOCS}"),
    "v6e": _arrays(4, 256, _DERIVED.format("434,000")),
    "tpu7x": _arrays(4, 256, _DERIVED.format("422,000")),
}


@dataclass(frozen=True)
class Clock:
    """The clock of a generation's cores.

    Attributes:
        hertz: Cycles per second.
        source: How that is known.
    """

    hertz: float
    source: str


def clock_of(generation: Generation) -> Clock | None:
    """The clock at which a generation reaches its peak; None where that isn't known.

    It is the peak of its bfloat16 arithmetic by what its matrix units do in a cycle: 0.70 GHz for
    v2, 0.94 for v3, 1.05 for v4, 1.5 for v5e, 1.75 for v5p and v6e, 2.2 for tpu7x. Where two cores
    work as one device the compiler's cycles are those of the two side by side.
    """
    units = _UNITS.get(generation.name)
    peak = dict(generation.peak_flops).get("bfloat16")
    if units is None or peak is None:
        return None
    hertz = peak / generation.cores_per_chip / units.flops_per_cycle
    return Clock(hertz, f"its bfloat16 peak by its matrix units; {units.source}")
