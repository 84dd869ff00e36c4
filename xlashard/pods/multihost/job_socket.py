"""Socket at which a process of a job answers `xlashard hosts` on its machine.

It is a file in a folder that only its user can open; nothing listens on a network. A process that
is asked requests the state of the others through the coordination service.
"""

import contextlib
import json
import logging
import os
import shlex
import socket
import sys
import threading
from functools import partial
from pathlib import Path

from xlashard._jax.runtime import coordination
from xlashard.core.processes.stack_dump import OWN_THREADS
from xlashard.pods.multihost.hang_report import request_hang_report
from xlashard.support.background import start_background
from xlashard.support.formatting import error_text
from xlashard.support.job_folder import REQUEST_BYTES, check_job_folder, find_job_folder

logger = logging.getLogger("xlashard.multihost")

# Seconds to wait for a request after a connection, and for the answers of the other processes.
_REQUEST, _ANSWERS = 2.0, 5.0


class JobSocket:
    """Socket of this process, opened once."""

    def __init__(self) -> None:
        self._opened_by = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        """Open the socket, unless it is open; without one the process is not visible."""
        with self._lock:
            # A forked child has a place of its own.
            if self._opened_by == os.getpid():
                return
            self._opened_by = os.getpid()
            path = find_job_folder() / f"{os.getpid()}.sock"
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                check_job_folder(path.parent)
                # One of a process that had this id before and was killed.
                path.unlink(missing_ok=True)
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(str(path))
                listener.listen()
            except (OSError, AttributeError) as error:
                logger.info("xlashard hosts does not find this process: %s", error)
                return
            stop = partial(_close, listener, path)
            try:
                start_background(partial(_serve, listener), stop, f"{OWN_THREADS}hosts")
            except RuntimeError:  # Python is about to exit.
                stop()


def _close(listener: socket.socket, path: Path) -> None:
    path.unlink(missing_ok=True)
    # Ends a blocking accept, which closing alone does not.
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # It was closed.
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_REQUEST)
            request = connection.recv(REQUEST_BYTES).decode(errors="replace").strip()
            connection.sendall(_answer(request).encode())


def _answer(request: str) -> str:
    """Return the answer to a request: of this process alone for `job`, else of all."""
    if request == "job":
        place = {"process": coordination.process_index(), "count": coordination.process_count()}
        alone = f"pid {os.getpid()}"
        job = coordination.coordinator_address() if coordination.client() else alone
        command = shlex.join(sys.orig_argv)
        return json.dumps({"job": job or alone, "pid": os.getpid(), "command": command, **place})
    try:
        report = request_hang_report(_ANSWERS)
    except Exception as error:
        return json.dumps({"error": error_text(error)})
    silent = list(report.silent)
    texts = {"table": report.table, "stacks": report.__str__, "json": report.to_json}
    text = texts.get(request, report.table)()
    return json.dumps({"text": text, "silent": silent, "other_code": list(report.other_code)})


job_socket = JobSocket()
"""Socket of this process."""
