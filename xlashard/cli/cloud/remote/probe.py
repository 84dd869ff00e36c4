"""Inspects a worker: TPU chips, processes that hold them, versions, memory, network.

A program of its own, copied to the worker and run by path, with Python 3.8 or newer. It prints one
line of JSON. The verb `count` runs on all workers together, in the environment of jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterator

# Parent of /dev, /proc and /sys; tests have their own.
ROOT = Path(os.environ.get("PROBE_ROOT", "/"))
_DEVICES = ("/dev/accel", "/dev/vfio/")

_VERSIONS = """
import json, platform
from importlib import metadata

found = {"python": platform.python_version()}
for name in ("jax", "jaxlib", "libtpu", "xlashard"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
requirements = metadata.requires("jax") or [] if found["jax"] else []
print(json.dumps({"found": found, "requirements": requirements, "problem": ""}))
"""


def look() -> dict[str, Any]:
    """Return all that this worker shows by itself."""
    return {
        "host": socket.gethostname(),
        "chips": chips(),
        "holders": holders(),
        "unseen": unseen(),
        "lock": lock(),
        "versions": versions(),
        "memory": memory(),
    }


def chips() -> list[str]:
    """Return the device files of the TPU's chips."""
    accel = sorted(str(path.name) for path in ROOT.glob("dev/accel[0-9]*"))
    vfio = sorted(str(path.name) for path in ROOT.glob("dev/vfio/[0-9]*"))
    return ["/dev/" + name for name in accel] or ["/dev/vfio/" + name for name in vfio]


def holders() -> list[dict[str, Any]]:
    """Return the processes that have a chip open."""
    devices = [(pid, file) for pid, file in opened_files() if file.startswith(_DEVICES)]
    processes = []
    for pid in sorted({pid for pid, file in devices if file != "/dev/vfio/vfio"}):
        folder, uid = ROOT / "proc" / str(pid), -1
        words = (read(folder / "cmdline") or "").replace("\0", " ").strip()
        with contextlib.suppress(OSError):
            uid = folder.stat().st_uid
        processes.append({"pid": pid, "command": words[:200], "own": uid == os.getuid()})
    return processes


def opened_files() -> Iterator[tuple[int, str]]:
    """Yield each file that a process has open, with the id of the process."""
    for link in ROOT.glob("proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            yield int(link.parts[-3]), os.readlink(str(link))


def read(path: Path) -> str | None:
    """Return the text of a file; None if it can't be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def unseen() -> int:
    """Return the number of other users' processes that can't be inspected."""
    count = 0
    for folder in ROOT.glob("proc/[0-9]*/fd"):
        try:
            os.listdir(str(folder))
        except PermissionError:
            count += 1
        except OSError:
            pass
    return count


def lock() -> dict[str, Any] | None:
    """Return the state of libtpu's lock file; None if it does not exist."""
    path = ROOT / "tmp" / "libtpu_lockfile"
    try:
        about = path.stat()
    except OSError:
        return None
    opened = [pid for pid, file in opened_files() if file == "/tmp/libtpu_lockfile"]
    return {"owner": about.st_uid, "own": about.st_uid == os.getuid(), "opened": sorted(opened)}


def versions() -> dict[str, Any]:
    """Return the versions in the environment of jobs, and the requirements of jax."""
    python = Path.home() / ".xlashard" / "venv" / "bin" / "python"
    words = [str(python) if python.exists() else sys.executable, "-c", _VERSIONS]
    try:
        done = subprocess.run(words, capture_output=True, timeout=60)
        return json.loads(done.stdout.decode())
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"found": {}, "requirements": [], "problem": str(error)}


def memory() -> dict[str, Any]:
    """Return limits of memory, in bytes: -1 for no limit, None for an unknown one."""
    text = read(ROOT / "proc" / "meminfo") or ""
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
    pages = read(ROOT / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", pages)
    locked = re.search(r"Max locked memory\s+(\w+)", read(ROOT / "proc/self/limits") or "")
    limit = locked.group(1) if locked else None
    return {
        "total": sizes.get("MemTotal"),
        "available": sizes.get("MemAvailable"),
        "locked": -1 if limit == "unlimited" else int(limit) if limit else None,
        "hugepages": chosen.group(1) if chosen else None,
        "disk": shutil.disk_usage(os.path.expanduser("~")).free,
    }


def listen(port: int, seconds: float) -> None:
    """Accept connections at a port for some seconds, unless another process does."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
    except OSError:
        print(json.dumps({"listening": "another process"}), flush=True)
        return
    server.listen(64)
    print(json.dumps({"listening": "this one"}), flush=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.close()


def reach(host: str, port: int, seconds: float) -> dict[str, Any]:
    """Connect to a port of another worker."""
    started, problem = time.monotonic(), ""
    while True:
        try:
            socket.create_connection((host, port), timeout=min(5.0, seconds)).close()
            return {"reached": True, "seconds": round(time.monotonic() - started, 3)}
        except OSError as error:
            problem = str(error)
        if time.monotonic() - started >= seconds:
            return {"reached": False, "problem": problem}
        time.sleep(0.2)


def count(timeout: float) -> dict[str, Any]:
    """Return the devices that this process sees, and the sum of a 1 from every device."""
    # The other verbs run without the environment of jobs.
    import jax

    from xlashard import multihost

    place = multihost.initialize(timeout=timeout)
    local = jax.local_device_count()
    ones = jax.pmap(lambda x: jax.lax.psum(x, "all"), axis_name="all")
    total = float(ones(jax.numpy.ones((local,)))[0])
    return {
        "process": place.process,
        "processes": place.count,
        "devices": jax.device_count(),
        "local": local,
        "summed": total,
        "kind": jax.devices()[0].device_kind,
    }


def main(words: list[str]) -> None:
    """Run a verb, and print its result as JSON."""
    if words[0] == "look":
        print(json.dumps(look()))
    elif words[0] == "listen":
        listen(int(words[1]), float(words[2]))
    elif words[0] == "reach":
        print(json.dumps(reach(words[1], int(words[2]), float(words[3]))))
    elif words[0] == "count":
        # The program and its libraries may print, too.
        print("chips: " + json.dumps(count(float(words[1]))), flush=True)
    else:
        sys.exit("unknown verb: " + words[0])


if __name__ == "__main__":
    main(sys.argv[1:])
