"""The doctor: probes of a machine, verdicts on them, and checks of a whole pod."""

import io
import json
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cli.cloud.conftest import Cloud
from tests.core.processes import free_port
from tests.fork_server import python_command
from xlashard.cli.cloud.doctor import (
    Finding,
    check,
    check_machine,
    compare_versions,
    findings_of,
    judge_chips,
    judge_reach,
    report,
)
from xlashard.cli.cloud.tpu import REMOTE, create


def machine(root: Path, chips: int = 4, kind: str = "accel") -> Path:
    """Make a machine with chips that no process holds."""
    for number in range(chips):
        name = f"accel{number}" if kind == "accel" else f"vfio/{number}"
        file = root / "dev" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (root / "tmp").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "self").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "meminfo").write_text("MemTotal: 400000000 kB\nMemAvailable: 390000000 kB\n")
    (root / "proc" / "self" / "limits").write_text(
        "Max locked memory  unlimited  unlimited bytes\n"
    )
    pages = root / "sys" / "kernel" / "mm" / "transparent_hugepage"
    pages.mkdir(parents=True, exist_ok=True)
    (pages / "enabled").write_text("[always] madvise never\n")
    return root


def hold(root: Path, pid: int, device: str, command: str = "python train.py") -> None:
    """Make a process that has a chip open."""
    folder = root / "proc" / str(pid) / "fd"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "7").symlink_to(device)
    (folder.parent / "cmdline").write_text(command.replace(" ", "\0"))


def probe(root: Path) -> dict[str, Any]:
    done = subprocess.run(
        [*python_command(), str(REMOTE / "probe.py"), "look"],
        env={**os.environ, "PROBE_ROOT": str(root), "HOME": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def observed(look: dict[str, Any], chips: int | None = 4) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings_of("0", look, chips)}


@pytest.mark.slow
def test_healthy_machine_passes_all_checks(tmp_path: Path) -> None:
    findings = observed(probe(machine(tmp_path, kind="vfio")))
    assert findings["TPU"].ok and findings["TPU"].observed == "4 chips (/dev/vfio/0 ...)"
    assert findings["held by"].observed == "no process"
    assert findings["memory"].ok
    assert findings["versions"].ok and "libtpu" in findings["versions"].observed
    assert all(finding.ok for finding in findings.values() if finding.subject != "disk")


@pytest.mark.slow
def test_each_problem_of_a_machine_is_reported(tmp_path: Path) -> None:
    root = machine(tmp_path, chips=3)
    hold(root, 4242, "/dev/accel0")
    (root / "tmp" / "libtpu_lockfile").touch()
    (root / "proc" / "meminfo").write_text("MemTotal: 400000000 kB\nMemAvailable: 9 kB\n")
    (root / "proc" / "self" / "limits").write_text("Max locked memory  65536  65536  bytes\n")
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never")
    findings = observed(probe(root))
    assert (
        findings["TPU"].ok is False
        and findings["TPU"].observed == "3 chips (/dev/accel0 ...), expected 4"
    )
    assert findings["held by"].observed == "process 4242: python train.py"
    assert "kill 4242" in findings["held by"].advice
    assert findings["libtpu's lock"].ok
    assert findings["memory"].ok is None
    assert "ulimit -l unlimited" in findings["locked memory"].advice
    assert "echo always" in findings["huge pages"].advice


@pytest.mark.slow
def test_machine_without_a_tpu_fails(tmp_path: Path) -> None:
    findings = observed(probe(machine(tmp_path, chips=0)), None)
    assert findings["TPU"].ok is False and "no /dev/accel*" in findings["TPU"].observed


BASE = {
    "chips": ["/dev/accel0"],
    "holders": [],
    "unseen": 0,
    "lock": None,
    "memory": {"total": None, "available": None, "locked": -1, "hugepages": None, "disk": 1e12},
    "versions": {
        "found": {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "libtpu": "0.0.50.1"},
        "requirements": [
            "jaxlib<=0.12.0.1,>=0.12.0.1",
            'libtpu==0.0.50.*; extra == "tpu"',
            'libtpu>=9; extra == "other"',
            "numpy>=2.1",
        ],
        "problem": "",
    },
}


def with_versions(**findings: str | None) -> dict[str, Any]:
    versions = BASE["versions"]
    return {**BASE, "versions": {**versions, "found": {**versions["found"], **findings}}}


def test_mismatched_libtpu_version_fails_with_the_pip_command() -> None:
    assert observed(BASE)["versions"].ok
    wrong = observed(with_versions(libtpu="0.0.17"))["versions"]
    assert wrong.ok is False
    assert wrong.observed == "libtpu 0.0.17, but jax 0.12.0.1 requires ==0.0.50.*"
    assert "pip install --upgrade 'jax[tpu]'" in wrong.advice
    missing = observed(with_versions(libtpu=None))["versions"]
    assert missing.observed.endswith("; no libtpu") and missing.advice == "install the code: run.py"


def test_different_versions_on_workers_fail() -> None:
    looks = {"0": BASE, "1": with_versions(jax="0.11.2"), "2": BASE}
    assert compare_versions({"0": BASE, "1": BASE}).ok
    finding = compare_versions(looks)
    assert finding.ok is False
    assert "jax 0.12.0.1" in finding.observed and " on 0, 2; " in finding.observed
    assert finding.observed.endswith("on 1")


@pytest.mark.parametrize(
    ("own", "advice"),
    [(True, ""), (False, "it belongs to another user: sudo rm /tmp/libtpu_lockfile")],
)
def test_stale_libtpu_lock_is_reported_with_its_owner(own: bool, advice: str) -> None:
    lock = observed({**BASE, "lock": {"owner": 1, "own": own, "opened": []}})["libtpu's lock"]
    assert (lock.ok, lock.advice) == (own, advice)


def count(processes: int, devices: int, summed: float) -> dict[str, Any]:
    return {"processes": processes, "devices": devices, "summed": summed}


def test_every_worker_must_see_all_devices() -> None:
    good = {"0": count(2, 8, 8), "1": count(2, 8, 8)}
    assert judge_chips(good, 2, 8).ok and judge_chips(good, 2, None).ok
    alone = judge_chips({"0": count(1, 4, 4), "1": count(1, 4, 4)}, 2, 8)
    assert alone.ok is False and "expected 2 processes, 8 devices" in alone.observed
    assert judge_chips({"0": count(2, 8, 8), "1": count(2, 8, 4)}, 2, 8).ok is False
    silent = judge_chips({"0": count(2, 8, 8), "1": None}, 2, 8)
    assert silent.ok is False and silent.observed.endswith("failed on 1")


@pytest.mark.slow
def test_unreachable_coordinator_fails() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]  # No process listens.
        words = [
            *python_command(),
            str(REMOTE / "probe.py"),
            "reach",
            "127.0.0.1",
            str(port),
            "0.1",
        ]
        result = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    finding = judge_reach("1", "127.0.0.1:8482", result)
    assert finding.ok is False and "refused" in finding.observed and "firewall" in finding.advice


