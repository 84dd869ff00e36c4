"""What Google Cloud says of a TPU: its state, its slices and their workers."""

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xlashard.cloud.commands import Runner
from xlashard.cloud.gcloud import Gcloud
from xlashard.cloud.retrying import Patience, run_again
from xlashard.errors import CloudError


class State(enum.Enum):
    """How far a TPU is, in the order in which one matters more than another."""

    REFUSED = "refused"
    """It was asked for, and can't be had."""
    LOST = "lost"
    """It was taken away."""
    LEAVING = "being deleted"
    ABSENT = "not there"
    COMING = "coming"
    READY = "ready"


# https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes#State
_OF_NODES = {
    "CREATING": State.COMING,
    "STARTING": State.COMING,
    "RESTARTING": State.COMING,
    "REIMAGING": State.COMING,
    "REPAIRING": State.COMING,
    "UNHIDING": State.COMING,
    "READY": State.READY,
    "DELETING": State.LEAVING,
    "PREEMPTED": State.LOST,
    "TERMINATED": State.LOST,
    "STOPPED": State.LOST,
    "STOPPING": State.LOST,
    "HIDDEN": State.LOST,
    "HIDING": State.LOST,
    "UNKNOWN": State.LOST,
}
# https://cloud.google.com/tpu/docs/queued-resources
_OF_QUEUED = {
    "CREATING": State.COMING,
    "ACCEPTED": State.COMING,
    "WAITING_FOR_RESOURCES": State.COMING,
    "PROVISIONING": State.COMING,
    "ACTIVE": State.READY,
    "DELETING": State.LEAVING,
    "SUSPENDING": State.LOST,
    "SUSPENDED": State.LOST,
    "FAILED": State.REFUSED,
}


@dataclass(frozen=True)
class Worker:
    """A VM of a slice.

    Attributes:
        node: The name of the slice.
        slice: The number of the slice.
        number: Its own, in the slice.
        address: Inside the network; empty where it is not known.
        label: What stands before its output: `3`, or `1.3` with several slices.
    """

    node: str
    slice: int
    number: int
    address: str
    label: str


@dataclass(frozen=True)
class Part:
    """A slice, or the queued resource of all of them.

    Attributes:
        name: Of it.
        state: How far it is.
        said: The state in Google Cloud's own word, with the reason where there is one.
    """

    name: str
    state: State
    said: str


@dataclass(frozen=True)
class Survey:
    """What there is of a TPU at one moment.

    Attributes:
        parts: The queued resource, if there is one, and all slices that there should be.
        workers: The workers of the slices that are ready.
    """

    parts: tuple[Part, ...]
    workers: tuple[Worker, ...]

    @property
    def state(self) -> State:
        """Of the TPU as a whole: that of the part which is worst off."""
        order = list(State)
        return min((part.state for part in self.parts), key=order.index)

    @property
    def text(self) -> str:
        """The state of each part, in Google Cloud's words."""
        return ", ".join(f"{part.name} {part.said}" for part in self.parts)

    def ready(self, name: str) -> tuple[Worker, ...]:
        """The workers, if the TPU of that name is ready.

        Raises:
            CloudError: It is not.
        """
        if self.state is State.READY:
            return self.workers
        raise CloudError(  # no-catalogue: needs a cloud
            f"{name} is not ready: {self.text}. Wait for it:\n"
            f"  python tpu_scripts/wait.py --name={name}"
        )


def survey(gcloud: Gcloud, runner: Runner, patience: Patience) -> Survey:
    """Looks at a TPU.

    Raises:
        CloudError: gcloud fails, again and again.
    """
    asked = [gcloud.list_queued()] if gcloud.queued else []
    told = [
        _listed(run_again(runner, command, patience).check())
        for command in [*asked, gcloud.list_nodes()]
    ]
    *queued, nodes = told
    parts = [_queued_part(gcloud.tpu.name, found) for found in queued]
    waiting = any(part.state is State.COMING for part in parts)
    parts += [_node_part(name, nodes, waiting) for name in gcloud.nodes]
    return Survey(tuple(parts), tuple(_workers(gcloud.nodes, nodes)))


def _listed(text: str) -> dict[str, Mapping[str, Any]]:
    """By its short name each resource of a list."""
    try:
        return {each["name"].rpartition("/")[2]: each for each in json.loads(text or "[]")}
    except (ValueError, KeyError, TypeError, AttributeError):
        # no-catalogue: needs a cloud
        raise CloudError(f"gcloud wrote no list of TPUs as JSON:\n  {text[:200]!r}") from None


def _queued_part(name: str, found: Mapping[str, Mapping[str, Any]]) -> Part:
    about = found.get(name)
    if about is None:
        return Part(name, State.ABSENT, "is not there")
    state = about.get("state", {})
    word = state.get("state", "STATE_UNSPECIFIED")
    reason = state.get("failedData", {}).get("error", {}).get("message", "")
    said = f"is {word}" + (f" ({reason})" if reason else "")
    return Part(name, _OF_QUEUED.get(word, State.COMING), said)


def _node_part(name: str, found: Mapping[str, Mapping[str, Any]], waiting: bool) -> Part:
    about = found.get(name)
    if about is None:
        # Before a queued resource is provisioned, its slices don't exist.
        return Part(name, State.COMING if waiting else State.ABSENT, "is not there")
    word = about.get("state", "STATE_UNSPECIFIED")
    return Part(name, _OF_NODES.get(word, State.COMING), f"is {word}")


def _workers(names: Iterable[str], found: Mapping[str, Mapping[str, Any]]) -> Iterable[Worker]:
    names = tuple(names)
    for index, name in enumerate(names):
        about = found.get(name, {})
        if about.get("state") != "READY":
            continue
        for number, end in enumerate(about.get("networkEndpoints", ())):
            label = f"{index}.{number}" if len(names) > 1 else str(number)
            yield Worker(name, index, number, end.get("ipAddress", ""), label)


def expected_workers(gcloud: Gcloud, hosts: int) -> tuple[Worker, ...]:
    """The workers that a TPU will have, for a dry run.

    Args:
        gcloud: Of the TPU.
        hosts: Workers of each slice.
    """
    made = {
        name: {"state": "READY", "networkEndpoints": [{} for _ in range(hosts)]}
        for name in gcloud.nodes
    }
    return tuple(_workers(gcloud.nodes, made))
