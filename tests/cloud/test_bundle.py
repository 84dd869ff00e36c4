"""The archive of a project's code: what is in it, and when it is the same."""

import subprocess
import tarfile
from pathlib import Path

import pytest

from xlashard.cloud.bundle import list_files, write_bundle
from xlashard.errors import CloudError


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names(folder: Path) -> list[str]:
    return [str(path) for path in list_files(folder)]


def test_without_git_what_is_made_again_stays(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", "data/a.txt", ".env", ".venv/x.py", "runs/one/m.json")
    fill(tmp_path, "pkg/__pycache__/a.pyc", "pkg.egg-info/PKG-INFO", "pkg/a.py")
    assert names(tmp_path) == ["data/a.txt", "pkg/a.py", "train.py"]


def test_with_git_what_it_ignores_stays(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    fill(tmp_path, "train.py", "new.py", "large.bin", "gone.py")
    (tmp_path / ".gitignore").write_text("*.bin\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "train.py", "gone.py"], check=True)
    (tmp_path / "gone.py").unlink()
    assert names(tmp_path) == [".gitignore", "new.py", "train.py"]


def test_the_same_files_are_the_same_bytes(tmp_path: Path) -> None:
    fill(tmp_path / "p", "a.py", "b/c.py")
    assert write_bundle(tmp_path / "p", tmp_path / "code.tar.gz") == 2
    before = (tmp_path / "code.tar.gz").read_bytes()
    (tmp_path / "p" / "a.py").touch()
    write_bundle(tmp_path / "p", tmp_path / "code.tar.gz")
    assert (tmp_path / "code.tar.gz").read_bytes() == before
    with tarfile.open(tmp_path / "code.tar.gz") as archive:
        assert archive.getnames() == ["a.py", "b/c.py"]


def test_nothing_to_copy(tmp_path: Path) -> None:
    with pytest.raises(CloudError, match="there is no file in it"):
        list_files(tmp_path)
    with pytest.raises(CloudError, match="there is no such folder"):
        list_files(tmp_path / "none")


def test_data_among_the_code(tmp_path: Path) -> None:
    fill(tmp_path, "train.py")
    with (tmp_path / "corpus.bin").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(CloudError, match=r"holds 1.0 GiB.*corpus.bin \(1.0 GiB\).*\.gitignore"):
        write_bundle(tmp_path, tmp_path / "code.tar.gz")
