"""Entry point of a worker, run by path: takes over the launcher's import path."""

import importlib
import json
import socket
import sys

if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    line = b""
    while not line.endswith(b"\n"):
        received = channel.recv(1)
        if not received:
            sys.exit(1)  # The launcher has exited.
        line += received
    request = json.loads(line)
    sys.path[:] = request["path"]
    importlib.import_module(request["module"]).main(channel)
