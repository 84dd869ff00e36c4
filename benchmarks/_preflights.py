"""Preflights of the settings files for real runs: their reports and the table in the guide.

`python -m benchmarks._preflights [NAME ...]` compiles the training step of each file in `configs/`
that names a topology (minutes each, on any machine) and writes `docs/preflight/NAME.json`, the
digests of the settings, and the table in `docs/configs.md`. `--table` writes the table alone.
"""

import argparse
import hashlib
import json
import re
import resource
import sys
import time
from pathlib import Path

from xlashard import tpu
from xlashard.tpu.preflight.api import preflight
from xlashard.tpu.preflight.report import PreflightReport
from xlashard.train.preflight import training_step
from xlashard.train.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs" / "preflight"
DIGESTS = REPORTS / "digests.json"
PAGE = ROOT / "docs" / "configs.md"
_BEGIN, _END = "<!-- table: make preflights -->", "<!-- end of table -->"
_HEADER = (
    "| settings | chips | mesh | parameters | tokens a step | HBM a chip | spare | seconds a step "
    "| waits for | tokens/s | MFU |"
)


def real() -> dict[str, Settings]:
    """The settings files that name a topology, the smallest model first."""
    found = {path.stem: load_settings(path) for path in (ROOT / "configs").glob("*.toml")}
    asked = {name: settings for name, settings in found.items() if settings.devices.topology}
    return dict(sorted(asked.items(), key=lambda item: (_size(item[1]), item[0])))


def _size(settings: Settings) -> int:
    return settings.model.layers * settings.model.width**2


def digest(name: str) -> str:
    """Of a settings file."""
    return hashlib.sha256((ROOT / "configs" / f"{name}.toml").read_bytes()).hexdigest()


def make(name: str, settings: Settings) -> PreflightReport:
    """The report of a settings file, for the topology that it names."""
    place = tpu.topology(settings.devices.topology, settings.devices.slices)
    target = training_step(settings, place.mesh(settings.mesh))
    return preflight(
        target.function,
        *target.args,
        topology=place,
        workload=target.workload,
        title=f"configs/{name}.toml",
    )


def kept(name: str) -> PreflightReport:
    """The report that is checked in."""
    return PreflightReport.from_json((REPORTS / f"{name}.json").read_text(encoding="utf-8"))


def written(report: PreflightReport) -> str:
    """A report as it is checked in: source files without the folders of this machine."""
    text = report.to_json()
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r'"/[^"]*/(?:site-packages|lib/python3\.\d+)/', '"', text)


def table() -> str:
    """A row for each report that is there."""
    rows = [_row(name, kept(name)) for name in real() if (REPORTS / f"{name}.json").exists()]
    return "\n".join([_HEADER, "|---" * _HEADER[1:].count("|") + "|", *rows])


def _row(name: str, report: PreflightReport) -> str:
    memory, spent, throughput = report.memory, report.time, report.throughput
    assert throughput is not None
    work = throughput.workload
    count = f"{work.parameters / 1e9:.1f} B"
    if work.active_parameters < work.parameters:
        count += f", {work.active_parameters / 1e9:.1f} B active"
    mesh = " × ".join(f"{axis.name}={axis.size}" for axis in report.mesh)
    cells = [
        f"[`{name}.toml`](../configs/{name}.toml)",
        f"{report.topology.chips:,} of {report.topology.generation}",
        mesh,
        count,
        f"{work.tokens:,}",
        f"{memory.total_bytes / 2**30:.1f} of {memory.available_bytes / 2**30:.1f} GiB",
        f"{memory.spare_bytes / memory.available_bytes:.0%}",
        f"{spent.roofline_seconds:.2f} to {spent.seconds:.2f}",
        {"compute": "arithmetic", "hbm": "HBM"}.get(spent.bound, spent.bound.upper()),
        f"{throughput.tokens_per_second:,.0f}",
        f"{throughput.utilisation:.0%} to {_highest(report):.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


def _highest(report: PreflightReport) -> float:
    """The utilisation at the roofline."""
    assert report.throughput is not None
    return report.throughput.utilisation * report.time.seconds / report.time.roofline_seconds


def page() -> str:
    """The guide, with the table of what is checked in."""
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(_BEGIN)
    return f"{head}{_BEGIN}\n{table()}\n{_END}{rest.split(_END)[1]}"


def main(arguments: list[str]) -> int:
    """Writes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="settings files, by name; by default all")
    parser.add_argument("--table", action="store_true", help="write the table alone")
    asked = parser.parse_args(arguments)
    settings = (
        {}
        if asked.table
        else {n: s for n, s in real().items() if n in asked.names or not asked.names}
    )
    REPORTS.mkdir(exist_ok=True)
    for name, one in settings.items():
        began = time.perf_counter()
        report = make(name, one)
        (REPORTS / f"{name}.json").write_text(written(report), encoding="utf-8")
        digests = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
        digests[name] = digest(name)
        DIGESTS.write_text(json.dumps(dict(sorted(digests.items())), indent=1) + "\n")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{name}: {report.outcome}, {time.perf_counter() - began:.0f} s, {peak:.1f} GiB",
            flush=True,
        )
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
