"""Sweeps over meshes, in worker processes."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.predict.sweep import programs
from xlashard.errors import ArgumentError, TopologyError
from xlashard.predict.costs.kernel_costs import KernelCost, read_kernel_costs
from xlashard.predict.sweep import evaluate
from xlashard.predict.sweep.sweep_report import SweepProgress
from xlashard.predict.sweep.sweep_run import preflight_sweep
from xlashard.tpu import topology
from xlashard.workers.job_pool import JobPool

GRAM = "tests.predict.sweep.programs:gram"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def swept(folder):
    """Three meshes of four chips, and an impossible one."""
    return preflight_sweep(
        programs.gram,
        topologies=["v5e-4", "v5litepod-4", topology("v5e-8")],
        mesh={"data": "..4", "model": "auto"},
        folder=folder,
        workers=1,
    )


@pytest.mark.slow
def test_every_mesh_is_evaluated_once(swept):
    outcomes = {(r.topology, dict(r.mesh)["data"]): r.outcome for r in swept.results}
    assert outcomes == {
        **{("v5e:2x2", data): "fits" for data in (1, 2, 4)},
        **{("v5e:2x4", data): "fits" for data in (2, 4)},
        ("v5e:2x4", 1): "impossible",
    }
    assert swept.title == GRAM and swept.reused_results == 0
    (impossible,) = [r for r in swept.results if r.outcome == "impossible"]
    assert "does not divide into 8 tiles ('model'=8)" in impossible.reason
    times = [r.facts.seconds for r in swept.results if r.outcome == "fits"]
    assert times == sorted(times) and times[0] > 0


@pytest.mark.slow
def test_full_report_of_the_best_result_is_stored(swept):
    report = swept.report(swept.best)
    assert report.title == GRAM and report.fits
    assert report.topology.name == swept.best.topology
    assert {a.name: a.size for a in report.mesh} == dict(swept.best.mesh)
    assert report.time.seconds == swept.best.facts.seconds
    assert swept.best.report.startswith(f"reports/{swept.best.topology.replace(':', '-')}.data")


@pytest.mark.slow
def test_second_sweep_reuses_earlier_results(swept, folder, monkeypatch):
    asked = []

    def ask_only(_, jobs):
        asked.extend(jobs)
        yield from ()

    monkeypatch.setattr(JobPool, "run", ask_only)

    def again(target=GRAM, **other):
        asked.clear()
        words = {"topologies": ["v5e-8", "v5e-4"], "mesh": {"data": "..4", "model": "auto"}}
        return preflight_sweep(target, folder=folder, workers=1, **(words | other))

    known = again()
    assert asked == [] and known.reused_results == 6 and known.results == swept.results
    again(again=True)
    assert len(asked) == 6
    again(compiler_options={"xla_tpu_scoped_vmem_limit_kib": "1024"})
    assert len(asked) == 6
    again(mesh={"data": "auto", "model": "auto"})
    assert [dict(job.request["mesh"]) for job in asked] == [{"data": 8, "model": 1}]
    again(topologies="v5e-4", slices=2)
    assert len(asked) == 3
    again("tests.predict.sweep.programs:huge")
    assert len(asked) == 6
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=1")
    again()
    assert len(asked) == 6


@pytest.mark.slow
def test_failed_results_are_retried(folder, monkeypatch):
    answers = iter(
        [{"outcome": "failed", "reason": "lost"}, {"outcome": "impossible", "reason": ""}]
    )
    monkeypatch.setattr(JobPool, "run", lambda _, jobs: ((job, next(answers)) for job in jobs))

    def sweep():
        return preflight_sweep(
            GRAM, topologies="v5e-4", mesh={"data": 4}, folder=folder / "lost", workers=1
        )

    assert [r.outcome for r in sweep().results] == ["failed"]
    assert [r.outcome for r in sweep().results] == ["impossible"]
    assert sweep().reused_results == 1


@pytest.mark.slow
def test_arguments_that_do_not_fit_are_not_compiled(folder):
    found = preflight_sweep(
        "tests.predict.sweep.programs:huge",
        topologies="v5e-16",
        mesh={"data": 4, "model": 4},
        folder=folder / "huge",
        workers=1,
    )
    (result,) = found.results
    assert (result.outcome, result.facts, found.best) == ("out of memory", None, None)
    assert "its arguments alone take 64.0 GiB of the 15.7" in result.reason


@pytest.mark.slow
def test_sweep_with_auto_shardings_chooses_a_layout(folder):
    def best(**words):
        place = {"topologies": "v5e-4", "mesh": {"data": 4}, "folder": folder / "layouts"}
        found = preflight_sweep(programs.unplaced_step, **place, workers=1, estimate=True, **words)
        assert found.reused_results == 0
        return found.report(found.best)

    plain, chosen = best(), best(shardings="auto")
    assert [value.spec for value in plain.inputs] == ["P()", "P()"]
    assert any("'data'" in value.spec for value in chosen.inputs)
    assert chosen.time.seconds < 0.7 * plain.time.seconds


def test_kernel_costs_reach_the_worker_processes(tmp_path, monkeypatch):
    asked = []

    def ask_only(_, jobs):
        asked.extend(jobs)
        yield from ()

    monkeypatch.setattr(JobPool, "run", ask_only)

    def keys(**how):
        asked.clear()
        place = {"topologies": "v5e-4", "mesh": {"data": 4}, "folder": tmp_path, "workers": 1}
        preflight_sweep(GRAM, **place, **how)
        return [job.key for job in asked]

    without = keys()
    assert keys(kernel_costs={"fwd": 1.2e-3, "bwd": {"flops": 4.6e9}}) != without
    request = evaluate.SweepRequest.from_json(json.loads(json.dumps(asked[0].request)))
    costs = read_kernel_costs(request.kernel_costs)
    assert costs == {"fwd": KernelCost(seconds=1.2e-3), "bwd": KernelCost(flops=4.6e9)}


@pytest.mark.slow
def test_measured_rates_reach_the_worker_processes(tmp_path, monkeypatch):
    asked = []

    def ask_only(_, jobs):
        asked.extend(jobs)
        yield from ()

    monkeypatch.setattr(JobPool, "run", ask_only)
    place = {"topologies": ["v5e-4", "v6e-4"], "workers": 1, "estimate": True}
    place["mesh"] = {"data": 2, "model": 2}
    preflight_sweep(GRAM, **place, folder=tmp_path)
    slow = {"chip": "v5e", "slowdown": dict.fromkeys(("matrix", "hbm", "ici"), 3.0)}
    preflight_sweep(GRAM, **place, folder=tmp_path, rates=slow)
    usual, other, measured, unmeasured = asked
    assert (usual.key != measured.key) and (other.key == unmeasured.key)
    monkeypatch.undo()
    found = [evaluate.run_target(json.loads(json.dumps(j.request))) for j in (usual, measured)]
    seconds = [each["facts"]["seconds"] for each in found]
    assert 1.5 < seconds[1] / seconds[0] < 3


def test_the_cache_key_depends_on_all_inputs(tmp_path, monkeypatch):
    (tmp_path / "swept_helper.py").write_text("SIZE = 1\n")
    (tmp_path / "swept_target.py").write_text("import jax\nfrom swept_helper import SIZE\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("swept_target")
    sources = evaluate.source_files("swept_target")
    assert [file.name for file in sources] == ["swept_helper.py", "swept_target.py"]
    key = evaluate.cache_key({"mesh": [["data", 4]]}, sources)
    assert key == evaluate.cache_key({"mesh": [["data", 4]]}, sources)
    assert key != evaluate.cache_key({"mesh": [["data", 2]]}, sources)
    (tmp_path / "swept_helper.py").write_text("SIZE = 2\n")
    assert key != evaluate.cache_key({"mesh": [["data", 4]]}, sources)
    for name in ("swept_target", "swept_helper"):
        del sys.modules[name]
    assert programs.__file__ in map(str, evaluate.source_files(programs.__name__))


WRONG = {
    "no function": ({"target": "nowhere:f"}, ArgumentError, "nowhere"),
    "a lambda": ({"target": lambda mesh: None}, ArgumentError, "top level of a module"),
    "no topology": ({"topologies": []}, ArgumentError, "topologies is empty"),
    "unknown topology": ({"topologies": "v9-4"}, TopologyError, "v9-4"),
    "no axes": ({"mesh": {}}, ArgumentError, "mesh={} is invalid"),
    "never": ({"mesh": {"data": 3}}, ArgumentError, "no mesh of data=3 has 4 devices"),
    "rates": (
        {"rates": {"chip": "v6e", "slowdown": {}}},
        ArgumentError,
        "is of v6e, but the topology has v5e",
    ),
    "price": ({"price": "cheap"}, ArgumentError, "price='cheap' is invalid"),
    **{
        f"{name} of another type": ({name: b"1"}, ArgumentError, f"^{name} is of type bytes")
        for name in ("folder", "workers", "timeout", "workload", "compiler_options", "rates")
    },
    "topologies of another type": ({"topologies": 8}, ArgumentError, "^topology is of type int"),
    "shardings of another type": ({"shardings": {}}, ArgumentError, "shardings={} is invalid"),
}


@pytest.mark.parametrize(("words", "error", "text"), WRONG.values(), ids=WRONG)
def test_invalid_sweeps_fail_before_compilation(words, error, text, tmp_path):
    right = {"target": GRAM, "topologies": "v5e-4", "mesh": {"data": "auto"}, "folder": tmp_path}
    words = right | words
    with pytest.raises(error, match=text):
        preflight_sweep(words.pop("target"), **words)
    assert list(tmp_path.iterdir()) == []


def test_a_topology_without_a_mesh_is_skipped(tmp_path, monkeypatch):
    answer = {"outcome": "impossible", "reason": "not divisible"}
    monkeypatch.setattr(JobPool, "run", lambda _, jobs: ((job, answer) for job in jobs))
    words = {"topologies": ["v5e-4", "v5e-8"], "mesh": {"data": "..4"}, "folder": tmp_path}
    report = preflight_sweep(GRAM, **words)
    assert {r.topology for r in report.results} == {"v5e:2x2"}
    (left_out,) = report.skipped_topologies
    assert left_out.where == "v5e:2x4"
    assert left_out.reason.startswith("no mesh of data=..4 has 8 devices: ")


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False], ids=["a bar", "lines"])
def test_progress_is_shown(swept, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with SweepProgress(console=console) as bar:
        bar.start(3, swept.results[:2])
        bar.update(swept.results[-1])
    text = console.file.getvalue()
    assert "3/3" in text
    if terminal:
        assert f"best {swept.best.facts.seconds * 1e6:.1f} µs" in text
    else:
        assert "3/3 v5e:2x4 model=8: impossible: dimension 1" in text


def test_progress_can_be_disabled(swept):
    console = Console(file=io.StringIO(), force_terminal=True)
    with SweepProgress(shown=False, console=console) as bar:
        bar.start(1, ())
        bar.update(swept.results[0])
    assert console.file.getvalue() == ""


def test_results_are_stored_as_json_lines(swept):
    lines = Path(swept.folder, "results.jsonl").read_text().splitlines()
    assert len(lines) == 6
    assert {json.loads(line)["outcome"] for line in lines} == {"fits", "impossible"}
