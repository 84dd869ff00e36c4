"""The processes of a run: they see that they do the same, and the first one decides for all."""

import json
import uuid
from collections.abc import Callable

import jax

from xlashard import multihost
from xlashard.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, format_processes, store
from xlashard.train.calls import OwnCalls, SharedCalls
from xlashard.train.checkpoint.about import setting_changes
from xlashard.train.errors import DataError, PeerError, SettingsError
from xlashard.train.settings import Settings
from xlashard.train.stop import Group, Stop
from xlashard.train.toml import to_toml

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


def make_stop(group: Group, say: Callable[[str], None]) -> Stop:
    """How the processes of a group stop."""
    calls = OwnCalls() if group.count == 1 else SharedCalls(f"train/{group.run}/calls")
    return Stop(group, calls, say, multihost.leave)


def from_the_first(group: Group, stop: Stop, name: str, make: Callable[[], str]) -> str:
    """What the first process makes, in every process.

    Args:
        group: The processes.
        stop: How they hear of failures.
        name: Of what is made.
        make: Is called in the first process.

    Raises:
        PeerError: Another process failed.
    """
    if group.count == 1:
        return make()
    key = f"train/{group.run}/{name}"
    if group.index == 0:
        made = make()
        store.write(key, made.encode())
        return made
    while (value := store.read(key, 1.0)) is None:
        stop.check()
    return value.decode()


def check_same_text(group: Group, stop: Stop, mark: str) -> None:
    """Checks that all processes learn from the same text.

    Args:
        group: The processes.
        stop: How they hear of failures.
        mark: Of this process's text.

    Raises:
        DataError: Some have another one.
        PeerError: Another process failed.
    """
    marks = stop.meet("the text", mark)
    other = next((number for number in marks if marks[number] != marks[0]), None)
    if other is not None:
        raise DataError(
            f"process {other} reads another text ({marks[other]}) than process 0 ({marks[0]}). "
            f"Put the same files on all hosts."
        )
