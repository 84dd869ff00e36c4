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
        found = channel.recv(1)
        if not found:
            sys.exit(1)  # The launcher has exited.
        line += found
    request = json.loads(line)
    sys.path[:] = request["path"]
    importlib.import_module(request["module"]).main(channel)
