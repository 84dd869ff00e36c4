"""Texts for the fields of a preflight report, shared by terminal and HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xlashard.errors import counted
from xlashard.predict.preflight.report.preflight_model import (
    AxisReport,
    TimeEstimate,
    TopologyReport,
)
from xlashard.predict.targets.chip import Links
from xlashard.support.formatting import (
    in_seconds,
    numbered,
    sizes_text,
)


class ResourceNames(NamedTuple):
    """Names of what takes the time of a step.

    Attributes:
        share: Part of the time of a schedule; empty for a bound that is no part.
        short: Short name of what bounds a step; empty for units of the cores, as are the others.
        bound: Its name in words.
        detail: Its name for readers who don't know the chips.
    """

    share: str
    short: str = ""
    bound: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Words:
    """Names of what a report shows, by the kind of its chips.

    Attributes:
        chip: A chip.
        group: Chips with faster links than the network.
        layout: Place of mesh axes.
        resources: What takes the time of a step.
        available: Memory that a program may use.
        reserves: Clause about the rest of the memory.
    """

    chip: str
    group: str
    layout: str
    resources: Mapping[str, ResourceNames]
    available: str
    reserves: str

    @property
    def shares(self) -> Mapping[str, str]:
        """Parts of the time of a schedule."""
        return {name: each.share for name, each in self.resources.items() if each.share}

    @property
    def networks(self) -> Mapping[str, str]:
        """Short names of networks."""
        return {name: self.resources[name].short for name in ("ici", "dcn")}


_COMPUTE = ResourceNames("", "compute", "arithmetic", "arithmetic")
_LAUNCHES = ResourceNames(
    "launches", "launches", "launches of operations", "the launches of its operations"
)
_HOST = ResourceNames(
    "waiting for the host", "host", "transfers to and from the host", "the host's memory"
)
_TPU = Words(
    chip="chip",
    group="slice",
    layout="torus",
    resources={
        "compute": _COMPUTE,
        "hbm": ResourceNames("HBM", "HBM", "HBM", "the chip's memory (HBM)"),
        "kernel": ResourceNames("kernels"),
        "launch": _LAUNCHES,
        "host": _HOST,
        "matrix": ResourceNames("matrix units"),
        "vector": ResourceNames("vector unit"),
        "vmem": ResourceNames("VMEM", "VMEM", "VMEM", "the memory of its cores (VMEM)"),
        "ici": ResourceNames(
            "waiting for ICI", "ICI", "links within a slice", "the links between chips (ICI)"
        ),
        "dcn": ResourceNames(
            "waiting for DCN", "DCN", "network between slices", "the network between slices (DCN)"
        ),
    },
    available="what the compiler lets a program use",
    reserves="the runtime reserves",
)


def _gpu_words(links: str) -> Words:
    within, network = f"the links within a node ({links})", "network between nodes"
    return Words(
        chip="GPU",
        group="node",
        layout="nodes",
        resources={
            "compute": _COMPUTE,
            "hbm": ResourceNames("HBM", "HBM", "HBM", "the GPU's memory (HBM)"),
            "kernel": ResourceNames("kernels"),
            "launch": _LAUNCHES,
            "host": _HOST,
            "matrix": ResourceNames("tensor cores"),
            "vector": ResourceNames("CUDA cores"),
            "ici": ResourceNames(f"waiting for {links}", links, links, within),
            "dcn": ResourceNames("waiting for the network", "network", network, f"the {network}"),
        },
        available="the share of the memory that JAX's allocator takes",
        reserves="JAX's allocator leaves",
    )


WORDS: Mapping[Links, Words] = {
    "ici": _TPU,
    "nvlink": _gpu_words("NVLink"),
    "pcie": _gpu_words("PCIe"),
}
"""Names by the links of chips."""


def words_of(topology: TopologyReport) -> Words:
    """Return the names of what a report on a topology shows."""
    return WORDS[topology.links]


ESTIMATE = "compiled without code, which the memory lacks"
"""Note on a report whose compilation was stopped before code generation."""


def topology_text(topology: TopologyReport) -> str:
    """Return the topology with its number of chips: `2 × v5p:4x4x2 (64 chips)`."""
    devices = ""
    if topology.devices != topology.chips:
        devices = f", {topology.devices:,} devices"
    chips = counted(topology.chips, words_of(topology).chip)
    return f"{topology_name(topology)} ({chips}{devices})"


def topology_name(topology: TopologyReport) -> str:
    """Return the topology with its number of slices: `2 × v5p:4x4x2`."""
    return slices_text(topology.name, topology.slices)


def slices_text(topology: str, slices: int) -> str:
    """Return the name of a topology with its number of slices: `2 × v5p:4x4x2`."""
    return topology if slices == 1 else f"{slices} × {topology}"


def axes_text(mesh: Sequence[AxisReport]) -> str:
    """Return the axes of a mesh with their sizes: `data=4 × model=2`."""
    return sizes_text((axis.name, axis.size) for axis in mesh)


def step_time_text(time: TimeEstimate) -> str:
    """Return the time: `3.1 ms`, `at least 3.1 ms`."""
    return f"{'at least ' * time.is_lower_bound}{in_seconds(time.seconds)}"


def unknown_work(time: TimeEstimate) -> str:
    """Return what the time of a lower bound lacks."""
    kernels = dict(time.unknown_kernels)
    calls = [call for call in time.unknown_calls if call[0] not in kernels]
    parts = (
        f"the kernels of unknown cost: {numbered(time.unknown_kernels)}" * bool(kernels),
        f"the calls of unknown cost: {numbered(calls)}" * bool(calls),
        f"more than one iteration of {counted(time.unknown_loops, 'loop')} of unknown trip count"
        * bool(time.unknown_loops),
    )
    return ", and ".join(filter(None, parts))


def error_text(time: TimeEstimate) -> str:
    """Return the error of the time: `-8 % to +10 %`, `-8 % or more`."""
    above = "or more" if time.above is None else f"to {time.above * 100:+.0f} %"
    return f"{time.below * 100:+.0f} % {above}"


def mesh_text(mesh: Sequence[AxisReport]) -> str:
    """Return the position of each mesh axis on the torus, or on the nodes of GPUs."""
    return ", ".join(_axis(axis) for axis in mesh if axis.size > 1)


def is_visible_ring(axis: AxisReport) -> bool:
    """Return whether a mesh axis is a ring of more than two chips.

    Two chips along a dimension, or the two devices of a chip, have a single link. The GPUs of a
    node have a switch.
    """
    chips = [count for dimension, count in axis.along if dimension not in _GROUPS]
    return axis.ring and (len(chips) > 1 or max(chips, default=0) > 2)


_GROUPS: Mapping[str, str] = {
    "core": "the cores of a chip",
    "slice": "the slices",
    "gpu": "the GPUs of a node",
    "node": "the nodes",
}
"""Dimensions other than those of a torus."""


def _axis(axis: AxisReport) -> str:
    if not axis.along:
        return f"{axis.name} across several dimensions"
    along = " and ".join(_GROUPS.get(d, d) for d, _ in axis.along)
    if is_visible_ring(axis):
        return f"{axis.name} around {along}"
    return f"{axis.name} along {along}"


def three_digits(number: float) -> str:
    """Return a number with three digits, or more if it is larger: `4.05`, `128`, `12,300`."""
    if abs(number) >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


def in_thousands(number: float) -> str:
    """Return a large number with an SI prefix: `1.23 M`."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{three_digits(number / size)} {unit}"
    return three_digits(number)
