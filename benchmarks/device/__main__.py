"""Measure this machine's GPU or TPUs, and compare them with what is predicted for them.

    python -m benchmarks.device gpu|tpu [--rehearse] [--folder FOLDER]
    python -m benchmarks.device gpu|tpu --add REPORT

It needs one NVIDIA GPU, or a TPU VM, and no network: ten minutes on a GPU, fifteen on TPUs. On
several hosts of a slice, it is started on each at the same time. Each result is kept in FOLDER as
soon as it is there: a later call goes on from these. FOLDER/report.json has everything, the rates
for `xlashard preflight --rates` too: it is the file to send. `--rehearse` runs small programs on
CPU devices, to test this benchmark. `--add` adds the programs of a report to the CSV beside this
file, and writes the errors into `docs/start/trust.md`.
"""

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._measure import environment, format_seconds, interleave
from benchmarks.device.programs import DeviceProgram
from benchmarks.device.targets import TARGETS, Target
from xlashard import PreflightReport
from xlashard.predict.preflight.report.measured import calibration_text, compare_with_profile
from xlashard.predict.preflight.report.profile_reader import read_profile

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent
PAGE = ROOT / "docs" / "start" / "trust.md"
NOT_RUN = "not run on hardware yet"

type Result = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of the benchmark.

    Attributes:
        folder: Folder of its results.
        target: The devices.
    """

    folder: Path
    target: Target

    @property
    def rehearsal(self) -> bool:
        """Return whether CPU devices stand for the measured ones."""
        return self.target.rehearsal

    @property
    def rounds(self) -> int:
        """Samples of each time."""
        return 1 if self.rehearsal else 9

    @property
    def calls(self) -> int:
        """Calls between two waits, which hide the host's part of a call."""
        return 2 if self.rehearsal else 20

    def read(self, part: str) -> Result | None:
        """Return the result of a part that an earlier run kept; None without one.

        A part that ended its process is not tried a third time.
        """
        if self._file(part).exists():
            return json.loads(self._file(part).read_text(encoding="utf-8"))
        begun = self._file(part).with_suffix(".begun")
        attempts = begun.read_text() if begun.exists() else ""
        begun.write_text(attempts + "x")
        return {"failed": "it ended its process"} if len(attempts) > 1 else None

    def keep(self, part: str, result: Result) -> None:
        """Keep the result of a part."""
        self._file(part).write_text(json.dumps(result, indent=1), encoding="utf-8")

    def _file(self, part: str) -> Path:
        return self.folder / f"{re.sub(r'\W+', '_', part)}.json"

    def do(self, part: str, work: Callable[[], Result]) -> Result:
        """Return the result of a part, from an earlier run if there is one."""
        result = self.read(part)
        if result is None:
            try:
                result = work()
            except Exception as error:  # a part that fails must not hide the others
                result = {"failed": _first_line(error)}
            self.keep(part, result)
        print(f"{part}: {_summary(result)}", flush=True)
        return result


def measure_program(run: Run, program: DeviceProgram, *, predicted: bool) -> Result:
    """Return the times and memory of a program, beside its prediction.

    Args:
        run: The run.
        program: The program.
        predicted: Whether to predict it, which takes a compilation.
    """
    arguments = run.target.arguments(program)
    compiled = jax.jit(program.function).lower(*arguments).compile()
    device = jax.local_devices()[0]
    peak_before = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)

    def call() -> None:
        jax.block_until_ready(compiled(*arguments))

    def call_often() -> None:
        for _ in range(run.calls - 1):
            compiled(*arguments)
        call()

    words = {"one call": call, "back to back": call_often}
    times = interleave(words, rounds=run.rounds, inner=1, warmup=1)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    sizes = compiled.memory_analysis()
    result: dict[str, Any] = {
        "kind": program.kind,
        "call_seconds": times["one call"].median,
        "seconds": times["back to back"].median / run.calls,
        # The peak of a process only rises; of a smaller program it is unknown.
        "peak_bytes": peak if peak > peak_before else None,
        "compiled_temporary_bytes": None if sizes is None else sizes.temp_size_in_bytes,
    }
    if predicted and run.target.model is not None:
        try:
            result |= _prediction(run.target.predict(program))
        except Exception as error:  # the measurement is worth as much without it
            result["failed"] = f"prediction: {_first_line(error)}"
    return result


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _prediction(report: PreflightReport) -> dict[str, Any]:
    time, rates = report.time, dict(report.topology.peak_flops)
    dtype = time.flops_by_dtype[0][0] if time.flops_by_dtype else ""
    return {
        "predicted_seconds": time.seconds,
        "below": time.below,
        "above": time.above,
        "bound": time.bound,
        "flops": time.flops,
        "hbm_bytes": time.hbm_bytes,
        "dtype": dtype,
        "peak_flops": rates.get(dtype) or rates.get(dtype.partition("_")[0]),
        "predicted_bytes": report.memory.total_bytes,
        "warnings": list(report.warnings),
    }


