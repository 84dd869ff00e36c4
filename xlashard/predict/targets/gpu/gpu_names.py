"""Names of groups of GPUs: models with counts, shapes, and the machine types of clouds."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from xlashard.errors import TopologyError
from xlashard.geometry.strides import divisors
from xlashard.predict.targets.figures import read_tables
from xlashard.predict.targets.gpu.gpu_models import BY_NAME, GPU_MODELS, GpuModel


@dataclass(frozen=True)
class MachineType:
    """A machine type of a cloud.

    Attributes:
        name: Name in the cloud, in lower case: `p5.48xlarge`.
        model: Figures of its GPUs.
        gpus: GPUs of a machine.
        network_bandwidth: Bytes per second per GPU in one direction to other machines, or to other
            racks where NVLink joins machines.
        source: Source of the figures.
    """

    name: str
    model: GpuModel
    gpus: int
    network_bandwidth: float
    source: str


_TABLES = read_tables(
    Path(__file__).with_name("machine_types.toml"), ("model", "gpus", "network_bits", "source")
)
MACHINE_TYPES: tuple[MachineType, ...] = tuple(
    MachineType(
        name,
        BY_NAME[table["model"]],
        table["gpus"],
        table["network_bits"] / 8 / table["gpus"],
        table["source"],
    )
    for name, table in _TABLES.items()
)
"""Machine types of Google Cloud, AWS, Azure and Oracle Cloud, and NVIDIA's own systems."""

MACHINES_BY_NAME = {
    **{machine.name: machine for machine in MACHINE_TYPES},
    **{f"standard_{m.name}": m for m in MACHINE_TYPES if "azure" in m.source},
    "nd_h100_v5": next(m for m in MACHINE_TYPES if m.name == "nd96isr_h100_v5"),
    "nd_h200_v5": next(m for m in MACHINE_TYPES if m.name == "nd96isr_h200_v5"),
}
"""Machine types by each of their names."""

_ALIASES = {
    **{model.name: model for model in GPU_MODELS},
    **dict.fromkeys(("a100", "a100-sxm"), BY_NAME["a100-80gb"]),
    **dict.fromkeys(("h100-sxm", "h100-80gb"), BY_NAME["h100"]),
    "h200-sxm": BY_NAME["h200"],
}
_NODE = "gb200-nvl72"
# `h100:4x8`, `h100-32`, `32xh100`, `4x8xh100`, `p5.48xlarge`, `4xp5.48xlarge`.
_SHAPE = re.compile(r"(?P<kind>[a-z][a-z0-9-]*):(?P<nodes>\d+)x(?P<gpus>\d+)")
_COUNT = re.compile(r"(?P<kind>[a-z][a-z0-9-]*?)-(?P<count>\d+)")
_FAMILY = re.compile(r"(?:\d+x)*(?:[abh]\d|gb\d|p\d\w*[.-]|nd|standard_nd|bm\.gpu|dgx)")
_TIMES = re.compile(r"(?P<sizes>(?:\d+x)*)(?P<kind>[a-z].*)")


@dataclass(frozen=True)
class GpuGroup:
    """Parsed name of some nodes of GPUs.

    Attributes:
        model: Figures of the GPUs.
        nodes: Groups of GPUs joined by NVLink.
        gpus: GPUs per node.
        machine: Machine type, if the name has one.
    """

    model: GpuModel
    nodes: int
    gpus: int
    machine: MachineType | None = None

    @property
    def text(self) -> str:
        """Shortest full name: `h100:4x8`, `4xp5.48xlarge`."""
        if self.machine is None:
            return f"{self.model.name}:{self.nodes}x{self.gpus}"
        machines = self.nodes * self.gpus // self.machine.gpus
        return self.machine.name if machines == 1 else f"{machines}x{self.machine.name}"

    @property
    def gpus_per_host(self) -> int:
        """GPUs per host."""
        most = self.machine.gpus if self.machine else self.model.gpus_per_host
        return most if self.gpus % most == 0 else self.gpus


def parse_gpu_name(name: str, times: int = 1) -> GpuGroup:
    """Parse the name of a group of GPUs.

    Args:
        name: A model with a number of GPUs (`h100-32`, `8xh200`), with nodes and GPUs per node
            (`h100:4x8`, `4x8xh100`), a rack (`gb200-nvl72`), or a machine type (`p5.48xlarge`,
            `4xa3-megagpu-8g`).
        times: Number by which to multiply the nodes.

    Raises:
        TopologyError: If the model or the number is unknown.
    """
    if not isinstance(name, str):
        raise TopologyError(
            f"name={name!r} is invalid: expected a string, such as topology('h100-32')"
        )
    if isinstance(times, bool) or not isinstance(times, int) or times < 1:
        raise TopologyError(
            f"nodes={times!r} is invalid: expected 1 or more, such as topology({name!r}, nodes=2)"
        )
    text = name.strip().lower()
    if (shape := _SHAPE.fullmatch(text)) and shape["kind"] in _ALIASES:
        model = _ALIASES[shape["kind"]]
        return _checked(name, GpuGroup(model, times * int(shape["nodes"]), int(shape["gpus"])))
    if machines := _machines(text, times):
        return machines
    if (counted := _COUNT.fullmatch(text)) and counted["kind"] in _ALIASES:
        return _of_count(name, _ALIASES[counted["kind"]], int(counted["count"]), times)
    if (several := _TIMES.fullmatch(text)) and several["kind"] in _ALIASES:
        model, sizes = _ALIASES[several["kind"]], _sizes(several["sizes"])
        if len(sizes) == 1:
            return _of_count(name, model, sizes[0], times)
        if len(sizes) == 2:
            return _checked(name, GpuGroup(model, times * sizes[0], sizes[1]))
    raise TopologyError(_unknown(name, text))


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split("x") if size]


