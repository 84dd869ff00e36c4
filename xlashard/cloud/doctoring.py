"""The doctor: is a TPU there, is it free, and do all workers see all of it?"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlashard.cloud.commands import Command
from xlashard.cloud.findings import (
    Finding,
    compare_versions,
    findings_of,
    judge_chips,
    judge_reach,
)
from xlashard.cloud.following import end_connection
from xlashard.cloud.jobs import new_job
from xlashard.cloud.preparing import give_tools, ready_workers
from xlashard.cloud.reaching import End, on_all
from xlashard.cloud.running import run_job
from xlashard.cloud.session import Session
from xlashard.cloud.slices import Worker
from xlashard.errors import counted

_PROBE = Path(__file__).with_name("remote") / "probe.py"
_ON_WORKER = "python3 ~/.xlashard/probe.py"
# For a listener: until all others have come by their own connections.
_LISTENS = 120
_MARKS = {True: ("✓", "green"), None: ("!", "yellow"), False: ("✗", "red")}


def look(session: Session) -> int:
    """Looks at all workers of the TPU that has a name, or at this machine where none is given."""
    return look_at_all(session) if session.settings.tpu.name else look_here(session)


def look_here(session: Session, root: str = "/") -> int:
    """Looks at this machine alone.

    Args:
        session: In whose dry run nothing is looked at.
        root: Where `/dev`, `/proc` and `/sys` are.

    Returns:
        1 if something is not as it should be.
    """
    words = (sys.executable, str(_PROBE), "look")
    if session.runner.dry:
        return session.runner.run(Command(words, "look at this machine")).code
    done = subprocess.run(
        words,
        env={**os.environ, "LAUNCHER_ROOT": root},
        capture_output=True,
        text=True,
        check=True,
    )
    return report(findings_of("", json.loads(done.stdout), None))


def look_at_all(session: Session) -> int:
    """Looks at all workers of a TPU, and whether they work together.

    Returns:
        1 if something is not as it should be.

    Raises:
        CloudError: The TPU is not ready.
    """
    workers = ready_workers(session)
    give_tools(session, workers)
    ends = on_all(session, workers, f"{_ON_WORKER} look", "look at")
    if session.runner.dry:
        _reach(session, workers)
        _count(session, workers)
        return 0
    looks = {e.worker.label: told for e in ends if (told := _told(e)) is not None}
    findings = [
        Finding(e.worker.label, "ssh", False, _last(e), "wait, or make the TPU again")
        for e in ends
        if e.worker.label not in looks
    ]
    chips = session.accelerator.chips_per_host if session.settings.tpu.accelerator else None
    for label, look in looks.items():
        findings += findings_of(label, look, chips)
    if looks:
        findings.append(compare_versions(looks))
    findings += _reach(session, workers)
    findings.append(_may_count(session, workers, findings))
    return report(findings)


def _told(end: End) -> Mapping[str, Any] | None:
    """The last line that a probe wrote, which is JSON."""
    if end.finished.code:
        return None
    try:
        return json.loads(end.finished.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None


def _last(end: End) -> str:
    return (end.finished.stderr.strip().splitlines() or ["it said nothing"])[-1]


def _reach(session: Session, workers: Sequence[Worker]) -> list[Finding]:
    """Whether each worker reaches worker 0, where somebody listens meanwhile."""
    port = session.settings.doctor.port
    first, *others = workers
    script = f"{_ON_WORKER} listen {port} {_LISTENS}"
    listener = session.runner.start(
        session.gcloud.ssh(first.node, first.number, script, "listen on worker 0")
    )
    try:
        if listener is not None:
            assert listener.stdout is not None
            listener.stdout.readline()  # By now it listens, or another process does.
        script = f"{_ON_WORKER} reach {first.address or 'WORKER-0'} {port} 10"
        ends = on_all(session, others or [first], script, "reach the coordinator from")
    finally:
        if listener is not None:
            end_connection(listener)
    if session.runner.dry:
        return []
    to = f"{first.address}:{port}"
    nothing = {"reached": False, "problem": "the worker itself was not reached"}
    return [judge_reach(e.worker.label, to, _told(e) or nothing) for e in ends]


def _may_count(session: Session, workers: Sequence[Worker], findings: Sequence[Finding]) -> Finding:
    """Counts chips unless it is known by now that it can't be, or would disturb a job."""
    if any(finding.ok is False for finding in findings):
        advice = "put the rest right first, and look again"
        return Finding("", "all chips", None, "not counted", advice)
    return _count(session, workers)


def _count(session: Session, workers: Sequence[Worker]) -> Finding:
    seconds = session.settings.doctor.chips_within
    script = f"timeout {2 * seconds:g} python ~/.xlashard/chips.py {seconds:g}"
    outcome = run_job(session, workers, new_job(script, {}))
    if session.runner.dry:
        return Finding("", "all chips", None, "")
    told = {worker.label: _counted(outcome.folder, worker.label) for worker in workers}
    devices = None
    if session.settings.tpu.accelerator:
        per_chip = session.accelerator.devices_per_chip
        devices = session.accelerator.chips * session.settings.tpu.slices * per_chip
    return judge_chips(told, len(workers), devices)


def _counted(folder: Path, label: str) -> Mapping[str, Any] | None:
    text = (folder / f"worker-{label}.log").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("chips: ")]
    return json.loads(lines[-1].removeprefix("chips: ")) if lines else None


def report(findings: Sequence[Finding], console: Console | None = None) -> int:
    """Shows findings as a table, what is wrong last with what to do.

    Returns:
        1 if something is wrong.
    """
    console = console or Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "worker", "looked at", "seen"):
        table.add_column(title, overflow="fold")
    for finding in _merged(findings):
        mark, style = _MARKS[finding.ok]
        seen = Text(finding.seen)
        if finding.advice:
            seen.append(f"\n→ {finding.advice}", style="bold")
        table.add_row(Text(mark, style=style), finding.worker or "all", finding.what, seen)
    console.print(table)
    wrong = sum(finding.ok is False for finding in findings)
    console.print(f"{counted(wrong, 'thing')} wrong" if wrong else "all is well")
    return 1 if wrong else 0


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """What was seen alike on several workers, in one line."""
    alike: dict[Finding, list[str]] = {}
    for finding in findings:
        alike.setdefault(replace(finding, worker=""), []).append(finding.worker)
    return [replace(finding, worker=", ".join(workers)) for finding, workers in alike.items()]
