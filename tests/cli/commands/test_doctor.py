"""`xlashard doctor`: checks of an installation, with remedies."""

import json
import os
from pathlib import Path

import jax
import pytest

from xlashard.cli.commands import doctor as installation
from xlashard.cli.commands import installation_probe
from xlashard.cli.commands.doctor import (
    STEPS,
    check_environment,
    check_extras,
    check_packages,
    check_probe,
    meets,
)
from xlashard.cli.commands.doctor_checks import Check, shown
from xlashard.cli.commands.tpu_host import check_tpu_host
from xlashard.cli.main import main

INSTALLED = {
    "xlashard": "0.1.0",
    "jax": "0.12.0.1",
    "jaxlib": "0.12.0.1",
    "numpy": "2.5.0",
    "libtpu": "0.0.50.1",
}
REQUIREMENTS = {
    "xlashard": ["jax<0.13,>=0.11.2", "numpy>=2.1", "libcst>=1.5; extra == 'legacy'"],
    "jax": [
        "jaxlib<=0.12.0.1,>=0.11.2",
        'jaxlib==0.11.2; extra == "minimum-jaxlib"',
        'libtpu==0.0.50.*; extra == "tpu"',
        'jax-cuda13-plugin[with-cuda]<=0.12.0.1,>=0.12.0.1; extra == "cuda13"',
    ],
}


def packages(**versions: str | None) -> dict[str, Check]:
    changed = {name.replace("_", "-"): version for name, version in versions.items()}
    installed = {k: v for k, v in {**INSTALLED, **changed}.items() if v is not None}
    checks = check_packages(installed, lambda name: REQUIREMENTS.get(name, []))
    return {check.subject: check for check in checks}


def test_matching_versions_pass() -> None:
    assert {check.status for check in packages().values()} == {"ok"}
    assert set(packages(libtpu=None)) == set(INSTALLED) - {"libtpu"}


@pytest.mark.parametrize(
    ("versions", "subject", "command"),
    [
        ({"jax": "0.10.0"}, "jax", "pip install 'jax<0.13,>=0.11.2'"),
        ({"jaxlib": "0.13.1"}, "jaxlib", "pip install 'jaxlib<=0.12.0.1,>=0.11.2'"),
        ({"jaxlib": None}, "jaxlib", "pip install jaxlib"),
        ({"libtpu": "0.0.49"}, "libtpu", "pip install 'libtpu==0.0.50.*'"),
        (
            {"jax_cuda13_plugin": "0.11.2"},
            "jax-cuda13-plugin",
            "pip install 'jax-cuda13-plugin<=0.12.0.1,>=0.12.0.1'",
        ),
    ],
)
def test_mismatched_version_fails_with_the_pip_command(
    versions: dict[str, str | None], subject: str, command: str
) -> None:
    failed = [check for check in packages(**versions).values() if check.status == "fail"]
    assert [(check.subject, check.advice) for check in failed] == [(subject, command)]
    version = next(iter(versions.values()))
    assert failed[0].observed.startswith(version or "not installed")


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("1.0", "==1", True),
        ("0.0.50.1", "==0.0.50.*", True),
        ("0.0.5", "==0.0.50.*", False),
        ("0.12.0", "<0.12.0.1", True),
        ("2.1", "!=2.1.0", False),
        ("2.1rc1", ">=2.0", True),
        ("3", "", True),
        ("3", "~=2.0", True),  # left to pip
    ],
)
def test_version_specifiers(version: str, wanted: str, expected: bool) -> None:
    assert meets(version, wanted) is expected


def test_missing_extra_is_noted_with_the_pip_command() -> None:
    found = {each.subject: each for each in check_extras(INSTALLED, REQUIREMENTS["xlashard"])}
    assert found["extra tpu"].status == "ok"
    assert found["extra legacy"].status == "note"
    assert found["extra legacy"].observed == "without libcst"
    assert "pip install 'xlashard[legacy]'" in found["extra legacy"].advice


def test_an_unknown_environment_variable_is_noted_with_a_suggestion() -> None:
    (only,) = check_environment({"HOME": "/root"})
    assert only.status == "ok"
    found = list(check_environment({"XLASHARD_PARTITIONR": "gspmd", "JAX_PLATFORMS": "cpu"}))
    assert (found[0].subject, found[0].status) == ("environment", "note")
    assert "did you mean XLASHARD_PARTITIONER?" in found[0].observed
    assert ("JAX_PLATFORMS", "ok", "cpu", "") in found


@pytest.mark.parametrize(
    ("code", "errors", "parts"),
    [
        (None, "", ["no answer in 180 s", "JAX_PLATFORMS=cpu"]),
        (-6, "F1123 log\nCheck failed: x\n", ["SIGABRT", "Check failed: x"]),
        (-40, "log\n", ["signal 40", "log"]),
        (1, "Traceback\nImportError: no jax\nDocumentation: y\n", ["ImportError: no jax"]),
    ],
)
def test_failed_probe_step_is_reported(code: int | None, errors: str, parts: list[str]) -> None:
    output = json.dumps(Check(STEPS[0], "ok", "well"))
    first, second = check_probe(code, f"noise\n{output}\n", errors, has_libtpu=True)
    assert first == Check(STEPS[0], "ok", "well")
    assert (second.subject, second.status) == (STEPS[1], "fail")
    assert all(part in f"{second.observed} {second.advice}" for part in parts)
    done = "\n".join(json.dumps(Check(step, "ok", "well")) for step in STEPS[:-1])
    assert len(list(check_probe(0, done, "", has_libtpu=False))) == len(STEPS) - 1
    assert len(list(check_probe(0, done, "", has_libtpu=True))) == len(STEPS)


