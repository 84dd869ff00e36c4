"""The state of a TPU, creating it and deleting it."""

import json
import time
from dataclasses import dataclass

from xlashard.cloud.session import Session
from xlashard.errors import CloudError, counted

# https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes#State
# All other states are on the way to READY.
_LOST = {"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "HIDDEN", "HIDING", "UNKNOWN"}
_LOST |= {"DELETING", "SUSPENDED", "SUSPENDING", "FAILED"}


@dataclass(frozen=True)
class TpuStatus:
    """State of a TPU at one moment.

    Attributes:
        name: Name of the TPU.
        state: State, in Google Cloud's words; empty if the TPU does not exist.
        addresses: Addresses of the workers in the network.
    """

    name: str
    state: str
    addresses: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        """True if the TPU can run jobs."""
        return self.state == "READY"

    @property
    def is_pending(self) -> bool:
        """True if the TPU is expected to become ready."""
        return bool(self.state) and not self.is_ready and self.state not in _LOST

    @property
    def text(self) -> str:
        """Description of the state."""
        return f"{self.name} is {self.state}" if self.state else f"{self.name} does not exist"


def query(session: Session) -> TpuStatus:
    """Return the state of the TPU.

    Raises:
        CloudError: gcloud fails repeatedly.
    """
    text, name = session.retry(session.gcloud.list()).check(), session.settings.tpu.name
    try:
        nodes = {each["name"].rpartition("/")[2]: each for each in json.loads(text or "[]")}
    except (ValueError, KeyError, TypeError, AttributeError):
        # no-catalogue: needs a cloud, for which tests/cloud has a stand-in
        raise CloudError(
            f"the output of gcloud is invalid: expected a JSON list of TPUs, got {text[:200]!r}"
        ) from None
    node = nodes.get(name, {})
    addresses = tuple(each.get("ipAddress", "") for each in node.get("networkEndpoints", ()))
    return TpuStatus(name, node.get("state", "STATE_UNSPECIFIED") if node else "", addresses)


def ready_status(session: Session) -> TpuStatus:
    """Return the state of a TPU that is ready; in a dry run that of its accelerator type.

    Raises:
        CloudError: The TPU is not ready.
    """
    name = session.settings.tpu.name
    if session.runner.dry:
        return TpuStatus(name, "READY", ("WORKER-0",) * session.accelerator.hosts)
    status = query(session)
    if not status.is_ready:
        # no-catalogue: needs a cloud, for which tests/cloud has a stand-in
        raise CloudError(
            f"the TPU is not ready: {status.text}. Create it, or wait for it:\n"
            f"  python tpu_scripts/create.py --name={name}"
        )
    return status


def lost_reason(session: Session) -> str:
    """Return the state of the TPU if it is not ready; empty if it is, or gcloud fails."""
    try:
        status = query(session)
    except CloudError as error:
        session.report(f"querying again later: {error}")
        return ""
    return "" if status.is_ready else status.text


def create(session: Session) -> int:
    """Request a TPU, unless it exists or was requested, and wait until it is ready.

    Raises:
        CloudError: The request failed, an earlier TPU has the name, or the time limit has passed.
    """
    command, name = session.gcloud.create(session.accelerator), session.settings.tpu.name
    if session.runner.dry:
        return session.runner.run(command).code
    status = query(session)
    if not status.state:
        session.runner.run(command).check()
        session.report(f"requested {name}: {_description(session)}")
    elif not (status.is_pending or status.is_ready):
        # no-catalogue: needs a cloud, for which tests/cloud has a stand-in
        raise CloudError(
            f"an earlier TPU has this name: {status.text}. Delete it:\n"
            f"  python tpu_scripts/delete.py --name={name}"
        )
    _wait_until_ready(session)
    return 0


def _description(session: Session) -> str:
    accelerator = session.accelerator
    chips, workers = counted(accelerator.chips, "chip"), counted(accelerator.hosts, "worker")
    return f"{accelerator.name}, {session.settings.tpu.capacity}, {chips}, {workers}"


def _wait_until_ready(session: Session) -> None:
    wait, reported = session.settings.wait, ""
    started = time.monotonic()
    while not (status := query(session)).is_ready:
        if not status.is_pending:
            # no-catalogue: needs a cloud, for which tests/cloud has a stand-in
            raise CloudError(f"the TPU is not available: {status.text}")
        waited = time.monotonic() - started
        if waited >= wait.ready_within:
            # no-catalogue: needs a cloud, for which tests/cloud has a stand-in
            raise CloudError(
                f"the TPU is not ready after {waited:.0f} s: {status.text}. Wait longer with "
                f"--ready_within={2 * wait.ready_within:g}"
            )
        if status.text != reported:
            session.report(f"waiting: {status.text}")
            reported = status.text
        session.sleep(wait.poll)
    workers = counted(len(status.addresses), "worker")
    session.report(f"{status.text}: {workers}")
    if len(status.addresses) != session.accelerator.hosts:
        # no-catalogue: needs a cloud, for which tests/cloud has a stand-in
        raise CloudError(
            f"{status.name} has {workers}, expected those of {_description(session)}. If it has "
            "another type, write that: --accelerator=TYPE"
        )


def delete(session: Session) -> int:
    """Delete a TPU; one that does not exist is no error.

    Raises:
        CloudError: gcloud fails.
    """
    status = None if session.runner.dry else query(session)
    if status is not None and status.state in ("", "DELETING"):
        session.report(f"nothing to delete: {status.text}")
    else:
        session.runner.run(session.gcloud.delete()).check()
        session.report(f"deleted {session.settings.tpu.name}")
    return 0
