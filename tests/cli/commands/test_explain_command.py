"""`xlashard explain`: the programs of scripts and of targets."""

import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from multiprocessing import spawn
from pathlib import Path

import jax
import jsonschema
import pytest

import xlashard
from xlashard import legacy
from xlashard.analysis.explain.script_report import ScriptReport
from xlashard.analysis.report.texts import line_text
from xlashard.cli.commands import script_run
from xlashard.cli.commands.script_run import matches
from xlashard.cli.main import main

TRAIN = """\
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))


@jax.jit
def init():
    return jnp.ones((16, 16))


@jax.jit
def train_step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, loss


w = init()
for number in range(int(sys.argv[1])):
    x = jax.device_put(np.ones((32, 16), np.float32), NamedSharding(mesh, P("data")))
    w, loss = train_step(jax.device_put(w, NamedSharding(mesh, P())), x)
    print("step", number, jnp.round(loss))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with `train.py` as the working folder; restore the process afterwards."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    for name in ("argv", "path", "excepthook"):
        value = getattr(sys, name)
        monkeypatch.setattr(sys, name, value.copy() if isinstance(value, list) else value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return tmp_path


def explained(*words: str) -> tuple[int, ScriptReport]:
    code = main(["explain", "--json", "report.json", *words])
    return code, ScriptReport.from_json(Path("report.json").read_text())


@pytest.mark.slow
def test_each_program_of_a_script_is_reported(folder: Path, capsys) -> None:
    code, report = explained("--values", "dot_general", "--", "python", "train.py", "3")
    out = capsys.readouterr().out
    assert code == 0
    assert (report.script, report.outcome) == ("train.py 3", "finished")
    assert main(["explain", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.validate(report.to_dict(), schema)
    assert schema == ScriptReport.json_schema() and set(schema["required"]) == set(report.to_dict())
    assert schema["$defs"]["ScriptProgram"]["properties"]["calls"]["description"]
    assert [(p.name, p.source, p.calls) for p in report.programs] == [
        ("init", "train.py:11", 1),
        ("train_step", "train.py:16", 3),
    ]
    step = report.programs[1]
    assert step.caller == "train.py:25"
    assert step.report is not None
    assert {c.kind for c in step.report.collectives} == {"all-reduce"}
    assert {(c.kind, c.axes) for c in step.report.collectives} == {("all-reduce", ("data",))}
    products = [v for v in step.report.values if v.source.line == 18]
    assert {(v.type, v.spec, v.in_pass) for v in products} == {
        ("float32[32,16]", "P('data')", "forward"),
        ("float32[16,16]", "P()", "backward"),
    }
    assert "no value has such a name" in report.programs[0].report.values[0].reason
    # `round` outside of jit.
    assert report.omitted.largest == "round"
    assert report.omitted.calls == 3
    # The script's own output comes first.
    assert out.startswith("step 0 ")
    assert out.index("step 2") < out.index("▶ init")
    assert "train_step  8 devices (cpu)" in out
    assert "2 of train.py 3" in out


LIBRARY = """\
import functools

import jax


def compiled(function):
    @functools.wraps(function)
    def wrapped(*args):
        return function(*args)

    return jax.jit(wrapped)
