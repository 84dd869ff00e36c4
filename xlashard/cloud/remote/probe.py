"""Looks at a worker: its TPU chips, who holds them, versions, memory and the way to the others.

A program of its own, copied to the worker beside `agent.py` and run by path, also with Python 3.8.
It writes one line of JSON.
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
from typing import Any

import agent

_VERSIONS = """
import json, platform
from importlib import metadata

found = {"python": platform.python_version()}
for name in ("jax", "jaxlib", "libtpu", "xlashard"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
needs = metadata.requires("jax") or [] if found["jax"] else []
print(json.dumps({"found": found, "needs": needs}))
"""


def look() -> dict[str, Any]:
    """All that can be seen on this worker alone."""
    return {
        "host": socket.gethostname(),
        "chips": chips(),
        "holders": agent.holders(),
        "unseen": unseen(),
        "lock": lock(),
        "versions": versions(),
        "memory": memory(),
    }


def chips() -> list[str]:
    """The device files of the TPU's chips."""
    accel = sorted(str(path.name) for path in agent.ROOT.glob("dev/accel[0-9]*"))
    vfio = sorted(str(path.name) for path in agent.ROOT.glob("dev/vfio/[0-9]*"))
    return ["/dev/" + name for name in accel] or ["/dev/vfio/" + name for name in vfio]


def unseen() -> int:
    """How many processes of others could not be looked into."""
    count = 0
    for folder in agent.ROOT.glob("proc/[0-9]*/fd"):
        try:
            os.listdir(str(folder))
        except PermissionError:
            count += 1
        except OSError:
            pass
    return count


def lock() -> dict[str, Any] | None:
    """The file by which libtpu sees that another process has the TPU; None where there is none."""
    path = agent.ROOT / "tmp" / "libtpu_lockfile"
    try:
        about = path.stat()
    except OSError:
        return None
    opened = []
    for link in agent.ROOT.glob("proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(str(link)) == "/tmp/libtpu_lockfile":
                opened.append(int(link.parts[-3]))
    return {"owner": about.st_uid, "own": about.st_uid == os.getuid(), "opened": sorted(opened)}


def versions() -> dict[str, Any]:
    """Of Python, jax, jaxlib, libtpu and xlashard, as jobs have them; and what jax asks for."""
    python = agent.HOME / "venv" / "bin" / "python"
    words = [str(python) if python.exists() else sys.executable, "-c", _VERSIONS]
    try:
        done = subprocess.run(words, capture_output=True, timeout=60)
        told = json.loads(done.stdout.decode())
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"found": {}, "wanted": {}, "problem": str(error)}
    return {"found": told["found"], "wanted": wanted(told["needs"]), "problem": ""}


def wanted(needs: list[str]) -> dict[str, str]:
    """The jaxlib and libtpu that jax[tpu] asks for, as it writes them."""
    found: dict[str, str] = {}
    for need in needs:
        match = re.match(r"(jaxlib|libtpu)\s*\(?([^;)]*)\)?\s*(;.*)?$", need)
        marker = (match.group(3) or "").replace("'", '"') if match else ""
        if match and ('"tpu"' in marker or ("extra" not in marker and match.group(1) not in found)):
            found[match.group(1)] = match.group(2).strip()
    return found


def memory() -> dict[str, Any]:
    """What limits memory, in bytes; -1 where there is no limit, None where it can't be seen."""
    text = agent.read(agent.ROOT / "proc" / "meminfo") or ""
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
    pages = agent.read(agent.ROOT / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", pages)
    locked = re.search(
        r"Max locked memory\s+(\w+)", agent.read(agent.ROOT / "proc/self/limits") or ""
    )
    limit = locked.group(1) if locked else None
    return {
        "total": sizes.get("MemTotal"),
        "available": sizes.get("MemAvailable"),
        "locked": -1 if limit == "unlimited" else int(limit) if limit else None,
        "hugepages": chosen.group(1) if chosen else None,
        "disk": shutil.disk_usage(os.path.expanduser("~")).free,
    }


def listen(port: int, seconds: float) -> None:
    """Lets others reach a port for some seconds, unless somebody listens there already."""
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
    """Whether a port of another worker can be reached."""
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


def main(words: list[str]) -> None:
    """Does one of these, and writes JSON of what came of it."""
    if words[0] == "look":
        print(json.dumps(look()))
    elif words[0] == "listen":
        listen(int(words[1]), float(words[2]))
    elif words[0] == "reach":
        print(json.dumps(reach(words[1], int(words[2]), float(words[3]))))
    else:
        sys.exit("no such verb: " + words[0])


if __name__ == "__main__":
    main(sys.argv[1:])
