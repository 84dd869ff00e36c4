"""Pipes, sockets and the coordinator port that connect a launcher to the processes of a pod."""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from xlashard.testing.emulated_devices import LOOPBACK

type StreamName = Literal["stdout", "stderr"]

CHANNEL = "{channel}"
"""Placeholder in a command that is replaced by the file descriptor of the channel."""


@dataclass
class ProcessPipes:
    """Connections between the launcher and one process.

    Attributes:
        outputs: Read end of the output pipe, by stream.
        channel: The launcher's end of the socket.
        far_stdout, far_stderr, far_channel: The other ends, for the guard and the process.
    """

    outputs: dict[StreamName, int]
    far_stdout: int
    far_stderr: int
    channel: socket.socket | None = None
    far_channel: socket.socket | None = None

    @classmethod
    def make(cls, one_stream: bool, channel: bool) -> Self:
        """Create the pipes, and a socket if a channel is requested."""
        stdout, far_stdout = os.pipe()
        made = cls({"stdout": stdout}, far_stdout, far_stdout)
        try:
            if not one_stream:
                made.outputs["stderr"], made.far_stderr = os.pipe()
            if channel:
                made.channel, made.far_channel = socket.socketpair()
        except OSError:
            made.close_far_ends()
            made.close_near_ends()
            raise
        return made

    @property
    def far_ends(self) -> set[int]:
        """File descriptors that the guard inherits."""
        ends = {self.far_stdout, self.far_stderr}
        return ends if self.far_channel is None else {*ends, self.far_channel.fileno()}

    def request(self, command: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
        """Return the launch request for the guard.

        Args:
            command: Command of the process; `CHANNEL` in it is replaced by the channel's
                descriptor.
            environment: Environment of the process.
        """
        keep = [] if self.far_channel is None else [self.far_channel.fileno()]
        return {
            "command": [str(keep[0]) if word == CHANNEL else word for word in command],
            "environment": environment,
            "stdout": self.far_stdout,
            "stderr": self.far_stderr,
            "keep": keep,
        }

    def close_far_ends(self) -> None:
        """Close this process's copies of the inherited ends."""
        for end in {self.far_stdout, self.far_stderr}:
            os.close(end)
        if self.far_channel is not None:
            self.far_channel.close()

    def close_near_ends(self) -> None:
        """Close the launcher's own ends."""
        for end in self.outputs.values():
            os.close(end)
        if self.channel is not None:
            self.channel.close()


class Port:
    """A free port on the loopback address, for the coordinator.

    On Linux the port stays reserved: the coordinator can listen on it while a socket here is bound
    to it, because both set SO_REUSEPORT, and the kernel assigns it to no other process. On other
    systems it is released at once, and another process may take it first.

    Attributes:
        number: The port number.
    """

    def __init__(self) -> None:
        self._holder = socket.socket()
        if sys.platform == "linux":
            self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._holder.bind((LOOPBACK, 0))
        self.number: int = self._holder.getsockname()[1]
        if sys.platform != "linux":
            self._holder.close()

    def release(self) -> None:
        """Lets others have it."""
        self._holder.close()