"""
COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
VALUE = re.compile(r"([a-z]+)([0-9]+)\[([0-9,]*)\]")


def counted_collectives(text: str) -> Counter[tuple[str, int]]:
    """Count the collectives of a compiled module by kind and bytes of their results, by regex."""
    found: Counter[tuple[str, int]] = Counter()
    for line in text.splitlines():
        if match := COLLECTIVE.search(line):
            found[match[2], sum(map(_value_bytes, VALUE.findall(match[1])))] += 1
    return found


def _value_bytes(value: tuple[str, str, str]) -> int:
    _, bits, shape = value
    return math.prod(int(size) for size in shape.split(",") if size) * int(bits) // 8


@pytest.mark.slow
def test_reports_of_a_script_are_those_of_the_programs_that_run(folder: Path, capsys) -> None:
    packages = folder / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "library.py").write_text(LIBRARY)
    sys.path.append(str(packages))
    script = str(Path(__file__).parent / "script_lookalikes.py")
    code, report = explained("--", script)
    printed = capsys.readouterr()
    assert code == 0 and printed.out.startswith("tokens 3 22 22"), printed.err
    # A later call of `decode` has a token of another sharding.
    programs = {program.name: program for program in reversed(report.programs)}
    for name, (function, arguments) in runpy.run_path(script)["PROGRAMS"].items():
        compiled = function.lower(*arguments).compile()
        own, memory = programs[name].report, compiled.memory_analysis()
        assert own is not None, name
        seen: Counter[tuple[str, int]] = Counter()
        for c in own.collectives:
            assert c.count == c.times
            seen[c.kind, c.result_bytes // c.count] += c.count
        assert seen == counted_collectives(compiled.as_text()), name
        assert own.memory is not None and own.place.num_devices == 8
        assert (own.memory.argument_bytes, own.memory.alias_bytes, own.memory.result_bytes) == (
            memory.argument_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.output_size_in_bytes,
        ), name
    assert programs["step"].source.startswith(str(script)) or ":" in programs["step"].source


@pytest.mark.slow
def test_each_program_of_a_script_is_compiled_once(folder: Path, monkeypatch) -> None:
    compiled: list[str] = []

    def note(event: str, _: float, **details: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        code, report = explained("--", "train.py", "2")
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert code == 0 and all(program.report is not None for program in report.programs)
    assert [name for name in compiled if "train_step" in name or "init" in name] == [
        "jit(init)",
        "jit(train_step)",
    ]


@pytest.mark.slow
def test_kernels_of_other_devices_leave_the_other_reports(folder: Path, capsys) -> None:
    (folder / "kernel.py").write_text(
        "import jax, numpy as np\n"
        "from jax.experimental import pallas as pl\n"
        "def kernel(x_ref, out_ref): out_ref[...] = x_ref[...] * 2\n"
        "double = jax.jit(pl.pallas_call(kernel, jax.ShapeDtypeStruct((8, 128), np.float32)))\n"
        "total = jax.jit(lambda x: x.sum())\n"
        "print(float(total(double(np.ones((8, 128), np.float32)))))\n"
    )
    code, report = explained("--", "kernel.py")
    assert (code, report.outcome) == (1, "finished")
    refused, total = report.programs
    assert refused.report is None and "interpret mode" in refused.error
    assert refused.caller == "kernel.py:6"
    assert total.report is not None and capsys.readouterr().out.startswith("0.0\n")


@pytest.mark.slow
def test_skipped_files_are_not_named(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delitem(sys.modules, "layers", raising=False)
    (folder / "layers.py").write_text("def dense(x, w):\n    return x @ w\n")
    text = TRAIN.replace("import sys\n", "import sys\nfrom layers import dense\n")
    (folder / "train.py").write_text(text.replace("x @ w", "dense(x, w)"))
    for words, line in (([], "layers.py:2"), (["--skip", "lay*.py"], "train.py:19")):
        code, report = explained(*words, "--", "python", "train.py", "1")
        step = report.programs[1].report
        assert code == 0 and step is not None
        sources = {c.source for c in step.collectives if "dot_general" in c.op_name}
        assert {line_text(source) for source in sources if source} == {line}
        assert line in capsys.readouterr().out
    assert os.environ["XLASHARD_SKIP_FILES"] == ""
    for wrong in ("", "a.py:b.py"):
        assert main(["explain", "--skip", wrong, "--", "python", "train.py", "1"]) == 2
        assert f"--skip {wrong!r}" in capsys.readouterr().err


@pytest.mark.slow
def test_heading_of_a_recompilation_names_its_cause(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (folder / "again.py").write_text(
        "import jax, numpy as np\n"
        "f = jax.jit(lambda x, y: x.sum() + y)\n"
        "one = np.float32(1)\n"
        "f(np.ones(4), one), f(np.ones(8), one), f(np.ones(8), jax.device_put(one))\n"
        "f(np.ones(8), jax.device_put(one, jax.devices()[0]))\n"
    )
    assert main(["explain", "--", "again.py"]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("▶")]
    again = [heading.partition("compiled again for ")[2] for heading in headings]
    assert again == ["", "x float32[4] → float32[8]", "y sharded by default → the argument"]


@pytest.mark.slow
def test_heading_names_weak_types_and_new_functions(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (folder / "weak.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "@jax.jit\n"
        "def train_step(state, x):\n"
        "    step = jnp.asarray(state['step'] + 1, jnp.int32)\n"
        "    return {'step': step, 'w': state['w'] - x.mean()}\n"
        "state = jax.jit(lambda: {'step': 0, 'w': jnp.ones((4, 4))})()\n"
        "for _ in range(3):\n"
        "    state = train_step(state, jnp.ones(8))\n"
        "for i in range(2):\n"
        "    scale = jax.jit(lambda x: x * i)\n"
        "    scale(state['w']), scale(state['w'][0])\n"
    )
    code, report = explained("--", "weak.py")
    out = capsys.readouterr().out
    headings = [line for line in out.splitlines() if line.startswith("▶")]
    assert code == 0 and len(headings) == 7
    assert "again for state['step'] weakly typed int32[] → int32[]" in headings[2]
    assert ["compiled again for x" in heading for heading in headings[3:]] == [False, True] * 2
    assert ["of a new function object" in heading for heading in headings].count(True) == 1
    numbers = [p.function for p in report.programs]
    assert len(set(numbers)) == 4 and numbers[3] == numbers[4] != numbers[5] == numbers[6]


@pytest.mark.slow
def test_stop_after_ends_a_script_after_that_many_calls(folder: Path, capsys) -> None:
    code, report = explained(
        "--stop-after", "2", "--programs", "train_*", "--", "train.py", "1000000"
    )
    assert code == 0
    assert (report.outcome, report.why) == ("stopped", "train_step was called 2 times")
    assert [(p.name, p.calls) for p in report.programs] == [("train_step", 2)]
    assert report.omitted.count == 2
    assert "step 1 " in capsys.readouterr().out
    # The second call compiles the function again: its argument is committed to the mesh by then.
    again = TRAIN.replace("jax.device_put(w, NamedSharding(mesh, P()))", "w")
    (folder / "train.py").write_text(again)
    words = ("--programs", "train_*", "--", "train.py", "3")
    _, report = explained("--stop-after", "1", *words)
    assert report.why == "train_step was called 1 time"
    assert [(p.name, p.calls) for p in report.programs] == [("train_step", 1)]
    _, report = explained("--stop-after", "3", *words)
    assert [(p.name, p.calls) for p in report.programs] == [("train_step", 1), ("train_step", 2)]


@pytest.mark.slow
def test_explain_checks_a_budget_and_writes_a_page(folder: Path, capsys) -> None:
    words = ("--budget", "collectives=0", "all_gather_bytes=0", "--html", "pages/all.html")
    code, report = explained(*words, "--", "train.py", "1")
    error = capsys.readouterr().err
    assert code == 1
    assert "train_step: collectives=0 is not met" in error
    assert "init: " not in error
    assert "all_gather_bytes" not in error
    page = Path("pages/all.html").read_text()
    assert "train_step" in page and "init" in page
    assert len(report.programs) == 2
    code, _ = explained("--budget", "collectives=99", "--", "train.py", "1")
    assert code == 0


@pytest.mark.slow
def test_small_programs_are_shown_by_their_size(folder: Path, capsys) -> None:
    _, report = explained("--min-bytes", "0", "--", "train.py", "1")
    assert [p.name for p in report.programs] == ["init", "train_step", "round"]
    assert not report.omitted.count
    _, report = explained("--min-bytes", "1.5kB", "--", "train.py", "1")
    assert [p.name for p in report.programs] == ["train_step"]
    assert (report.omitted.largest, report.omitted.largest_bytes) == ("init", 1024)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "why"),
    [("raise LookupError('no data')", "LookupError"), ("sys.exit(3)", "exit code 3")],
)
def test_the_programs_of_a_script_that_fails_are_reported(
    folder: Path, capsys, last: str, why: str
) -> None:
    (folder / "fails.py").write_text(f"{TRAIN}\n{last}\n")
    code, report = explained("--", "python", "fails.py", "1")
    assert code == 1
    assert (report.outcome, report.why, len(report.programs)) == ("failed", why, 2)
    printed = capsys.readouterr()
    assert ("no data" in printed.err) == (why == "LookupError")
    assert "script_run.py" not in printed.err


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ([], ["which program", "package.module:function", "-- python train.py"]),
        (["a:b", "--", "train.py"], ["a:b and the script after --"]),
        (["tests"], ["'tests' is not a program", "package.module:function"]),
        (["a.toml"], ["a.toml is a settings file", "xlashard preflight"]),
        (["--mesh", "data=8", "--", "train.py"], ["--mesh data=8", "its own mesh"]),
        (["--mesh", "data=8", "a.json"], ["--mesh data=8", "stored report"]),
        (["--programs", "x", "a:b"], ["--programs", "-- python train.py"]),
        (["--stop-after", "3", "a:b"], ["--stop-after", "-- python train.py"]),
        (["--min-bytes", "0", "a:b"], ["--min-bytes", "-- python train.py"]),
        (["--programs", "", "--", "train.py"], ["--programs is empty"]),
        (["--budget", "memroy=1", "--", "train.py"], ["'memroy=1'", "did you mean memory?"]),
        (["--budget", "memory=lots", "--", "train.py"], ["'lots'", "memory=2GB"]),
        (["--json", ".", "--", "train.py"], [". can't be written: it is a folder"]),
        (["--html", "train.py/x", "--", "train.py"], ["train.py/x can't be written"]),
        (["--json", "-", "--html", "-", "--", "train.py"], ["--json and --html are both -"]),
        (["--", "python"], ["no script is named", "-- python train.py"]),
        (["--", "python", "-c", "pass"], ["-c is no script"]),
        (["--", "missing.py"], ["no file 'missing.py'"]),
        (["--", "ls"], ["'ls'", "no Python program"]),
        (["--", "python", "-m", "no_such_module"], ["no_such_module"]),
        (["--programs", "/(/", "--", "train.py", "0"], ["/(/", "regular expression"]),
        (["no_such_module:f"], ["no_such_module"]),
        (["train.py"], ["train.py is a script", "-- python train.py"]),
        (["--budget", "memory=1", "a:b"], ["budget 'a:b' has no value", "before the budget"]),
        (["--markdown", "c.md", "--", "train.py"], ["--markdown c.md", "--compare"]),
        (["--compare", "no.json", "--", "train.py"], ["no.json can't be read"]),
        (["--compare", "train.py", "--", "train.py"], ["train.py is no report of explain"]),
        (["no.json"], ["no.json can't be read"]),
        (["--values", "tanh", "a.json"], ["--values tanh", "stored report", "-- python SCRIPT"]),
        (
            ["tests.cli.commands.programs:doubled"],
            ["doubled", "'x'", "returns it and its arguments"],
        ),
    ],
)
def test_invalid_arguments_are_named_before_a_script_runs(
    folder: Path, capsys, words: list[str], facts: list[str]
) -> None:
    assert main(["explain", *words]) == 2
    printed = capsys.readouterr()
    assert all(fact in printed.err for fact in facts), printed.err
    assert "step" not in printed.out  # No script has run.


def test_an_invalid_variable_is_named_before_a_script_runs(folder: Path, capsys, monkeypatch):
    monkeypatch.setenv("XLASHARD_STRICT", "2")
    for command in ("explain", "run"):
        assert main([command, "--", "train.py", "1"]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ") and "XLASHARD_STRICT" in printed.err
        assert printed.out == ""


COMPILED_TWICE = """\
import jax
import numpy as np
import xlashard

