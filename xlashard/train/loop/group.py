"""Processes of a run: consistency of their settings, and messages between them."""

import json
import queue
import uuid
from dataclasses import dataclass
from typing import Literal

import jax

from xlashard.documents import JsonRecord
from xlashard.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, format_processes, store
from xlashard.train.config.settings import Settings
from xlashard.train.config.toml_text import setting_changes, to_toml
from xlashard.train.errors import PeerError, SettingsError


@dataclass(frozen=True)
class Group:
    """Processes of a run.

    Attributes:
        run: Unique identifier of the run.
        index: Index of this process.
        count: Number of processes.
    """

    run: str = ""
    index: int = 0
    count: int = 1


type Kind = Literal["stop", "fail", "end"]


@dataclass(frozen=True)
class StopMessage(JsonRecord):
    """Message of one process to all processes.

    Attributes:
        kind: ``stop``: stop at an agreed point; ``fail``: the sender failed; ``end``: the run is
            complete.
        process: Sender.
        reason: Name of the signal, or the error.
    """

    kind: Kind
    process: int
    reason: str = ""


class SharedCalls:
    """Messages through the key-value store of a pod.

    Messages are numbered, and a number is written once, so all processes receive the same messages
    in the same order.

    Args:
        folder: Prefix of the run's keys.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._received = 0
        self._sent = 0

    def send(self, call: StopMessage) -> None:
        """Send a message to all processes, including this one."""
        value = call.to_json().encode()
        while not store.write(f"{self._folder}/{self._sent}", value):
            self._sent += 1  # Taken by another message.

    def receive(self, seconds: float) -> StopMessage | None:
        """Return the next message; None after a timeout in seconds."""
        value = store.read(f"{self._folder}/{self._received}", seconds)
        if value is None:
            return None
        self._received += 1
        return StopMessage.from_json(value)


class OwnCalls:
    """Messages of a single process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[StopMessage] = queue.SimpleQueue()

    def send(self, call: StopMessage) -> None:
        """Send a message."""
        self._calls.put(call)

    def receive(self, seconds: float) -> StopMessage | None:
        """Return the next message; None after a timeout in seconds."""
        try:
            return self._calls.get(timeout=seconds)
        except queue.Empty:
            return None


_START_TIMEOUT = 300.0
"""Timeout in seconds for the start of all processes."""


def form_group(settings: Settings, task: str) -> Group:
    """Wait for all processes of the run and compare their settings.

    Args:
        settings: Settings of this process.
        task: Task of this process: a new run, or the folder to resume.

    Returns:
        The group of all processes.

    Raises:
        SettingsError: The processes have different settings.
        PeerError: Some processes did not start in time.
    """
    count = jax.process_count()
    if count == 1:
        return Group()
    own = {"token": uuid.uuid4().hex, "task": task, "settings": to_toml(settings)}
    barrier = Barrier(tuple(range(count)), "train", _START_TIMEOUT)
    try:
        received = RENDEZVOUS.exchange(barrier, json.dumps(own))
    except BarrierTimeoutError as error:
        raise PeerError(
            f"{format_processes(error.processes)} of {count} did not start training in "
            f"{_START_TIMEOUT:g} s"
        ) from None
    first, *others = [json.loads(received[number]) for number in range(count)]
    for number, other in enumerate(others, 1):
        changes = list(setting_changes(first["settings"], other["settings"]).values())
        if other["task"] != first["task"]:
            changes.insert(0, f"{first['task']} is {other['task']}")
        if changes:
            raise SettingsError(
                f"process {number} has other settings than process 0: {'; '.join(changes)} "
                f"there. Start all with the same command line and the same settings file."
            )
    return Group(first["token"], jax.process_index(), count)
