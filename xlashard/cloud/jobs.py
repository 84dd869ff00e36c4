"""Jobs on all workers of all slices: naming, starting and ending them."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xlashard.cloud.reaching import agent_call, check_all, on_all
from xlashard.cloud.session import Session
from xlashard.cloud.slices import Worker
from xlashard.errors import CloudError


@dataclass(frozen=True)
class Job:
    """What runs on the workers.

    Attributes:
        name: Of this start of it; no other one has the same.
        command: For a shell.
        environment: For the command.
    """

    name: str
    command: str
    environment: Mapping[str, str] = field(default_factory=dict)


def new_job(command: str, environment: Mapping[str, str]) -> Job:
    """A job under a name that no other has.

    Raises:
        CloudError: There is no command.
    """
    if not command.strip():
        raise CloudError(
            "which command? Write, for example:\n"
            "  --command='xlashard train --config configs/tiny.toml'",
            code=2,
        )
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    return Job(name, command, dict(environment))


def newest_job(session: Session, workers: Sequence[Worker]) -> Job:
    """The job that was started last on workers, be it over or not.

    Raises:
        CloudError: There is none, or the first worker is not reached.
    """
    ends = on_all(session, workers[:1], agent_call("newest"), "look for a job on")
    if session.runner.dry:
        return Job("NEWEST", "")
    check_all(ends)
    name = json.loads(ends[0].finished.stdout.splitlines()[-1])["job"]
    if name is None:
        tpu = session.settings.tpu.name
        raise CloudError(  # no-catalogue: needs a cloud
            f"no job was started on {tpu} that could be followed. Start one:\n"
            f"  python tpu_scripts/run.py --name={tpu} --command=COMMAND"
        )
    return Job(name, "")


def start_job(session: Session, workers: Sequence[Worker], job: Job) -> None:
    """Starts a job on all workers, and ends what is left there of earlier ones.

    Raises:
        CloudError: A worker was not reached or is not set up, or another process has its TPU; then
            the job runs nowhere.
    """
    chosen = session.settings.run
    ends = on_all(
        session, workers, lambda worker: agent_call("start", _request(session, job)), "start on"
    )
    if session.runner.dry:
        return
    try:
        check_all(ends)
        for end in ends:
            _check_started(json.loads(end.finished.stdout.splitlines()[-1]), end.worker, session)
    except BaseException:
        stop_job(session, workers, job, chosen.grace)
        raise


def _request(session: Session, job: Job) -> str:
    request = {
        "job": job.name,
        "command": job.command,
        "environment": dict(job.environment),
        "folder": session.settings.setup.folder,
        "grace": session.settings.run.grace,
        "take": session.settings.run.take,
    }
    return json.dumps(request)


def _check_started(told: Mapping[str, Any], worker: Worker, session: Session) -> None:
    name = session.settings.tpu.name
    if told["ended"]:
        session.say(f"worker {worker.label}: ended what was left there ({_pids(told['ended'])})")
    if "no_folder" in told:
        raise CloudError(  # no-catalogue: needs a cloud
            f"worker {worker.label} has no folder {told['no_folder']}: it is not set up. Write:\n"
            f"  python tpu_scripts/setup.py --name={name}"
        )
    if "held" in told:
        holders = "\n".join(
            f"  process {each['pid']}: {each['command']} ({', '.join(each['devices'])})"
            for each in told["held"]
        )
        raise CloudError(  # no-catalogue: needs a cloud
            f"the TPU of worker {worker.label} is held by another process:\n{holders}\n"
            "If it is yours and not needed any more, let it be ended: --take"
        )


def _pids(pids: Sequence[int]) -> str:
    return f"{'process' if len(pids) == 1 else 'processes'} {', '.join(map(str, pids))}"


def stop_job(session: Session, workers: Sequence[Worker], job: Job, grace: float) -> None:
    """Ends a job everywhere; says which workers were not reached."""
    script = agent_call("stop", job.name, f"{grace:g}")
    for end in on_all(session, workers, script, "end the job on"):
        if end.finished.code:
            last = (end.finished.stderr.strip().splitlines() or ["nothing"])[-1]
            session.say(f"worker {end.worker.label} was not reached to end the job ({last})")
