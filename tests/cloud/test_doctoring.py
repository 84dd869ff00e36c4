"""The doctor: what it sees on a machine, what it says of it, and a look at a whole pod."""

import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cloud.conftest import Cloud
from xlashard.cloud.doctoring import look, look_here, report
from xlashard.cloud.findings import (
    Finding,
    compare_versions,
    findings_of,
    judge_chips,
    judge_reach,
    satisfies,
)
from xlashard.cloud.preparing import setup
from xlashard.cloud.provisioning import create, wait
from xlashard.cloud.running import run
from xlashard.errors import CloudError

REMOTE = Path(__file__).parents[2] / "xlashard" / "cloud" / "remote"


def machine(root: Path, chips: int = 4, kind: str = "accel") -> Path:
    """A machine with chips; nobody holds them."""
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
    """A process that has a chip open."""
    folder = root / "proc" / str(pid) / "fd"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "7").symlink_to(device)
    (folder.parent / "cmdline").write_text(command.replace(" ", "\0"))


def probe(root: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(REMOTE / "probe.py"), "look"],
        env={**os.environ, "LAUNCHER_ROOT": str(root), "HOME": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def seen(look: dict[str, Any], chips: int | None = 4) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings_of("0", look, chips)}


def test_a_machine_that_is_well(tmp_path: Path) -> None:
    found = seen(probe(machine(tmp_path, kind="vfio")))
    assert found["TPU"].ok and found["TPU"].seen == "4 chips (/dev/vfio/0 ...)"
    assert found["held by"].seen == "nobody"
    assert found["memory"].ok
    assert found["versions"].ok and "libtpu" in found["versions"].seen
    assert all(finding.ok for finding in found.values() if finding.what != "disk")


def test_a_machine_where_much_is_wrong(tmp_path: Path) -> None:
    root = machine(tmp_path, chips=3)
    hold(root, 4242, "/dev/accel0")
    (root / "tmp" / "libtpu_lockfile").touch()
    (root / "proc" / "meminfo").write_text("MemTotal: 400000000 kB\nMemAvailable: 9 kB\n")
    (root / "proc" / "self" / "limits").write_text("Max locked memory  65536  65536  bytes\n")
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never")
    found = seen(probe(root))
    assert found["TPU"].ok is False and found["TPU"].seen == "3 chips (/dev/accel0 ...), of 4"
    assert found["held by"].seen == "process 4242: python train.py"
    assert "kill 4242 (or run.py --take)" in found["held by"].advice
    assert found["libtpu's lock"].ok
    assert found["memory"].ok is None
    assert "ulimit -l unlimited" in found["locked memory"].advice
    assert "echo always" in found["huge pages"].advice


def test_a_machine_without_a_tpu(tmp_path: Path) -> None:
    found = seen(probe(machine(tmp_path, chips=0)), None)
    assert found["TPU"].ok is False and "no /dev/accel*" in found["TPU"].seen


BASE = {
    "chips": ["/dev/accel0"],
    "holders": [],
    "unseen": 0,
    "lock": None,
    "memory": {"total": None, "available": None, "locked": -1, "hugepages": None, "disk": 1e12},
    "versions": {
        "found": {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "libtpu": "0.0.50.1"},
        "wanted": {"jaxlib": "<=0.12.0.1,>=0.12.0.1", "libtpu": "==0.0.50.*"},
        "problem": "",
    },
}


def with_versions(**found: str | None) -> dict[str, Any]:
    versions = BASE["versions"]
    return {**BASE, "versions": {**versions, "found": {**versions["found"], **found}}}


def test_versions_that_do_not_fit() -> None:
    assert seen(BASE)["versions"].ok
    wrong = seen(with_versions(libtpu="0.0.17"))["versions"]
    assert wrong.ok is False
    assert wrong.seen == "libtpu 0.0.17, but jax 0.12.0.1 asks for ==0.0.50.*"
    assert "pip install --upgrade 'jax[tpu]'" in wrong.advice
    missing = seen(with_versions(libtpu=None))["versions"]
    assert missing.seen.endswith("; no libtpu") and missing.advice == "set it up: setup.py"


def test_versions_that_differ() -> None:
    looks = {"0": BASE, "1": with_versions(jax="0.11.2"), "2": BASE}
    assert compare_versions({"0": BASE, "1": BASE}).ok
    finding = compare_versions(looks)
    assert finding.ok is False
    assert "jax 0.12.0.1" in finding.seen and " on 0, 2; " in finding.seen
    assert finding.seen.endswith("on 1")


@pytest.mark.parametrize(
    ("own", "advice"), [(True, ""), (False, "it is another user's: sudo rm /tmp/libtpu_lockfile")]
)
def test_a_lock_that_was_left(own: bool, advice: str) -> None:
    lock = seen({**BASE, "lock": {"owner": 1, "own": own, "opened": []}})["libtpu's lock"]
    assert (lock.ok, lock.advice) == (own, advice)


