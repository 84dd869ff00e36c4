"""Facts of a process that its peers compare and show: host, versions, code and memory."""

import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import ModuleType

import jax

from xlashard._jax.runtime import coordination
from xlashard.core.processes.equality import minority
from xlashard.core.processes.wait_graph import is_package_file
from xlashard.support.documents import JsonRecord
from xlashard.support.formatting import format_processes, group_by_value
from xlashard.support.lazily import dataclass

VERSIONED = ("xlashard", "jax", "jaxlib", "libtpu")
"""Packages whose versions decide which program a line of code becomes."""

# Differing modules of one process that a text names.
_MODULES_SHOWN = 3
RUNTIME = ("jax", "jaxlib", "xlashard")


@dataclass(frozen=True)
class ProcessFacts(JsonRecord):
    """Facts of one process.

    Attributes:
        host: Host name.
        pid: Process id on that host.
        versions: Versions of Python and of the packages in `VERSIONED` that are installed.
        code: Digest of the file of each module of the user's program, by the module's name.
        resident_bytes: Resident memory of the process; None where the system does not report it.
        device_bytes: Bytes in use on the devices of the process; None where they do not report it.
        device_limit: Bytes that these devices have; None where they do not report it.
    """

    host: str
    pid: int
    versions: dict[str, str]
    code: dict[str, str]
    resident_bytes: int | None = None
    device_bytes: int | None = None
    device_limit: int | None = None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def read_facts() -> ProcessFacts:
    """Return the facts of this process."""
    versions = {"Python": platform.python_version(), **installed_versions(VERSIONED)}
    in_use, limit = _read_device_memory()
    host, pid = socket.gethostname(), os.getpid()
    return ProcessFacts(host, pid, versions, digest_code(), _read_resident(), in_use, limit)


@lru_cache(maxsize=8)
def installed_versions(names: tuple[str, ...]) -> Mapping[str, str]:
    """Return the versions of those distributions that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def classify_file(file: str) -> str:
    """Return `"user"`, `"runtime"` (JAX and this package), or `"library"` (everything else)."""
    if is_package_file(file):
        return "runtime"
    folders = Path(file).parts
    if "site-packages" in folders:
        package = folders[folders.index("site-packages") + 1]
        return "runtime" if package in RUNTIME else "library"
    if file.startswith(("<", sys.base_prefix)):
        return "library"
    return "user"


def digest_code() -> dict[str, str]:
    """Return a digest of each module that neither JAX, this package nor a library has."""
    digests = {}
    for name, module in sys.modules.copy().items():
        # Reading an attribute of a lazy module would import it.
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and file.endswith(".py") and classify_file(file) == "user":
            try:
                changed = os.stat(file).st_mtime_ns
                digests[f"{name} ({Path(file).name})"] = _digest_file(file, changed)
            except OSError:
                continue
    return digests


@lru_cache(maxsize=4096)
def _digest_file(file: str, changed: int) -> str:
    """Return the digest of a file; `changed` is the time of its last change."""
    return sha256(Path(file).read_bytes()).hexdigest()[:8]


def _read_resident() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _read_device_memory() -> tuple[int | None, int | None]:
    """Return the bytes in use on the local devices, and their limit; CPUs report neither."""
    if not coordination.backend_has_started():
        return None, None
    try:
        each = [device.memory_stats() or {} for device in jax.local_devices()]
    except jax.errors.JaxRuntimeError:
        return None, None
    if not all("bytes_in_use" in stats for stats in each):
        return None, None
    limit = sum(stats.get("bytes_limit", 0) for stats in each)
    return sum(stats["bytes_in_use"] for stats in each), limit or None


def describe_other_code(by_process: Mapping[int, ProcessFacts]) -> dict[int, str]:
    """Describe the processes whose versions or code differ from those of most.

    Modules are compared that several processes have imported: the first process may import more
    than the others.

    Args:
        by_process: Facts by process.

    Returns:
        A text per differing process: `jax is 0.11.2, and 0.12.0 in processes 0, 1`.
    """
    texts: dict[int, list[str]] = {}
    records = [*by_process.values()]
    for kind in ("versions", "code"):
        for name in dict.fromkeys(name for facts in records for name in getattr(facts, kind)):
            known = {p: getattr(facts, kind).get(name) for p, facts in by_process.items()}
            values = {p: value for p, value in known.items() if kind == "versions" or value}
            most = group_by_value(values)[0]
            for process in minority(values):
                own = values[process] or "not installed"
                usual = f"{most[0] or 'not installed'} in {format_processes(most[1])}"
                texts.setdefault(process, []).append(f"{name} is {own}, and {usual}")
    return {process: _join(each) for process, each in texts.items()}


def _join(texts: Sequence[str]) -> str:
    more = len(texts) - _MODULES_SHOWN
    return "; ".join(texts[:_MODULES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
