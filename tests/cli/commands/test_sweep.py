"""``xlashard preflight --mesh auto`` and ``xlashard compile`` on the command line."""

import json
import pkgutil
from dataclasses import replace

import pytest

from xlashard import Compiled, P, PreflightReport
from xlashard.cli.commands import preflight, sweep
from xlashard.cli.main import main
from xlashard.predict.sweep.sweep_report import SweepReport
from xlashard.predict.sweep.sweep_results import SweepResult
from xlashard.tpu import topology
from xlashard.workers.job_pool import JobPool

PRODUCT = "tests.cli.commands.programs:product"
JITTED = "tests.cli.commands.programs:jitted_product"
AT = ("--topology", "v5e-4")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """The command line, with the meshes tried in this process."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)

    def here(_, jobs):
        for job in jobs:
            yield job, pkgutil.resolve_name(job.runner)(json.loads(json.dumps(job.request)))

    monkeypatch.setattr(JobPool, "run", here)

    def running(*words):
        code = main([*words])
        return code, *capsys.readouterr()

    return running


@pytest.mark.slow
def test_sweep_of_meshes_stores_its_reports(run, tmp_path):
    words = ("preflight", *AT, "--mesh", "data=auto,model=..2", PRODUCT, "--price", "v5e=1.2 USD")
    code, out, _ = run(*words, "--html", "best.html", "--compare", "--budget", "hbm=90%")
    assert code == 0
    assert "2 fit" in out and "Fastest first" in out and "USD" in out and "→" in out
    assert (tmp_path / "best.html").read_text().startswith("<!DOCTYPE html>")
    code, out, err = run(*words, "--json", "-", "--budget", "hbm=0%")
    report = SweepReport.from_json(out)
    assert code == 1 and "hbm=0%" in err
    assert [dict(r.mesh) for r in report.results if r.outcome == "fits"]
    assert report.folder == "sweeps/tests.cli.commands.programs.product"
    kept = sorted((tmp_path / report.folder / "reports").iterdir())
    assert [PreflightReport.from_json(f.read_text()).title for f in kept] == [PRODUCT] * 2
    code, out, _ = run(*words, "--all")
    assert code == 0 and "2 results from an earlier run" in out
    code, out, _ = run(*words, "--estimate", "--json", "-")
    estimate = SweepReport.from_json(out)
    assert code == 0 and estimate.is_estimate and not report.is_estimate
    assert estimate.reused_results == 0
    assert estimate.report(estimate.best).is_estimate
    code, out, _ = run(*words, "--estimate")
    assert "estimate  compiled without code" in out and "2 results from an earlier run" in out


WRONG = {
    "two programs": ((*AT, "--mesh", "auto", PRODUCT, PRODUCT), "takes one program"),
    "no chips": (("--mesh", "auto", PRODUCT), "for which chips"),
    "no axes": ((*AT, "--mesh", "auto", PRODUCT), "of a function write them"),
    "no slices": (
        (*AT, "--mesh", "data=auto", "--slices", "0", PRODUCT),
        "write --topology v5e-4 --slices 2\n",
    ),
    "no size": ((*AT, "--mesh", "data=auto,model", PRODUCT), "is not NAME=SIZE"),
    "never": ((*AT, "--mesh", "data=3,model=..2", PRODUCT), "no mesh of data=3"),
    "no function": (
        (*AT, "--mesh", "data=auto", "tests.cli.commands.programs:f"),
        "has no function",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_sweeps_are_refused(run, name):
    words, message = WRONG[name]
    code, _, err = run("preflight", *words)
    assert code == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_omitted_meshes_are_shown_by_the_option_all(run, monkeypatch):
    never = SweepResult("a", "v5e:2x2", 1, (("data", 4),), "impossible", "why")
    report = SweepReport(PRODUCT, "sweeps", (never,) * 40)
    monkeypatch.setattr(sweep, "run_sweep", lambda *_, **__: report)
    words = ("preflight", *AT, "--mesh", "data=auto", PRODUCT)
    code, out, err = run(*words)
    assert code == 1 and err == "it fits on none of these meshes\n"
    assert "and 32 more: --all\n" in out
    _, out, _ = run(*words, "--all")
    assert out.count("data=4") == 40 and "--all" not in out


def test_rates_option_reads_a_file_for_each_chip(run, monkeypatch, tmp_path):
    for chip in ("v5e", "v5p", "v6e"):
        (tmp_path / f"{chip}.toml").write_text(f"chip = '{chip}'\n[slowdown]\nhbm = 1.5\n")
    tried = []
    report = SweepReport(PRODUCT, "sweeps", ())
    monkeypatch.setattr(sweep, "run_sweep", lambda s, *_, **__: tried.append(s) or report)
    words = ("preflight", "-t", "v5e-4,v5p-8", PRODUCT, "--mesh", "data=4")
    run(*words[:-1], "data=auto", "--rates", "v5e.toml,v5p.toml")
    (found,) = tried
    assert {chip: dict(c.slowdown) for chip, c in found.calibrations.items()} == {
        "v5e": {"hbm": 1.5},
        "v5p": {"hbm": 1.5},
    }
    # Of several topologies without a sweep, each takes its own file; `auto` is for one.
    given = []
    monkeypatch.setattr(preflight, "preflight_target", lambda *words: given.append(words[-1]))
    monkeypatch.setattr(preflight, "_show", lambda *_: None)
    monkeypatch.setattr(preflight, "check_budget", lambda *_, **__: True)
    assert run(*words, "--rates", "v5p.toml")[0] == 0
    assert [None if c is None else c.chip for c in given] == [None, "v5p"]
    for kind in ((), ("--mesh", "data=auto"), ("-t", "v5e-4", "--shardings", "auto")):
        code, _, err = run(*words, *kind, "--rates", "v6e.toml")
        assert code == 2 and "rates='v6e.toml' is of v6e, but the topology has v5e" in err
    code, _, err = run("preflight", "a.json", "--rates", "v6e.toml")
    assert code == 2 and "a.json has its prediction" in err


def test_error_of_zero_slices_suggests_a_valid_count(run):
    code, _, err = run("compile", *AT, "--slices", "0", "--mesh", "data=4", PRODUCT)
    assert code == 2 and err.endswith("expected 1 or more: write --topology v5e-4 --slices 2\n")


@pytest.mark.slow
def test_compile_writes_the_program_to_a_file(run, tmp_path):
    code, out, err = run("compile", *AT, "--mesh", "data=-1", PRODUCT)
    assert (code, err) == (0, "")
    assert out.startswith("product.xlashard: ") and "for v5e:2x2 as data=4" in out
    mesh = topology("v5e-4").mesh({"data": 4})
    loaded = Compiled.deserialize((tmp_path / "product.xlashard").read_bytes(), devices=mesh)
    assert "dot" in loaded.as_text() or "convolution" in loaded.as_text()
    code, _, err = run("compile", *AT, "--mesh", "data=4", "tests.cli.commands.programs:too_large")
    assert code == 1 and "xlashard preflight --topology v5e-4" in err
    code, _, err = run("compile", PRODUCT)
    assert code == 2 and "for which chips" in err
    code, _, err = run("compile", "-t", "v5e-4,v5e-8", PRODUCT)
    assert code == 2 and "one file holds the program of one topology" in err
    code, _, err = run("compile", *AT, "--mesh", "data=4", PRODUCT, "-o", f"{tmp_path}/a.json/b")
    assert code == 0
    code, _, err = run(
        "compile", *AT, "--mesh", "data=4", PRODUCT, "-o", f"{tmp_path}/product.xlashard/b"
    )
    assert code == 2 and "can't be written" in err


@pytest.mark.slow
def test_jax_and_xlashard_functions_have_equal_files_and_sweeps(run, tmp_path):
    mesh, texts, facts = topology("v5e-4").mesh({"data": 4}), [], []
    for program in (PRODUCT, JITTED):
        code, out, err = run("compile", *AT, "--mesh", "data=4", program, "-o", "saved")
        assert (code, err) == (0, "") and "for v5e:2x2 as data=4" in out
        loaded = Compiled.deserialize((tmp_path / "saved").read_bytes(), devices=mesh)
        assert loaded.in_tree.num_leaves == 1 and loaded.output_shardings.spec == P("data")
        lines = (line.partition(", metadata")[0] for line in loaded.as_text().splitlines())
        texts.append([line.split(" = ")[-1] for line in lines if line.startswith("  ")])
        words = ("preflight", *AT, "--mesh", "data=4,model=auto", program, "--estimate")
        code, out, _ = run(*words, "--json", "-")
        (result,) = SweepReport.from_json(out).results
        assert code == 0 and (result.outcome, dict(result.mesh)) == (
            "fits",
            {"data": 4, "model": 1},
        )
        facts.append(replace(result.facts, compile_seconds=0.0))
    assert texts[0] == texts[1] and facts[0] == facts[1]