def _machines(text: str, times: int) -> GpuGroup | None:
    """Return the group of a machine type or of a rack, or None for another name."""
    match = _TIMES.fullmatch(text)
    sizes = _sizes(match["sizes"]) if match else []
    if match is None or len(sizes) > 1:
        return None
    count = times * (sizes or [1])[0]
    if match["kind"] == _NODE:
        model = BY_NAME["gb200"]
        return GpuGroup(model, count, model.max_node) if count else None
    machine = MACHINES_BY_NAME.get(match["kind"])
    if machine is None or not count:
        return None
    # NVLink joins the machines of a rack: as many of them as are one domain.
    racks = divisors(count)
    most = max(1, machine.model.max_node // machine.gpus)
    joined = max(n for n in racks if n <= most)
    return GpuGroup(machine.model, count // joined, joined * machine.gpus, machine)


def _of_count(name: str, model: GpuModel, count: int, times: int) -> GpuGroup:
    if 0 < count <= model.max_node:
        return _checked(name, GpuGroup(model, times, count))
    if count and count % model.max_node == 0:
        return GpuGroup(model, times * count // model.max_node, model.max_node)
    whole = max(1, count // model.max_node)
    offers = [f"'{model.name}-{nodes * model.max_node}'" for nodes in (whole, whole + 1)]
    other = max(n for n in divisors(max(1, count)) if n <= model.max_node)
    more = f"; {model.name}:{count // other}x{other} has nodes of {other}" if other > 1 else ""
    raise TopologyError(
        f"{count:,} GPUs of {name!r} are not whole nodes of {model.max_node} {model.title}: the "
        f"nearest are {' and '.join(offers)}{more}"
    )


def _checked(name: str, group: GpuGroup) -> GpuGroup:
    model = group.model
    if group.nodes < 1 or not 1 <= group.gpus <= model.max_node:
        raise TopologyError(
            f"{name!r} has {group.nodes} nodes of {group.gpus} GPUs: expected 1 or more nodes of 1 "
            f"to {model.max_node} {model.title}, such as '{model.name}:2x{model.max_node}'"
        )
    if group.gpus > model.gpus_per_host and group.gpus % model.gpus_per_host:
        below = group.gpus - group.gpus % model.gpus_per_host
        raise TopologyError(
            f"{name!r} has nodes of {group.gpus} GPUs, which are not whole machines of "
            f"{model.gpus_per_host}: write '{model.name}:{group.nodes}x{below}'"
        )
    return group


def _unknown(name: str, text: str) -> str:
    kind = re.sub(r"^(?:\d+x)+|(?::\d+x\d+|-\d+)$", "", text)
    if kind in _ALIASES:
        model = _ALIASES[kind]
        return (
            f"topology {name!r} lacks a number of GPUs: write '{model.name}-{model.max_node}', or "
            f"'{model.name}:4x{model.max_node}' for four nodes"
        )
    near = difflib.get_close_matches(kind, [*_ALIASES, *MACHINES_BY_NAME, _NODE], n=3, cutoff=0.6)
    meant = f"the nearest are {', '.join(map(repr, near))}. " if near else ""
    return (
        f"unknown GPU topology {name!r}: {meant}Write a model ({', '.join(BY_NAME)}) and a number "
        f"of GPUs: 'h100-32' or 'h100:4x8', or a machine type: 'p5.48xlarge'"
    )


def is_gpu_name(name: str) -> bool:
    """Return True if a name begins as those of GPUs do, whether or not it is valid."""
    return _FAMILY.match(name.strip().lower()) is not None


def common_names() -> tuple[str, ...]:
    """Return names of usual sizes, to complete words of a command line."""
    counts = (8, 16, 32, 64, 128, 256, 512, 1024)
    machines = (machine.name for machine in MACHINE_TYPES)
    models = (f"{m.name}-{n}" for m in GPU_MODELS if m.max_node == 8 for n in counts)
    return (*models, _NODE, *(f"{n}x{_NODE}" for n in (2, 4, 8)), *machines)
