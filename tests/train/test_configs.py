"""The settings files for real runs, and the reports of their preflights that are checked in."""

import json

import pytest

from benchmarks import _preflights as preflights
from xlashard.tpu.preflight.report import PreflightReport
from xlashard.train.formulas import workload

REAL = preflights.real()
ADVICE = "write them again: make preflights"


def test_there_are_settings_for_all_sizes() -> None:
    asked = {
        *("1b_v5e_16", "8b_v5p_64", "8b_v6e_64", "70b_v5p_512", "405b_v5p_4096", "moe_v5p_128")
    }
    assert asked <= set(REAL)


@pytest.mark.parametrize("name", REAL)
def test_the_report_is_of_the_settings_as_they_are(name: str) -> None:
    digests = json.loads(preflights.DIGESTS.read_text())
    assert digests[name] == preflights.digest(name), ADVICE
    report, settings = preflights.kept(name), REAL[name]
    assert report.throughput is not None
    assert report.throughput.workload == workload(settings), ADVICE
    assert {axis.name: axis.size for axis in report.mesh} == settings.mesh
    assert (preflights.REPORTS / f"{name}.json").stat().st_size < 200_000


@pytest.mark.parametrize("name", REAL)
def test_every_config_fits_with_memory_to_spare(name: str) -> None:
    report = preflights.kept(name)
    assert report.outcome == "fits"
    assert report.memory.spare_bytes >= 0.08 * report.memory.available_bytes
    # The state lies in the memory of the one before.
    assert report.memory.alias_bytes > 0.99 * report.memory.argument_bytes


@pytest.mark.parametrize("name", REAL)
def test_reports_name_no_folder_of_the_machine(name: str) -> None:
    text = (preflights.REPORTS / f"{name}.json").read_text()
    assert '"/' not in text


def test_the_guide_has_the_table() -> None:
    assert preflights.page() == preflights.PAGE.read_text(encoding="utf-8"), ADVICE


@pytest.fixture(scope="module")
def again() -> PreflightReport:
    """The preflight of the smallest, made here."""
    return preflights.make("1b_v5e_16", REAL["1b_v5e_16"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_smallest_gives_its_report_again(again: PreflightReport) -> None:
    before = preflights.kept("1b_v5e_16")
    assert again.outcome == "fits"
    assert again.memory.spare_bytes >= 0.08 * again.memory.available_bytes
    assert again.memory.argument_bytes == pytest.approx(before.memory.argument_bytes, rel=1e-3)
    # Other versions of the compiler place temporaries otherwise, and do the same work.
    assert again.memory.total_bytes == pytest.approx(before.memory.total_bytes, rel=0.2)
    products, expected = (
        sum(flops for _, flops in report.time.flops_by_dtype) for report in (again, before)
    )
    assert products == pytest.approx(expected, rel=0.01)
