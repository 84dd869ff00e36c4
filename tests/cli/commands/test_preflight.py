"""``xlashard preflight`` on the command line."""

import gzip
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fork_server import python_command
from tests.predict.preflight.examples import FITTING, HUGE, OUT_OF_MEMORY, SMALL
from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard import PreflightReport
from xlashard._jax.runtime import topologies
from xlashard.analysis.explain.script_report import ScriptComparison
from xlashard.cli.commands import preflight as commands
from xlashard.cli.commands.result_files import check_writable
from xlashard.cli.commands.targets import topologies_for
from xlashard.cli.main import main
from xlashard.predict.preflight.report.comparison import PreflightReports
from xlashard.predict.preflight.report.measured import MeasuredStep
from xlashard.predict.preflight.report.profile_reader import Profile
from xlashard.tpu import topology

ROOT = Path(__file__).parents[3]
PRODUCT = "tests.cli.commands.programs:product"
# Topologies are made once: no other test uses these chips.
NEVER_MADE = ("-t", "v6e-4", "--slices", "7", "--mesh", "data=28")
TINY = ("--set", "model.layers=1", "training.batch=8")

type Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "160")

    def running(*words: str) -> tuple[int, str, str]:
        code = main(["preflight", *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return running


@pytest.mark.slow
def test_preflight_of_a_function_prints_and_stores_the_report(run: Run, tmp_path: Path) -> None:
    kept, shown = tmp_path / "deep" / "a.json", tmp_path / "a.html"
    code, out, err = run(
        *("--topology", "v5e-8", "--mesh", "data=-1", PRODUCT, "--price", "3.6 USD"),
        *("--json", str(kept), "--html", str(shown), "--budget", "hbm=90%", "dcn_bytes=0"),
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"<lambda>  {PRODUCT} · v5e:2x4 (8 chips) · data=8 · ")
    assert "USD a step" in out and "tokens/s" in out
    report = PreflightReport.from_json(kept.read_text(encoding="utf-8"))
    assert report.fits and report.title == PRODUCT
    assert shown.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")

    # The same report again, from its file.
    trace = tmp_path / "step.json.gz"
    words = ("--all", "--budget", "all_gather_bytes=1kB", "mfu=99%", "--trace", str(trace))
    code, out, _ = run(str(kept), *words)
    assert code == 1 and out.startswith("<lambda>  ")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last == pytest.approx(report.time.seconds * 1e6, rel=0.01)


@pytest.mark.slow
def test_error_of_an_exceeded_budget_names_the_source_lines(run: Run) -> None:
    words = ("-t", "v5e-8", "--mesh", "data=8", PRODUCT, "--json", "-")
    code, out, err = run(*words, "--budget", "hbm=90%", "all_gather_bytes=100kB")
    assert code == 1
    assert PreflightReport.from_json(out).topology.devices == 8
    first, *lines = err.splitlines()
    assert first.startswith("all_gather_bytes=100kB is not met: the all-gather traffic of a device")
    assert len(lines) == 1
    assert "all-gather along data" in lines[0] and "programs.py:12" in lines[0]


@pytest.mark.slow
def test_estimate_checks_the_budget_and_has_no_code_bytes(run: Run) -> None:
    words = ("-t", "v5e-8", "--mesh", "data=8", PRODUCT, "--estimate")
    code, out, err = run(*words, "--budget", "all_gather_bytes=100kB")
    assert code == 1 and "estimate  compiled without code" in out
    assert err.startswith("estimate: all_gather_bytes=100kB is not met: the all-gather traffic")
    _, out, _ = run(*words, "--json", "-", "--kernel-cost", "fwd=1.2ms")
    report = PreflightReport.from_json(out)
    assert report.is_estimate and report.memory.code_bytes == 0
    assert report.time.unmatched_kernel_costs == ("fwd",)


def test_rates_are_written_beside_json(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Profile("p", "step", 2, 1.0, {})
    ratios = {"hbm": ((2.0, 1.0),)}
    step = MeasuredStep(profile, 1.0, "", (), (), SMALL.topology, ratios)
    monkeypatch.setattr(commands, "compare_with_profile", lambda report, path: step)
    report, rates = tmp_path / "a.json", tmp_path / "rates.toml"
    report.write_text(SMALL.to_json())
    words = ("--measured", "p", "--calibrate", str(rates), "--json", "-")
    code, out, _ = run(str(report), *words)
    assert code == 0 and PreflightReport.from_json(out) == SMALL
    assert "hbm = 2.000" in rates.read_text()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_results_of_a_script_are_written_before_errors_of_its_profile(
    run: Run, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    made = PreflightReports((SMALL,) * count)
    monkeypatch.setattr(commands, "_script_reports", lambda arguments: (made, False))
    words = ("-t", "v5e-4", "--json", "-", "--measured", "/nowhere", "--", "python", "train.py")
    code, out, err = run(*words)
    assert code == 2
    if count == 1:
        assert PreflightReport.from_json(out) == SMALL and "/nowhere can't be read" in err
    else:
        assert PreflightReports.from_json(out) == made
        assert f"--measured /nowhere is of one report, and here are {count}" in err


def test_program_that_does_not_fit_exits_with_1(run: Run) -> None:
    program = "tests.cli.commands.programs:too_large"
    code, out, err = run("-t", "v5e-4", "--mesh", "data=4", program)
    assert (code, err) == (1, "it does not fit\n")
    assert "too large  needs" in out


@pytest.mark.parametrize("name", ["by_name", "lowered"])
def test_every_return_form_of_a_target_is_accepted(run: Run, name: str) -> None:
    mesh = ("--mesh", "data=4") if name == "lowered" else ()
    code, out, err = run("-t", "v5e-4", *mesh, f"tests.cli.commands.programs:{name}", "--json", "-")
    assert (code, err) == (0, "")
    report = PreflightReport.from_json(out)
    assert [axis.size for axis in report.mesh] == [4]


@pytest.mark.slow
def test_preflight_of_a_settings_file_reports_the_training_step(run: Run) -> None:
    code, out, err = run(*AT, "configs/tiny_dp.toml", *TINY, "--estimate", "--json", "-")
    assert (code, err) == (0, "")
    report = PreflightReport.from_json(out)
    assert (report.name, report.title) == ("train_step", "configs/tiny_dp.toml")
    assert [(axis.name, axis.size) for axis in report.mesh] == [("data", 4)]
    assert report.throughput is not None
    assert report.throughput.workload.tokens == 8 * 128
    assert any(t.origin == "gradient" for t in report.traffic)
    assert all(d.is_reused for d in report.donations if d.donated)


def test_topologies_default_to_those_of_the_settings() -> None:
    config = "configs/70b_v5p_512.toml"
    assert topologies_for(config, "", None, ()) == [topology("v5p-512")]
    assert topologies_for(config, "", 2, ()) == [topology("v5p-512", 2)]
    assert topologies_for(config, "v5p-1024, v6e-256", None, ()) == [
        topology("v5p-1024"),
        topology("v6e-256"),
    ]
    words = ["devices.topology=v5e-256", "devices.slices=2"]
    assert topologies_for(config, "", None, words) == [topology("v5e-256", 2)]


@needs_plugin
@pytest.mark.slow
def test_preflight_of_settings_uses_the_kernels_of_each_chip(run: Run, tmp_path: Path) -> None:
    # The command of docs/gpu/preflight.md, for a model of two small layers.
    sizes = "layers=2 width=512 heads=4 kv_heads=2 mlp=512 vocab=512 vocab_parts=1 length=1024"
    code, out, err = run(
        *("configs/8b_v6e_64.toml", "--mesh", "auto", "--topology", "v5p-8,h100-4"),
        *("--price", "v5p=4.2,h100=3", "--estimate", "--folder", str(tmp_path)),
        *("--set", "training.batch=4", *(f"model.{size}" for size in sizes.split())),
    )
    assert code == 0, err
    assert "Best mesh of each topology  the cheapest first" in out
    reports = {
        report.topology.name: report
        for path in (tmp_path / "reports").rglob("*.json")
        for report in [PreflightReport.from_json(path.read_text(encoding="utf-8"))]
    }
    assert set(reports) == {"v5p:2x2x1", "h100:1x4"}
    for name, kernel in (("v5p:2x2x1", "splash_mha"), ("h100:1x4", "cudnn_attention")):
        time = reports[name].time
        # Forward and backward in each of two layers.
        assert sum(runs for found, runs in time.kernels if found.startswith(kernel)) >= 4
        assert not time.unknown_kernels


@pytest.mark.slow
def test_function_on_two_topologies_has_two_reports(run: Run, tmp_path: Path) -> None:
    both = tmp_path / "both.json"
    words = (PRODUCT, "--mesh", "data=-1", "--json", str(both))
    code, out, err = run("-t", "v5e-4,v5e-8", *words)
    assert (code, err) == (0, "")
    assert "2 reports" in out
    small, large = PreflightReports.from_json(both.read_text()).reports
    assert [r.topology.name for r in (small, large)] == ["v5e:2x2", "v5e:2x4"]
    assert small.time.flops == pytest.approx(2 * large.time.flops, rel=0.1)

    paths = [str(tmp_path / f"{number}.json") for number in range(2)]
    for path, report in zip(paths, (small, large), strict=True):
        Path(path).write_text(report.to_json(), encoding="utf-8")
    assert run(*paths, "--json", str(both))[0] == 0
    assert PreflightReports.from_json(both.read_text()).reports == (small, large)
    assert run("--compare", str(both), "--json", "-") == run("--compare", *paths, "--json", "-")
    code, out, err = run("--compare", *paths, "--budget", "hbm=50%")
    assert (code, err) == (0, "")
    assert re.search(r"topology +v5e:2x2 \(4 chips\) +→ +v5e:2x4 \(8 chips\)", out)
    assert re.search(r"time: arithmetic .* → .* -50", out)
    code, out, _ = run("--compare", *paths, "--json", "-")
    changed = json.loads(out)
    assert code == 0
    assert {fact["name"] for fact in changed["facts"]} >= {"topology", "mesh"}


def test_two_stored_reports_are_compared(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report in zip(paths, (FITTING, OUT_OF_MEMORY), strict=True):
        path.write_text(report.to_json(), encoding="utf-8")
    code, out, err = run("--compare", *map(str, paths))
    assert "grown" in out and "125.2 GiB" in out
    assert (code, err) == (1, "it does not fit\n")
    code, out, err = run("--compare", str(paths[1]), str(paths[0]))
    assert (code, err) == (0, "")
    _, out, _ = run("--compare", *map(str, paths), "--markdown", "-")
    assert out.startswith("### ") and "- **worse**: memory" in out
    code, _, err = run("--markdown", "-", str(paths[0]))
    assert code == 2 and "--compare" in err


def test_two_stored_sets_of_reports_are_compared_in_every_format(run: Run, tmp_path: Path) -> None:
    old, new, page = (tmp_path / name for name in ("old.json", "new.json", "changes.html"))
    old.write_text(PreflightReports((FITTING, SMALL)).to_json(), encoding="utf-8")
    new.write_text(PreflightReports((OUT_OF_MEMORY, SMALL)).to_json(), encoding="utf-8")
    words = ("--compare", str(old), str(new), "--json", "-", "--html", str(page))
    code, out, err = run(*words)
    assert code == 1 and err.endswith("it does not fit\n") and err.count("\n") == 1
    changes = ScriptComparison.from_json(out)
    assert [each.is_same for each in changes.programs] == [False, True]
    assert "1 of 2 programs became worse." in page.read_text(encoding="utf-8")
    options = {"trace": "t.json", "measured": "profile", "rates": "r.json", "values": "hidden"}
    for option, value in options.items():
        code, _, err = run("--compare", str(old), str(new), f"--{option}", value)
        assert code == 2 and f"--{option} {value} is" in err, option


@pytest.mark.slow
def test_omitted_rows_are_shown_by_the_option_all(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report in zip(paths, (HUGE, SMALL), strict=True):
        path.write_text(report.to_json(), encoding="utf-8")
    for words in ((str(paths[0]),), ("--compare", *map(str, paths))):
        _, some, _ = run(*words)
        _, every, _ = run(*words, "--all")
        assert re.search(r"and \d+ more.*: --all\n", some)
        assert "print(all" not in some and "--all" not in every


def test_schema_option_prints_the_published_schema(run: Run) -> None:
    code, out, _ = run("--schema")
    published = ROOT / "tests" / "predict" / "preflight" / "report" / "preflight.schema.json"
    assert code == 0
    assert json.loads(out) == json.loads(published.read_text(encoding="utf-8"))


AT = ("-t", "v5e-4", "--mesh", "data=4")
OURS = "tests.cli.commands.programs:"

BAD_INPUT = {
    "no program": ((), "which program? Write a settings file"),
    "no topology": ((PRODUCT,), "for which chips? Write, for example, --topology v5p-128"),
    "an unknown topology": (("-t", "v5e-99", PRODUCT), "the nearest are 'v5litepod-64'"),
    "another unknown topology": (("-t", "v5q-8", PRODUCT), "v5q"),
    "no slices": (
        ("-t", "v5e-8", "--slices", "0", PRODUCT),
        "slices=0 is invalid: expected 1 or more: write --topology v5e-8 --slices 2\n",
    ),
    "slices that nothing joins": (
        ("-t", "v3-32", "--slices", "2", PRODUCT),
        "TPU v3 supports a single slice: write --topology v3:4x4 --slices 1\n",
    ),
    "more than a pod": (
        ("-t", "v5e:32x32", PRODUCT),
        "Larger topologies have several slices: write --topology v5e:16x16 --slices 2\n",
    ),
    "a mesh that does not multiply out": (
        ("-t", "v5e-4", "--mesh", "data=3", PRODUCT),
        "a mesh of data=3 has 3 devices, and v5e:2x2 has 4: write --mesh data=4\n",
    ),
    "an invalid mesh": (("-t", "v5e-4", "--mesh", "data:4", PRODUCT), "write --mesh data=8"),
    "a mesh with an axis twice": (("-t", "v5e-4", "--mesh", "a=2,a=2", PRODUCT), "a twice"),
    "no mesh for one who takes it": (("-t", "v5e-4", PRODUCT), "write --mesh data=4"),
    "an axis that the mesh lacks": (
        ("-t", "v5e-4", "--mesh", "x=4", PRODUCT),
        "the mesh has 'x'=4",
    ),
    "no module": ((*AT, "tests.nowhere:f"), "no module named tests.nowhere for"),
    "no function": ((*AT, OURS + "produkt"), "has no function produkt; did you mean product?"),
    "no function at all": ((*AT, OURS + "NOT_CALLABLE"), "has type int, expected a function"),
    "no name": (
        (*AT, "tests.cli.commands.programs"),
        "'tests.cli.commands.programs' is not a program",
    ),
    "a path": ((*AT, "tests/cli/commands/programs.py:product"), "is not a program"),
    "a function that fails": (
        (*AT, OURS + "fails"),
        "fails failed at programs.py:48 in fails: LookupError: no such layer and more of it",
    ),
    "a program that can't be traced": (
        (*AT, OURS + "untraceable"),
        "untraceable can't be traced at programs.py:42 in step: TypeError: ",
    ),
    "a number": (
        (*AT, OURS + "gives_a_number"),
        "returned int: expected a function and its arguments",
    ),
    "a name": ((*AT, OURS + "gives_a_name"), "returned a tuple of str, tuple: expected a function"),
    "an array": ((*AT, OURS + "gives_an_array"), "returned its arguments as ShapeDtypeStruct"),
    "one who takes more": ((*AT, OURS + "takes_more"), "requires layers: the parameters"),
    "a price that is no number": ((*AT, PRODUCT, "--price", "cheap"), "price='cheap' is invalid"),
    "a kernel without a time": (
        (*AT, PRODUCT, "--kernel-cost", "fwd"),
        "--kernel-cost fwd is invalid: expected NAME=TIME",
    ),
    "an invalid budget": ((*AT, PRODUCT, "--budget", "hmb=1%"), "did you mean hbm?"),
    "a program after an option": (
        ("-t", "v5e-4", "--option", "xla_a=1", PRODUCT),
        f"which program? Write a settings file, such as configs/tiny.toml, or package.module:"
        f"function; write {PRODUCT} before --option",
    ),
    "options of a script": ((*AT, PRODUCT, "--programs", "x"), "--programs is for the programs of"),
    "options of a sweep": ((*AT, PRODUCT, "--again"), "write --mesh auto"),
    "a price of unknown chips": (
        ("-t", "v5e-4", "--mesh", "data=auto", "--price", "v5x=3", PRODUCT),
        "price of 'v5x': expected a kind of chips",
    ),
    "an option without a value": ((*AT, PRODUCT, "--option", "xla_a"), "--option xla_a=true"),
    "an option that there isn't": ((*AT, PRODUCT, "--option", "xla_no=1"), "xla_no"),
    "settings of no file": (
        (*AT, PRODUCT, "--set", "model.layers=1"),
        "--set is invalid",
    ),
    "no settings file": ((*AT, "configs/none.toml"), "Write the path of an existing file."),
    "one report to compare": ((*AT, PRODUCT, "--compare"), "--compare takes two reports"),
    "no report": (("nowhere.json",), "nowhere.json can't be read: No such file or directory"),
    "JSON of another kind": (
        ("benchmarks/figures.json",),
        "no report of preflight",
    ),
    "a file that can't be written": (
        (*AT, PRODUCT, "--html", "README.md/x.html"),
        "README.md/x.html can't be written: ",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_invalid_input_is_reported_as_one_error(run: Run, name: str) -> None:
    words, message = BAD_INPUT[name]
    code, _, err = run(*words)
    assert code == 2
    assert message in err
    assert "--config" not in err  # an option of `xlashard train`
    assert err.startswith("error: ") and "Traceback" not in err
    assert len([line for line in err.splitlines() if line and not line.startswith(" ")]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json", "README.md/x.json"), "README.md/x.json can't be written: Not a directory"),
        (("--json", "docs"), "docs can't be written: it is a folder, expected a file"),
        (("--json", "new/"), "new/ can't be written: it is a folder, expected a file"),
        (("--html", "/proc/x/a.html"), "/proc/x/a.html can't be written: "),
        (("--compare",), "--compare takes two reports, and here are 1"),
        (("--option", "xla_a"), "--option xla_a=true"),
        (("nowhere.json",), "nowhere.json can't be read: No such file or directory"),
        (("--json", "a.html"), "write a name that ends with .json or .json.gz"),
        (
            ("-t", "v5e-4,v5e-8", "--trace", "a.json"),
            "--trace a.json is of one report, and here are 2",
        ),
        (("--calibrate", "a.toml"), "--calibrate a.toml needs a measurement: write --measured"),
        (
            ("--measured", "p", "--calibrate", "a.toml", "--rates", "b.toml"),
            "write it without --rates b.toml",
        ),
        (("--trace", "docs"), "docs can't be written: it is a folder, expected a file"),
        (("-t", "v5e-4,v5e-8", "--json", "README.md"), "README.md is no name of a JSON file"),
    ],
)
def test_invalid_arguments_are_refused_before_compilation(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(commands, "preflight_target", lambda *_: pytest.fail("compiled"))
    code, _, err = run(*AT, PRODUCT, *words)
    assert code == 2 and err.startswith("error: ") and message in err
    assert not Path("x.json").exists() and not Path("a.json").exists()


def test_check_writable_accepts_writable_paths_unchanged(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    for path in (kept, tmp_path / "deep" / "er" / "a.json", "-", None):
        check_writable(path and str(path))
    assert kept.read_text() == "{}"
    assert [*tmp_path.iterdir()] == [kept]


def test_unknown_setting_is_refused(run: Run) -> None:
    code, _, err = run(*AT, "configs/tiny.toml", "--set", "model.layer=1")
    assert code == 2 and "model.layer is not a setting. Did you mean model.layers?" in err


def test_binary_report_file_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff\xfe\x00")
    code, _, err = run(str(path))
    assert (code, err) == (2, f"error: {path} can't be read: it is no text\n")


def test_module_with_an_import_error_is_reported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken_one.py").write_text("import json\nx = undefined\n", encoding="utf-8")
    (tmp_path / "broken_two.py").write_text("def f(:\n", encoding="utf-8")
    (tmp_path / "broken_three.py").write_text("import not_installed_here\n", encoding="utf-8")
    message = {
        "broken_one": "broken_one can't be imported at broken_one.py:2 in <module>: NameError: ",
        "broken_two": "broken_two can't be imported at broken_two.py:1: SyntaxError: ",
        "broken_three": "broken_three can't be imported: it requires not_installed_here",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        for name, sentence in message.items():
            code, _, err = run(*AT, f"{name}:f")
            assert code == 2 and sentence in err


def test_missing_libtpu_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies.cloud_tpu_init, "get_tpu_library_path", lambda: None)
    code, _, err = run(*NEVER_MADE, PRODUCT)
    assert code == 2
    assert err.startswith("error: ") and "libtpu: pip install 'xlashard[tpu]'\n" in err


def test_other_libtpu_version_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies, "libtpu_version", lambda: "0.0.1")
    code, _, err = run(*NEVER_MADE, PRODUCT)
    assert code == 2
    assert "libtpu 0.0.1 is installed: pip install 'libtpu==" in err


@pytest.mark.slow
def test_command_prints_no_warnings_on_a_machine_without_chips(tmp_path: Path) -> None:
    source = (ROOT / "tests" / "cli" / "commands" / "programs.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    words = [*("-t", "v5e-8", "--mesh", "data=8"), "mine:product", "--json", "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*python_command(environment), "-m", "xlashard", "preflight", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert PreflightReport.from_json(done.stdout).fits
