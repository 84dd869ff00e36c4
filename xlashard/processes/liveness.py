"""The connections between process 0 and the others, kept open to notice at once who is gone.

The kernel closes them with their process, however that ends. One that ends as it should says so
before; so a connection that closes without that is a process that was killed. JAX's service sees
it too, but only when heartbeats have been missing for long enough, and then ends all processes
with no exception and no code of ours. That remains for machines that vanish from the network.

One that ends because of an error says so with its goodbye, for the others may be waiting for it in
a collective, which no exception reaches.
"""

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable

from xlashard.processes.connections import Connection
from xlashard.processes.thread_stacks import OWN_THREADS
from xlashard.wording import printable

# Seconds without traffic after which the kernel asks whether the other end is there, so that no
# firewall forgets the connection, and how often it asks in vain.
_IDLE, _INTERVAL, _PROBES = 60, 10, 6


class LivenessMonitor:
    """The connections of this process.

    Args:
        connections: By process, as the roll call left them.
        gone: Is called in a thread of its own with the processes that are gone.
        failed: Is called there with a process that has ended and the error that ended it; "" if
            its program was over.
    """

    def __init__(
        self,
        connections: dict[int, Connection],
        gone: Callable[[tuple[int, ...]], None],
        failed: Callable[[int, str], None] = lambda process, error: None,
    ) -> None:
        self._connections = dict(connections)
        self._ended: set[int] = set()
        self._all_ended = threading.Event()
        self._leaving = False
        self._gone = gone
        self._failed = failed
        self._have_failed: set[int] = set()
        for connection in connections.values():
            _keep_open(connection.socket)
        # A forked child would hold the connections open when this process is gone.
        os.register_at_fork(after_in_child=self._close)
        threading.Thread(target=self._watch, name=f"{OWN_THREADS}lines", daemon=True).start()

    @property
    def leaving(self) -> bool:
        """Whether this process has said goodbye."""
        return self._leaving

    def goodbye(self, wait: float = 0, error: str | None = None) -> None:
        """Says that this process ends, and is not to be taken for gone.

        Args:
            wait: For how many seconds at most the others may end first.
            error: What ends it, or "" if its program is over: the others may wait for it in
                vain. None if they know.
        """
        self._leaving = True
        me = {} if error is None else {"failed": error}
        for connection in self._connections.values():
            connection.send(goodbye=True, **me)
        self._all_ended.wait(wait)

    def end_failed(self) -> None:
        """Says to those that have failed, and still wait in JAX's ending, that process 0 ends."""
        for process in self._have_failed & set(self._connections):
            self._connections[process].send(gone=[0])

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                selector.register(connection.socket, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)

    def _hear(self, process: int) -> bool:
        """Whether the connection is still open."""
        connection = self._connections[process]
        try:
            said = connection.receive()
        except ConnectionResetError:
            said = None
        except (OSError, ValueError):
            return False  # The network's trouble: JAX's heartbeats tell whether it is the end.
        if said is None:
            # Without process 0 there is no service: JAX's client ends this process, if it still
            # runs, whether process 0 has ended as it should or not.
            if process not in self._ended or (process == 0 and not self._leaving):
                self._tell((process,))
            return False
        for line in said:
            failed = line.get("process", process)
            if "failed" in line and type(failed) is int:
                self._fail(failed, printable(str(line["failed"])))
            if "goodbye" in line:
                self._end(process)
            gone = line.get("gone")
            if isinstance(gone, list) and gone and all(type(number) is int for number in gone):
                self._tell(tuple(gone))
        return True

    def _end(self, *processes: int) -> None:
        self._ended.update(processes)
        if self._ended >= set(self._connections):
            self._all_ended.set()

    def _fail(self, process: int, error: str) -> None:
        if error:
            self._have_failed.add(process)
        if 0 not in self._connections:
            for other, connection in self._connections.items():
                if other != process and other not in self._ended:
                    connection.send(failed=error, process=process)
        self._failed(process, error)

    def _tell(self, processes: tuple[int, ...]) -> None:
        self._end(*processes)
        if 0 not in self._connections:  # This is process 0, which alone knows all.
            for process, connection in self._connections.items():
                if process not in self._ended:
                    connection.send(gone=processes)
        self._gone(processes)


def _keep_open(connection: socket.socket) -> None:
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _IDLE, "TCP_KEEPINTVL": _INTERVAL, "TCP_KEEPCNT": _PROBES}
    for name, value in options.items():
        # Each system knows some of them.
        with contextlib.suppress(OSError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
