"""Runs a job on a worker, so that it outlives the connection by which it was started.

A program of its own, copied to the worker and run by path. It imports only what comes with Python,
and must run with the Python 3.8 of old VM images.

- A job is a folder `~/.xlashard/jobs/NAME` with its `request.json`, its `log` and, in the end, its
  `code`. A supervisor in a session of its own waits for the command, so a connection that breaks,
  or a laptop that is closed, ends nothing.
- Who follows a log says from which byte, so that a connection can be made again without loss.
- Every process of a job has the job's folder in its environment. That is how all of them are found,
  also those that detached.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

HOME = Path.home() / ".xlashard"
JOBS = HOME / "jobs"
MARK = "LAUNCHER_JOB_FOLDER"
# Where /dev, /proc and /sys are; tests have their own.
ROOT = Path(os.environ.get("LAUNCHER_ROOT", "/"))
_LOOK = 0.1
_CHUNK = 1 << 16
_KEPT_JOBS = 5
_DEVICES = ("/dev/accel", "/dev/vfio/")


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Starts a job; once more with the same name changes nothing."""
    folder = JOBS / request["job"]
    if (folder / "request.json").exists():
        return {"started": False, "ended": []}
    ended = stop_others(folder, request["grace"])
    held = holders()
    if held and request["take"]:
        ended += end([each["pid"] for each in held if each["own"]], request["grace"])
        held = holders()
    if held:
        return {"started": False, "ended": ended, "held": held}
    if not (Path.home() / request["folder"]).is_dir():
        return {"started": False, "ended": ended, "no_folder": request["folder"]}
    folder.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed: who sees it sees all of it.
    write(folder / "request.json", json.dumps(request))
    with open(os.devnull, "r+b") as nothing:
        supervisor = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "supervise", request["job"]],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            start_new_session=True,
        )
    write(folder / "supervisor", str(supervisor.pid))
    forget_old_jobs(folder)
    return {"started": True, "ended": ended}