double = jax.jit(lambda x: x * 2)
double(np.ones(4, np.float32)), double(np.ones(5, np.float32))
print(xlashard.explain_recompile(double))
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "explain", "preflight --topology v5e-8"])
def test_functions_of_a_script_are_watched(folder: Path, capsys, monkeypatch, command: str) -> None:
    monkeypatch.setattr(spawn, "get_preparation_data", spawn.get_preparation_data)
    (folder / "twice.py").write_text(COMPILED_TWICE)
    main([*command.split(), "--", "twice.py"])  # Preflight refuses a program on one device.
    assert "differs from number 1 in x: float32[4] → float32[5] (shape)" in capsys.readouterr().out
    unwatched = jax.jit(lambda x: x * 3)
    unwatched(1.0)
    assert not xlashard.explain_recompile(unwatched).watched


@pytest.mark.parametrize("command", ["run", "legacy"])
def test_an_error_of_the_script_is_printed_once(
    folder: Path, capsys, monkeypatch, command: str
) -> None:
    monkeypatch.setattr(spawn, "get_preparation_data", spawn.get_preparation_data)
    (folder / "fails.py").write_text("import xlashard\nraise xlashard.errors.ConfigError('mine')\n")
    with pytest.raises(xlashard.errors.ConfigError):
        main([command, "--", "fails.py"])
    if command == "legacy":
        legacy.uninstall()
    error = capsys.readouterr().err
    assert error.count("ConfigError: mine") == 1 and "error: mine" not in error


