"""Measure this machine's GPU, and compare it with what is predicted for it.

    python -m benchmarks.gpu [--rehearse] [--folder FOLDER] [--page]

It needs one NVIDIA GPU and no network, and less than ten minutes. Each result is kept in FOLDER as
soon as it is there: a later call goes on from these. FOLDER/results.csv has the programs,
FOLDER/MODEL.toml the rates for `xlashard preflight --rates`, FOLDER/report.json everything: send
that folder. `--rehearse` runs small programs on any device, to test this benchmark. `--page` copies
the CSV beside this file, and writes its errors into `docs/start/trust.md`.
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
from benchmarks.gpu.programs import PROFILED, GpuProgram, list_programs
from xlashard import PreflightReport, preflight
from xlashard.gpu import GPU_MODELS
from xlashard.predict.preflight.report.measured import calibration_text, compare_with_profile
from xlashard.predict.preflight.report.profile_reader import read_profile

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.csv")
PAGE = ROOT / "docs" / "start" / "trust.md"
_MARKS = ("<!-- gpu -->", "<!-- /gpu -->")
NOT_RUN = "not run on hardware yet"

type Result = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of the benchmark.

    Attributes:
        folder: Folder of its results.
        rehearsal: Whether programs are small, and those that need a GPU are left out.
    """

    folder: Path
    rehearsal: bool

    @property
    def model(self) -> str | None:
        """Model of GPU that is predicted; None for one without figures."""
        return "h100" if self.rehearsal else find_model(jax.devices()[0].device_kind)

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
                result = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            self.keep(part, result)
        print(f"{part}: {_summary(result)}", flush=True)
        return result


def find_model(device_kind: str) -> str | None:
    """Return the model of GPU with the name that a driver reports; None for one without figures."""
    words = re.split(r"[ -]", device_kind)
    for model in GPU_MODELS:
        if all(a == b for a, b in zip(words, re.split(r"[ -]", model.device_kind), strict=False)):
            return model.name
    return None


def measure_program(run: Run, program: GpuProgram, *, predicted: bool) -> Result:
    """Return the times and memory of a program, beside its prediction.

    Args:
        run: The run.
        program: The program.
        predicted: Whether to predict it, which takes a compilation.
    """
    arguments = program.make_arguments(tiny=run.rehearsal)
    compiled = jax.jit(program.function).lower(*arguments).compile()
    device = jax.devices()[0]
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
    if predicted and run.model is not None:
        result |= _prediction(predict(run, program))
    return result


def predict(run: Run, program: GpuProgram) -> PreflightReport:
    """Return the prediction of a program."""
    types = program.types(tiny=run.rehearsal)
    return preflight(jax.jit(program.function), *types, topology=f"{run.model}-1")


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


