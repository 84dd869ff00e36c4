"""`python -m xlashard.legacy`: its arguments, programs and reports."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import spawn
from pathlib import Path

import jax
import pytest

from tests.fork_server import python_command
from xlashard.errors import ArgumentError
from xlashard.legacy.run_command import RunCommand, UsageError, main, read_command
from xlashard.support.program_runner import ScriptOrModule

ROOT = Path(__file__).resolve().parents[2]

BESIDE = "VALUE = 7\n"

SCRIPT = """\
import sys
import beside
import jax
from jax.config import config
from jax import (
    tree_leaves,
    tree_map,
)
from jax.experimental import maps

if __name__ == "__main__":
    config.update("jax_parallel_functions_output_gda", True)
    print(sys.argv, beside.VALUE, jax.config.jax_array, jax.config.jax_enable_x64)
    for n in range(3):
        tree_map(abs, [n])
        jax.tree_map(
            abs, [n]
        )
    jax.tree_util.tree_leaves([1])

    def fails():
        maps.xmap(abs)

    fails()
"""

MODULE = """\
import atexit, sys
import jax.linear_util as lu

atexit.register(lambda: print(lu.wrap_init(abs).call_wrapped(-5)))
print(__name__, __spec__.name, sys.argv[1:])
sys.exit(3)
"""


PACKAGE = """\
import jax
from jax.experimental.maps import Mesh
"""

# It leaves work for its exit, and has some done by a process that imports it.
STARTER = """\
import atexit, multiprocessing, pickle, sys, threading
import jax
from jax.experimental import maps


class State:
    pass


def work(n):
    return jax.tree_map(abs, [n]), jax.config.jax_array, __name__


def late():
    threading.main_thread().join()
    print(type(pickle.loads(pickle.dumps(State()))) is State)


if __name__ == "__main__":
    print(__spec__, __package__, sys.argv)
    open(__file__).close()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [-1]))
    threading.Thread(target=late).start()
    atexit.register(lambda: print(sys.modules["__main__"].State is State))
