"""Tests of pages find a browser, or fail with instructions to install one, and never skip."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.browser import COMMAND, NAMES, BrowserError, find_browser

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "get-browser"


def stand_in(folder: Path, name: str, *lines: str) -> None:
    """Put a command on a PATH that is only this folder."""
    file = folder / name
    file.write_text("\n".join(("#!/bin/bash", *lines, "")), encoding="utf-8")
    file.chmod(0o755)


def get_browser(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with nothing else on the PATH."""
    return subprocess.run(
        ["/bin/bash", str(SCRIPT)],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_error_without_a_browser_suggests_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("XLASHARD_TEST_BROWSER", raising=False)
    with pytest.raises(BrowserError, match="need Chromium") as caught:
        find_browser()
    assert COMMAND in str(caught.value)
    assert "XLASHARD_TEST_BROWSER" in str(caught.value)


def test_a_browser_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(tmp_path, "another")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XLASHARD_TEST_BROWSER", "another")
    assert find_browser() == str(tmp_path / "another")


@pytest.mark.parametrize("name", NAMES)
def test_script_accepts_every_supported_browser(tmp_path: Path, name: str) -> None:
    stand_in(tmp_path, name)
    done = get_browser(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_root_installs_chromium_on_debian(tmp_path: Path) -> None:
    stand_in(tmp_path, "id", "echo 0")
    stand_in(tmp_path, "apt-get", f'echo "apt-get $*" >>{tmp_path}/ran')
    done = get_browser(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    ran = (tmp_path / "ran").read_text(encoding="utf-8").splitlines()
    assert ran == ["apt-get update -qq", f"{COMMAND} -qq"]


@pytest.mark.parametrize(("user", "works"), [(0, False), (1000, True)], ids=["offline", "no root"])
def test_script_prints_the_command_if_installing_is_impossible(
    tmp_path: Path, user: int, works: bool
) -> None:
    stand_in(tmp_path, "id", f"echo {user}")
    stand_in(tmp_path, "apt-get", f"exit {0 if works else 100}")
    done = get_browser(tmp_path)
    assert done.returncode == 0
    assert COMMAND in done.stderr


def test_make_installs_the_browser_before_the_tests() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "test"],
        cwd=ROOT,
        env={**os.environ, "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    (asked,) = (n for n, line in enumerate(lines) if ".ci/get-browser" in line)
    (ran,) = (n for n, line in enumerate(lines) if "-m pytest" in line)
    assert asked < ran