def measure_profile(run: Run, program: DeviceProgram) -> Result:
    """Return the profile of a program beside its predicted schedule."""
    arguments = run.target.arguments(program)
    compiled = jax.jit(program.function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(5):
                jax.block_until_ready(compiled(*arguments))
        if run.rehearsal or run.target.model is None:
            profile = read_profile(folder)
            return {"executions": profile.executions, "not run": "needs a device with figures"}
        step = compare_with_profile(run.target.predict(program), folder)
    rates = calibration_text(step, str(run.target.model))
    (run.folder / f"{run.target.model}.toml").write_text(rates)
    return {
        "rates": rates,
        "executions": step.profile.executions,
        "seconds": step.profile.seconds,
        "predicted_seconds": step.predicted_seconds,
        "slowdowns": step.slowdowns(),
        "unmatched": len(step.unmatched),
    }


def exceed_memory() -> Result:
    """Return the error of an allocation that exceeds the memory of a device."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if not limit:
        return {"not run": "needs an allocator with a limit"}
    try:
        jax.block_until_ready(jnp.zeros(int(limit) // 2, jnp.float32) + 1)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)[:500]}
    return {"failed": f"{limit} bytes were exceeded without an error"}


_QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_TIMEOUT = 600.0
"""Seconds of a command, which takes fewer than 60 on a machine without other work."""


def emulated_flag(target: Target) -> str:
    """Return the flag of XLA for the CPU devices of a rehearsal."""
    return f"--xla_force_host_platform_device_count={target.emulated}"


def run_command(run: Run, words: Sequence[str], folder: Path) -> Result:
    """Return the end of a command's output, and how long it took.

    Args:
        run: The run.
        words: Words after `python -m`.
        folder: Folder that it runs in.
    """
    variables = {"JAX_PLATFORMS": run.target.platform, "PYTHONPATH": str(ROOT)}
    if run.rehearsal:
        variables |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{_QUICK_COMPILE} {emulated_flag(run.target)}",
        }
    elif words[0] == "pytest":
        variables["XLASHARD_TEST_PLATFORM"] = run.target.platform
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    taken = time.perf_counter() - began
    if done.returncode:
        return {"failed": f"exit code {done.returncode}: {done.stderr[-500:]}"}
    return {"seconds": taken, "output": done.stdout[-2000:]}


_RULES = ("vocab", "embed", "heads", "kv_heads", "mlp")
_SMALL_JOB = ("training.steps=2", "model.layers=1", "model.length=16", "model.width=32")


def _main_job(run: Run, devices: int) -> list[str]:
    """Return the command of the main job, whose batch is sharded over all devices."""
    settings = [
        f"mesh={{data = {devices}}}",
        'sharding.rules.batch=["data"]',
        *(f"sharding.rules.{axis}=[]" for axis in _RULES),
        f"training.batch={devices * (2 if run.rehearsal else -(-16 // devices))}",
        "training.eval_every=1000",
        f"devices.emulate={devices if run.rehearsal else 0}",
        *(("model.mlp=32", *_SMALL_JOB) if run.rehearsal else ("training.steps=50",)),
    ]
    job = ["xlashard", "train", "--config", str(ROOT / "configs" / "tiny.toml")]
    return job + [word for setting in settings for word in ("--set", setting)]


def _tests(run: Run) -> list[str]:
    config = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider")
    folders = [str(ROOT / name) for name in run.target.tests]
    return ["pytest", "-q", "-n0", "-m", "not slow and not integration", *config, *folders]


_POD = "benchmarks.device.pod"
_ALONE = ("xlashard", "pod", "-n", "2", "--", sys.executable, "-m", _POD)
"""Two processes, in which a rehearsal joins hosts."""


def run_commands(run: Run) -> dict[str, Result]:
    """Return the results of the parts that are processes of their own.

    The main job, dispatch and transfers beside `jax.jit`; on TPUs also the tests for their number,
    and a pod of several hosts. This process must not have started its backend, which takes most of
    a GPU's memory, and a TPU whole.
    """
    rounds = ("--rounds", str(run.rounds))
    with tempfile.TemporaryDirectory() as name:
        do = partial(_do_command, run, Path(name))
        results: dict[str, Result] = {}
        hosts = devices = 1
        if run.target.name == "tpu":
            results["devices"] = do("devices", [_POD, "--count"])
            found = json.loads((results["devices"].get("output") or "{}").strip() or "{}")
            hosts, devices = found.get("hosts", 1), found.get("devices", 1)
            pod = _ALONE if run.rehearsal else [_POD]
            is_alone = hosts == 1 and not run.rehearsal
            results["pod"] = {"not run": "one host"} if is_alone else do("pod", pod)
        results["main job"] = do("main job", _main_job(run, devices))
        if hosts > 1:
            return results
        if run.target.tests:
            results["tests"] = do("tests", _tests(run))
        if not (run.rehearsal and run.target.tests):
            # The rehearsal of a GPU runs the same.
            results["dispatch"] = do("dispatch", ["benchmarks.dispatch", *rounds])
        if not run.rehearsal:
            words = ["benchmarks.transfer", "--mb", "64", *rounds]
            results["transfer"] = do("transfer", words)
        return results


def _do_command(run: Run, folder: Path, part: str, words: Sequence[str]) -> Result:
    return run.do(part, partial(run_command, run, words, folder))


def run_all(run: Run) -> dict[str, Any]:
    """Run every part that has no result yet, and return all results."""
    others, target = run_commands(run), run.target
    measured, profiles = {}, {}
    for name, program in target.programs.items():
        # Each prediction is a compilation for the devices, which takes seconds.
        predicted = not run.rehearsal or name in target.rehearsed
        work = partial(measure_program, run, program, predicted=predicted)
        measured[name] = run.do(name, work)
    for name in target.profiled[: 1 if run.rehearsal else None]:
        part = f"profile of {name}"
        profiles[part] = run.do(part, partial(measure_profile, run, target.programs[name]))
    others["out of memory"] = run.do("out of memory", exceed_memory)
    return {
        "target": target.name,
        "device": f"{len(target.devices)} × {target.devices[0].device_kind}",
        "environment": environment(),
        "rehearsal": run.rehearsal,
        "programs": measured,
        "profiles": profiles,
        "others": others,
    }


def _summary(result: Result) -> str:
    for word in ("failed", "not run"):
        if word in result:
            return f"{word}: {result[word]}"
    text = format_seconds(result["seconds"]) if "seconds" in result else "done"
    if "predicted_seconds" in result:
        text += f", predicted {format_seconds(result['predicted_seconds'])}"
    return text


COLUMNS = (
    *("device", "kind", "program", "call_seconds", "seconds", "predicted_seconds", "below"),
    *("above", "bound", "flops", "hbm_bytes", "dtype", "peak_flops", "peak_bytes"),
    *("predicted_bytes", "compiled_temporary_bytes", "failed"),
)


def list_rows(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the programs of a report as rows of the CSV."""
    device = report["device"].removeprefix("1 × ")
    rows = [{"device": device, "program": n, **each} for n, each in report["programs"].items()]
    return [{c: "" if row.get(c) is None else str(row[c]) for c in COLUMNS} for row in rows]


def read_csv(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV; none without the file."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def write_csv(file: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write rows."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def add_report(report: Mapping[str, Any], folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Add the programs of a report to the CSV of its target, and write the page.

    Rows of the same device are replaced.

    Args:
        report: The report of a run on hardware.
        folder: Folder of the CSV.
        page: The page.
    """
    file, rows = folder / f"{report['target']}.csv", list_rows(report)
    kept = [row for row in read_csv(file) if row["device"] != rows[0]["device"]]
    write_csv(file, [*kept, *rows])
    write_page(report["target"], describe_results(report["target"], folder), page)


def describe_errors(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each kind of program: errors of the predictions, and what the bars hold."""
    by_kind: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for row in rows:
        if row["predicted_seconds"] and row["seconds"]:
            measured = float(row["seconds"])
            error = float(row["predicted_seconds"]) / measured - 1
            low, high = float(row["below"] or -1), float(row["above"] or "inf")
            held = 1 + low <= 1 / (1 + error) <= 1 + high
            by_kind[row["kind"]].append((error, held))
    return [
        f"{kind}: {len(found)} programs, median error "
        f"{statistics.median(abs(error) for error, _ in found):.0%}, the bar holds "
        f"{sum(held for _, held in found)}"
        for kind, found in by_kind.items()
    ]


def describe_results(target: str, folder: Path = RESULTS) -> str:
    """Return the page's text on the measurements of a target; without its CSV, that of none.

    Args:
        target: `gpu` or `tpu`.
        folder: Folder of the CSV.
    """
    rows = read_csv(folder / f"{target}.csv")
    if not rows:
        title, command = TARGETS[target].title, f"`make bench-{target}`"
        return f"Predictions for {title}: **{NOT_RUN}**. {command} measures them."
    parts = []
    for device in dict.fromkeys(row["device"] for row in rows):
        lines = describe_errors([row for row in rows if row["device"] == device])
        listed = "\n".join(f"- {line}" for line in lines)
        parts.append(f"Predictions beside measurements on {device}:\n\n{listed}")
    return "\n\n".join(parts)


def write_page(target: str, text: str, page: Path = PAGE) -> None:
    """Write the text on the measurements of a target between its marks of the page."""
    begin, end = f"<!-- {target} -->", f"<!-- /{target} -->"
    old = page.read_text(encoding="utf-8")
    head, tail = old.partition(begin)[0], old.partition(end)[2]
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


def measure(run: Run) -> int:
    """Run every part, write the results, and return 1 if a part failed."""
    folder, report = run.folder, run_all(run)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    rows = list_rows(report)
    write_csv(folder / "results.csv", rows)
    if not run.rehearsal:
        print("\n".join(describe_errors(rows)))
    parts = {**report["programs"], **report["profiles"], **report["others"]}
    failed = [name for name, result in parts.items() if "failed" in result]
    print(f"send {folder / 'report.json'}" + f"; failed: {', '.join(failed)}" * bool(failed))
    if run.rehearsal:
        print(f"a rehearsal: {run.target.title} were {NOT_RUN.removesuffix(' on hardware yet')}")
    return 1 if failed else 0


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=TARGETS, help="devices to measure")
    parser.add_argument("--rehearse", action="store_true", help="run small programs anywhere")
    parser.add_argument("--folder", type=Path, help="folder of the results")
    parser.add_argument("--add", type=Path, metavar="REPORT", help="add a report to CSV and page")
    arguments = parser.parse_args(words)
    if arguments.add:
        report = json.loads(arguments.add.read_text(encoding="utf-8"))
        if report["rehearsal"] or report["target"] != arguments.target:
            parser.error(f"{arguments.add} is of a rehearsal, or not of {arguments.target}")
        add_report(report)
        return 0
    target = TARGETS[arguments.target](arguments.rehearse)
    if target.rehearsal:
        os.environ.setdefault("XLA_FLAGS", emulated_flag(target))
    if not (arguments.rehearse or target.is_here()):
        print(f"no {target.title} here: {NOT_RUN}; --rehearse runs small programs")
        return 2
    folder = arguments.folder or ROOT / "bench-results" / target.name
    folder.mkdir(parents=True, exist_ok=True)
    return measure(Run(folder, target))


if __name__ == "__main__":
    raise SystemExit(main())
