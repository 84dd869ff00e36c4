"""The programs of this folder after `xlashard legacy --migrate`: equal results under plain JAX."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.core.processes import run_pod
from tests.legacy.programs import ALONE, FOLDER, references
from tests.legacy.programs.test_checkpointed_trainer import losses_of_six_steps
from tests.legacy.programs.test_programs import assert_close
from xlashard.legacy.migration import Migrated, migrate
from xlashard.pods.testing.supervision import EndingRules

pytestmark = pytest.mark.integration

PROGRAMS = (
    "gda_pipeline",
    "hostlocal_trainer",
    "model_parallel_inference",
    "pmap_trainer",
    "checkpointed_trainer",
    "partitioned_trainer",
)
SNIPPETS = ("frozen_rules", "jaxpr_walker", "named_axes", "regex_rules", "replicas")
FOR_A_HUMAN = ("mesh_functions", "praxis_like", "reach_inside")

DRIVER = """\
import contextlib, io, json, pathlib, runpy, sys, tempfile

here = pathlib.Path(sys.argv[1])
for name in json.loads(sys.argv[2]):
    words = [f"--workdir={tempfile.mkdtemp()}"] if "workdir" in (here / name).read_text() else []
    sys.argv = [str(here / name), *words]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")
    print("RAN", name, output.getvalue().strip().rpartition("RESULT ")[2], flush=True)
print("xlashard" in sys.modules)
"""


@pytest.fixture(scope="module")
def migrated(tmp_path_factory) -> tuple[Path, dict[str, Migrated]]:
    folder = tmp_path_factory.mktemp("migrated")
    paths = [FOLDER / f"{name}.py" for name in PROGRAMS]
    paths += [FOLDER / "snippets" / f"{name}.py" for name in SNIPPETS]
    migrated_programs = {path.stem: migrate(path.read_text(encoding="utf-8")) for path in paths}
    for name, program in migrated_programs.items():
        # The manual step that the comment there describes.
        code = program.code.replace('found["pjit"]', 'found["jit"]')
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    (folder / "driver.py").write_text(DRIVER, encoding="utf-8")
    return folder, migrated_programs


def run(folder: Path, *words: str) -> tuple[dict[str, Any], list[str]]:
    names = json.dumps([f"{name}.py" for name in (*SNIPPETS, *PROGRAMS)])
    done = run_pod([*words, str(folder / "driver.py"), str(folder), names], ALONE, EndingRules(280))
    assert done.verdict.well, done.report()
    (output,) = done.outputs
    lines = output.splitlines()
    ran = [line.removeprefix("RAN ").partition(".py ") for line in lines if line.startswith("RAN ")]
    return {name: json.loads(result) for name, _, result in ran if result}, lines


def test_migrated_programs_have_equal_results_under_plain_jax(migrated) -> None:
    folder, _ = migrated
    results, lines = run(folder)
    assert "False" in lines, "xlashard is not loaded"
    ran = {line.split()[1].removesuffix(".py") for line in lines if line.startswith("RAN ")}
    assert ran == {*PROGRAMS, *SNIPPETS}
    expected = references.gda_pipeline(6)
    for key in ("losses", "eval", "predicted"):
        assert_close(results["gda_pipeline"][key], expected[key])
    assert results["gda_pipeline"]["mesh_axes_are_spec"]
    expected = references.hostlocal_trainer(5)
    assert_close(results["hostlocal_trainer"]["losses"], expected["losses"])
    assert_close(results["hostlocal_trainer"]["local_out"], expected["out"])
    assert results["hostlocal_trainer"]["sharded_device_array"]
    assert results["model_parallel_inference"]["greedy"] == references.tokens(0)
    assert results["model_parallel_inference"]["sampled"] == references.tokens(0.7)
    expected = references.pmap_trainer(5)
    assert_close(results["pmap_trainer"]["losses"], expected["losses"])
    assert_close(results["pmap_trainer"]["outputs"], expected["outputs"])
    assert results["pmap_trainer"]["buffers_are_local"]
    assert_close(results["checkpointed_trainer"]["losses"], losses_of_six_steps()[3:])
    assert results["checkpointed_trainer"]["restored_is_saved"]
    expected = references.partitioned_trainer(4)
    assert_close(results["partitioned_trainer"]["losses"], expected["losses"])
    assert_close(results["partitioned_trainer"]["norm"], expected["norm"])


def test_migrated_programs_use_no_removed_names(migrated) -> None:
    folder, _ = migrated
    run(folder, "-m", "xlashard.legacy", f"--report={folder / 'uses.json'}")
    uses = json.loads((folder / "uses.json").read_text())["uses"]
    # The mesh in force stays as it was: jax.set_mesh would place what is made inside on the mesh.
    assert {use["name"] for use in uses} == {"with mesh:"}


def test_lines_for_manual_migration_are_marked(migrated) -> None:
    _, migrated_programs = migrated
    assert {
        name: program.marked for name, program in migrated_programs.items() if program.marked
    } == {"jaxpr_walker": 1}
    for name in FOR_A_HUMAN:
        program = migrate((FOLDER / "snippets" / f"{name}.py").read_text(encoding="utf-8"))
        assert program.code.count("# xlashard: ") == program.marked > 0


def test_migration_of_a_migrated_program_changes_nothing(migrated) -> None:
    folder, migrated_programs = migrated
    for name in migrated_programs:
        code = (folder / f"{name}.py").read_text(encoding="utf-8")
        assert migrate(code).code == code
    compiled = [sys.executable, "-m", "compileall", "-q", str(folder)]
    assert subprocess.run(compiled, check=False).returncode == 0
