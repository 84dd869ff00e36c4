"""The benchmarks start, measure and write their figures, whatever their speed."""

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks._published_runs import published_runs
from benchmarks.truth import Comparison, list_refuted, ranking, read_kept, validate_bars, write_page
from tests.device_counts import QUICK_COMPILE
from tests.fork_server import python_command

ROOT = Path(__file__).resolve().parents[2]
# `truth` and `operations` compare predictions with published times, `auto` those of layouts,
# `resharding` prices and `advice` promises with compiled programs; they measure nothing.
PROGRAMS = sorted(
    {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    - {"truth", "operations", "auto", "advice", "resharding"}
)
QUICK = ("assembly", "geometry", "legacy", "makers")


@pytest.mark.slow
def test_rankings_count_pairs_that_differ_per_token() -> None:
    runs = published_runs()
    names = [f"tpu7x_llama3.1-70b_256_{number}" for number in (1, 2, 5)]
    first, second, again = (runs[name] for name in names)
    assert second.settings == again.settings and second.options == again.options
    right = [Comparison(run, run.seconds, 0.0, 0.0) for run in (first, second, again)]
    assert ranking(right) == (2, 2)
    wrong = [Comparison(run, 1 / run.seconds, 0.0, 0.0) for run in (first, second, again)]
    assert ranking(wrong) == (0, 2)
    far = [right[0], Comparison(runs["v4_maxtext-22b-2023_64_1"], 1.0, 0.0, 0.0)]
    assert ranking(far) == (0, 0)


def test_error_bars_are_validated_on_models_that_were_left_out() -> None:
    runs = published_runs()
    names = ("tpu7x_llama3.1-70b_256_1", "v4_maxtext-22b-2023_64_1", "v4_maxtext-22b-2023_128_1")
    near, far, alike = (
        Comparison(runs[name], runs[name].seconds / ratio, -0.1, 0.2)
        for name, ratio in zip(names, (1.1, 1.3, 1.3), strict=True)
    )
    assert (near.is_in_bar, far.is_in_bar) == (True, False)
    assert near.reach == pytest.approx(0.5) and near.width == pytest.approx(0.3)
    # Bars that hold 1.1 are half as wide, and don't hold 1.3; those that hold 1.3 hold 1.1.
    assert "hold 33% of its runs" in validate_bars([near, far, alike])
    assert list_refuted([near, replace(far, fits=False)]).endswith(f"memory: {names[1]}")


def test_page_of_step_times_has_a_picture_and_folded_rows(tmp_path: Path) -> None:
    runs = published_runs()
    found = [
        Comparison(runs["v5p_deepseek2-16b_4_1"], 6.0, -0.1, 0.2),
        Comparison(runs["tpu7x_gemma4-31b_64_3"], 6.0, -0.1, None, fits=False),
    ]
    for folder in ("pictures", "tpu"):
        (tmp_path / folder).mkdir()
    page = tmp_path / "tpu" / "step_times.md"
    page.write_text("# Steps\n\n<!-- step times -->\nbefore\n<!-- /step times -->\nend\n")
    write_page("tpu", found, tmp_path)
    text = page.read_text()
    assert "](../pictures/step_times_tpu.svg)" in text.partition("2 runs:")[0]
    assert "    | tpu7x_gemma4-31b_64_3 | 12.2 s | 6 s | -51% | -10% | no |" in text
    assert "before" not in text and text.endswith("end\n")
    picture = ElementTree.fromstring((tmp_path / "pictures" / "step_times_tpu.svg").read_text())
    bars = {g.findtext(f"{_SVG}title"): g.get("class") for g in picture.iter(f"{_SVG}g")}
    assert bars == {
        "v5p_deepseek2-16b_4_1: 106% of the measured time": "held",
        "tpu7x_gemma4-31b_64_3: 49% of the measured time": "held",
    }
    assert {"v5p", "tpu7x", "100%"} <= {each.text for each in picture.iter(f"{_SVG}text")}


_SVG = "{http://www.w3.org/2000/svg}"


def test_predictions_are_kept_of_published_runs_alone() -> None:
    kept = read_kept()
    assert kept and all(one.seconds > 0 and one.below < 0 for one in kept.values())


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python as `make bench` does, with its own number of devices."""
    kept = {**os.environ, "XLA_FLAGS": QUICK_COMPILE}
    return subprocess.run(
        [*python_command(kept), *words],
        cwd=ROOT,
        env=kept,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.integration
@pytest.mark.parametrize("name", QUICK)
def test_benchmark_measures_and_writes_json(name: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    done = run("-m", f"benchmarks.{name}", "--rounds", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert f"{name}: " in done.stdout
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert figures["benchmark"] == name
    assert figures["environment"]["jax"]
    for table in figures["tables"]:
        assert all(row["median_s"] > 0 for row in table["rows"]), table["title"]


ALL_HELP = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except SystemExit as end:
        print("===", name, end.code, flush=True)
"""


@pytest.mark.slow
def test_every_benchmark_has_a_help_text() -> None:
    done = run("-c", ALL_HELP, *PROGRAMS)
    assert done.returncode == 0, done.stderr
    *helps, rest = re.split(r"^=== (\w+) 0\n", done.stdout, flags=re.M)
    assert (helps[1::2], rest) == (PROGRAMS, "")
    for name, text in zip(PROGRAMS, helps[::2], strict=True):
        assert text.startswith("usage: ") and "--rounds" in text, name
