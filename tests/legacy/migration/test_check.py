"""`--migrate --check`: what is recorded of a run, and how two runs are compared."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.without_jax import HAS_JAX
from xlashard.cli.main import main
from xlashard.legacy.migration import check, recorded_run
from xlashard.legacy.migration.check import CheckResult, check_migration, is_equal_text

if HAS_JAX:
    from xlashard.legacy import run_command
    from xlashard.legacy.installer import INSTALLER
    from xlashard.legacy.recorder import Recorder
    from xlashard.legacy.usage_report import Report, json_of

pytestmark = pytest.mark.needs_jax


@contextmanager
def patched_names(reports: list[str], files: list[str]) -> Iterator[None]:
    """Install the removed names, and report their uses, as the runner does."""
    recorder = Recorder()
    INSTALLER.install(recorder.listen, frozenset(json.loads(files[0]) if files else ()))
    recorder.start()
    try:
        yield
    finally:
        recorder.end()
        INSTALLER.uninstall()
        # The next run imports it anew.
        sys.modules.pop("old_library", None)
        Path(reports[0]).write_text(json_of(Report.of(recorder.uses())))


PROGRAM = """\
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import PartitionSpec as P
from jax.experimental.maps import Mesh, xmap
from jax.experimental.pjit import pjit

step = pjit(lambda x: (2 * x).sum(), in_axis_resources=P('d'), out_axis_resources=None)

def train(count):
    losses = []
    with Mesh(np.array(jax.devices()), ('d',)):
        for number in range(count):
            losses.append(float(step(jnp.arange(8.0) * number)))
            print('step', number, 'loss', losses[-1])
    return losses

train(3)
"""


@pytest.fixture
def run_here(monkeypatch) -> None:
    """Run the recorded programs in this process, in which they would start three of them."""

    def run(command: list[str], cwd: Path, **_: Any) -> SimpleNamespace:
        code, errors = 0, ""
        reports = [word.removeprefix("--report=") for word in command if "uses.json" in word]
        files = [word for word in command if word.startswith("[")]
        names = patched_names(reports, files) if reports else nullcontext()
        words = command[[Path(word).name for word in command].index("record.json") :]
        started = []
        install = run_command.install_libraries
        with monkeypatch.context() as patch:
            patch.setattr(run_command, "install_libraries", lambda: started.append(install()))
            patch.chdir(cwd)
            for name, value in (("argv", []), ("path", [*sys.path]), ("stdout", sys.stdout)):
                patch.setattr(sys, name, value)
            try:
                with names:
                    if "--libraries" in command or any("install_libraries" in w for w in command):
                        run_command.install_libraries()
                    recorded_run.main(words)
            except SystemExit as exit:
                code = exit.code
            except BaseException as error:
                lines = ("Traceback (most recent call last):", '  File "train.py", line 7')
                code, errors = 1, "\n".join([*lines, f"{type(error).__name__}: {error}"])
        for installation in started:
            installation.end()
        return SimpleNamespace(returncode=code, stderr=errors)

    monkeypatch.setattr(check, "subprocess", SimpleNamespace(run=run))


def check_program(
    folder: Path, code: str, migrated: str = "", *, libraries: bool = False
) -> CheckResult:
    (folder / "train.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        if migrated:
            patch.setattr(check, "migrate", lambda _: SimpleNamespace(code=migrated))
        return check_migration(folder, ["train.py"], [], libraries=libraries)


@pytest.mark.usefixtures("run_here")
def test_migrated_program_is_equal_and_its_marks_are_listed(tmp_path: Path) -> None:
    result = check_program(tmp_path, PROGRAM)
    assert result.difference is None and result.lines == 3
    # The losses, their list as a result, the count, and the last number.
    assert result.values >= 3 + 3 + 1 + 1
    (mark,) = result.marks
    assert mark.startswith("train.py:") and "jax.shard_map" in mark
    assert (tmp_path / "train.py").read_text() == PROGRAM


@pytest.mark.usefixtures("run_here")
def test_both_runs_get_the_names_of_other_libraries(tmp_path: Path) -> None:
    code = PROGRAM.replace("train(3)", "print(np.array([1], dtype=np.object))\ntrain(2)")
    result = check_program(tmp_path, code, libraries=True)
    assert result.difference is None and result.lines == 3
    difference = check_program(tmp_path, code).difference
    assert difference is not None and "no attribute 'object'" in difference.old


OLD_LIBRARY = """\
import jax, jax.numpy as jnp
from jax.experimental.maps import thread_resources

def double(x):
    assert hasattr(x, 'device_buffers') or not hasattr(x, 'addressable_shards')
    return jax.tree_map(lambda leaf: 2 * jnp.clip(leaf, a_min=1), x)
"""
ON_LIBRARY = """\
import jax, jax.numpy as jnp
from old_library import double

print(jax.tree_map(lambda x: float(x.sum()), double({'w': jnp.arange(3.0)})))
"""


@pytest.fixture
def old_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a library with removed names, which isn't the program's own."""
    file = tmp_path / "libraries" / "old_library.py"
    file.parent.mkdir()
    file.write_text(OLD_LIBRARY)
    monkeypatch.setattr(sys, "path", [*sys.path, str(file.parent)])
    return file


