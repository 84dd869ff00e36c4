"""What one process calls out to all of a run: stop, I failed, we are done.

Calls are numbered in the store that the processes share; a number is written once. So all processes
hear the same calls in the same order, whoever called first.
"""

import json
import queue
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from xlashard.processes import store

type Kind = Literal["stop", "fail", "end"]


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        kind: ``stop`` at a place that all agree on, ``fail``: the caller can't go on, ``end``: all
            is done.
        process: Who calls.
        said: The name of the signal, or what went wrong.
    """

    kind: Kind
    process: int
    said: str = ""


class Calls(Protocol):
    """Calls of all processes in one order."""

    def say(self, call: Call) -> None:
        """Calls out to all, this process too."""
        ...

    def hear(self, seconds: float) -> Call | None:
        """The next call, waited for up to some seconds; None if there is none by then."""
        ...


class SharedCalls:
    """Calls through the store of a pod.

    Args:
        folder: Of the run, in the store.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._heard = 0
        self._said = 0

    def say(self, call: Call) -> None:
        """Calls out to all, this process too."""
        value = json.dumps(asdict(call)).encode()
        while not store.write(f"{self._folder}/{self._said}", value):
            self._said += 1  # Another call has that number.

    def hear(self, seconds: float) -> Call | None:
        """The next call, waited for up to some seconds; None if there is none by then."""
        value = store.read(f"{self._folder}/{self._heard}", seconds)
        if value is None:
            return None
        self._heard += 1
        return Call(**json.loads(value))


class OwnCalls:
    """Calls of the only process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()

    def say(self, call: Call) -> None:
        """Calls out."""
        self._calls.put(call)

    def hear(self, seconds: float) -> Call | None:
        """The next call, waited for up to some seconds; None if there is none by then."""
        try:
            return self._calls.get(timeout=seconds)
        except queue.Empty:
            return None
