"""Preflights of the settings files for real runs: their facts and the table of the guide.

`python -m benchmarks._preflights [NAME ...]` compiles the training step of each file in `configs/`
that names a topology, without generating code (seconds each), and writes the facts of its report to
`benchmarks/_preflights.json`, from which the site's table of settings is made.
"""

import argparse
import hashlib
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from xlashard.predict.preflight.mesh_mapping import find_topology
from xlashard.predict.preflight.preflight_run import preflight
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.targets.gpu.gpu_models import BY_NAME
from xlashard.train.config.settings import Settings, load_settings
from xlashard.train.model.programs import training_step

ROOT = Path(__file__).resolve().parent.parent
FACTS = ROOT / "benchmarks" / "_preflights.json"
# The smallest settings file with smaller arrays: it compiles in a seventh of the time.
SMALL = "1b_v5e_16 small"
_SMALL_OF = "1b_v5e_16"
_SMALL_WORDS = (
    *("model.width=256", "model.heads=4", "model.kv_heads=2", "model.mlp=1024"),
    *("model.vocab=4096", "model.length=512", "model.attention_block=128", "training.batch=32"),
)
_HEADER = (
    "| settings | chips | mesh | parameters | tokens a step | HBM a chip | spare | seconds a step "
    "| waits for | tokens/s | MFU |"
)


@dataclass(frozen=True)
class Facts:
    """Figures of one preflight: those of the table, and those that the formulas predict.

    Attributes:
        settings: SHA-256 of the settings file.
        outcome: `fits` or the reason against it.
        versions: Versions of JAX and libtpu.
        generation: Generation of the chips.
        chips: Number of chips.
        devices: Number of devices.
        mesh: Sizes of the mesh axes by name.
        tokens: Tokens per step.
        model_flops: FLOP of the model per step.
        parameters: Parameters of the model.
        active_parameters: Parameters that each token uses.
        available_bytes: HBM per device that a program may use.
        total_bytes: HBM per device at the peak.
        argument_bytes: Bytes of the arguments per device.
        alias_bytes: Bytes of the arguments that results reuse.
        state_bytes: Bytes of the training state per device.
        product_flops: FLOP of the matrix products per device.
        unknown_loops: Loops of unknown trip count.
        sent_bytes: Bytes that each device sends per step.
        roofline_seconds: Seconds per step at the peak rates.
        seconds: Seconds per step by the compiler's schedule.
        bound: The resource that limits the step.
        tokens_per_second: Tokens per second by the compiler's schedule.
        utilisation: Model FLOP utilisation by the compiler's schedule.
    """

    settings: str
    outcome: str
    versions: dict[str, str]
    generation: str
    chips: int
    devices: int
    mesh: dict[str, int]
    tokens: int
    model_flops: float
    parameters: int
    active_parameters: int
    available_bytes: int
    total_bytes: int
    argument_bytes: int
    alias_bytes: int
    state_bytes: int
    product_flops: float
    unknown_loops: int
    sent_bytes: float
    roofline_seconds: float
    seconds: float
    bound: str
    tokens_per_second: float
    utilisation: float

    @property
    def spare(self) -> float:
        """Fraction of the available HBM that stays free."""
        return 1 - self.total_bytes / self.available_bytes


def topology_settings() -> dict[str, Settings]:
    """Read the settings files that name a topology, the smallest model first."""
    found = {path.stem: load_settings(path) for path in (ROOT / "configs").glob("*.toml")}
    chosen = {name: settings for name, settings in found.items() if settings.devices.topology}
    return dict(sorted(chosen.items(), key=lambda item: (_size(item[1]), item[0])))


def small_settings() -> Settings:
    """Read the smallest settings file, with smaller arrays."""
    return load_settings(ROOT / "configs" / f"{_SMALL_OF}.toml", _SMALL_WORDS)


def _size(settings: Settings) -> int:
    return settings.model.layers * settings.model.width**2


def digest(name: str) -> str:
    """Return the SHA-256 of a settings file, and of the words that make it small."""
    words = _SMALL_WORDS if name == SMALL else ()
    data = (ROOT / "configs" / f"{_SMALL_OF if words else name}.toml").read_bytes()
    return hashlib.sha256(data + " ".join(words).encode()).hexdigest()


