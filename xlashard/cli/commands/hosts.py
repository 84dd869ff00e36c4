"""``xlashard hosts``: state of the hosts of each job of this user that runs on this machine.

A process of the job answers at a socket in a folder of this user (`xlashard.support.job_folder`).
This module imports no JAX, and takes the answer as it is.
"""

import argparse
import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from xlashard.support.documents import parse_json
from xlashard.support.formatting import format_processes, print_error, printable
from xlashard.support.job_folder import check_job_folder, find_job_folder

# Seconds in which a process names its job, and collects the state of the others.
_NAME, _STATE = 3.0, 40.0
_NO_JOB = (
    "no job of yours is visible on this machine: a process is visible after "
    "xlashard.multihost.initialize() in a job of several processes, and inside of "
    "xlashard.multihost.Watchdog, which xlashard train has. Run this command on a host of the job "
    "as the same user, in a container inside of it: kubectl exec POD -- xlashard hosts"
)


def run(arguments: argparse.Namespace) -> int:
    """Print the state of each job.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit code: 0 if all processes answered and have the same code, 1 if one did not, or
        without a job.
    """
    try:
        names, hung = _find_processes()
    except OSError as error:
        print_error(error)
        return 1
    if arguments.pid is not None:
        jobs = [name["job"] for name in names if name["pid"] == arguments.pid]
        names = [name for name in names if name["job"] in jobs]
        hung = [pid for pid in hung if pid == arguments.pid]
        if not names and not hung:
            print_error(
                f"--pid {arguments.pid} is no visible process of a job: xlashard hosts without "
                "--pid lists the jobs of this machine"
            )
            return 1
    if not names and not hung:
        print_error(_NO_JOB)
        return 1
    view = "json" if arguments.json else "stacks" if arguments.stacks else "table"
    codes = [_show_job(job, view, names) for job in dict.fromkeys(name["job"] for name in names)]
    for pid in hung:
        print_error(
            f"process {pid} of a job does not answer: it is stopped (kill -CONT {pid} continues "
            "it), or native code keeps Python's lock (py-spy dump --pid shows it)"
        )
    return 1 if hung else max(codes)


def _find_processes() -> tuple[list[dict[str, Any]], list[int]]:
    """Return the visible processes, lowest index first, and the ids of those that do not answer."""
    folder = find_job_folder()
    if not folder.exists():
        return [], []
    check_job_folder(folder)
    names, hung = [], []
    for path in sorted(folder.glob("[0-9]*.sock")):
        try:
            # Children of a killed process may still hold its socket.
            os.kill(int(path.stem), 0)
            names.append({**_ask(path, "job", _NAME), "path": path})
        except (ProcessLookupError, FileNotFoundError, ConnectionRefusedError):
            with contextlib.suppress(OSError):
                path.unlink()
        except (OSError, ValueError):
            hung.append(int(path.stem))
    return sorted(names, key=lambda name: name["process"]), hung


def _show_job(job: str, view: str, names: list[dict[str, Any]]) -> int:
    own = [name for name in names if name["job"] == job]
    answer = _ask_any(own, view)
    if "error" in answer:
        print_error(f"the job at {job} does not answer: {answer['error']}")
        return 1
    first, text = own[0], answer["text"]
    if view == "json":
        head = {"job": job, "command": first["command"], "count": first["count"]}
        text = json.dumps({**head, **parse_json(text)})
    else:
        local = format_processes([name["process"] for name in own])
        text = f"{first['command']}: {local} of {first['count']} on this host, job {job}\n\n{text}"
    print(printable(text), flush=True)
    return 1 if answer["silent"] or answer["other_code"] else 0


def _ask_any(names: list[dict[str, Any]], view: str) -> dict[str, Any]:
    """Return the answer of the first process of a job that has one, or an object with its error."""
    answer: dict[str, Any] = {}
    for name in names:
        try:
            answer = _ask(name["path"], view, _STATE)
        except (OSError, ValueError) as error:
            answer = {"error": str(error) or type(error).__name__}
        if "error" not in answer:
            break
    return answer


def _ask(path: Path, request: str, seconds: float) -> dict[str, Any]:
    """Return the answer of the process that listens at a socket.

    Raises:
        OSError: No process listens, or it does not answer in time.
        ValueError: The answer is incomplete.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        connection.connect(str(path))
        connection.sendall(f"{request}\n".encode())
        received = bytearray()
        while part := connection.recv(1 << 16):
            received += part
    answer = parse_json(bytes(received))
    if not isinstance(answer, dict):
        raise ValueError("it is no object of JSON")  # no-catalogue: needs another program
    return answer
