"""Fast Python processes for tests: forked from servers that have imported JAX, and nothing of ours.

A fresh interpreter spends a second of CPU on `import jax`; a fork of one that has done so spends a
few milliseconds. The test's process stays a real one: it has its own pid, environment, arguments,
working directory and exit status, starts its own JAX backend, and imports xlashard anew.

Use `python_command` in place of `[sys.executable]` where the test is not about the start of the
interpreter itself (its flags, its import times, its process group, its resident memory).
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.fork_server import server
from tests.waiting import wait_for
from xlashard.support.background import at_exit

HERE = Path(__file__).parent

# Read when Python or JAX is imported, so a server serves one combination of values.
_READ_AT_IMPORT = ("JAX_", "PYTHON", "OPENBLAS_", "OMP_")
# Read by a forked process, by xlashard.legacy, or when a process joins the others of its pod.
_READ_LATER = frozenset(
    {
        *server.OPTIONS_OF_JAX,
        *server.OPTIONS_OF_PYTHON,
        *("JAX_ARRAY", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"),
    }
)

_servers: dict[frozenset[tuple[str, str]], list[str]] = {}


def python_command(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the start of a command line that runs Python with JAX imported already.

    Args:
        environment: The environment in which the command will run; by default that of this process.

    Returns:
        Words to put before `-m MODULE`, `-c CODE` or `SCRIPT`, and their arguments. Other options
        of the interpreter are refused. Elsewhere than on Linux this is `sys.executable`.
    """
    if sys.platform != "linux":
        return [sys.executable]
    environment = os.environ if environment is None else environment
    key = frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    )
    if key not in _servers:
        _servers[key] = _start_server(environment)
    return _servers[key]


def _start_server(environment: Mapping[str, str]) -> list[str]:
    folder = tempfile.TemporaryDirectory(prefix="tests-forking-")
    address = os.path.join(folder.name, "socket")
    kept = {name: value for name, value in environment.items() if name not in _READ_LATER}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), address], env=kept, stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    lifeline = process.stdin

    def stop() -> None:
        lifeline.close()
        process.wait()
        folder.cleanup()

    at_exit(stop)
    wait_for(lambda: _listens(address, process), "server that has imported JAX")
    return [sys.executable, "-I", "-S", str(HERE / "client.py"), address]


def _listens(address: str, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, f"the server ended with {server.returncode}"
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