"""


CONSOLE_SCRIPT = "import sys\nfrom xlashard.cli.main import main\nsys.exit(main())\n"


def run(
    folder: Path, *words: str, stdin: str = "", start: Sequence[str] = ("-m", "xlashard.legacy")
) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        [*python_command(environment), *start, *words],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("program")
    (folder / "old").mkdir()
    (folder / "old" / "beside.py").write_text(BESIDE)
    (folder / "old" / "script.py").write_text(SCRIPT)
    flags = ("--jax_array=0", "--jax_enable_x64", "--report=uses.json")
    return folder, run(folder, *flags, "old/script.py", "--report", "-m")


@pytest.mark.slow
def test_script_runs_as_under_python(scripted) -> None:
    _, done = scripted
    assert done.stdout == "['old/script.py', '--report', '-m'] 7 False True\n"


def test_traceback_of_a_script_begins_with_its_own_frames(scripted) -> None:
    folder, done = scripted
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    frames = [line for line in lines if line.startswith("  File")]
    script = folder / "old" / "script.py"
    assert frames[0] == f'  File "{script}", line 24, in <module>'
    assert frames[1] == f'  File "{script}", line 22, in fails'
    assert "RefusedError: jax.experimental.maps.xmap was removed" in lines[-1]
    assert "runpy" not in done.stderr


def test_report_lists_names_and_lines_also_after_an_exception(scripted) -> None:
    folder, _ = scripted
    report = json.loads((folder / "uses.json").read_text())
    lines = {
        use["name"]: {line["line"]: line["count"] for line in use["lines"]}
        for use in report["uses"]
    }
    assert lines == {
        "jax.config.config": {4: 1},
        "jax.config.jax_array": {13: 1},
        "jax.config.jax_parallel_functions_output_gda": {12: 1},
        "jax.experimental.maps": {9: 1},
        "jax.experimental.maps.xmap": {22: 1},
        "jax.tree_leaves": {5: 1},
        "jax.tree_map": {5: 1, 15: 3, 16: 3},
    }
    (tree_map,) = (use for use in report["uses"] if use["name"] == "jax.tree_map")
    assert tree_map["today"] == "jax.tree.map"
    assert tree_map["count"] == 7
    assert {line["file"] for line in tree_map["lines"]} == {str(folder / "old" / "script.py")}
    assert report["failure"] == "RefusedError"


@pytest.mark.slow
def test_script_is_the_main_module_also_in_multiprocessing_workers(tmp_path: Path) -> None:
    (tmp_path / "starter.py").write_text(STARTER)
    done = run(tmp_path, "--jax_array=0", "starter.py", "one")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "None None ['starter.py', 'one']",
        "[([1], False, '__mp_main__')]",
        "True",
        "True",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["folder", "archive"])
def test_folder_and_archive_run_as_under_python(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "__main__.py").write_text("import beside, sys; print(sys.argv[1:], beside.VALUE)")
    (folder / "beside.py").write_text(BESIDE)
    if form == "archive":
        shutil.make_archive(str(folder), "zip", folder)
    done = run(tmp_path, "old" if form == "folder" else "old.zip", "one")
    assert (done.stdout, done.stderr) == ("['one'] 7\n", "")


@pytest.mark.slow
def test_script_can_be_read_from_a_pipe(tmp_path: Path) -> None:
    done = run(tmp_path, "/dev/stdin", "one", stdin="import sys; print(sys.argv[1:], __name__)\n")
    assert (done.stdout, done.stderr) == ("['one'] __main__\n", "")


@pytest.mark.slow
def test_package_init_imports_legacy_names_and_shows_its_own_errors(tmp_path: Path) -> None:
    for name, init in (("old", PACKAGE), ("broken", "import no_such_thing\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(init)
        (tmp_path / name / "__main__.py").write_text("print(__spec__.name, __package__)")
    done = run(tmp_path, "-m", "old")
    assert (done.stdout, done.stderr) == ("old.__main__ old\n", "")
    done = run(tmp_path, "-m", "broken")
    init = tmp_path / "broken" / "__init__.py"
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{init}", line 1, in <module>',
        "    import no_such_thing",
        "ModuleNotFoundError: No module named 'no_such_thing'",
    ]


@pytest.mark.slow
def test_option_m_runs_a_module_and_prints_a_report(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "old.py").write_text(MODULE)
    # A console script begins with its own folder in `sys.path`, not with the current one.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "xlashard").write_text(CONSOLE_SCRIPT)
    words = ["--report", "--jax_enable_x64=1", "--", "python", "-m", "package.old", "one"]
    done = run(tmp_path, *words, start=("bin/xlashard", "legacy"))
    assert done.returncode == 3
    assert done.stdout == "__main__ package.old ['one']\n5\n"
    assert done.stderr.splitlines() == [
        "2 removed names used, at 2 lines, before exit code 3 ended the program",
        "jax.linear_util (until JAX 0.4.24); today: import jax.extend.linear_util",
        "  package/old.py:2",
        "jax.linear_util.wrap_init (until JAX 0.4.24); today: jax.extend.linear_util.wrap_init",
        "  package/old.py:4",
    ]


def test_command_line_is_parsed() -> None:
    assert read_command(["a.py"]) == RunCommand(ScriptOrModule("a.py", False))
    assert read_command(["--report", "--", "-odd.py", "-m"]) == RunCommand(
        ScriptOrModule("-odd.py", False, ("-m",)), report=True
    )
    module = RunCommand(ScriptOrModule("a.b", True, ("-x",)))
    assert read_command(["--", "/usr/bin/python3.13", "-u", "-m", "a.b", "-x"]) == module
    words = ["--nojax_array", "--jax_enable_x64", "--report=r.json", "-m", "a.b", "--report"]
    assert read_command(words) == RunCommand(
        ScriptOrModule("a.b", True, ("--report",)),
        report=True,
        report_file="r.json",
        flags={"jax_array": False, "jax_enable_x64": True},
    )


def test_name_of_a_console_script_is_found_as_a_shell_finds_it(tmp_path, monkeypatch) -> None:
    for folder in ("bin", "elsewhere"):
        (tmp_path / folder).mkdir()
        script = tmp_path / folder / "t5x_train"
        script.write_text(f"#!{sys.executable}\n{CONSOLE_SCRIPT}")
        script.chmod(0o755)
    (tmp_path / "elsewhere" / "make").write_text("#!/bin/sh\n")
    (tmp_path / "elsewhere" / "make").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    found = ScriptOrModule(str(tmp_path / "elsewhere" / "t5x_train"), False, ("--steps=3",))
    assert read_command(["--", "t5x_train", "--steps=3"]) == RunCommand(found)
    # The scripts of an environment that is not activated.
    monkeypatch.setenv("PATH", "/none")
    assert read_command(["--", "t5x_train"]).program.target == str(tmp_path / "bin" / "t5x_train")
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    for name in ("make", "t5x_tarin"):
        with pytest.raises(ArgumentError, match=f"'{name}' after -- is no Python program"):
            read_command(["--", name])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make").touch()
    assert read_command(["--", "make"]).program.target == "make"


WRONG = {
    "nothing": ([], "missing program to run"),
    "no module": (["-m"], "-m requires a module name"),
    "a migration": (["--migrate", "a.py"], "write python -m xlashard legacy --migrate FILE"),
    "an option": (["--steps=3", "a.py"], "unknown option --steps"),
    "no file": (["--report=", "a.py"], "--report=uses.json"),
}


@pytest.mark.parametrize(("words", "why"), WRONG.values(), ids=WRONG)
def test_invalid_command_line_exits_with_a_suggestion(words, why, capsys) -> None:
    with pytest.raises(UsageError):
        read_command(words)
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert why in printed
    assert "usage: python -m xlashard.legacy" in printed


def test_invalid_flags_and_missing_programs_are_refused(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    original = spawn.get_preparation_data
    assert main(["--jax_arary=1", "a.py"]) == 2
    assert "did you mean 'jax_array'" in capsys.readouterr().err
    assert main(["--jax_array=maybe", "a.py"]) == 2
    assert "expected True or False" in capsys.readouterr().err
    assert main(["no/such.py"]) == 2
    assert "no file 'no/such.py'" in capsys.readouterr().err
    assert main(["-m", "no.such"]) == 1
    assert "no module 'no.such'" in capsys.readouterr().err
    assert main(["--report", "-m", "json"]) == 1
    assert "no module 'json'" in capsys.readouterr().err
    assert main(["-m", ".beside"]) == 1
    assert main([str(tmp_path)]) == 2
    assert "has no __main__.py: pass a script in it" in capsys.readouterr().err
    assert not hasattr(jax, "tree_map")
    assert spawn.get_preparation_data is original


def test_help(capsys) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("--report=FILE", "--jax_array=0", "-m module"))


@pytest.mark.slow
def test_ineffective_flag_is_reported(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(
        "import jax\njax.config.update('jax_parallel_functions_output_gda', True)\n"
        "import sys\nif len(sys.argv) > 1: jax.config.update('jax_array', False)\n"
    )
    note = run(tmp_path, "old.py").stderr
    assert "jax_parallel_functions_output_gda" in note and "--jax_array=0" in note
    assert run(tmp_path, "old.py", "off").stderr == ""
    assert run(tmp_path, "--jax_array=1", "old.py").stderr == ""


@pytest.mark.slow
def test_current_libraries_run_while_legacy_names_are_installed() -> None:
    done = subprocess.run(
        [*python_command(), "-m", "tests.legacy.libraries_of_today"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
