"""Request a Python process from a server, and behave as it does: `client.py ADDRESS WORDS ...`.

Runs under `python -I -S`, so it starts in milliseconds. Its open descriptors, environment and
working directory become those of the forked process; signals are forwarded; it has its exit status.
"""

import array
import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
             signal.SIGABRT, signal.SIGQUIT, signal.SIGCONT)  # fmt: skip


def main() -> None:
    """Run one process."""
    address, *words = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    descriptors = [
        number
        for number in map(int, os.listdir("/proc/self/fd"))
        if number != server.fileno() and _is_open(number)
    ]
    request = {
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": descriptors,
        "ignored": [
            int(number) for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN
        ],
    }
    for number in PASSED_ON:
        if int(number) not in request["ignored"]:
            signal.signal(number, lambda sent, _: server.sendall(bytes([sent])))
    text = json.dumps(request).encode()
    server.sendall(len(text).to_bytes(8, "little"))
    server.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
    server.sendall(text)
    # Only the forked process holds its streams open, as a reader of a pipe expects.
    for number in descriptors:
        os.close(number)
    answer = server.recv(16)
    code = int(answer) if answer else 70
    if code >= 0:
        os._exit(code)
    with contextlib.suppress(OSError):  # Nothing catches SIGKILL.
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _is_open(number: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(number)
        return True
    return False


if __name__ == "__main__":
    main()
