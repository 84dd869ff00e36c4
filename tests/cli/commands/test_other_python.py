"""Scripts in the Python of an environment that lacks xlashard: it is lent, not installed."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import pytest

from tests.cli.commands.environments import (
    COMPILED,
    ROOT,
    find_newest_python,
    import_names,
    list_files,
    list_members,
    make_environment,
    required,
)
from tests.message_patterns import naming
from xlashard._jax import describe_requirement
from xlashard.analysis.explain.script_report import ScriptReport
from xlashard.cli.commands import other_python
from xlashard.cli.commands.other_python import change_python
from xlashard.cli.main import main
from xlashard.errors import ArgumentError
from xlashard.support import lending
from xlashard.support.lending import LENT, LentPackages, install_command, repeat_words, start_words

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_lent_packages_are_those_that_the_project_requires() -> None:
    names = [import_names(name) for name in required(PROJECT["dependencies"], COMPILED)]
    assert set(LENT) == {"xlashard"}.union(*names)
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, other_python.MINIMUM_PYTHON))


def test_lent_folder_gives_the_lent_packages_alone(tmp_path: Path) -> None:
    for name in ("rich", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    finder = LentPackages([str(tmp_path)])
    spec = finder.find_spec("rich")
    assert spec is not None and spec.origin == str(tmp_path / "rich" / "__init__.py")
    assert finder.find_spec("numpy") is None
    assert finder.find_spec("rich.console") is None


def test_child_processes_are_lent_what_the_process_is_lent(monkeypatch) -> None:
    assert repeat_words() == []
    assert install_command("tpu", "'jax[tpu]'") == "pip install 'xlashard[tpu]'"
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, LentPackages(["/one", "/two"])])
    assert repeat_words() == start_words(["/one", "/two"]) == [lending.__file__, "/one:/two"]
    expected = f"{sys.executable} -m pip install 'jax[tpu]'"
    assert install_command("tpu", "'jax[tpu]'") == expected


type Fake = Callable[..., str]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a function that makes a program which answers as a Python with such facts."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    number = 0

    def make(answer: str = "", **facts: object) -> str:
        nonlocal number
        number += 1
        path = tmp_path / str(number) / "bin" / "python"
        path.parent.mkdir(parents=True)
        known = {"executable": str(path), "prefix": str(path.parents[1]), "python": (3, 12, 1)}
        answer = answer or json.dumps(known | facts)
        path.write_text(f"#!/bin/sh\ncat <<'END'\na line of the site\n{answer}\nEND\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the commands by which this process would have been replaced."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: commands.append(list(words)))
    return commands


def test_python_that_cannot_run_a_program_is_refused(fake: Fake, capsys) -> None:
    cases = [
        (fake(python=(3, 8, 18)), ("is Python 3.8.18", "Python 3.12 or later")),
        (fake(), ("has no jax", describe_requirement())),
        (fake(jax="0.4.30"), ("has jax 0.4.30", describe_requirement())),
        (fake("no JSON"), ("does not answer as a Python",)),
        ("/nowhere/bin/python", ("was found",)),
    ]
    for path, facts in cases:
        with pytest.raises(
            ArgumentError, match=naming(path, *facts, "-- .venv/bin/python train.py")
        ):
            change_python(["explain"], [path, "train.py"])
        assert main(["explain", "--", path, "train.py"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and path in error


def test_command_line_starts_again_in_the_other_python(fake: Fake, started, capsys) -> None:
    python = fake(jax="0.11.2")
    change_python(["explain", "--all"], [python, "-u", "train.py", "--steps", "3"])
    ((own, *rest),) = started
    assert (own, rest[:2]) == (python, ["-u", lending.__file__])
    expected = "xlashard explain --all -- PYTHON train.py --steps 3".replace("PYTHON", python)
    assert " ".join(rest[3:]) == expected
    assert "lent" in capsys.readouterr().err
    change_python(["run"], [fake(jax="0.12.0", xlashard="9.8"), "-m", "package.train"])
    assert started[1][-2:] == ["-m", "package.train"]
    line = capsys.readouterr().err
    assert "jax 0.12.0" in line and "its own xlashard 9.8" in line


def test_options_start_the_current_python_again(fake: Fake, started, capsys) -> None:
    change_python(["run"], [sys.executable, "train.py"])
    change_python(["run"], ["train.py"])
    assert started == []
    change_python(["run"], [sys.executable, "-u", "train.py", "a"])
    python = sys.executable
    words = [python, "-u", "-m", "xlashard", "run", "--", python, "train.py", "a"]
    assert started == [words]
    # A program that starts the Python of this environment.
    same = fake(prefix=sys.prefix, executable=python)
    change_python(["run"], [same, "train.py"])
    assert len(started) == 1
    assert capsys.readouterr().err == ""


def test_bare_python_without_jax_leaves_the_script_here(
    fake: Fake, started, monkeypatch, capsys
) -> None:
    python = fake()
    monkeypatch.setenv("PATH", os.path.dirname(python), prepend=os.pathsep)
    change_python(["run"], ["python", "train.py"])
    assert started == []
    line = capsys.readouterr().err
    assert f"{python} has no jax" in line and sys.executable in line
    # With another JAX the user can't mean this environment.
    monkeypatch.setenv("PATH", os.path.dirname(fake(jax="0.4.30")), prepend=os.pathsep)
    with pytest.raises(ArgumentError, match=naming("has jax 0.4.30")):
        change_python(["run"], ["python", "train.py"])
    monkeypatch.setenv("PATH", "/nowhere")
    change_python(["run"], ["python", "train.py"])
    assert started == []


@pytest.mark.parametrize("without", ["jax", "activation"])
def test_bare_python_is_not_that_of_the_tool(
    fake: Fake, started: Sequence[Sequence[str]], monkeypatch, without: str
) -> None:
    python = fake(jax="0.11.2")
    folders = [os.path.dirname(sys.executable), os.path.dirname(python), os.defpath]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    if without == "jax":
        monkeypatch.setattr(other_python, "has_jax", lambda: False)
        # No interpreter at all means `python`, too.
        change_python(["run"], ["train.py"])
    else:
        monkeypatch.setenv("VIRTUAL_ENV", str(Path(python).parents[1]))
        change_python(["run"], ["python", "train.py"])
    assert [words[0] for words in started] == [python]


TRAIN = """\
import json
import sys

