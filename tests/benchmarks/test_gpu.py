"""The benchmark of a GPU: a rehearsal of all its parts on CPU, and the text on its results."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu.programs import PROFILED, list_programs
from tests.predict.targets.gpu.plugin import needs_plugin


def test_programs_have_names_of_their_own_and_equal_dimensions_when_small() -> None:
    programs = list(list_programs())
    names = [program.name for program in programs]
    assert len(names) == len(set(names)) >= 40 and set(PROFILED) <= set(names)
    for program in programs:
        small, large = program.types(tiny=True), program.types(tiny=False)
        assert [t.dtype for t in small] == [t.dtype for t in large]
        # Arrays of the largest programs fit into 40 GB.
        assert sum(t.size * t.dtype.itemsize for t in large) < 8e9, program.name


@pytest.mark.integration
@needs_plugin
def test_rehearsal_runs_every_part_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--rehearse", "--folder", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["others"]) == {"main job", "dispatch", "out of memory"}
    with (tmp_path / "results.csv").open() as stream:
        rows = {row["program"]: row for row in csv.DictReader(stream)}
    assert all(float(row["seconds"]) > 0 for row in rows.values()) and len(rows) > 40
    assert float(rows["product f32"]["predicted_seconds"]) > 0
    assert rows["product f32"]["dtype"] == "tensorfloat32"
    capsys.readouterr()
    kept = tmp_path / "sort.json"
    kept.write_text(kept.read_text().replace('"sort"', '"kept"'))
    assert bench.main(["--rehearse", "--folder", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["programs"]["sort"]["kind"] == "kept"
    assert "the GPU was not run" in capsys.readouterr().out


def test_part_that_ended_its_process_twice_is_left_out(tmp_path: Path) -> None:
    run = bench.Run(tmp_path, rehearsal=True)
    assert run.read("sort") is None and run.read("sort") is None
    assert run.do("sort", dict) == {"failed": "it ended its process"}


def test_gpus_are_found_by_the_names_of_their_drivers() -> None:
    found = {
        name: bench.find_model(name)
        for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA L4")
    }
    assert list(found.values()) == ["h200", "h100", "h100-pcie", None]


def test_page_has_the_errors_of_the_results(tmp_path: Path) -> None:
    assert bench.describe_results() in bench.PAGE.read_text()
    assert bench.NOT_RUN in bench.describe_results(tmp_path / "absent.csv")
    programs = {
        "a": {
            "kind": "sort",
            "seconds": 1.0,
            "predicted_seconds": 1.1,
            "below": -0.2,
            "above": 0.2,
        },
        "b": {
            "kind": "sort",
            "seconds": 1.0,
            "predicted_seconds": 2.0,
            "below": -0.2,
            "above": 0.2,
        },
        "c": {"kind": "sort", "failed": "out of memory"},
    }
    file, page = tmp_path / "results.csv", tmp_path / "page.md"
    bench.write_csv(file, {"device": "NVIDIA H100 80GB HBM3", "programs": programs})
    page.write_text("# Page\n\n<!-- gpu -->\nbefore\n<!-- /gpu -->\nend\n")
    bench.write_page(bench.describe_results(file), page)
    text = page.read_text()
    assert "sort: 2 programs, median error 55%, the bar holds 1" in text
    assert "before" not in text and text.endswith("<!-- /gpu -->\nend\n")