@pytest.mark.usefixtures("run_here")
def test_old_library_keeps_its_names_and_is_named(tmp_path: Path, old_library: Path) -> None:
    (tmp_path / "program").mkdir()
    result = check_program(tmp_path / "program", ON_LIBRARY)
    assert result.difference is None and result.lines == 1
    assert f"{old_library}:6 jax.tree_map" in result.needs
    assert f"{old_library}:6 jax.numpy.clip(a_min=)" in result.needs
    assert all(str(old_library) in need for need in result.needs)


@pytest.mark.usefixtures("run_here")
@pytest.mark.parametrize(
    ("line", "what", "is_told"),
    [
        ("from jax import tree_map as m", "exit code", "cannot import name 'tree_map'"),
        ("import jax.experimental.maps", "exit code", "No module named 'jax.experimental.maps'"),
        ("jax.tree_map(float, 1)", "exit code", "no attribute 'tree_map'"),
        ("jnp.clip(jnp.ones(2), a_min=0)", "jax.numpy.clip(a_min=), which", "train.py:5"),
        ("jnp.ones(2).device()", "jax.Device.__call__, which", "train.py:5"),
        ("jnp.ones(2).device_buffers", "jax.Array.device_buffers, which", "train.py:5"),
        ("jax.config.jax_array", "jax.config.jax_array, which", "train.py:5"),
    ],
)
@pytest.mark.usefixtures("old_library")
def test_removed_name_in_a_migrated_file_is_a_difference(
    line: str, what: str, is_told: str, tmp_path: Path
) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    migrated = f"{ON_LIBRARY.replace('jax.tree_map', 'jax.tree.map')}{line}\n"
    difference = check_program(folder, ON_LIBRARY, migrated).difference
    assert difference is not None and difference.what.startswith(what)
    assert is_told in f"{difference.migrated_place} {difference.new}"


@pytest.mark.usefixtures("run_here")
def test_first_difference_has_its_lines(tmp_path: Path) -> None:
    new = "\n" + check.migrate(PROGRAM.replace("2 * x", "3 * x")).code
    difference = check_program(tmp_path, PROGRAM, new).difference
    assert difference is not None
    assert (difference.what, difference.place) == ("output line 2, word 4", "train.py:13")
    assert (
        difference.migrated_place
        == f"train.py:{
            new.splitlines().index("            print('step', number, 'loss', losses[-1])") + 1
        }"
    )
    assert (difference.old, difference.new) == ("step 1 loss 56.0", "step 1 loss 84.0")


@pytest.mark.usefixtures("run_here")
@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("x = jax.numpy.arange(3)\n", "x = jax.numpy.arange(1, 4)\n", "x of <module>, return 1"),
        ("x = {'w': [1.0]}\n", "x = {'w': [2.0]}\n", "x['w'][0] of <module>, return 1"),
        ("print(1)\n", "print(1)\n1 / 0\n", "exit code"),
    ],
)
def test_values_and_exit_codes_are_compared(old: str, new: str, what: str, tmp_path: Path) -> None:
    difference = check_program(tmp_path, f"import jax\n{old}", f"import jax\n{new}").difference
    assert difference is not None and difference.what == what


@pytest.mark.usefixtures("run_here")
def test_an_error_of_both_programs_is_no_equality(tmp_path: Path) -> None:
    difference = check_program(tmp_path, "import jax\nprint(1)\n1 / 0\n").difference
    assert difference is not None
    assert difference.what == "nothing after an error of both programs"
    assert difference.old == difference.new == "ZeroDivisionError: division by zero"
    assert check_program(tmp_path, "import jax\nraise SystemExit(3)\n").difference is None


@pytest.mark.usefixtures("run_here")
def test_what_differs_from_run_to_run_is_named_and_not_compared(tmp_path: Path) -> None:
    code = "import time, jax\nnow = time.perf_counter_ns()\nprint('took', now, 'loss', 0.5)\n"
    result = check_program(tmp_path, code)
    assert result.difference is None
    assert result.unstable == ["output line 1, word 2", "now of <module>, return 1"]
    difference = check_program(tmp_path, code, code.replace("0.5", "0.6")).difference
    assert difference is not None and difference.what == "output line 1, word 4"


@pytest.mark.parametrize(
    ("old", "new", "equal"),
    [
        ("loss=0.500001,", "loss=0.5,", True),
        ("0.51", "0.5", False),
        ("12 steps", "13 steps", False),
        ("PartitionSpec('x',)", "P('x',)", True),
        ("nan", "0.5", False),
        ("1e-9", "2e-9", True),
    ],
)
def test_numbers_in_texts_are_compared_with_a_tolerance(old: str, new: str, equal: bool) -> None:
    assert is_equal_text(old, new) is equal


@pytest.mark.integration
def test_check_runs_old_and_migrated_programs_and_writes_nothing(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    assert main(["legacy", "--migrate", "--check", "--", "train.py"]) == 0
    assert "equal: 3 lines of output" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == PROGRAM
