"""Memory of this machine that a process may use: a container's, or a batch job's, is less.

A Linux control group (cgroup) limits the memory of its processes, and each group above it limits
them too. What exceeds the least of the limits is killed, without an error in the program.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Of each version of cgroups: the files of the limit and of the usage, and the name of the page
# cache that the kernel gives up before it kills a process.
_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_ROOT = Path("/")


@dataclass(frozen=True)
class MemoryLimit:
    """Most memory that this process may have.

    Attributes:
        bytes: The number of bytes.
        file: The cgroup's file with this limit; None if the machine's memory is less.
    """

    bytes: int
    file: Path | None = None


def read_memory_limit(root: Path = _ROOT) -> MemoryLimit:
    """Return the least of the machine's memory and of the limits of this process's cgroups.

    Args:
        root: Folder with `proc` and `sys`.
    """
    machine = _read_meminfo(root, "MemTotal")
    if machine is None:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    groups = [MemoryLimit(group.limit, group.file) for group in _read_groups(root)]
    return min([MemoryLimit(machine), *groups], key=lambda limit: limit.bytes)


def read_available_memory(root: Path = _ROOT) -> int:
    """Return the bytes that a new process can have without swapping; 0 if unknown.

    Args:
        root: Folder with `proc` and `sys`.
    """
    machine = _read_meminfo(root, "MemAvailable")
    if machine is None:
        return 0
    return max(0, min([machine, *(group.limit - group.used for group in _read_groups(root))]))


@dataclass(frozen=True)
class _LimitedGroup:
    file: Path
    limit: int
    used: int


class PeakMemory:
    """Peak of the memory of this process above that at the creation of this object."""

    def __init__(self) -> None:
        with suppress(OSError):  # Resets the peak, which import and start have raised.
            Path("/proc/self/clear_refs").write_text("5")
        self._start = _read_status("VmRSS")

    def read(self) -> int | None:
        """Return the bytes; None where the system doesn't report them."""
        peak = _read_status("VmHWM")
        return None if peak is None or self._start is None else max(0, peak - self._start)


def _read_status(name: str) -> int | None:
    line = re.search(rf"^{name}:\s+(\d+) kB", _read(_ROOT / "proc/self/status"), re.MULTILINE)
    return int(line[1]) * 1024 if line else None


def _read_meminfo(root: Path, name: str) -> int | None:
    line = re.search(rf"^{name}:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(line[1]) * 1024 if line else None


def _read_groups(root: Path) -> Iterator[_LimitedGroup]:
    """Yield the cgroups with a limit that this process is in, the innermost first."""
    for version, top, path in _find_groups(root):
        limit_name, usage_name, cache_name = _FILES[version]
        for folder in (top / path, *(top / parent for parent in path.parents)):
            limit = _read(folder / limit_name).strip()
            if not limit.isdecimal():  # "max", or a group without this controller.
                continue
            usage = _read(folder / usage_name).strip()
            cache = re.search(rf"^{cache_name} (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            used = int(usage or 0) - (int(cache[1]) if cache else 0)
            yield _LimitedGroup(folder / limit_name, int(limit), max(0, used))


def _find_groups(root: Path) -> Iterator[tuple[str, Path, PurePosixPath]]:
    """Yield the version and mount of each hierarchy of memory, and the path of the group in it."""
    paths: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        _, _, _, shown, point, *_ = mount.split()
        version, *_, options = system.split()
        if version in paths and (version == "cgroup2" or "memory" in options.split(",")):
            yield version, root / point.lstrip("/"), _path_below(paths[version], shown)


def _path_below(path: str, shown: str) -> PurePosixPath:
    """Return the path of a group below the group that a mount shows.

    A container may see the path of its group in the hierarchy of the host, of which only the group
    itself is mounted.
    """
    with suppress(ValueError):
        below = PurePosixPath(path).relative_to(shown)
        if ".." not in below.parts:
            return below
    return PurePosixPath()


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace")
    return ""
