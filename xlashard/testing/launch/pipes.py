"""What joins a launcher to the processes of a pod: pipes, sockets, and a port that they share."""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from xlashard.testing.launch.pod_environment import LOOPBACK

type StreamName = Literal["stdout", "stderr"]

CHANNEL = "{channel}"
"""The word of a command in whose place each process gets the number of its channel."""


@dataclass
class ProcessPipes:
    """What joins the launcher to one process.

    Attributes:
        outputs: By stream the ends of pipes from which the launcher reads.
        channel: Its end of the socket.
        far_stdout, far_stderr, far_channel: The other ends, for the guard and the process.
    """

    outputs: dict[StreamName, int]
    far_stdout: int
    far_stderr: int
    channel: socket.socket | None = None
    far_channel: socket.socket | None = None

    @classmethod
    def make(cls, one_stream: bool, channel: bool) -> Self:
        """New pipes, and a socket where there is to be a channel."""
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
        """The descriptors that the guard takes over."""
        ends = {self.far_stdout, self.far_stderr}
        return ends if self.far_channel is None else {*ends, self.far_channel.fileno()}

    def request(self, command: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
        """What the guard is told of the process.

        Args:
            command: What it runs; the word `CHANNEL` in it becomes the number of its channel.
            environment: In which it runs.
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
        """Closes here what the guard has by now."""
        for end in {self.far_stdout, self.far_stderr}:
            os.close(end)
        if self.far_channel is not None:
            self.far_channel.close()

    def close_near_ends(self) -> None:
        """Closes the launcher's own ends."""
        for end in self.outputs.values():
            os.close(end)
        if self.channel is not None:
            self.channel.close()


class Port:
    """A free port of the loopback address, for the coordinator.

    On Linux it stays taken: the coordinator can listen on it while a socket here is bound to it, as
    both say that they share it, and the system gives it to nobody else. Elsewhere it is free again
    at once, and somebody may be faster than the coordinator.

    Attributes:
        number: Of the port.
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