def supervise(job: str) -> None:
    """Runs the command of a job and writes down how it ended."""
    folder = JOBS / job
    request = json.loads((folder / "request.json").read_text())
    with open(folder / "log", "ab") as log:
        try:
            child = subprocess.Popen(
                # A shell that is told to end waits for what it runs, and does nothing after it.
                ["bash", "-c", "trap 'exit 143' TERM\n" + request["command"]],
                cwd=str(Path.home() / request["folder"]),
                env=environment(request, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            code = child.wait()
        except OSError as error:
            log.write(f"could not start: {error}\n".encode())
            code = 126
    end(members(folder), 1.0)  # What the command has left behind would hold the TPU.
    write(folder / "code", str(code))


def environment(request: dict[str, Any], folder: Path) -> dict[str, str]:
    """The environment of a job's command."""
    variables = dict(os.environ)
    venv = HOME / "venv"
    if venv.is_dir():
        variables["PATH"] = f"{venv}/bin:{variables.get('PATH', '/usr/bin:/bin')}"
        variables["VIRTUAL_ENV"] = str(venv)
    variables.update({"PYTHONUNBUFFERED": "1", **request["environment"]})
    variables[MARK] = str(folder)
    return variables


def follow(job: str, offset: int) -> None:
    """Writes the log of a job from a byte on, as it grows, and in the end its exit code.

    What is not the log stands between zero bytes, of which the log keeps none.
    """
    folder, out = JOBS / job, sys.stdout.buffer
    broken = select.poll()
    broken.register(out.fileno(), 0)
    out.write(b"\0go\0")
    out.flush()
    while not broken.poll(0):
        code = read(folder / "code")
        alive = code is None and is_alive(folder)
        # After it was seen whether the job is over: what it wrote before is there by then.
        offset = send_log(folder / "log", offset, out)
        if code is not None or not alive:
            code = read(folder / "code") if code is None else code
            out.write(b"\0gone\0" if code is None else b"\0end " + code.encode() + b"\0")
            out.flush()
            return
        time.sleep(_LOOK)


def send_log(path: Path, offset: int, out: BinaryIO) -> int:
    """Writes what there is of a log from a byte on; gives the byte after it."""
    if not path.exists():
        return offset
    with open(path, "rb") as log:
        log.seek(offset)
        for chunk in iter(lambda: log.read(_CHUNK), b""):
            out.write(chunk.replace(b"\0", b" "))
            out.flush()
        return log.tell()


def is_alive(folder: Path) -> bool:
    """Whether the supervisor of a job runs, or has not begun."""
    if not (folder / "request.json").exists():
        return False
    pid = read(folder / "supervisor")
    if pid is None:
        # `start` writes it right after the request.
        return time.time() - (folder / "request.json").stat().st_mtime < 5.0
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return folder.name.encode() in words


def stop(job: str, grace: float) -> dict[str, Any]:
    """Ends a job: SIGTERM to all of its processes, and SIGKILL to those that are left."""
    folder = JOBS / job
    if not (folder / "request.json").exists():
        # A `start` that comes after this one, on its way for long, is too late.
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "request.json", json.dumps({"job": job, "stopped": True}))
        write(folder / "code", "143")
        return {"ended": []}
    ended = end(members(folder), grace)
    deadline = time.monotonic() + 5.0
    while is_alive(folder) and read(folder / "code") is None and time.monotonic() < deadline:
        time.sleep(_LOOK / 2)
    if read(folder / "code") is None:
        write(folder / "code", "143")
    return {"ended": ended}


def newest() -> dict[str, Any]:
    """The job that was started last; None if there is none."""
    jobs = [path.parent.name for path in JOBS.glob("*/log")]
    return {"job": max(jobs, default=None)}


def stop_others(folder: Path, grace: float) -> list[int]:
    """Ends the jobs that are left of before."""
    ended: list[int] = []
    for other in sorted(JOBS.glob("*")):
        if other != folder and (other / "request.json").exists() and read(other / "code") is None:
            ended += stop(other.name, grace)["ended"]
    return ended


def forget_old_jobs(newest: Path) -> None:
    """Removes the folders of jobs that are over, but for the last few."""
    over = [each for each in JOBS.glob("*") if each != newest and (each / "code").exists()]
    for folder in sorted(over, key=lambda each: each.stat().st_mtime)[:-_KEPT_JOBS]:
        shutil.rmtree(str(folder), ignore_errors=True)


def members(folder: Path) -> list[int]:
    """The processes of a job."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def end(pids: list[int], grace: float) -> list[int]:
    """Ends processes; gives those that were there."""
    told = [pid for pid in pids if send(pid, signal.SIGTERM)]
    deadline = time.monotonic() + grace
    while any(runs(pid) for pid in told) and time.monotonic() < deadline:
        time.sleep(_LOOK / 2)
    for pid in told:
        if runs(pid):
            send(pid, signal.SIGKILL)
    while any(runs(pid) for pid in told) and time.monotonic() < deadline + 5.0:
        time.sleep(_LOOK / 2)
    return told


def send(pid: int, number: int) -> bool:
    """Sends a signal; returns whether there was somebody to get it."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def runs(pid: int) -> bool:
    """Whether a process is there, and not only its exit code."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def holders() -> list[dict[str, Any]]:
    """The processes that have a TPU open: number, user, command line, and what they hold."""
    found: dict[int, set[str]] = {}
    for link in ROOT.glob("proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            target = os.readlink(str(link))
            if target.startswith(_DEVICES) and target != "/dev/vfio/vfio":
                found.setdefault(int(link.parts[-3]), set()).add(target)
    return [about(pid, sorted(devices)) for pid, devices in sorted(found.items())]


def about(pid: int, devices: list[str]) -> dict[str, Any]:
    """What to tell of a process that holds devices."""
    folder = ROOT / "proc" / str(pid)
    words = (read(folder / "cmdline") or "").replace("\0", " ").strip()
    uid = -1
    with contextlib.suppress(OSError):
        uid = folder.stat().st_uid
    return {"pid": pid, "command": words[:200], "devices": devices, "own": uid == os.getuid()}


def read(path: Path) -> str | None:
    """A text file, or None."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def write(path: Path, text: str) -> None:
    """Writes a file that others see as a whole, or not at all."""
    beside = path.with_name("." + path.name + ".new")
    beside.write_text(text)
    os.replace(str(beside), str(path))


def main(words: list[str]) -> None:
    """Does one of these, and writes JSON of what came of it."""
    verb, request = words[0], words[1:]
    if verb == "supervise":
        supervise(request[0])
        return
    if verb == "follow":
        with contextlib.suppress(BrokenPipeError):
            follow(request[0], int(request[1]))
        # Python would try to write once more what nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return
    if verb == "start":
        print(json.dumps(start(json.loads(request[0]))))
    elif verb == "newest":
        print(json.dumps(newest()))
    elif verb == "stop":
        print(json.dumps(stop(request[0], float(request[1]))))
    else:
        sys.exit("no such verb: " + verb)


if __name__ == "__main__":
    main(sys.argv[1:])
