"""The processes of a run: they see that they do the same, and the first one decides for all."""

import json
import queue
import uuid
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

import jax

from xlashard.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, format_processes, store
from xlashard.train.config.settings import Settings
from xlashard.train.config.toml import setting_changes, to_toml
from xlashard.train.errors import PeerError, SettingsError


@dataclass(frozen=True)
class Group:
    """The processes of a run.

    Attributes:
        run: Tells this run from others of the same processes.
        index: Which one this is.
        count: How many there are.
    """

    run: str = ""
    index: int = 0
    count: int = 1


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


_COMING = 300.0
"""Seconds in which all processes must have started."""


def form_group(settings: Settings, task: str) -> Group:
    """Meets the other processes of the run.

    Args:
        settings: The settings that this process was started with.
        task: What it was started for: a new run, or the folder of one that goes on.

    Returns:
        The group of all processes.

    Raises:
        SettingsError: Others were started with other settings.
        PeerError: Some did not come.
    """
    count = jax.process_count()
    if count == 1:
        return Group()
    mine = {"token": uuid.uuid4().hex, "task": task, "settings": to_toml(settings)}
    invitation = Barrier(tuple(range(count)), "train", _COMING)
    try:
        came = RENDEZVOUS.exchange(invitation, json.dumps(mine))
    except BarrierTimeoutError as error:
        raise PeerError(
            f"{format_processes(error.processes)} of {count} did not start training in "
            f"{_COMING:g} s"
        ) from None
    first, *others = [json.loads(came[number]) for number in range(count)]
    for number, other in enumerate(others, 1):
        changes = list(setting_changes(first["settings"], other["settings"]).values())
        if other["task"] != first["task"]:
            changes.insert(0, f"{first['task']} is {other['task']}")
        if changes:
            raise SettingsError(
                f"process {number} was started otherwise than process 0: {'; '.join(changes)} "
                f"there. Start all with the same command line and the same settings file."
            )
    return Group(first["token"], jax.process_index(), count)
