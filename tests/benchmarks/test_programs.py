"""The benchmarks start, measure and write their figures; how fast they are is not asked here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py"))
QUICK = ("dispatch", "geometry", "legacy", "makers")


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark as `make bench` does, with none of the tests' settings for JAX."""
    kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words],
        cwd=ROOT,
        env=kept,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_it_measures_and_writes_its_figures(name: str, tmp_path: Path) -> None:
    done = run(name, "--rounds", "1", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    assert f"{name}: " in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures["benchmark"] == name
    assert figures["environment"]["jax"]
    for table in figures["tables"]:
        assert all(row["median_s"] > 0 for row in table["rows"]), table["title"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_says_what_it_measures(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout
