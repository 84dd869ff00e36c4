"""`xlashard doctor`: checks of an installation, with remedies."""

import json

import jax
import pytest

from xlashard.cli.commands import doctor as installation
from xlashard.cli.commands import installation_probe
from xlashard.cli.commands.doctor import (
    STEPS,
    Check,
    check_environment,
    check_extras,
    check_packages,
    check_probe,
    meets,
    shown,
)
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