@pytest.mark.slow
def test_script_without_matching_programs_is_refused_with_a_suggestion(
    folder: Path, capsys
) -> None:
    assert main(["explain", "--programs", "trian_step", "--", "train.py", "1"]) == 2
    error = capsys.readouterr().err
    assert all(fact in error for fact in ("trian_step", "init", "did you mean train_step?"))
    assert "--min-bytes" not in error
    assert main(["explain", "--min-bytes", "1GB", "--", "train.py", "1"]) == 2
    error = capsys.readouterr().err
    assert all(fact in error for fact in ("953.7 MiB", "train_step", "4.0 KiB"))
    (folder / "alone.py").write_text("import jax.numpy as jnp\njnp.ones(3) + 1\n")
    assert main(["explain", "--", "alone.py"]) == 2
    error = capsys.readouterr().err
    assert "--min-bytes 0" in error and "outside of jit" in error


@pytest.mark.slow
def test_comparison_fails_on_a_regression(folder: Path, capsys) -> None:
    explained("--", "train.py", "1")
    Path("report.json").rename("old.json")
    written = ("--compare", "old.json", "--markdown", "c.md", "--html", "c.html")
    code, _ = explained(*written, "--", "train.py", "1")
    assert code == 0
    assert "No program became worse." in Path("c.md").read_text()
    assert "**Unchanged**: init, train\\_step" in Path("c.md").read_text()
    source = TRAIN.replace(").mean())(w)", ").sum() / x.max())(w)").replace("def init", "def make")
    (folder / "train.py").write_text(source.replace("w = init", "w = make"))
    capsys.readouterr()
    code, report = explained(*written, "--", "train.py", "1")
    printed = capsys.readouterr()
    assert code == 1
    assert [p.name for p in report.programs] == ["make", "train_step"]
    worse = [line for line in printed.err.splitlines() if line.startswith("worse: ")]
    assert worse and all(line.startswith("worse: train_step: ") for line in worse)
    words = " ".join(printed.out.split())
    assert all(names in words for names in ("Only before init", "Only after make"))
    assert "**1 of 1 program became worse.**" in Path("c.md").read_text()
    assert "Some figures became worse." in Path("c.html").read_text()
    words = ("--programs", "train_step", "--compare", "old.json", "--", "train.py", "1")
    main(["explain", *words])
    assert "Only before" not in capsys.readouterr().out
    # Compare in the opposite direction, with a stored report in place of a run.
    assert main(["explain", "--compare", "report.json", "--markdown", "-", "old.json"]) == 0
    assert capsys.readouterr().out.startswith("## Programs of train.py 1\n")