def compile_facts(name: str, settings: Settings) -> Facts:
    """Compile the training step of a settings file for its topology; return the facts."""
    place = find_topology(settings.devices.topology, settings.devices.slices)
    target = training_step(settings, place.mesh(settings.mesh))
    report = preflight(
        target.function,
        *target.args,
        topology=place,
        workload=target.workload,
        estimate=True,
        title=f"configs/{name}.toml",
    )
    return _facts(name, report)


def _facts(name: str, report: PreflightReport) -> Facts:
    memory, spent, throughput = report.memory, report.time, report.throughput
    assert throughput is not None
    state = [x.device_bytes for x in report.inputs if x.path.startswith("state")]
    return Facts(
        settings=digest(name),
        outcome=report.outcome,
        versions={"jax": report.versions.jax, "libtpu": report.versions.libtpu},
        generation=report.topology.generation,
        chips=report.topology.chips,
        devices=report.topology.devices,
        mesh={axis.name: axis.size for axis in report.mesh},
        **asdict(throughput.workload),
        available_bytes=memory.available_bytes,
        total_bytes=memory.total_bytes,
        argument_bytes=memory.argument_bytes,
        alias_bytes=memory.alias_bytes,
        state_bytes=sum(state),
        product_flops=sum(flops for _, flops in spent.flops_by_dtype),
        unknown_loops=spent.unknown_loops,
        sent_bytes=sum(traffic.sent_bytes for traffic in spent.traffic),
        roofline_seconds=spent.roofline_seconds,
        seconds=spent.seconds,
        bound=spent.bound,
        tokens_per_second=throughput.tokens_per_second,
        utilisation=throughput.utilisation,
    )


def read_facts() -> dict[str, Facts]:
    """Return the checked-in facts by the names of the settings files."""
    return {name: Facts(**each) for name, each in json.loads(FACTS.read_text()).items()}


def write_facts(facts: dict[str, Facts]) -> None:
    """Write the facts of all settings files."""
    data = {name: asdict(each) for name, each in sorted(facts.items())}
    FACTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def table() -> str:
    """Return the table of the guide, one row per settings file with facts."""
    facts = read_facts()
    rows = [_row(name, facts[name]) for name in topology_settings() if name in facts]
    return "\n".join([_HEADER, "|---" * _HEADER[1:].count("|") + "|", *rows])


def _row(name: str, facts: Facts) -> str:
    count = f"{facts.parameters / 1e9:.1f} B"
    if facts.active_parameters < facts.parameters:
        count += f", {facts.active_parameters / 1e9:.1f} B active"
    cells = [
        f"[`{name}.toml`](../../configs/{name}.toml)",
        f"{facts.chips:,} of {facts.generation}",
        " × ".join(f"{axis}={size}" for axis, size in facts.mesh.items()),
        count,
        f"{facts.tokens:,}",
        f"{facts.total_bytes / 2**30:.1f} of {facts.available_bytes / 2**30:.1f} GiB",
        f"{facts.spare:.0%}",
        f"{facts.seconds:.2f}",
        _waits(facts),
        f"{facts.tokens_per_second:,.0f}",
        f"{facts.utilisation:.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


def _waits(facts: Facts) -> str:
    names = {"compute": "arithmetic", "hbm": "HBM", "ici": "ICI", "dcn": "DCN"}
    if facts.generation in BY_NAME:
        names |= {"ici": "NVLink", "dcn": "network"}
    return names.get(facts.bound, facts.bound)


def main(arguments: list[str]) -> int:
    """Compile the chosen settings files and write their facts and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="settings files, by name; by default all")
    options = parser.parse_args(arguments)
    for name, settings in {**topology_settings(), SMALL: small_settings()}.items():
        if options.names and name not in options.names:
            continue
        began = time.perf_counter()
        facts = compile_facts(name, settings)
        write_facts(read_facts() | {name: facts})
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{name}: {facts.outcome}, {seconds:.0f} s, {peak:.1f} GiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
