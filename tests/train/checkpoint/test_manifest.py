import hashlib
from pathlib import Path

import pytest

from xlashard.train.checkpoint.manifest import digests, files_in, writer_of
from xlashard.train.checkpoint.writing import path_of, steps_in


@pytest.mark.parametrize(
    ("name", "process"),
    [
        ("arrays/ocdbt.process_3/d/0a1b", 3),
        ("arrays/ocdbt.process_12/manifest.ocdbt", 12),
        ("arrays/array_metadatas/process_1", 1),
        ("arrays/d/0a1b", 0),
        ("arrays/_METADATA", 0),
        ("arrays/preprocess_3/x", 0),
        ("arrays/process_x", 0),
    ],
)
def test_writer_of_returns_the_process_of_a_file(name: str, process: int) -> None:
    assert writer_of(name) == process


def test_digests_equal_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "big").write_bytes(bytes(range(256)) * 5000)
    (tmp_path / "none").write_bytes(b"")
    assert files_in(tmp_path) == {"a/big": 1_280_000, "none": 0}
    for durable in (False, True):
        by_name = digests(tmp_path, ["a/big", "none"], durable=durable)
        for name, digest in by_name.items():
            data = (tmp_path / name).read_bytes()
            assert (digest.bytes, digest.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_steps_are_read_from_folder_names(tmp_path: Path) -> None:
    for step in (20, 3, 123_456_789):
        path_of(tmp_path, step).mkdir()
    for name in (".saving-00000030-0a", ".deleting-00000001", "00000040.tmp", "notes", "5"):
        (tmp_path / name).mkdir()
    (tmp_path / "00000050").write_text("a file")
    assert steps_in(tmp_path) == [3, 20, 123_456_789]
    assert steps_in(tmp_path / "none") == steps_in(tmp_path / "00000050") == []
