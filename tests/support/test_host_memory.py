"""Limits of memory in files of `/proc` and `/sys` as the kernel writes them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from xlashard.support.host_memory import MemoryLimit, read_available_memory, read_memory_limit

MIB = 1 << 20
MACHINE = "MemTotal: 1024000 kB\nMemFree: 90000 kB\nMemAvailable: 512000 kB\n"
SECOND = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
FIRST = (
    "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {shown} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"
)


def write_system(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/meminfo": MACHINE, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write_groups(root: Path, path: str, limits: Mapping[str, str]) -> Path:
    files = {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    groups = {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": SECOND}
    return write_system(root, groups | files)


def describe(limit: MemoryLimit, root: Path) -> tuple[int, str]:
    return limit.bytes, "" if limit.file is None else str(limit.file.relative_to(root))


@pytest.mark.parametrize("path", ["/", "/a/b", "/../sibling", "/of/the/host"])
def test_machine_is_the_limit_without_a_group_of_less(tmp_path: Path, path: str) -> None:
    limits = {"a/memory.max": "max", "a/b/memory.max": f"{2**63 - 4096}"}
    root = write_groups(tmp_path, path, limits)
    assert describe(read_memory_limit(root), root) == (1024000 << 10, "")
    assert read_available_memory(root) == 512000 << 10


@pytest.mark.parametrize(
    ("outer", "middle", "inner", "least"),
    [
        ("300", "max", "max", "a"),
        ("300", "200", "max", "a/b"),
        ("300", "200", "100", "a/b/c"),
        ("100", "200", "300", "a"),
        ("max", "100", "200", "a/b"),
    ],
)
def test_least_limit_of_nested_groups_counts(
    tmp_path: Path, outer: str, middle: str, inner: str, least: str
) -> None:
    limits = {"a": outer, "a/b": middle, "a/b/c": inner}
    texts = {
        f"{folder}/memory.max": text if text == "max" else str(int(text) * MIB)
        for folder, text in limits.items()
    }
    root = write_groups(tmp_path, "/a/b/c", texts)
    size = int(limits[least]) * MIB
    assert describe(read_memory_limit(root), root) == (size, f"sys/fs/cgroup/{least}/memory.max")


def test_group_of_a_container_is_the_top_of_its_mount(tmp_path: Path) -> None:
    root = write_groups(tmp_path, "/", {"memory.max": f"{64 * MIB}\n"})
    assert describe(read_memory_limit(root), root) == (64 * MIB, "sys/fs/cgroup/memory.max")


@pytest.mark.parametrize(
    ("shown", "path", "folder"),
    [
        ("/", "/slurm/job", "slurm"),
        ("/docker/9f", "/docker/9f", ""),
        ("/docker/9f", "/docker/9f/inner", "inner"),
        ("/docker/9f", "/", ""),
    ],
)
def test_first_version_of_groups_is_read(
    tmp_path: Path, shown: str, path: str, folder: str
) -> None:
    top = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    root = write_system(
        tmp_path,
        {
            "proc/self/cgroup": f"4:cpu:/other\n3:memory,hugetlb:{path}\n0::/\n",
            "proc/self/mountinfo": FIRST.format(shown=shown),
            f"{top}/memory.limit_in_bytes": f"{200 * MIB}\n",
            f"{top}/memory.usage_in_bytes": f"{150 * MIB}\n",
            f"{top}/memory.stat": f"inactive_file 1\ntotal_inactive_file {30 * MIB}\n",
        },
    )
    assert describe(read_memory_limit(root), root) == (
        200 * MIB,
        f"{top}/memory.limit_in_bytes",
    )
    assert read_available_memory(root) == 80 * MIB


@pytest.mark.parametrize(
    ("used", "cache", "left"), [("60", "0", 40), ("60", "20", 60), ("110", "0", 0), ("5", "9", 100)]
)
def test_page_cache_of_a_group_is_available(
    tmp_path: Path, used: str, cache: str, left: int
) -> None:
    texts = {
        "a/memory.max": str(100 * MIB),
        "a/memory.current": str(int(used) * MIB),
        "a/memory.stat": f"anon 5\ninactive_file {int(cache) * MIB}\nactive_file 7\n",
    }
    assert read_available_memory(write_groups(tmp_path, "/a", texts)) == left * MIB


def test_system_without_these_files_has_a_limit_but_no_available_memory(tmp_path: Path) -> None:
    assert read_memory_limit(tmp_path).bytes > 0
    assert read_available_memory(tmp_path) == 0
    assert 0 < read_available_memory() <= read_memory_limit().bytes