@pytest.mark.slow
def test_report_includes_the_checks_of_the_probe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installation_probe.main()
    output = capsys.readouterr().out
    monkeypatch.setattr(installation, "_probe", lambda: (0, output, ""))
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    checks = {check["subject"]: check for check in report["checks"]}
    assert report["ok"] and set(STEPS) <= set(checks)
    assert checks["jax"]["observed"] == jax.__version__
    assert "8 × cpu" in checks["devices"]["observed"]

    monkeypatch.setenv("XLASHARD_STRICT", "perhaps")
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "FAIL  environment" in out and err == "error: to be repaired: environment\n"


def test_unwritable_cache_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", "/proc/nowhere")
        found = installation_probe.check_cache("cache")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert found.status == "fail" and "/proc/nowhere" in found.observed
    assert "JAX_COMPILATION_CACHE_DIR" in found.advice


def test_checks_fit_into_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check("JAX_COMPILATION_CACHE_DIR", "fail", "a\x1b[31m " + "word " * 30, "pip install x")
    for columns in (40, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = shown(check).splitlines()
        assert max(map(len, lines)) <= columns
        assert lines[0].startswith("FAIL  JAX_COMPILATION_CACHE_DIR")
        assert "\x1b" not in shown(check) and lines[-1].strip() == "→ pip install x"


def make_machine(root: Path, chips: int = 4, kind: str = "accel") -> Path:
    """Make a machine with chips that no process holds."""
    for number in range(chips):
        file = root / "dev" / (f"accel{number}" if kind == "accel" else f"vfio/{number}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    texts = {
        "proc/meminfo": "MemTotal: 400000000 kB\nMemAvailable: 390000000 kB\n",
        "proc/self/limits": "Max locked memory  unlimited  unlimited bytes\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "tmp").mkdir()
    return root


def check_machine(root: Path, **environment: str) -> dict[str, Check]:
    return {check.subject: check for check in check_tpu_host(environment, root)}


def test_healthy_tpu_host_passes_all_checks(tmp_path: Path) -> None:
    checks = check_machine(make_machine(tmp_path, kind="vfio"))
    checks.pop("disk", None)  # That of the machine that runs the test.
    checks.pop("disk", None)  # That of the machine that runs the test.
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["TPU chips"].observed == "4 chips (/dev/vfio/0 ...)"
    assert checks["TPU held by"].observed == "no process"
    assert checks["libtpu's lock"].observed == "none"


def test_each_problem_of_a_tpu_host_is_reported(tmp_path: Path) -> None:
    root = make_machine(tmp_path, chips=3)
    folder = root / "proc" / "4242"
    (folder / "fd").mkdir(parents=True)
    (folder / "fd" / "7").symlink_to("/dev/accel0")
    (folder / "cmdline").write_text("python\0train.py\0")
    (root / "tmp" / "libtpu_lockfile").touch()
    (root / "proc" / "meminfo").write_text("MemTotal: 400000000 kB\nMemAvailable: 9 kB\n")
    (root / "proc" / "self" / "limits").write_text("Max locked memory  65536  65536  bytes\n")
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never")
    checks = check_machine(root, TPU_CHIPS_PER_HOST_BOUNDS="2,2,1")
    assert checks["TPU chips"].status == "fail"
    assert checks["TPU chips"].observed.startswith("3 chips (/dev/accel0 ...), expected 4 by TPU_")
    assert checks["TPU held by"].observed == "process 4242: python train.py"
    assert checks["TPU held by"].advice.endswith(": kill 4242")
    assert checks["libtpu's lock"].observed == "of the process that holds the TPU"
    assert checks["host memory"].status == "note"
    assert "ulimit -l unlimited" in checks["locked memory"].advice
    assert "echo always" in checks["huge pages"].advice


def test_stale_lock_of_another_user_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_machine(tmp_path)
    (root / "tmp" / "libtpu_lockfile").touch()
    assert check_machine(root)["libtpu's lock"].status == "ok"
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    lock = check_machine(root)["libtpu's lock"]
    assert (lock.status, lock.advice) == (
        "fail",
        "it belongs to another user: sudo rm /tmp/libtpu_lockfile",
    )


def test_laptop_is_described_by_what_it_can_do(tmp_path: Path) -> None:
    (only,) = check_machine(make_machine(tmp_path, chips=0)).values()
    assert only.status == "ok" and "xlashard pod" in only.observed
    (chips,) = list(check_machine(tmp_path, TPU_WORKER_ID="0").values())[:1]
    assert chips.status == "fail" and "TPU_WORKER_ID is set" in chips.observed