RULES = {
    "==0.0.50.*": (["0.0.50", "0.0.50.1"], ["0.0.5", "0.0.51"]),
    "<=0.12.0.1,>=0.11.2": (["0.11.2", "0.12", "0.12.0.1"], ["0.11.1", "0.12.0.2", "1.0"]),
    "~=1.4.2": (["1.4.2", "1.4.9"], ["1.5", "1.4.1"]),
    "!=1.3.*": (["1.4"], ["1.3.7"]),
    "==1.2": (["1.2.0", "1.2.0.dev3"], ["1.2.1"]),
    "!=1.2,>1,<3": (["2"], ["1", "1.2.0", "3"]),
    "": (["1"], []),
}


@pytest.mark.parametrize(("rule", "versions"), RULES.items())
def test_what_a_requirement_allows(rule: str, versions: tuple[list[str], list[str]]) -> None:
    assert all(satisfies(version, rule) for version in versions[0])
    assert not any(satisfies(version, rule) for version in versions[1])


def count(processes: int, devices: int, summed: float) -> dict[str, Any]:
    return {"processes": processes, "devices": devices, "summed": summed}


def test_chips_that_all_see_or_not() -> None:
    good = {"0": count(2, 8, 8), "1": count(2, 8, 8)}
    assert judge_chips(good, 2, 8).ok and judge_chips(good, 2, None).ok
    alone = judge_chips({"0": count(1, 4, 4), "1": count(1, 4, 4)}, 2, 8)
    assert alone.ok is False and "there should be 2 processes, 8 devices" in alone.seen
    assert judge_chips({"0": count(2, 8, 8), "1": count(2, 8, 4)}, 2, 8).ok is False
    silent = judge_chips({"0": count(2, 8, 8), "1": None}, 2, 8)
    assert silent.ok is False and silent.seen.endswith("did not end on 1")


def test_a_coordinator_that_is_out_of_reach() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]  # Nobody listens.
        words = [sys.executable, str(REMOTE / "probe.py"), "reach", "127.0.0.1", str(port), "0.1"]
        told = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    finding = judge_reach("1", "127.0.0.1:8482", told)
    assert finding.ok is False and "refused" in finding.seen and "firewall" in finding.advice


def test_the_table_says_what_to_do() -> None:
    out = io.StringIO()
    alike = [Finding(label, "held by", True, "nobody") for label in ("0", "1")]
    code = report(
        [*alike, Finding("", "TPU", False, "none", "get one")], Console(file=out, width=80)
    )
    lines = out.getvalue().splitlines()
    assert code == 1
    assert re.search(r"✓\s+0, 1\s+held by\s+nobody", lines[1])
    assert re.search(r"✗\s+all\s+TPU\s+none", lines[2])
    assert "→ get one" in lines[3] and lines[-1] == "1 thing wrong"
    assert report(alike, Console(file=io.StringIO())) == 0


def test_this_machine_alone(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert look_here(cloud.session(), str(machine(cloud.folder / "other", chips=0))) == 1
    out = capsys.readouterr().out
    assert "no /dev/accel*" in out and "thing" in out.splitlines()[-1]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_all_workers_of_a_pod(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    machine(cloud.folder / "machine", chips=4)
    cloud.write_code(job_sh="true")
    create(cloud.session())
    wait(cloud.session())
    doctor = {"doctor__port": free_port(), "setup__folder": ".xlashard"}
    code = look(cloud.session(**doctor))
    out = " ".join(capsys.readouterr().out.split())
    # Its VMs have 2 emulated devices each in place of 4 chips.
    assert code == 1
    assert "✓ 0, 1 TPU 4 chips" in out and "✓ all same versions on 2 workers" in out
    assert "✓ 1 coordinator" in out
    assert "2 processes, 4 devices on 0; 2 processes, 4 devices on 1" in out
    assert "there should be 2 processes, 8 devices" in out
    hold(cloud.folder / "machine", 4242, "/dev/accel1")
    cloud.faults(ssh_fails={"1": 1})
    assert look(cloud.session(**doctor, wait__ssh_tries=2)) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "✗ 0, 1 held by process 4242: python train.py" in out
        and "! all all chips not counted" in out
    )


@pytest.mark.slow
def test_a_tpu_that_is_held_is_not_run_on(cloud: Cloud) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        root = machine(cloud.folder / "machine")
        create(cloud.session())
        wait(cloud.session())
        setup(cloud.session())
        hold(root, sleeper.pid, "/dev/accel1", "sleep 60")
        with pytest.raises(CloudError) as caught:
            run(cloud.session(run__command="true"))
        text = str(caught.value)
        assert f"process {sleeper.pid}: sleep 60 (/dev/accel1)" in text and "--take" in text
        with pytest.raises(CloudError, match="is held"):
            # It is ended, but what the test has written of it stays.
            run(cloud.session(run__command="true", run__take=True))
        assert sleeper.wait(5) == -15
    finally:
        sleeper.kill()
        sleeper.wait()
