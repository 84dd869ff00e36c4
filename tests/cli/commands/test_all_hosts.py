"""`xlashard doctor --all-hosts`: one table that compares the hosts of a job."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.processes import free_port
from tests.fork_server import python_command
from xlashard.cli.commands import all_hosts
from xlashard.cli.commands.all_hosts import HostReport, compare_hosts, make_report
from xlashard.cli.commands.doctor_checks import Check
from xlashard.cli.main import main

SAME = HostReport(0, "host0", {"jax": "0.12.0.1", "chips": "4"}, {"JAX_PLATFORMS": "tpu"}, ())


def compare(*reports: HostReport, count: int = 4) -> dict[str, Check]:
    named = {r.process: replace(r, host=f"host{r.process}") for r in reports}
    return {check.subject: check for check in compare_hosts(named, count, "srun")}


def test_equal_hosts_pass() -> None:
    checks = compare(*(replace(SAME, process=process) for process in range(4)))
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["hosts"].observed == "4 of 4" and checks["jax"].observed == "0.12.0.1"
    assert checks["environment"].observed == "1 variable equal on all hosts"


def test_missing_and_different_hosts_are_named() -> None:
    other = replace(
        SAME,
        process=2,
        facts={**SAME.facts, "jax": "0.11.2"},
        variables={},
        problems=("TPU held by: process 7: python",),
    )
    checks = compare(SAME, replace(SAME, process=1), other)
    assert (checks["hosts"].status, checks["hosts"].advice) == ("fail", "srun")
    assert checks["hosts"].observed == "process 3 of 4 missing after 45 s"
    assert checks["jax"].observed == "0.12.0.1 on processes 0, 1; 0.11.2 on process 2 (host2)"
    assert checks["JAX_PLATFORMS"].observed.endswith("; not set on process 2 (host2)")
    assert checks["TPU held by"].observed == "process 7: python on process 2 (host2)"
    assert checks["chips"].status == "ok"


def test_report_has_versions_code_and_settings_of_the_job() -> None:
    report = make_report(1, 4, {"XLA_FLAGS": "--a", "TPU_WORKER_ID": "1", "HOME": "/root"})
    assert report.variables == {"XLA_FLAGS": "--a"}
    assert {"Python", "jax", "jaxlib", "libtpu", "xlashard", "code", "chips"} <= set(report.facts)
    assert report.facts["processes"] == "4"


def test_process_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--all-hosts"]) == 1
    assert "xlashard pod -n 2 -- xlashard doctor --all-hosts" in capsys.readouterr().err


@pytest.mark.integration
def test_pod_of_4_names_the_missing_and_the_different_host(tmp_path: Path) -> None:
    """Three of four processes start; one has another environment and another working folder."""
    command = "import sys; from xlashard.cli.commands import all_hosts; all_hosts._ARRIVE = 8.0; "
    command += "sys.exit(all_hosts.run())"
    address, processes = f"127.0.0.1:{free_port()}", []
    for process in (0, 1, 3):
        own = {
            "XLASHARD_POD_COORDINATOR": address,
            "XLASHARD_POD_PROCESSES": "4",
            "XLASHARD_POD_PROCESS_ID": str(process),
            "XLASHARD_POD_DEVICES": "1",
            "LIBTPU_INIT_ARGS": "--other" if process == 3 else "--same",
        }
        processes.append(
            subprocess.Popen(
                [*python_command(), "-c", command],
                env={**os.environ, "COLUMNS": "200", **own},
                cwd=tmp_path if process == 3 else Path(__file__).parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [each.communicate(timeout=100)[0] for each in processes]
    assert [each.returncode for each in processes] == [1, 1, 1], outputs
    lines = {line[6:].partition("  ")[0]: line for line in outputs[0].splitlines()}
    assert "process 2 of 4 missing after 8 s" in lines["hosts"]
    assert "; --other on process 3 (" in lines["LIBTPU_INIT_ARGS"]
    assert "no git commit on process 3 (" in lines["code"]
    assert lines["jax"].startswith("ok") and lines["xlashard"].startswith("ok")
    assert outputs[1] == outputs[2] == ""
    assert all_hosts._ARRIVE < 60


@pytest.mark.integration
def test_host_that_reaches_no_process_0_names_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr(all_hosts, "_ARRIVE", 0.5)
    for name, value in {
        "XLASHARD_POD_COORDINATOR": f"127.0.0.1:{free_port()}",
        "XLASHARD_POD_PROCESSES": "2",
        "XLASHARD_POD_PROCESS_ID": "1",
        "XLASHARD_POD_DEVICES": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--all-hosts"]) == 1
    error = capsys.readouterr().err
    assert "process 1 of 2 has not reached process 0 at 127.0.0.1:" in error and "pod -n 2" in error