early = [name for name in ("jax", "numpy") if name in sys.modules]

import jax
import jinja2
import numpy as np
import rich
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import xlashard.cli.commands

mesh = Mesh(np.array(jax.devices()), ("data",))


@jax.jit
def step(w, x):
    return ((x @ w) ** 2).mean()


x = jax.device_put(np.ones((32, 16), np.float32), NamedSharding(mesh, P("data")))
w = jax.device_put(np.ones((16, 16), np.float32), NamedSharding(mesh, P()))
step(w, x)
facts = {
    "arguments": sys.argv,
    "early": early,
    "path": sys.path,
    "collectives": step.lower(w, x).compile().as_text().count(" all-reduce("),
    "files": {m.__name__: m.__file__ for m in (jax, jinja2, np, rich, xlashard.cli.commands)},
}
with open("facts.json", "w") as file:
    json.dump(facts, file)
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with xlashard and without JAX."""
    names = required(PROJECT["dependencies"], COMPILED)
    links = {"xlashard": ROOT / "xlashard"}
    for name in names:
        links |= list_members(name)
    folder = tmp_path_factory.mktemp("launcher") / "venv"
    return make_environment(folder, find_newest_python(), links)


def user_python(folder: Path, *names: str) -> Path:
    """Return the Python of an environment with JAX and some distributions, without xlashard."""
    links: dict[str, Path] = {}
    for name in required(["jax", *names]):
        links |= list_members(name)
    return make_environment(folder, sys.executable, links)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with JAX and its own rich."""
    return user_python(tmp_path_factory.mktemp("user") / "venv", "rich")