@pytest.mark.slow
def test_budget_applies_to_a_stored_report(folder: Path, capsys) -> None:
    explained("--", "train.py", "1")
    assert main(["explain", "report.json", "--budget", "memory=1MB", "all_reduce_bytes=9kB"]) == 0
    capsys.readouterr()
    assert main(["explain", "report.json", "--budget", "all_reduce_bytes=9B"]) == 1
    (line, *_) = capsys.readouterr().err.splitlines()
    assert line.startswith("train_step: all_reduce_bytes=9B is not met")


def test_error_of_an_invalid_stop_after_suggests_calls_or_seconds(folder: Path, capsys) -> None:
    for word in ("x", "xs", "0", "-1s"):
        with pytest.raises(SystemExit):
            main(["explain", f"--stop-after={word}", "--", "train.py", "1"])
        error = capsys.readouterr().err
        assert all(fact in error for fact in (repr(word), "calls", "90s"))


def test_a_script_without_programs_fails(folder: Path, capsys) -> None:
    (folder / "empty.py").write_text("import jax\n")
    assert main(["explain", "--", "empty.py"]) == 1
    assert "empty.py finished and compiled no program" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "name", "spec"),
    [
        ("product --mesh data=-1 --values dot", "<lambda>", "P('data')"),
        ("jitted", "jitted", "device 0"),
        ("lowered --mesh data=4,model=2", "<lambda>", "P()"),
    ],
)
@pytest.mark.devices(8)
def test_explain_of_a_target_reports_its_program(capsys, target: str, name: str, spec: str) -> None:
    function, *mesh = target.split()
    assert main(["explain", f"tests.cli.commands.programs:{function}", *mesh, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["name"] == name
    assert report["outputs"][0]["spec"] == spec


def test_a_target_for_a_topology_is_refused(capsys) -> None:
    assert main(["explain", "tests.cli.commands.programs:by_name"]) == 2
    assert "xlashard preflight --topology v5p-128" in capsys.readouterr().err


def test_names_match_globs_and_regular_expressions() -> None:
    assert matches("train_step", ["eval*", "train_*"])
    assert matches("train_step", ["/step$/"])
    assert not matches("train_step", ["step", "/^step/"])


@pytest.mark.slow
def test_environment_variables_set_by_a_script_take_effect(tmp_path: Path) -> None:
    """JAX reads JAX_ENABLE_X64 when it is imported, and XLA_FLAGS with its first device."""
    (tmp_path / "early.py").write_text(
        "import os\n"
        "os.environ['JAX_ENABLE_X64'] = '1'\n"
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=3'\n"
        "import jax\n"
        "assert jax.device_count() == 3\n"
        "print(jax.jit(lambda x: x * 2)(jax.numpy.ones(2)).dtype)\n"
    )
    root = str(Path(xlashard.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "xlashard", "explain", "--json", "-", "--", "python", "early.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (program,) = json.loads(done.stdout)["programs"]
    assert program["report"]["inputs"][0]["dtype"] == "float64"
    # Standard output has JSON only.
    assert "float64" in done.stderr


@pytest.mark.slow
def test_progress_is_shown(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(script_run, "_EVERY", 0.01)
    explained("--", "train.py", "40")
    assert "train.py 40 has run for" in capsys.readouterr().err
