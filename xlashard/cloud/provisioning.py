"""Making a TPU, waiting until it is there, and deleting it."""

from collections.abc import Sequence

from xlashard.cloud.reaching import on_all
from xlashard.cloud.session import Session
from xlashard.cloud.slices import State, Survey, Worker
from xlashard.errors import CloudError, counted


def create(session: Session) -> int:
    """Asks for a TPU, unless it is there or on its way; `wait` waits for it.

    Raises:
        CloudError: It was refused, or what is left of an earlier one is in the way.
    """
    command = session.gcloud.create(session.accelerator)
    if not session.runner.dry:
        found = session.survey()
        if found.state in (State.COMING, State.READY):
            session.say(f"nothing to do: {found.text}")
            return 0
        if any(part.state is not State.ABSENT for part in found.parts):
            name = session.settings.tpu.name
            raise CloudError(  # no-catalogue: needs a cloud
                f"there is something left of an earlier TPU: {found.text}. Delete it first:\n"
                f"  python tpu_scripts/delete.py --name={name}"
            )
    session.runner.run(command).check()
    session.say(f"asked for {session.settings.tpu.name} ({_asked(session)})")
    return 0


def _asked(session: Session) -> str:
    tpu, accelerator = session.settings.tpu, session.accelerator
    chips = counted(accelerator.chips * tpu.slices, "chip")
    workers = counted(accelerator.hosts * tpu.slices, "worker")
    slices = f"{tpu.slices} × " if tpu.slices > 1 else ""
    return f"{slices}{accelerator.name}, {tpu.capacity}: {chips}, {workers}"


def wait(session: Session) -> int:
    """Returns when a TPU is ready and all its workers answer.

    Raises:
        CloudError: It was refused or taken away, or did not come in time.
    """
    if session.runner.dry:
        show_looks(session)
        on_all(session, session.expected(), "true", "reach")
        return 0
    wait_until_ready(session)
    return 0


def show_looks(session: Session) -> None:
    """In a dry run, the commands that look at the TPU."""
    if session.gcloud.queued:
        session.runner.run(session.gcloud.list_queued())
    session.runner.run(session.gcloud.list_nodes())


def wait_until_ready(session: Session) -> tuple[Worker, ...]:
    """Waits until a TPU is ready and all its workers answer.

    Returns:
        The workers.

    Raises:
        CloudError: It was refused or taken away, or did not come in time.
    """
    found = _wait_for_state(session)
    session.say(f"{found.text}: {counted(len(found.workers), 'worker')}")
    _check_count(session, found.workers)
    _wait_for_ssh(session, found.workers)
    return found.workers


def _wait_for_state(session: Session) -> Survey:
    limits, started, before = session.settings.wait, session.clock.now(), ""
    while True:
        found = session.survey()
        if found.state is State.READY:
            return found
        if found.state in (State.REFUSED, State.LOST, State.LEAVING):
            raise CloudError(f"the TPU will not come: {found.text}")  # no-catalogue: needs a cloud
        if all(part.state is State.ABSENT for part in found.parts):
            raise CloudError(  # no-catalogue: needs a cloud
                f"there is no TPU {session.settings.tpu.name} in this zone, and nobody has asked "
                "for one. Ask for it:\n  python tpu_scripts/create.py --name="
                f"{session.settings.tpu.name} --accelerator=v5litepod-16 --zone=ZONE",
            )
        waited = session.clock.now() - started
        if waited >= limits.ready_within:
            raise CloudError(  # no-catalogue: needs a cloud
                f"after {waited:.0f} s the TPU is not ready: {found.text}. Wait longer with "
                f"--ready_within={2 * limits.ready_within:g}; a request that is queued stays so"
            )
        if found.text != before:
            session.say(f"waiting: {found.text}")
            before = found.text
        session.clock.sleep(limits.poll)


def _check_count(session: Session, workers: Sequence[Worker]) -> None:
    """Google Cloud says how many workers there are; a name that was given says how many to be."""
    if not session.settings.tpu.accelerator:
        return
    wanted = session.accelerator.hosts * session.settings.tpu.slices
    if len(workers) != wanted:
        raise CloudError(  # no-catalogue: needs a cloud
            f"{session.settings.tpu.name} has {counted(len(workers), 'worker')}, but "
            f"{_asked(session)}. If it was made as another type, name that: --accelerator=TYPE"
        )


def _wait_for_ssh(session: Session, workers: Sequence[Worker]) -> None:
    """Waits until every worker runs commands: sshd and keys come some time after READY."""
    limits, started = session.settings.wait, session.clock.now()
    missing = list(workers)
    while missing:
        ends = on_all(session, missing, "true", "reach", once=True)
        failed = {end.worker.label: end.finished for end in ends if end.finished.code}
        missing = [worker for worker in missing if worker.label in failed]
        waited = session.clock.now() - started
        if missing and waited >= limits.ssh_within:
            names = ", ".join(f"worker {worker.label} of {worker.node}" for worker in missing)
            last = failed[missing[0].label].stderr.strip() or "nothing"
            raise CloudError(  # no-catalogue: needs a cloud
                f"after {waited:.0f} s {names} did not answer; gcloud said last:\n  {last}\n"
                f"Try it by hand:\n  {failed[missing[0].label].command.text}"
            )
        if missing:
            session.say(f"{counted(len(missing), 'worker')} of {len(workers)} not answering yet")
            session.clock.sleep(min(limits.poll, 10.0))


def delete(session: Session) -> int:
    """Deletes a TPU and what was asked for it; one that is not there is no error.

    Raises:
        CloudError: It could not be deleted.
    """
    gcloud, runner = session.gcloud, session.runner
    if runner.dry:
        show_looks(session)
        found = None
    else:
        found = session.survey()
    there = {part.name for part in found.parts if part.state is not State.ABSENT} if found else {}
    deleted = 0
    if gcloud.queued and _is_queued(found):
        runner.run(gcloud.delete_queued()).check()  # The slices go with it.
        deleted += 1
        found = found and session.survey()
        there = {p.name for p in found.parts if p.state is not State.ABSENT} if found else {}
    for node in gcloud.nodes:
        if node in there or (found is None and not gcloud.queued):
            runner.run(gcloud.delete_node(node)).check()
            deleted += 1
    name = session.settings.tpu.name
    session.say(f"deleted {name}" if deleted else f"nothing to do: there is no {name}")
    return 0


def _is_queued(found: Survey | None) -> bool:
    return found is None or found.parts[0].state is not State.ABSENT