def run(
    launcher: Path, folder: Path, *words: str | Path, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run the launcher's command line in a folder."""
    # JAX has set the path of the libtpu of this process.
    environment = {k: v for k, v in os.environ.items() if k != "TPU_LIBRARY_PATH"}
    done = subprocess.run(
        [launcher, "-m", "xlashard", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.integration
@pytest.mark.jax_version
def test_programs_are_explained_in_an_environment_without_xlashard(
    launcher: Path, user: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    before = list_files(user.parents[1])
    words = ("--programs", "step", "--json", "report.json", "--", user, "-u", "train.py", "a")
    done = run(launcher, tmp_path, "explain", *words)
    assert list_files(user.parents[1]) == before
    assert f"{user} with jax {jax.__version__}; xlashard" in done.stderr
    assert "step  8 devices (cpu)" in done.stdout
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["arguments"] == ["train.py", "a"] and facts["early"] == []
    report = ScriptReport.from_json((tmp_path / "report.json").read_text())
    (program,) = report.programs
    assert program.report is not None
    assert len(program.report.collectives) == facts["collectives"] == 1
    # What the environment has is its own, and the rest of the launcher's is not on the path.
    lender = str(launcher.parents[1])
    own = str(user.parents[1])
    is_own = {name: path.startswith(own) for name, path in facts["files"].items()}
    assert is_own.pop("jinja2") is is_own.pop("xlashard.cli.commands") is False
    assert set(is_own) == {"jax", "numpy", "rich"} and all(is_own.values())
    assert facts["path"][0] == str(tmp_path)
    assert not [entry for entry in facts["path"] if entry.startswith((lender, str(ROOT)))]


STOPPED = """\
import os, signal, sys
print("pid", os.getpid())
print("to stderr", file=sys.stderr)
sys.stdout.flush()
if sys.argv[1] == "signal":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[1] == "ctrl-c":
    os.kill(os.getpid(), signal.SIGINT)
sys.exit(7)
"""


@pytest.mark.integration
@pytest.mark.parametrize("command", ["run", "legacy"])
def test_streams_signals_and_exit_code_are_those_of_the_script(
    launcher: Path, user: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "stop.py").write_text(STOPPED)
    codes = {"exit": 7, "signal": -signal.SIGTERM, "ctrl-c": 130}
    for how, code in codes.items():
        with subprocess.Popen(
            [launcher, "-m", "xlashard", command, "--", user, "stop.py", how],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            out, err = process.communicate(timeout=120)
        assert out == f"pid {process.pid}\n"
        assert "to stderr" in err
        assert process.returncode == code, err


WORKERS = """\
import sys
import jax
from xlashard.workers.job_pool import JobPool, WorkerJob, WorkerLimits
from xlashard.testing import pod

if __name__ == "__main__":
    job = WorkerJob("one", "xlashard.hlo:no_such_name", {})
    with JobPool(WorkerLimits(workers=1)) as pool:
        ((_, answer),) = pool.run([job])
    print(answer["reason"])
    print(pod(processes=1).run(jax.process_count))
    print(pod(processes=1).run_script("child.py").outputs[0])
"""


@pytest.mark.integration
@pytest.mark.jax_version
def test_processes_that_a_script_starts_through_xlashard_are_lent_it(
    launcher: Path, user: Path, tmp_path: Path
) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    (tmp_path / "beside.py").touch()
    child = "import sys, beside, xlashard; print('child', sys.argv[1:], xlashard.__version__)\n"
    (tmp_path / "child.py").write_text(child)
    done = run(launcher, tmp_path, "run", "--", user, "workers.py")
    assert "has no attribute 'no_such_name'" in done.stdout
    assert "[1]" in done.stdout
    assert "child [] 0" in done.stdout


@pytest.mark.integration
@pytest.mark.jax_version
def test_programs_are_preflighted_in_an_environment_without_xlashard(
    launcher: Path, user: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    topology = ("preflight", "--topology", "v5e-8")
    # The error names what to install there, and not xlashard.
    lacking = run(launcher, tmp_path, *topology, "--", user, "train.py", code=2)
    assert f"libtpu: {user} -m pip install 'jax[tpu]'" in lacking.stderr
    python = user_python(tmp_path / "venv", "libtpu")
    before = list_files(python.parents[1])
    run(launcher, tmp_path, *topology, "--json", "report.json", "--", python, "train.py")
    assert list_files(python.parents[1]) == before
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["jax"] == jax.__version__ and report["versions"]["libtpu"]