def measure_profile(run: Run, program: GpuProgram) -> Result:
    """Return the profile of a program beside its predicted schedule."""
    arguments = program.make_arguments(tiny=run.rehearsal)
    compiled = jax.jit(program.function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(5):
                jax.block_until_ready(compiled(*arguments))
        if run.rehearsal or run.model is None:
            profile = read_profile(folder)
            return {"executions": profile.executions, "not run": "needs a GPU with figures"}
        step = compare_with_profile(predict(run, program), folder)
    (run.folder / f"{run.model}.toml").write_text(calibration_text(step, str(run.model)))
    return {
        "executions": step.profile.executions,
        "seconds": step.profile.seconds,
        "predicted_seconds": step.predicted_seconds,
        "slowdowns": step.slowdowns(),
        "unmatched": len(step.unmatched),
    }


def exceed_memory() -> Result:
    """Return the error of an allocation that exceeds the memory of the GPU."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if not limit:
        return {"not run": "needs a GPU, whose allocator has a limit"}
    try:
        jax.block_until_ready(jnp.zeros(int(limit) // 2, jnp.float32) + 1)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)[:500]}
    return {"failed": f"{limit} bytes were exceeded without an error"}


_QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_TIMEOUT = 600.0
"""Seconds of a command, which takes fewer than 60 on a machine without other work."""


def run_command(run: Run, words: Sequence[str], folder: Path) -> Result:
    """Return the end of a command's output, and how long it took.

    Args:
        run: The run.
        words: Words after `python -m`.
        folder: Folder that it runs in.
    """
    variables = {"JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)}
    if run.rehearsal:
        variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _QUICK_COMPILE}
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


_SHARDED = ("batch", "vocab", "embed", "heads", "kv_heads", "mlp")
_MAIN_JOB = (
    *("mesh={data = 1}", "training.eval_every=1000", "devices.emulate=0"),
    *(f"sharding.rules.{axis}=[]" for axis in _SHARDED),
)
"""Settings of the main job on one device."""
_SMALL_JOB = (
    *("training.steps=2", "training.batch=2", "devices.emulate=1"),
    *("model.layers=1", "model.length=16", "model.width=32", "model.mlp=32"),
)


def run_commands(run: Run) -> dict[str, Result]:
    """Return the results of the main job, and of dispatch and transfers beside `jax.jit`.

    They are processes of their own. This one must not have started its backend, which takes most of
    a GPU's memory.
    """
    settings = [*_MAIN_JOB, *(_SMALL_JOB if run.rehearsal else ("training.steps=50",))]
    job = ["xlashard", "train", "--config", str(ROOT / "configs" / "tiny.toml")]
    job += [word for setting in settings for word in ("--set", setting)]
    rounds = ("--rounds", str(run.rounds))
    commands = {"main job": job, "dispatch": ["benchmarks.dispatch", *rounds]}
    if not run.rehearsal:
        commands["transfer"] = ["benchmarks.transfer", "--mb", "64", *rounds]
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: run.do(name, partial(run_command, run, words, Path(folder)))
            for name, words in commands.items()
        }


_PREDICTED = ("product f32", "sort")
"""Programs that a rehearsal predicts."""


def run_all(run: Run) -> dict[str, Any]:
    """Run every part that has no result yet, and return all results."""
    others = dict(run_commands(run))
    programs = {p.name: p for p in list_programs() if not (run.rehearsal and p.needs_gpu)}
    measured, profiles = {}, {}
    for name, program in programs.items():
        # Each prediction is a compilation for GPUs, which takes a second.
        predicted = not run.rehearsal or name in _PREDICTED
        work = partial(measure_program, run, program, predicted=predicted)
        measured[name] = run.do(name, work)
    for name in PROFILED[: 1 if run.rehearsal else None]:
        part = f"profile of {name}"
        profiles[part] = run.do(part, partial(measure_profile, run, programs[name]))
    others["out of memory"] = run.do("out of memory", exceed_memory)
    return {
        "device": jax.devices()[0].device_kind,
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


def write_csv(file: Path, report: Mapping[str, Any]) -> None:
    """Write the programs of a report, one a row."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for name, result in report["programs"].items():
            writer.writerow({"device": report["device"], "program": name, **result})


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


def describe_results(file: Path = RESULTS) -> str:
    """Return the page's text on the measurements of a CSV; without the file, that of none."""
    if not file.exists():
        return f"Predictions for GPUs: **{NOT_RUN}**. `make bench-gpu` measures a GPU."
    with file.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    lines = [f"- {line}" for line in describe_errors(rows)]
    return f"Predictions beside measurements on one {rows[0]['device']}:\n\n" + "\n".join(lines)


def write_page(text: str, page: Path = PAGE) -> None:
    """Write the text on the measurements between the marks of the page."""
    begin, end = _MARKS
    old = page.read_text(encoding="utf-8")
    head, tail = old.partition(begin)[0], old.partition(end)[2]
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="run small programs anywhere")
    parser.add_argument("--folder", type=Path, help="folder of the results")
    parser.add_argument("--page", action="store_true", help="write the CSV and the page")
    arguments = parser.parse_args(words)
    if not (arguments.rehearse or Path("/dev/nvidiactl").exists()):
        print(f"no NVIDIA GPU here: {NOT_RUN}; --rehearse runs small programs")
        return 2
    folder = arguments.folder or ROOT / "bench-results" / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    report = run_all(Run(folder, arguments.rehearse))
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    write_csv(folder / "results.csv", report)
    with (folder / "results.csv").open(encoding="utf-8", newline="") as stream:
        print("\n".join(describe_errors(list(csv.DictReader(stream)))))
    if arguments.page and not arguments.rehearse:
        RESULTS.write_bytes((folder / "results.csv").read_bytes())
        write_page(describe_results())
    parts = {**report["programs"], **report["profiles"], **report["others"]}
    failed = [name for name, result in parts.items() if "failed" in result]
    print(f"results: {folder}" + f"; failed: {', '.join(failed)}" * bool(failed))
    if arguments.rehearse:
        print(f"a rehearsal: the GPU was {NOT_RUN.removesuffix(' on hardware yet')}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