def test_table_shows_the_remedies() -> None:
    out = io.StringIO()
    alike = [Finding(label, "held by", True, "no process") for label in ("0", "1")]
    code = report(
        [*alike, Finding("", "TPU", False, "none", "get one")], Console(file=out, width=80)
    )
    lines = out.getvalue().splitlines()
    assert code == 1
    assert re.search(r"✓\s+0, 1\s+held by\s+no process", lines[1])
    assert re.search(r"✗\s+all\s+TPU\s+none", lines[2])
    assert "→ get one" in lines[3] and lines[-1] == "1 problem"
    assert report(alike, Console(file=io.StringIO())) == 0


@pytest.mark.slow
def test_check_of_a_single_machine_returns_1_on_a_problem(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_machine(cloud.session(), str(machine(cloud.folder / "other", chips=0))) == 1
    out = capsys.readouterr().out
    assert "no /dev/accel*" in out and "problem" in out.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_check_of_a_pod_reports_all_workers(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(cloud.folder / "machine", chips=4)
    create(cloud.session())
    session = cloud.session(doctor__port=free_port())
    code = check(session)
    out = " ".join(capsys.readouterr().out.split())
    # Its VMs have 2 emulated devices each in place of 4 chips.
    assert code == 1
    assert "✓ 0, 1 TPU 4 chips" in out and "✓ all same versions on 2 workers" in out
    assert "✓ 1 coordinator" in out
    assert "2 processes, 4 devices on 0; 2 processes, 4 devices on 1" in out
    assert "expected 2 processes, 8 devices" in out
    hold(cloud.folder / "machine", 4242, "/dev/accel1")
    cloud.unreachable = {1: 1}
    assert check(session) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "✗ 0, 1 held by process 4242: python train.py" in out
    assert "! all all chips not counted" in out
