"""The benchmark of devices: rehearsals of all its parts on CPU, and the text on its results."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.device import __main__ as bench
from benchmarks.device.programs import PROFILED, PROGRAMS_FOR_TPUS, list_programs
from benchmarks.device.targets import (
    TARGETS,
    GpuTarget,
    find_generation,
    find_gpu_model,
    slice_shape,
)
from tests.predict.targets.gpu.plugin import needs_plugin


def test_programs_have_names_of_their_own_and_equal_dimensions_when_small() -> None:
    programs = list(list_programs())
    names = [program.name for program in programs]
    assert len(names) == len(set(names)) >= 40
    assert {*PROFILED, *PROGRAMS_FOR_TPUS} <= set(names) and len(PROGRAMS_FOR_TPUS) >= 10
    for program in programs:
        small, large = program.types(tiny=True), program.types(tiny=False)
        assert [t.dtype for t in small] == [t.dtype for t in large]
        # Arrays of the largest programs fit into 40 GB, those for TPUs into the 16 GB of a v5e.
        most = 4e9 if program.name in PROGRAMS_FOR_TPUS else 8e9
        assert sum(t.size * t.dtype.itemsize for t in large) < most, program.name


@pytest.mark.integration
@needs_plugin
def test_rehearsal_of_a_gpu_runs_every_part_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["gpu", "--rehearse", "--folder", str(tmp_path)]) == 0
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
    assert bench.main(["gpu", "--rehearse", "--folder", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["programs"]["sort"]["kind"] == "kept"
    assert "GPUs were not run" in capsys.readouterr().out


@pytest.mark.integration
def test_rehearsal_of_tpus_runs_every_part_on_several_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["tpu", "--rehearse", "--folder", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    parts = {"devices", "pod", "main job", "tests", "out of memory"}
    assert set(report["others"]) == parts
    assert '"hosts": [0, 1]' in report["others"]["pod"]["output"]
    assert " passed" in report["others"]["tests"]["output"]
    assert list(report["programs"]) == list(PROGRAMS_FOR_TPUS)
    assert report["programs"]["sum of products"]["predicted_seconds"] > 0
    assert "TPUs were not run" in capsys.readouterr().out


def test_part_that_ended_its_process_twice_is_left_out(tmp_path: Path) -> None:
    run = bench.Run(tmp_path, GpuTarget(rehearsal=True))
    assert run.read("sort") is None and run.read("sort") is None
    assert run.do("sort", dict) == {"failed": "it ended its process"}


def test_devices_are_found_by_the_names_of_their_drivers() -> None:
    found = {
        name: find_gpu_model(name)
        for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA L4")
    }
    assert list(found.values()) == ["h200", "h100", "h100-pcie", None]
    kinds = ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "TPU v9")
    assert list(map(find_generation, kinds)) == ["v5e", "v5p", "v6e", "tpu7x", None]


@pytest.mark.parametrize(
    ("kind", "shape", "slices", "expected"),
    [
        ("TPU v5 lite", (2, 4, 1), 1, "2x4"),
        ("TPU v6 lite", (4, 4, 1), 2, "4x4"),
        ("TPU v5", (2, 2, 4), 1, "2x2x4"),
    ],
)
def test_slices_have_the_shape_of_their_coordinates(
    kind: str, shape: tuple[int, ...], slices: int, expected: str
) -> None:
    x, y, z = shape
    devices = [
        SimpleNamespace(device_kind=kind, coords=(i, j, k), slice_index=number)
        for number in range(slices)
        for k in range(z)
        for j in range(y)
        for i in range(x)
    ]
    assert slice_shape(devices) == expected


def test_page_has_the_errors_of_a_report_that_was_added(tmp_path: Path) -> None:
    for target in TARGETS:
        assert bench.describe_results(target) in bench.PAGE.read_text()
        assert bench.NOT_RUN in bench.describe_results(target, tmp_path)
    bar = {"kind": "sort", "seconds": 1.0, "below": -0.2, "above": 0.2}
    programs = {
        "a": {**bar, "predicted_seconds": 1.1},
        "b": {**bar, "predicted_seconds": 2.0},
        "c": {"kind": "sort", "failed": "out of memory"},
    }
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- tpu -->\nbefore\n<!-- /tpu -->\nend\n")
    for device in ("8 × TPU v6 lite", "4 × TPU v5", "8 × TPU v6 lite"):
        report = {"target": "tpu", "device": device, "programs": programs}
        bench.add_report(report, tmp_path, page)
    text = page.read_text()
    assert text.count("sort: 2 programs, median error 55%, the bar holds 1") == 2
    assert "before" not in text and text.endswith("<!-- /tpu -->\nend\n")
    assert len(bench.read_csv(tmp_path / "tpu.csv")) == 2 * len(programs)
