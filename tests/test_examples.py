"""The programs of `examples/` run, train and print the expected results."""

import json
import os
import re
import subprocess
from pathlib import Path

import jax
import pytest

from tests.fork_server import python_command
from tests.notebooks import code_cells

pytestmark = pytest.mark.jax_version

FOLDER = Path(__file__).resolve().parent.parent / "examples"
TOUR = FOLDER / "tour.ipynb"
# It is in plain JAX, and trains only; a page of the documents explains it.
PLAIN = "nnx.py"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != PLAIN)
# Name, the factor by which its loss falls at least, and the sharding that its picture shows.
FACTS = {
    "equinox_mlp.py": (3, r"float32\[256,256\]  P\('data'\)"),
    "nnx_transformer.py": (3, r"float32\[64,256\]  P\(None, 'model'\)"),
    "plain_transformer.py": (1.5, r"float32\[64,256\]  P\(None, 'model'\)"),
}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with the devices of this one."""
    done = subprocess.run(
        [*python_command(), *words],
        env=os.environ | {"PYTHONPATH": str(FOLDER.parent)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.integration
@pytest.mark.parametrize("name", PROGRAMS)
def test_example_trains_and_explains_its_step(name: str) -> None:
    done = run(str(FOLDER / name))
    assert "Warning" not in done.stderr
    factor, picture = FACTS[name]
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) > 5
    assert losses[-1] * factor < losses[0]
    assert re.search(rf"^{picture} on data=", done.stdout, re.M)
    assert f"train_step  {jax.device_count()} devices" in done.stdout
    along_data = re.findall(r"^ +[\d.]+ \w+  (all-\w+).* data  ", done.stdout, re.M)
    assert "all-reduce" in along_data
    assert "Donated  " in done.stdout and "reused for results" in done.stdout


@pytest.mark.integration
def test_the_plain_program_trains() -> None:
    done = run(str(FOLDER / PLAIN))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", done.stdout, re.M)]
    assert losses[-1] * 5 < losses[0]
    assert "import xlashard" not in (FOLDER / PLAIN).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*PROGRAMS, PLAIN])
def test_a_program_is_short_and_documented(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text.count("\n") < 120
    assert f"python examples/{name}" in text
    assert f"]({name})" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_example_has_expected_results() -> None:
    assert set(FACTS) == set(PROGRAMS)


@pytest.mark.integration
def test_the_notebook_shows_pictures_and_reports() -> None:
    cells = json.loads(run("-m", "tests.notebooks", str(TOUR)).stdout)
    assert [(name, cell["error"]) for name, cell in cells.items() if cell["error"]] == []
    assert list(cells) == [cell["id"] for cell in code_cells(TOUR)]
    assert not any(cell["displays"] for cell in cells.values())
    drawn = cells["tiles"]["value"]["text/html"]
    assert "<svg" in drawn
    assert all(re.search(rf"\b{device.id}\b", drawn) for device in jax.devices())
    assert "along data" in cells["copies"]["value"]["text/html"]
    assert cells["tree"]["value"]["text/html"].count("<details") == 3
    assert cells["file"]["value"]["image/svg+xml"].startswith("<svg")
    report = cells["explain"]["stdout"]
    assert report.startswith(f"train_step  {jax.device_count()} devices")
    assert "all-gather  data" in report and "mlp['up']" in report
    sent = eval(cells["fields"]["value"]["text/plain"])
    assert sent["data"] > sent["model"] > 0
    first, last = eval(cells["run"]["value"]["text/plain"])
    assert last < 0.5 * first
    assert "2 compilations" in cells["again"]["stdout"]
    # Lines of cells are shown by the cell's number, not by IPython's name of its code.
    number = list(cells).index("again") + 1
    assert f"at cell {number}, line " in cells["again"]["stdout"]
    assert re.search(r"\bcell \d+\b", report)
    assert "ipython-input" not in str(cells)
    assert "float32[512,256] → float32[256,256] (shape)" in cells["again"]["stdout"]


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = json.loads(TOUR.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    for cell in code_cells(TOUR):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert "](tour.ipynb)" in (FOLDER / "README.md").read_text(encoding="utf-8")
